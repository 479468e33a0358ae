"""Packing rows of different lengths without padding, and attention within each packed document.

Invariants
- The packing depends only on the rows in their given order and on `tokens_per_pass`.
- A row is never split: a row longer than a pass gets its own pass.
- The token at index t of a row is predicted at index t - 1 of the same document; nothing is predicted across documents.
- A document ends before its last trained token: no trained token depends on that token or on anything after it.

Attention is causal within each document and registered with transformers as `ATTENTION_NAME`. Documents of similar
length are gathered into a right-padded bucket and attended together. Padding needs no mask: under causal attention a
padded key comes after every real query of its document, so no real query sees it, and padded queries are never read
back, so they have no gradient. This holds for any bucket width, so widths are chosen for speed alone.

Legend: _T packed input tokens, _N trained tokens, _D1 documents + 1, _P padded tokens of all buckets, B documents of a
bucket, W its width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outpace.types import Floats, Ints, Row

Longs = NDArray[np.int64]

Extras = Mapping[str, Floats]
"""Additional values of a row by name, one per trained token."""

_NO_EXTRAS: Extras = {}


@dataclass(frozen=True)
class Packed:
    """The input of one forward/backward pass. `sources_N` are indices into T: the position that predicts each trained
    token. `sequence_N` is the index of each token's document."""

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
    """Return how many tokens of the row are model input; 0 if the row has no trained token."""
    trained = np.flatnonzero(row.mask)
    return int(trained[-1]) if trained.size else 0


def pack(rows: Sequence[Row], tokens_per_pass: int, extras: Sequence[Extras] = ()) -> list[Packed]:
    """Fill passes greedily in row order. Rows without trained tokens are left out.

    `extras` is empty or has one entry per row, all with the same names."""
    extras = extras or [_NO_EXTRAS] * len(rows)
    return [_join(documents) for documents in _passes(zip(rows, extras, strict=True), tokens_per_pass)]


_Document = tuple[Row, Extras]


def _passes(documents: Iterable[_Document], tokens_per_pass: int) -> Iterator[list[_Document]]:
    current: list[_Document] = []
    filled = 0
    for row, extras in documents:
        _check_row(row)
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


def _check_row(row: Row) -> None:
    count = len(row.tokens)
    parts = (row.mask, row.logprobs, row.versions, row.advantages)
    if any(len(part) != count for part in parts):
        raise ValueError(f"a row of {count} tokens has arrays of other lengths: {[len(part) for part in parts]}")
    if count and row.mask[0]:
        raise ValueError("the first token of a row cannot be trained: no token predicts it")


def _join(documents: list[_Document]) -> Packed:
    rows = [row for row, _ in documents]
    lengths = [input_length(row) for row in rows]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    trained = [np.flatnonzero(row.mask) for row in rows]

    def trained_values(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(row, name)[index] for row, index in zip(rows, trained, strict=True)])

    return Packed(
        tokens_T=np.concatenate([row.tokens[:n] for row, n in zip(rows, lengths, strict=True)]).astype(np.int64),
        position_ids_T=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        cu_seqlens_D1=starts,
        sources_N=np.concatenate([start + index - 1 for start, index in zip(starts[:-1], trained, strict=True)]),
        targets_N=trained_values("tokens").astype(np.int64),
        sampler_logp_N=trained_values("logprobs").astype(np.float32),
        advantages_N=trained_values("advantages").astype(np.float32),
        versions_N=trained_values("versions").astype(np.int32),
        sequence_N=np.repeat(np.arange(len(rows)), [len(index) for index in trained]),
        extras={name: np.concatenate([extras[name] for _, extras in documents]) for name in documents[0][1]},
    )
