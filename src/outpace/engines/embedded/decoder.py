"""The decoder protocol: one weight set and a KV cache with a fixed number of slots.

Invariants
- `prefill` computes a slot's keys and values for a whole prefix and no logits: the last token of a sequence always
  goes through `step`. So the first token, every later token and the token after a KV recomputation take the same path.
- `step` runs over slots 0 … B-1. Cache entries beyond a row's position never affect that row.
- A deterministic decoder keeps every shape fixed: the caller steps all slots, the key window is the whole context, and
  each prefix is computed alone in a shape that depends on its own length only.
- `prepare` may run on any thread while the decoder is in use; call everything else from one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.errors import BadInput
from outpace.types import Ints

WINDOW_STEP: Final = 16
"""Key windows and single prefills are rounded up to a multiple of this, to keep the number of shapes small."""

DecoderWeights = Mapping[str, Tensor]
"""A weight set in the decoder's layout, dtype and device."""


class Decoder(Protocol):
    """A weight set with a KV cache for `slots` sequences of at most `context` tokens."""

    @property
    def slots(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    def prefill(self, slots: Sequence[int], prefixes: Sequence[Ints]) -> None:
        """Compute the keys and values of each prefix and store them in its slot."""
        ...

    def step(self, tokens_B: NDArray[np.int64], positions_B: NDArray[np.int64]) -> Tensor:
        """Feed one token per slot 0 … B-1 at its position; return the next token's logits_B_V in float32."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` keys and values of one slot into another."""
        ...

    def clear(self, slot: int) -> None:
        """Zero a slot. Needed only when it contains non-finite values."""
        ...

    def prepare(self, tensors: Mapping[str, Tensor]) -> DecoderWeights:
        """Convert tensors with the names of the model's state dict into this decoder's layout.

        Raises `BadInput` when a tensor is missing or has the wrong shape. The result never aliases the input."""
        ...

    def install(self, prepared: DecoderWeights) -> None:
        """Use these weights from the next call on."""
        ...

    def sibling(self, prepared: DecoderWeights, slots: int | None = None) -> Decoder:
        """Return a second decoder of the same model with these weights and an empty cache (default: as many slots)."""
        ...


def round_up(length: int, multiple: int = WINDOW_STEP) -> int:
    return -(-length // multiple) * multiple


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Raise `BadInput` unless every expected tensor is present with its shape."""
    for name, shape in expected.items():
        if name not in tensors:
            raise BadInput(f"the weights have no tensor {name}")
        if tensors[name].shape != shape:
            raise BadInput(f"tensor {name} has shape {list(tensors[name].shape)}, expected {list(shape)}")
