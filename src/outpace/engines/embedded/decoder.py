"""The decoder: one weight set and a KV cache with a fixed number of slots.

Invariants
- `prefill` computes a slot's keys and values for a whole prefix and no logits: the last token of a sequence always
  goes through `step`. So the first token, every later token and the token after a KV recomputation take the same path.
- `step` runs over slots 0 … B-1. Cache entries beyond a row's position never affect that row.
- A deterministic decoder keeps every shape fixed: the caller steps all slots, the key window is the whole context, and
  each prefix is computed alone in a shape that depends on its own length only.
- `prepare` may run on any thread while the decoder is in use; call everything else from one thread.

A decoder that `shares_prompts` has a second cache, for prompts. A prompt slot holds a prefix shared by any number of
rows, whose own slots hold only the tokens after it. `shared=True` refers to slots of this cache.

KV cache: the time axis doubles up to the context, so a long context costs memory only once a sequence needs it. On a
GPU the memory of the smaller cache goes back to the driver: the larger cache cannot reuse it, and the learner may need
it. Memory is zeroed, never uninitialized: a masked key has weight zero, but zero times NaN is NaN.

Shapes: S slots, N of these slots, H key-value heads, T capacity, L padded prefix length, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.engines.embedded.row_blocks import by_class, round_up
from outpace.engines.embedded.shared_prompts import MIN_REQUESTS, SharedPrompts
from outpace.errors import BadInput
from outpace.models.loading import release_unused_memory
from outpace.types import Ints

FIRST_CAPACITY = 128

PREFILL_TOKENS = 4096
"""Maximum number of tokens, including padding, in one prefill pass."""

DecoderWeights = Mapping[str, Tensor]
"""A weight set in the decoder's layout, dtype and device."""


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
        capacity: int,
    ) -> None:
        """`shapes` is (heads, key size, value size) per layer; `capacity` is the initial number of tokens."""
        self.slots = slots
        self.context = context
        self.capacity = capacity
        self.keys = [self._zeros(heads, size, dtype, device) for heads, size, _ in shapes]
        self.values = [self._zeros(heads, size, dtype, device) for heads, _, size in shapes]

    def _zeros(self, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(self.slots, heads, self.capacity, size, dtype=dtype, device=device)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of the layer's keys and values with the heads of all slots in one dimension: SH_T_D."""
        return self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Grow the cache to hold sequences of `length` tokens."""
        assert length <= self.context, f"{length} tokens in a context of {self.context}"
        if length <= self.capacity:
            return
        self.capacity = min(self.context, max(length, 2 * self.capacity, FIRST_CAPACITY))
        for tensors in (self.keys, self.values):
            for layer in range(len(tensors)):
                old = tensors[layer]
                tensors[layer] = self._zeros(old.shape[1], old.shape[3], old.dtype, old.device)
                tensors[layer][:, :, : old.shape[2]] = old
                device = old.device
                del old
                release_unused_memory(device)

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        device = self.keys[0].device
        source_N, target_N = (torch.tensor(slots, device=device) for slots in (sources, targets))
        parts = [(torch.from_numpy(chosen).to(device), length) for chosen, length in by_class(np.array(lengths))]
        for tensor in (*self.keys, *self.values):
            prefixes = [tensor[:, :, :length].index_select(0, source_N[chosen]) for chosen, length in parts]
            for (chosen, length), prefix_N_H_L_D in zip(parts, prefixes, strict=True):
                tensor[:, :, :length].index_copy_(0, target_N[chosen], prefix_N_H_L_D)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[slot].zero_()


class Decoder(ABC):
    """A weight set with a KV cache for `slots` sequences of at most `context` tokens."""

    vocabulary: int
    attends_in_blocks = False
    """Whether a step is cheaper with rows ordered by length, longest first (`row_blocks`)."""
    shares_prompts = False
    """Whether several rows can use the keys and values of one prompt (`shared_prompts`)."""

    def __init__(self, slots: int, context: int, *, deterministic: bool) -> None:
        self.slots, self.context, self.deterministic = slots, context, deterministic

    @property
    def prompt_slots(self) -> int:
        """Number of prompts that rows can share."""
        return -(-self.slots // MIN_REQUESTS)

    def _allocate(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the cache. `shapes` is (heads, key size, value size) per layer."""
        self.device = device
        first = self.context if self.deterministic else min(self.context, FIRST_CAPACITY)
        self._cache = SlotCache(shapes, self.slots, self.context, dtype, device, capacity=first)
        self._prompt_cache = SlotCache(shapes, self.prompt_slots, self.context, dtype, device, capacity=0)

    @torch.inference_mode()
    def prefill(self, slots: Sequence[int], prefixes: Sequence[Ints], *, shared: bool = False) -> None:
        """Compute and store the keys and values of each prefix in its slot, several prefixes per pass if they fit."""
        cache = self._cache_of(shared)
        order = sorted(range(len(slots)), key=lambda index: len(prefixes[index]), reverse=True)
        start = 0
        while start < len(order):
            longest = len(prefixes[order[start]])
            length = min(self.context, round_up(longest)) if self.deterministic else longest
            rows = 1 if self.deterministic else max(1, PREFILL_TOKENS // longest)
            chunk = order[start : start + rows]
            tokens_N_L = np.zeros((len(chunk), length), dtype=np.int64)
            for row, index in enumerate(chunk):
                tokens_N_L[row, : len(prefixes[index])] = prefixes[index]
            cache.reserve(length)
            slot_N = torch.tensor([slots[index] for index in chunk], device=self.device)
            self._prefill_pass(cache, slot_N, torch.from_numpy(tokens_N_L).to(self.device))
            start += len(chunk)

    @abstractmethod
    def _prefill_pass(self, cache: SlotCache, slot_N: Tensor, tokens_N_L: Tensor) -> None:
        """Compute the keys and values of these prefixes at positions 0 … L-1 and store them in their slots of `cache`.

        Shorter prefixes are padded on the right: causal attention hides the padding, and later steps overwrite it."""

    @abstractmethod
    def step(
        self, tokens_B: NDArray[np.int64], positions_B: NDArray[np.int64], prompts: SharedPrompts | None = None
    ) -> Tensor:
        """Feed one token per slot 0 … B-1 at its position; return the next token's logits_B_V in float32.

        `prompts`: the prompts that rows share; only for a decoder that `shares_prompts`."""

    @abstractmethod
    def prepare(self, tensors: Mapping[str, Tensor]) -> DecoderWeights:
        """Convert tensors with the names of the model's state dict into this decoder's layout.

        Raises `BadInput` when a tensor is missing or has the wrong shape. The result never aliases the input."""

    @abstractmethod
    def install(self, prepared: DecoderWeights) -> None:
        """Use these weights from the next call on."""

    @abstractmethod
    def sibling(self, prepared: DecoderWeights, slots: int | None = None) -> Decoder:
        """Return a second decoder of the same model with these weights and an empty cache (default: as many slots)."""

    def copy(
        self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int], *, shared: bool = False
    ) -> None:
        """Copy the first `lengths` keys and values of the source slots to the target slots; read all before writing."""
        self._cache_of(shared).copy(sources, targets, lengths)

    def clear(self, slot: int, *, shared: bool = False) -> None:
        """Zero a slot. Needed only when it contains non-finite values."""
        self._cache_of(shared).clear(slot)

    def _cache_of(self, shared: bool) -> SlotCache:
        return self._prompt_cache if shared else self._cache

    def _reserve_window(self, positions_B: NDArray[np.int64]) -> int:
        """Return the number of keys that a step at these slot positions reads; reserve room for them in the cache."""
        window = self.context if self.deterministic else min(self.context, round_up(int(positions_B.max()) + 1))
        self._cache.reserve(window)
        return window


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Raise `BadInput` unless every expected tensor is present with its shape."""
    for name, shape in expected.items():
        if name not in tensors:
            raise BadInput(f"the weights have no tensor {name}")
        if tensors[name].shape != shape:
            raise BadInput(f"tensor {name} has shape {list(tensors[name].shape)}, expected {list(shape)}")
