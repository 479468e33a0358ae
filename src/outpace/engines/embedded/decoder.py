"""What a lane asks of a model: weights in use, and keys and values for a fixed number of slots.

Invariants
- `prefill` fills a slot's keys and values for a whole prefix and computes no logits: the last token of a sequence
  always goes through `step`. So the first token, every later one, and the one after a recomputation come from the
  same code.
- `step` runs over slots 0 … B-1. What stands in a slot behind a row's position never reaches that row.
- A decoder built deterministic keeps every shape fixed: the caller steps all slots, the key window is the whole
  context, and each prefix is computed alone in a shape that its own length sets.
- `prepare` may run on any thread while the decoder works; everything else belongs to one thread.
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
"""Key windows and lone prefills are rounded up to a multiple of this, so that few distinct shapes occur."""

Prepared = Mapping[str, Tensor]
"""A weight set in a decoder's own layout, dtype and device."""


class Decoder(Protocol):
    """One weight set with a key-value cache of `slots` sequences of at most `context` tokens."""

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
        """Compute the keys and values of each prefix into its slot."""
        ...

    def step(self, tokens_B: NDArray[np.int64], positions_B: NDArray[np.int64]) -> Tensor:
        """Feed one token per slot 0 … B-1 at its position; returns the next token's logits_B_V in float32."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` keys and values of one slot into another."""
        ...

    def clear(self, slot: int) -> None:
        """Overwrite a slot with zeros: needed only where it holds numbers that are not finite."""
        ...

    def prepare(self, tensors: Mapping[str, Tensor]) -> Prepared:
        """Bring named tensors, as the model's own state dict names them, into this decoder's layout.

        Raises `BadInput` when a tensor is missing or has another shape. Never aliases its input."""
        ...

    def install(self, prepared: Prepared) -> None:
        """Use these weights from the next call on."""
        ...

    def sibling(self, prepared: Prepared, slots: int | None = None) -> Decoder:
        """A second decoder of the same shape, with its own weights and an empty cache of as many slots, or `slots`."""
        ...


def round_up(length: int, multiple: int = WINDOW_STEP) -> int:
    return -(-length // multiple) * multiple


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Raise `BadInput` unless every expected tensor is there in its shape."""
    for name, shape in expected.items():
        if name not in tensors:
            raise BadInput(f"the weights lack the tensor {name}")
        if tensors[name].shape != shape:
            raise BadInput(f"the tensor {name} has shape {list(tensors[name].shape)}, not {list(shape)}")
