"""Packing rows of different lengths into passes, without padding and with common prefixes computed once.

The attempts of a group begin with the same prompt, the turns of an episode with the same history. Rows of a pass are
merged into a tree of segments: equal tokens with the same history are computed once, in forward and in backward.

    rows      p p p a a a a        segments   p p p ─┬─ a a a a
              p p p b b                              ├─ b b
              p p p b b c c                          │   └─ c c
                                                     …
A segment attends to its context: the segments before it on the way from the root, and itself, causally. Its tokens
see exactly what they would see in separate rows, so logprobs and gradients are the same up to rounding.

Invariants
- The packing depends only on the rows in their given order and on `tokens_per_pass`.
- A row is never split between passes: a row longer than a pass gets its own pass.
- The token at index t of a row is predicted at index t - 1 of the same row; nothing is predicted across rows.
- A row ends before its last trained token: no trained token depends on that token or on anything after it.

Legend: _T tokens of the pass, _N trained tokens, _S1 segments + 1, _K tokens of all contexts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outpace.learner.backend import Extras, check_rows
from outpace.types import Floats, Ints, Row

Longs = NDArray[np.int64]

MIN_SHARED = 8
"""Shortest prefix that is shared if every segment is attended alone (flash attention): an additional segment then costs
about as much as computing this many tokens. In all cases, rows share a root only if this many first tokens match."""

CONTEXT_PER_SHARED_TOKEN = 32
"""A split must share one token per this many tokens before it, because every segment copies its context's keys."""

_NO_EXTRAS: Extras = {}


@dataclass(frozen=True)
class PackedBatch:
    """The input of one forward/backward pass.

    `cu_seqlens_S1` are the bounds of the segments in T. `context_K` are indices into T: for each segment, its context
    in order, up to and including itself; `cu_context_S1` are the bounds of contexts in K. `sources_N` are indices into
    T: the position that predicts each trained token. `sequence_N` is the index of each trained token's row among the
    `rows` of the pass."""

    tokens_T: Longs
    position_ids_T: Longs
    cu_seqlens_S1: Longs
    context_K: Longs
    cu_context_S1: Longs
    sources_N: Longs
    targets_N: Longs
    sampler_logp_N: Floats
    advantages_N: Floats
    versions_N: Ints
    sequence_N: Longs
    rows: int
    extras: Extras = field(default_factory=dict)

    @property
    def shares_prefixes(self) -> bool:
        return len(self.context_K) > len(self.tokens_T)


def input_length(row: Row) -> int:
    """Return how many tokens of the row are model input; 0 if the row has no trained token."""
    return max(0, row.mask.tobytes().rfind(1))


def pack(
    rows: Sequence[Row],
    tokens_per_pass: int,
    extras: Sequence[Extras] = (),
    min_shared: int | None = MIN_SHARED,
) -> list[PackedBatch]:
    """Fill passes greedily in row order. Rows without trained tokens are left out.

    `extras` is empty or has one entry per row, all with the same names. `min_shared` is the minimum number of common
    tokens for rows to share a branch of the tree (at the root always `MIN_SHARED`); None shares nothing."""
    check_rows(rows)
    extras = extras or [_NO_EXTRAS] * len(rows)
    passes = _passes(zip(rows, extras, strict=True), tokens_per_pass, min_shared)
    return [_join(documents) for documents in passes]


@dataclass(eq=False)
class _Segment:
    """A run of tokens with the same history: the history of `parent`, then its tokens. `children` are keyed by their
    first `key_length` tokens."""

    tokens: Ints
    offset: int  # position of the first token in its rows
    parent: _Segment | None
    key_length: int
    children: dict[bytes, _Segment] = field(default_factory=dict)

    def key(self, tokens: Ints) -> bytes | None:
        """Return the key of a child that begins with `tokens`, None if there are too few tokens."""
        return tokens[: self.key_length].tobytes() if len(tokens) >= self.key_length else None


@dataclass(frozen=True)
class _Document:
    row: Row
    extras: Extras
    last: _Segment


class _PrefixTree:
    def __init__(self, min_shared: int | None) -> None:
        self.size = 0  # tokens of all segments
        self._min_shared = min_shared
        self._root = _Segment(np.zeros(0, dtype=np.int32), 0, None, MIN_SHARED)
        self._rows: dict[bytes, _Segment] = {}  # the last segment of every row

    def insert(self, tokens: Ints, limit: int) -> _Segment | None:
        """Add a row. Return its last segment, or None if the tree would exceed `limit` tokens."""
        if self._min_shared is None:
            return self._append(self._root, tokens, 0, limit)
        whole = tokens.tobytes()
        if (known := self._rows.get(whole)) is not None:
            return known if self.size <= limit else None
        segment, common = self._match(tokens)
        end = segment.offset + common
        if self.size + len(tokens) - end > limit:
            return None
        if common < len(segment.tokens):
            segment = self._split(segment, common)
        last = segment if end == len(tokens) else self._append(segment, tokens[end:], end, limit)
        if last is not None:
            self._rows[whole] = last
        return last

    def _append(self, parent: _Segment, tokens: Ints, offset: int, limit: int) -> _Segment | None:
        if self.size + len(tokens) > limit:
            return None
        self.size += len(tokens)
        leaf = _Segment(tokens, offset, parent, self._min_shared or MIN_SHARED)
        if (key := parent.key(tokens)) is not None:
            parent.children.setdefault(key, leaf)
        return leaf

    def _match(self, tokens: Ints) -> tuple[_Segment, int]:
        """Return the deepest segment that these tokens reach, and how many tokens of that segment match."""
        segment, end = self._root, 0
        while (key := segment.key(rest := tokens[end:])) is not None and (child := segment.children.get(key)):
            common = _common_prefix(child.tokens, rest)
            if common < len(child.tokens):
                worthwhile = common * CONTEXT_PER_SHARED_TOKEN >= end
                return (child, common) if worthwhile else (segment, len(segment.tokens))
            segment, end = child, end + common
        return segment, len(segment.tokens)

    def _split(self, segment: _Segment, at: int) -> _Segment:
        """Split a segment in two and return the first part. `segment` becomes the second part."""
        parent = segment.parent
        assert parent is not None
        key = parent.key(segment.tokens)
        assert key is not None
        first = _Segment(segment.tokens[:at], segment.offset, parent, segment.key_length)
        parent.children[key] = first
        segment.tokens, segment.offset, segment.parent = segment.tokens[at:], segment.offset + at, first
        if (rest_key := first.key(segment.tokens)) is not None:
            first.children[rest_key] = segment
        return first


def _common_prefix(left: Ints, right: Ints) -> int:
    size = min(len(left), len(right))
    different = (left[:size] != right[:size]).nonzero()[0]
    return int(different[0]) if different.size else size


def _passes(
    documents: Iterable[tuple[Row, Extras]], tokens_per_pass: int, min_shared: int | None
) -> Iterator[list[_Document]]:
    tree, current = _PrefixTree(min_shared), list[_Document]()
    for row, extras in documents:
        length = input_length(row)
        if length == 0:
            continue
        tokens = np.ascontiguousarray(row.tokens[:length], dtype=np.int32)
        last = tree.insert(tokens, tokens_per_pass if current else length)
        if last is None:
            yield current
            tree, current = _PrefixTree(min_shared), []
            last = tree.insert(tokens, length)
            assert last is not None, "a row fits into a pass of its own"
        current.append(_Document(row, extras, last))
    if current:
        yield current


class _Layout:
    """Places of segments in T, parents before their children, in the order of the rows."""

    def __init__(self, documents: Iterable[_Document]) -> None:
        self.segments: list[_Segment] = []
        self.contexts: list[Longs] = []  # places of the whole history and the tokens of each segment
        self._numbers: dict[_Segment, int] = {}
        self._end = 0
        self.last_D = np.array([self._number(document.last) for document in documents])

    def _number(self, segment: _Segment) -> int:
        """Return the index of a segment among all, adding it after its missing ancestors."""
        missing = []
        ancestor: _Segment | None = segment
        while ancestor is not None and ancestor.parent is not None and ancestor not in self._numbers:
            missing.append(ancestor)
            ancestor = ancestor.parent
        for new in reversed(missing):
            own = np.arange(self._end, self._end + len(new.tokens))
            before = self._numbers.get(new.parent) if new.parent is not None else None  # None: the parent is the root
            self.contexts.append(own if before is None else np.concatenate([self.contexts[before], own]))
            self._numbers[new] = len(self.segments)
            self.segments.append(new)
            self._end += len(new.tokens)
        return self._numbers[segment]


def _join(documents: list[_Document]) -> PackedBatch:
    layout, rows = _Layout(documents), [document.row for document in documents]
    segments, lengths = layout.segments, np.array([len(row.tokens) for row in rows])
    trained = np.concatenate([row.mask for row in rows]).nonzero()[0]  # places in all rows
    sequence_N = np.repeat(np.arange(len(rows)), lengths)[trained]
    index_N = trained - (np.cumsum(lengths) - lengths)[sequence_N]  # of each trained token in its row
    context_K, cu_context_S1 = np.concatenate(layout.contexts), _bounds([len(each) for each in layout.contexts])
    cu_seqlens_S1 = _bounds([len(segment.tokens) for segment in segments])
    offsets = np.array([segment.offset for segment in segments]) - cu_seqlens_S1[:-1]
    position_ids_T = np.arange(cu_seqlens_S1[-1]) + np.repeat(offsets, np.diff(cu_seqlens_S1))

    def trained_values(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(row, name) for row in rows])[trained]

    return PackedBatch(
        tokens_T=np.concatenate([segment.tokens for segment in segments]).astype(np.int64),
        position_ids_T=position_ids_T,
        cu_seqlens_S1=cu_seqlens_S1,
        context_K=context_K,
        cu_context_S1=cu_context_S1,
        sources_N=context_K[cu_context_S1[layout.last_D][sequence_N] + index_N - 1],
        targets_N=trained_values("tokens").astype(np.int64),
        sampler_logp_N=trained_values("logprobs").astype(np.float32),
        advantages_N=trained_values("advantages").astype(np.float32),
        versions_N=trained_values("versions").astype(np.int32),
        sequence_N=sequence_N,
        rows=len(rows),
        extras={name: np.concatenate([d.extras[name] for d in documents]) for name in documents[0].extras},
    )


def _bounds(lengths: list[int]) -> Longs:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
