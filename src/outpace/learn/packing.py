"""Rows of different lengths, laid end to end without padding.

Invariants
- The packing is a function of the rows in the order given and of `tokens_per_pass`, and of nothing else.
- A row is never split: one that is longer than a pass gets a pass of its own.
- The token at index t of a row is predicted at index t - 1 of the same document; nothing is predicted across documents.
- A document ends before its last trained token: that token, and whatever follows it, is an input to nothing trained.

No torch here. Legend: _T packed input tokens, _N trained tokens, _D1 documents + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outpace.types import Floats, Ints, Row

Longs = NDArray[np.int64]

Extras = Mapping[str, Floats]
"""What else is known of a row, by name: one value per trained token."""

NOTHING: Extras = {}


@dataclass(frozen=True)
class Packed:
    """One forward/backward pass. `sources_N` are indices into T: where each trained token is predicted;
    `sequence_N` numbers the document each is of."""

    tokens_T: Longs
    position_ids_T: Longs
    cu_seqlens_D1: Longs
    sources_N: Longs
    targets_N: Longs
    sampler_logp_N: Floats
    advantages_N: Floats
    versions_N: Ints
    sequence_N: Longs
    extras: Extras = field(default_factory=dict)

    @property
    def documents(self) -> int:
        return len(self.cu_seqlens_D1) - 1


def input_length(row: Row) -> int:
    """How many tokens of the row the model has to read; 0 when the row trains nothing."""
    trained = np.flatnonzero(row.mask)
    return int(trained[-1]) if trained.size else 0


def pack(rows: Sequence[Row], tokens_per_pass: int, extras: Sequence[Extras] = ()) -> list[Packed]:
    """Fill passes greedily in the order of the rows; rows that train nothing take no part.

    `extras` belong to the rows, one to one, and all have the same names; none at all is fine."""
    known = extras or [NOTHING] * len(rows)
    return [_join(documents) for documents in _passes(zip(rows, known, strict=True), tokens_per_pass)]


Document = tuple[Row, Extras]


def _passes(documents: Iterable[Document], tokens_per_pass: int) -> Iterator[list[Document]]:
    current: list[Document] = []
    filled = 0
    for row, extras in documents:
        _check(row)
        length = input_length(row)
        if length == 0:
            continue
        if current and filled + length > tokens_per_pass:
            yield current
            current, filled = [], 0
        current.append((row, extras))
        filled += length
    if current:
        yield current


def _check(row: Row) -> None:
    count = len(row.tokens)
    parts = (row.mask, row.logprobs, row.versions, row.advantages)
    if any(len(part) != count for part in parts):
        raise ValueError(f"a row of {count} tokens has arrays of lengths {[len(part) for part in parts]}")
    if count and row.mask[0]:
        raise ValueError("the first token of a row cannot be trained: nothing predicts it")


def _join(documents: list[Document]) -> Packed:
    rows = [row for row, _ in documents]
    lengths = [input_length(row) for row in rows]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    trained = [np.flatnonzero(row.mask) for row in rows]

    def pick(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(row, name)[index] for row, index in zip(rows, trained, strict=True)])

    return Packed(
        tokens_T=np.concatenate([row.tokens[:n] for row, n in zip(rows, lengths, strict=True)]).astype(np.int64),
        position_ids_T=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        cu_seqlens_D1=starts,
        sources_N=np.concatenate([start + index - 1 for start, index in zip(starts[:-1], trained, strict=True)]),
        targets_N=pick("tokens").astype(np.int64),
        sampler_logp_N=pick("logprobs").astype(np.float32),
        advantages_N=pick("advantages").astype(np.float32),
        versions_N=pick("versions").astype(np.int32),
        sequence_N=np.repeat(np.arange(len(rows)), [len(index) for index in trained]),
        extras={name: np.concatenate([extras[name] for _, extras in documents]) for name in documents[0][1]},
    )
