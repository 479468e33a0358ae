"""KV cache for a fixed number of slots.

The time axis doubles up to the context, so a long context costs memory only once a sequence needs it. On a GPU the
memory of the smaller cache goes back to the driver: the larger cache cannot reuse it, and the learner may need it.
Memory is zeroed, never uninitialized: a masked key has weight zero, but zero times NaN is NaN.

Shapes: S slots, H key-value heads, T capacity, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.models.loading import release_unused_memory

FIRST_CAPACITY = 128


class SlotCache:
    """Per layer, keys and values of shape S_H_T_D."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        slots: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        preallocate: bool,
    ) -> None:
        """`shapes` is (heads, key size, value size) per layer; `preallocate` reserves the whole context at once."""
        self.slots = slots
        self.context = context
        self.capacity = context if preallocate else min(context, FIRST_CAPACITY)
        self.keys = [self._zeros(heads, size, dtype, device) for heads, size, _ in shapes]
        self.values = [self._zeros(heads, size, dtype, device) for heads, _, size in shapes]

    def _zeros(self, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(self.slots, heads, self.capacity, size, dtype=dtype, device=device)

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Grow the cache to hold sequences of `length` tokens."""
        assert length <= self.context, f"{length} tokens in a context of {self.context}"
        if length <= self.capacity:
            return
        self.capacity = min(self.context, max(length, 2 * self.capacity))
        for tensors in (self.keys, self.values):
            for layer in range(len(tensors)):
                old = tensors[layer]
                tensors[layer] = self._zeros(old.shape[1], old.shape[3], old.dtype, old.device)
                tensors[layer][:, :, : old.shape[2]] = old
                device = old.device
                del old
                release_unused_memory(device)

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[slot].zero_()
