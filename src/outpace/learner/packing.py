"""Packing rows of different lengths into passes, without padding and with common prefixes computed once.

The attempts of a group begin with the same prompt, the turns of an episode with the same history. Rows of a pass are
merged into a tree of segments: tokens with the same history are one token of the pass, in forward and in backward.

    rows      p p p a a a a        segments   p p p ─┬─ a a a a
              p p p b b                              ├─ b b
              p p p b b c c                          │   └─ c c
                                                     …
A segment attends to its context: the segments before it on the way from the root, and itself, causally. That is what
its tokens would see in their own rows, so logprobs and gradients are those of separate rows, up to rounding.

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
"""Shortest prefix that is shared: a segment costs about as much as the computation of so many tokens."""

CONTEXT_PER_SHARED_TOKEN = 32
"""Tokens of context for each of which one more token must be shared: every segment copies the keys of its context."""

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
    trained = np.flatnonzero(row.mask)
    return int(trained[-1]) if trained.size else 0


def pack(
    rows: Sequence[Row], tokens_per_pass: int, extras: Sequence[Extras] = (), share_prefixes: bool = True
) -> list[PackedBatch]:
    """Fill passes greedily in row order. Rows without trained tokens are left out.

    `extras` is empty or has one entry per row, all with the same names."""
    extras = extras or [_NO_EXTRAS] * len(rows)
    passes = _passes(zip(rows, extras, strict=True), tokens_per_pass, share_prefixes)
    return [_join(tree, documents) for tree, documents in passes]


@dataclass(eq=False)
class _Segment:
    """A run of tokens with the same history: that of `parent`, then the parent itself."""

    tokens: Ints
    offset: int  # position of the first token in its rows
    parent: _Segment | None
    children: dict[bytes, _Segment] = field(default_factory=dict)  # by their first `MIN_SHARED` tokens


@dataclass(frozen=True)
class _Document:
    row: Row
    extras: Extras
    last: _Segment


class _PrefixTree:
    def __init__(self, share_prefixes: bool) -> None:
        self.size = 0  # tokens of all segments
        self._shares = share_prefixes
        self._root = _Segment(np.zeros(0, dtype=np.int32), 0, None)

    def shared_length(self, tokens: Ints) -> int:
        """Return how many of the first tokens the tree already has."""
        segment, common = self._match(tokens)
        return segment.offset + common

    def insert(self, tokens: Ints) -> _Segment:
        """Add a row. Return the segment that it ends with."""
        segment, common = self._match(tokens)
        if common < len(segment.tokens):
            segment = self._split(segment, common)
        rest = tokens[segment.offset + common :]
        if len(rest) == 0:
            return segment
        leaf = _Segment(rest, segment.offset + common, segment)
        self.size += len(rest)
        if (key := _key(rest)) is not None:
            segment.children.setdefault(key, leaf)
        return leaf

    def _match(self, tokens: Ints) -> tuple[_Segment, int]:
        """Return the last segment on the way of these tokens, and how many of its tokens are theirs."""
        segment, end = self._root, 0
        while self._shares and (key := _key(tokens[end:])) is not None and (child := segment.children.get(key)):
            common = _common_prefix(child.tokens, tokens[end:])
            if common < len(child.tokens):
                worthwhile = common * CONTEXT_PER_SHARED_TOKEN >= end
                return (child, common) if worthwhile else (segment, len(segment.tokens))
            segment, end = child, end + common
        return segment, len(segment.tokens)

    def _split(self, segment: _Segment, at: int) -> _Segment:
        """Split a segment in two, the second of which keeps its identity. Return the first."""
        parent, key = segment.parent, _key(segment.tokens)
        assert parent is not None
        assert key is not None
        first = _Segment(segment.tokens[:at], segment.offset, parent)
        parent.children[key] = first
        segment.tokens, segment.offset, segment.parent = segment.tokens[at:], segment.offset + at, first
        if (rest_key := _key(segment.tokens)) is not None:
            first.children[rest_key] = segment
        return first


def _key(tokens: Ints) -> bytes | None:
    return tokens[:MIN_SHARED].tobytes() if len(tokens) >= MIN_SHARED else None


def _common_prefix(left: Ints, right: Ints) -> int:
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if different.size else size


def _passes(
    documents: Iterable[tuple[Row, Extras]], tokens_per_pass: int, share_prefixes: bool
) -> Iterator[tuple[_PrefixTree, list[_Document]]]:
    tree, current = _PrefixTree(share_prefixes), list[_Document]()
    for row, extras in documents:
        check_rows([row])
        length = input_length(row)
        if length == 0:
            continue
        tokens = np.ascontiguousarray(row.tokens[:length], dtype=np.int32)
        if current and tree.size + length - tree.shared_length(tokens) > tokens_per_pass:
            yield tree, current
            tree, current = _PrefixTree(share_prefixes), []
        current.append(_Document(row, extras, tree.insert(tokens)))
    if current:
        yield tree, current


class _Layout:
    """Places of segments in T, parents before their children, in the order of the rows."""

    def __init__(self, documents: Iterable[_Document]) -> None:
        self.segments: list[_Segment] = []
        self._contexts: dict[_Segment, Longs] = {}
        self._end = 0
        for document in documents:
            self.context(document.last)

    def context(self, segment: _Segment) -> Longs:
        """Return the places of the segment's whole history and of its own tokens."""
        missing = []
        ancestor: _Segment | None = segment
        while ancestor is not None and ancestor.parent is not None and ancestor not in self._contexts:
            missing.append(ancestor)
            ancestor = ancestor.parent
        for new in reversed(missing):
            own = np.arange(self._end, self._end + len(new.tokens))
            before = self._contexts.get(new.parent) if new.parent is not None else None
            self._contexts[new] = own if before is None else np.concatenate([before, own])
            self.segments.append(new)
            self._end += len(new.tokens)
        return self._contexts[segment]


def _join(tree: _PrefixTree, documents: list[_Document]) -> PackedBatch:
    layout = _Layout(documents)
    rows, segments = [document.row for document in documents], layout.segments
    trained = [np.flatnonzero(row.mask) for row in rows]
    contexts = [layout.context(segment) for segment in segments]
    sources = [layout.context(document.last)[index - 1] for document, index in zip(documents, trained, strict=True)]

    def trained_values(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(row, name)[index] for row, index in zip(rows, trained, strict=True)])

    return PackedBatch(
        tokens_T=np.concatenate([segment.tokens for segment in segments]).astype(np.int64),
        position_ids_T=np.concatenate([s.offset + np.arange(len(s.tokens), dtype=np.int64) for s in segments]),
        cu_seqlens_S1=_bounds([len(segment.tokens) for segment in segments]),
        context_K=np.concatenate(contexts),
        cu_context_S1=_bounds([len(context) for context in contexts]),
        sources_N=np.concatenate(sources),
        targets_N=trained_values("tokens").astype(np.int64),
        sampler_logp_N=trained_values("logprobs").astype(np.float32),
        advantages_N=trained_values("advantages").astype(np.float32),
        versions_N=trained_values("versions").astype(np.int32),
        sequence_N=np.repeat(np.arange(len(rows)), [len(index) for index in trained]),
        rows=len(rows),
        extras={name: np.concatenate([d.extras[name] for d in documents]) for name in documents[0].extras},
    )


def _bounds(lengths: list[int]) -> Longs:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
