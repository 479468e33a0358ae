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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from outpace.errors import OutpaceError
from outpace.learner.backend import Extras, check_rows
from outpace.types import Floats, Ints, Row

Longs = NDArray[np.int64]

_NO_EXTRAS: Extras = {}


@dataclass(frozen=True)
class PackedBatch:
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


def pack(rows: Sequence[Row], tokens_per_pass: int, extras: Sequence[Extras] = ()) -> list[PackedBatch]:
    """Fill passes greedily in row order. Rows without trained tokens are left out.

    `extras` is empty or has one entry per row, all with the same names."""
    extras = extras or [_NO_EXTRAS] * len(rows)
    return [_join(documents) for documents in _passes(zip(rows, extras, strict=True), tokens_per_pass)]


_Document = tuple[Row, Extras]


def _passes(documents: Iterable[_Document], tokens_per_pass: int) -> Iterator[list[_Document]]:
    current: list[_Document] = []
    filled = 0
    for row, extras in documents:
        check_rows([row])
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


def _join(documents: list[_Document]) -> PackedBatch:
    rows = [row for row, _ in documents]
    lengths = [input_length(row) for row in rows]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    trained = [np.flatnonzero(row.mask) for row in rows]

    def trained_values(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(row, name)[index] for row, index in zip(rows, trained, strict=True)])

    return PackedBatch(
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


ATTENTION_NAME = "outpace_documents"
"""Name of this attention in transformers."""

MIN_WIDTH = 16
WIDTHS_PER_OCTAVE = 8


class PackingUnsupported(OutpaceError):
    """The model uses an attention feature that packing does not support."""


@dataclass(frozen=True)
class Bucket:
    """Documents attended together. `gather` are indices into T, `width` per document."""

    count: int
    width: int
    gather: Tensor


@dataclass(frozen=True)
class DocumentBuckets:
    """The buckets of a packed batch. Computed once per pass, used by every layer."""

    buckets: list[Bucket]
    restore_T: Tensor  # index of each packed token among the padded tokens

    @classmethod
    def plan(cls, cu_seqlens_D1: Longs, device: torch.device) -> DocumentBuckets:
        lengths = np.diff(cu_seqlens_D1)
        widths = np.array([bucket_width(int(n)) for n in lengths], dtype=np.int64)
        buckets: list[Bucket] = []
        restore_T = np.empty(int(cu_seqlens_D1[-1]), dtype=np.int64)
        offset = 0
        for width in np.unique(widths):
            members = np.flatnonzero(widths == width)
            width = min(int(width), int(lengths[members].max()))
            starts, ends = cu_seqlens_D1[members], cu_seqlens_D1[members + 1]
            # Padding repeats the document's last token: a valid index whose result is never read.
            gather = np.minimum(starts[:, None] + np.arange(width), ends[:, None] - 1).reshape(-1)
            for slot, start, end in zip(range(len(members)), starts, ends, strict=True):
                restore_T[start:end] = offset + slot * width + np.arange(end - start)
            buckets.append(Bucket(len(members), width, torch.from_numpy(gather).to(device)))
            offset += len(members) * width
        return cls(buckets, torch.from_numpy(restore_T).to(device))


def bucket_width(length: int) -> int:
    """Round up to one of a few widths per octave: at most an eighth of padding, few distinct shapes."""
    octave = 1 << (length.bit_length() - 1)
    step = max(MIN_WIDTH, octave // WIDTHS_PER_OCTAVE)
    return -(-length // step) * step


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: DocumentBuckets | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: [1, heads, T, D] in, [1, T, H, D] out. Dropout is never applied: the sampler
    has none, and importance weights compare with the sampler."""
    if documents is None or attention_mask is not None or query.shape[0] != 1:
        raise PackingUnsupported("attention was called without documents, with a mask, or with a batch dimension")
    if softcap is not None or s_aux is not None:
        raise PackingUnsupported("packing does not support soft-capped attention or attention sinks")
    heads = [states[0].transpose(0, 1) for states in (query, key, value)]  # [T, heads, D]
    padded = [
        _attend_bucket(bucket, *heads, scaling=scaling, sliding_window=sliding_window) for bucket in documents.buckets
    ]
    out_P = padded[0] if len(padded) == 1 else torch.cat(padded)
    return out_P.index_select(0, documents.restore_T).unsqueeze(0), None


def _attend_bucket(
    bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, sliding_window: int | None
) -> Tensor:
    def gathered(states: Tensor) -> Tensor:
        return states.index_select(0, bucket.gather).view(bucket.count, bucket.width, *states.shape[1:]).transpose(1, 2)

    window = _window_mask(bucket.width, sliding_window, query.device)
    out = functional.scaled_dot_product_attention(
        gathered(query),
        gathered(key),
        gathered(value),
        attn_mask=window,
        is_causal=window is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)  # [B * W, H, D]


def _window_mask(width: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Return the sliding-window mask, None if the window covers the whole width: causal attention without a mask has
    faster kernels."""
    if sliding_window is None or sliding_window >= width:
        return None
    index = torch.arange(width, device=device)
    distance = index[:, None] - index[None, :]
    return (distance >= 0) & (distance < sliding_window)


AttentionInterface.register(ATTENTION_NAME, document_attention)
