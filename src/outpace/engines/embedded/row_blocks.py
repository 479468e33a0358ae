"""Blocks of rows with similar lengths, so that a decode step does not read the padding of its longest sequence.

The keys of all rows are one tensor, padded to the longest row. Few sequences of a batch are long, so attention over the
whole tensor would mostly read padding. Instead, each block of neighboring rows attends over its own window.

    rows      0 … 12       13 … 60     61 … 255
    window    256          120         64

- `split`: the blocks of a batch. Correct for rows in any order, cheap if they are ordered by length, longest first.
- `moves`: which rows to move to restore that order, if the steps that follow save more than the moves cost.

Only the length class (up to 32, 64, 128 … tokens) matters, so a sequence moves only a few times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW_STEP = 8
"""Windows are rounded up to a multiple of this, to keep the number of shapes small."""

SHORTEST = 32
"""Largest length of the first class. The limit doubles from class to class."""

BLOCK_COST = 512
"""Cost of one more block, in keys: a block that saves fewer is not worth its kernels."""

STEPS_AHEAD = 8
"""A move pays if this many steps save more keys than it copies."""

_CLASS_ENDS = SHORTEST << np.arange(40, dtype=np.int64)

Indices = NDArray[np.int64]


class RowBlock(NamedTuple):
    """Rows `start` to `end`, exclusive, and the number of keys that each of them reads."""

    start: int
    end: int
    window: int

    @property
    def keys(self) -> int:
        return (self.end - self.start) * self.window


def round_up(length: int, multiple: int = WINDOW_STEP) -> int:
    return -(-length // multiple) * multiple


def length_classes(lengths_B: NDArray[Any]) -> Indices:
    return np.searchsorted(_CLASS_ENDS, lengths_B)


def split(lengths_B: Indices, limit: int) -> list[RowBlock]:
    """Return blocks that cover the rows in order. No window exceeds `limit`."""
    if lengths_B.max() <= SHORTEST:
        return [_block(lengths_B, 0, len(lengths_B), limit)]
    longest_from_B = np.maximum.accumulate(lengths_B[::-1])[::-1]
    starts = np.flatnonzero(np.diff(length_classes(longest_from_B), prepend=-1))
    blocks: list[RowBlock] = []
    for start, end in zip(starts, [*starts[1:], len(lengths_B)], strict=True):
        block = _block(lengths_B, int(start), int(end), limit)
        if blocks and blocks[-1].window * (block.end - block.start) - block.keys < BLOCK_COST:
            block = RowBlock(blocks[-1].start, block.end, blocks.pop().window)
        blocks.append(block)
    return blocks


def _block(lengths_B: Indices, start: int, end: int, limit: int) -> RowBlock:
    return RowBlock(start, end, min(limit, round_up(int(lengths_B[start:end].max()))))


def moves(rows_N: Indices, lengths_N: Indices, limit: int) -> dict[int, int]:
    """Return the moves that order these rows by length, longest first, from row 0 on: row -> new row. Empty if they do
    not pay. `rows_N` are in ascending order and may have gaps."""
    if len(rows_N) == 0 or lengths_N.max() <= SHORTEST:
        return {}
    targets_N = _ordered(rows_N, length_classes(lengths_N))
    moving_N = targets_N != rows_N
    after_N = np.empty_like(lengths_N)
    after_N[targets_N] = lengths_N
    saved = sum(block.keys for block in split(lengths_N, limit)) - sum(block.keys for block in split(after_N, limit))
    if saved * STEPS_AHEAD <= lengths_N[moving_N].sum():
        return {}
    return dict(zip(rows_N[moving_N].tolist(), targets_N[moving_N].tolist(), strict=True))


def _ordered(rows_N: Indices, classes_N: Indices) -> Indices:
    """Return a new row for each row, such that classes descend and few rows move."""
    targets_N = np.empty_like(rows_N)
    start = 0
    for each in np.unique(classes_N)[::-1]:
        members = np.flatnonzero(classes_N == each)
        places = np.arange(start, start + len(members))
        stays = np.isin(rows_N[members], places, assume_unique=True)
        targets_N[members[stays]] = rows_N[members[stays]]
        targets_N[members[~stays]] = np.setdiff1d(places, rows_N[members[stays]], assume_unique=True)
        start += len(members)
    return targets_N


def by_class(lengths_N: NDArray[Any]) -> Iterator[tuple[Indices, int]]:
    """Yield the indices and the longest length of each length class."""
    classes_N = length_classes(lengths_N)
    for each in np.unique(classes_N):
        members = np.flatnonzero(classes_N == each)
        yield members, int(lengths_N[members].max())
