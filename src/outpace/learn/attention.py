"""MERGED"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from outpace.errors import OutpaceError
from outpace.learn.packing import Longs

DOCUMENTS = "outpace_documents"
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
class Documents:
    """The buckets of a packed batch. Computed once per pass, used by every layer."""

    buckets: list[Bucket]
    restore_T: Tensor  # index of each packed token among the padded tokens

    @classmethod
    def plan(cls, cu_seqlens_D1: Longs, device: torch.device) -> Documents:
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
    documents: Documents | None = None,
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


AttentionInterface.register(DOCUMENTS, document_attention)
