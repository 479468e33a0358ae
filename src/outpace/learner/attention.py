"""Attention of a packed batch: every segment attends to its context, causally.

Two implementations with the same result, registered with transformers as `ATTENTION_NAME`:
- `FlashPlan`: the variable-length flash attention of torch, for 16-bit types on a GPU. One kernel for all segments.
- `BucketPlan`: everything else. Units of similar length are gathered into a right-padded bucket and attended together
  by `scaled_dot_product_attention`. A unit is one segment with its context, or a small tree of segments with a mask of
  which tokens see which. Padded queries are never read back, and no query sees a padded key, so widths are chosen for
  speed alone.

A plan is computed once per pass and used by every layer.

Legend: _T tokens of the pass, _K tokens of all contexts, _P padded queries of all buckets, B units of a bucket, Q and C
width of its queries and keys, H query heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from outpace.errors import OutpaceError
from outpace.learner.packing import Longs, PackedBatch

ATTENTION_NAME = "outpace_segments"
"""Name of this attention in transformers."""

MIN_WIDTH = 16
WIDTHS_PER_OCTAVE = 8

MAX_TREE = 256
"""Size limit, in tokens, of a tree attended as one unit. In larger trees, most tokens cannot see each other."""


class PackingUnsupported(OutpaceError):
    """The model uses an attention feature that packing does not support."""


class FlashPlan(NamedTuple):
    """Arguments of variable-length flash attention. `context_K` is None if every context is the segment itself."""

    cu_seqlens: Tensor
    cu_context: Tensor
    longest: int
    longest_context: int
    context_K: Tensor | None


@dataclass(frozen=True)
class Bucket:
    """Units attended together, with the widths of their queries and keys. `distance_BQC` is the distance from each key
    to each query that follows it, negative if the query cannot see the key; None if keys and queries are the same
    tokens in causal order. B = 1 if all units are segments with histories of equal length."""

    count: int
    queries: int
    keys: int
    distance_BQC: Tensor | None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by sliding window, made once for all layers


@dataclass(frozen=True)
class BucketPlan:
    buckets: list[Bucket]
    queries_P: Tensor  # indices into T, in the order of the buckets
    keys: Tensor | None  # indices into T, in the order of the buckets; None: the same as the queries
    restore_T: Tensor  # index of each token among the padded queries
    padding_P: Tensor  # where queries are padding


Plan = FlashPlan | BucketPlan


def uses_flash(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _FLASH_ARGUMENTS is not None


def plan_attention(packed: PackedBatch, device: torch.device, dtype: torch.dtype) -> Plan:
    return _plan_flash(packed, device) if uses_flash(device, dtype) else plan_buckets(packed, device)


# ------------------------------------------------------------------------------------------------------------- flash


def _flash_arguments() -> dict[str, Any] | None:
    """Return the installed torch's arguments for causal attention with grouped heads; None if it has no varlen_attn."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    names = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    return causal | ({"enable_gqa": True} if "enable_gqa" in names else {})


_FLASH_ARGUMENTS = _flash_arguments()


def _plan_flash(packed: PackedBatch, device: torch.device) -> FlashPlan:
    def on_device(values: Longs) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device, non_blocking=True)

    return FlashPlan(
        cu_seqlens=on_device(packed.cu_seqlens_S1),
        cu_context=on_device(packed.cu_context_S1),
        longest=_rounded(np.diff(packed.cu_seqlens_S1)),
        longest_context=_rounded(np.diff(packed.cu_context_S1)),
        context_K=torch.from_numpy(packed.context_K).to(device) if packed.shares_prefixes else None,
    )


def _rounded(lengths: Longs) -> int:
    """Return the maximum length rounded up to a power of two, because compiled layers are specialized on its value."""
    return 1 << max(int(lengths.max()) - 1, 0).bit_length()


def _attend_flash(
    plan: FlashPlan, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert _FLASH_ARGUMENTS is not None
    arguments = dict(_FLASH_ARGUMENTS)
    if sliding_window is not None:
        if "window_size" not in arguments:
            raise PackingUnsupported("variable-length attention of this torch has no sliding window")
        arguments["window_size"] = (sliding_window - 1, 0)
    if plan.context_K is not None:
        key, value = _Expand.apply(key, plan.context_K), _Expand.apply(value, plan.context_K)  # type: ignore[no-untyped-call]
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        plan.cu_seqlens,
        plan.cu_context,
        plan.longest,
        plan.longest_context,
        scale=scaling,
        **arguments,
    )
    assert isinstance(out, Tensor)
    return out


class _Expand(torch.autograd.Function):
    """Repeat tokens. Gradients of the copies are summed in float32."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.tokens = states.shape[0]
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.tokens, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return total.index_add(0, index, grad.float()).to(grad.dtype), None


# ----------------------------------------------------------------------------------------------------------- buckets


class _Units:
    """Small trees of several segments, and every other segment with its context.

    Legend: _R trees, _S segments, _U units."""

    def __init__(self, packed: PackedBatch) -> None:
        self._packed = packed
        self._lengths_S = np.diff(packed.cu_seqlens_S1)
        roots_S = packed.context_K[packed.cu_context_S1[:-1]]
        _, first_R, tree_S, count_R = np.unique(roots_S, return_index=True, return_inverse=True, return_counts=True)
        size_R = np.bincount(tree_S, self._lengths_S)
        whole_S = ((count_R > 1) & (size_R <= MAX_TREE))[tree_S]
        leader_S = np.where(whole_S, first_R[tree_S], np.arange(len(tree_S)))
        self._leader_U, self._unit_S = np.unique(leader_S, return_inverse=True)
        self.whole_U = whole_S[self._leader_U]
        self.queries_U = np.bincount(self._unit_S, self._lengths_S).astype(np.int64)
        contexts_S = np.diff(packed.cu_context_S1)
        self.history_U = np.where(self.whole_U, 0, (contexts_S - self._lengths_S)[self._leader_U])
        unit_T = np.repeat(self._unit_S, self._lengths_S)
        self._order_T = np.argsort(unit_T, kind="stable")  # tokens by unit
        self._start_U = np.cumsum(self.queries_U) - self.queries_U
        self._unit_T = unit_T
        self._slot_T = np.empty_like(unit_T)  # place in the unit
        self._slot_T[self._order_T] = np.arange(len(unit_T)) - np.repeat(self._start_U, self.queries_U)

    def kinds(self) -> Iterator[Longs]:
        """Yield the units of each bucket. They have similar widths of queries and of the history before the queries."""
        columns = (self.whole_U, _rounded_widths(self.history_U), _rounded_widths(self.queries_U))
        order = np.lexsort(columns)
        changes = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
        yield from np.split(order, np.flatnonzero(changes) + 1)

    def queries(self, units: Longs, width: int) -> Longs:
        """Return indices into T. Padding repeats a valid index whose result is never read."""
        inside = np.minimum(np.arange(width), self.queries_U[units, None] - 1)
        found: Longs = self._order_T[self._start_U[units, None] + inside]
        return found

    def keys(self, units: Longs, width: int) -> Longs:
        first, end = (self._packed.cu_context_S1[self._leader_U[units] + offset, None] for offset in (0, 1))
        found: Longs = self._packed.context_K[np.minimum(first + np.arange(width), end - 1)]
        return found

    def restore(self, offset_U: Longs) -> Longs:
        """Return the place of each token among the padded queries. `offset_U`: the place of each unit's first token."""
        found: Longs = offset_U[self._unit_T] + self._slot_T
        return found

    def distances(self, units: Longs, width: int) -> Longs | None:
        """Return the distance from each key to each query. None if no unit has a history: causal attention without a
        mask has faster kernels."""
        if self.whole_U[units[0]]:
            return self._tree_distances(units, width)
        histories = np.unique(self.history_U[units])
        if not histories.any():
            return None
        histories = histories if len(histories) == 1 else self.history_U[units]
        place = np.arange(width)[:, None] - np.arange(int(histories.max()) + width)
        found: Longs = histories[:, None, None] + place
        return found

    def _tree_distances(self, units: Longs, width: int) -> Longs:
        """Return the distance from each key of a tree to each query, -1 if the key is not in the query's context. A
        padded query sees one key, because attention over no keys is not finite."""
        packed, count_S = self._packed, np.diff(self._packed.cu_context_S1)
        number_U = np.full(len(self.whole_U), -1)
        number_U[units] = np.arange(len(units))
        segments = np.flatnonzero(number_U[self._unit_S] >= 0)
        pairs = self._lengths_S[segments] * count_S[segments]  # of queries and keys
        segment = np.repeat(segments, pairs)
        query, key = np.divmod(np.arange(len(segment)) - np.repeat(np.cumsum(pairs) - pairs, pairs), count_S[segment])
        query += packed.cu_seqlens_S1[segment]
        key = packed.context_K[packed.cu_context_S1[segment] + key]
        distances = np.full((len(units), width, width), -1)
        distances[:, :, 0] = np.where(np.arange(width) < self.queries_U[units, None], -1, 0)
        place = number_U[self._unit_T[query]], self._slot_T[query], self._slot_T[key]
        distances[place] = packed.position_ids_T[query] - packed.position_ids_T[key]
        return distances


def plan_buckets(packed: PackedBatch, device: torch.device) -> BucketPlan:
    units = _Units(packed)
    buckets: list[Bucket] = []
    queries: list[Longs] = []
    keys: list[Longs] = []
    histories = units.history_U.any()
    offset_U = np.empty_like(units.queries_U)
    end = 0
    for members in units.kinds():
        count, width = len(members), int(units.queries_U[members].max())
        context = width + int(units.history_U[members].max())
        offset_U[members] = end + width * np.arange(count)
        end += count * width
        queries.append(units.queries(members, width).ravel())
        if histories:
            keys.append(queries[-1] if units.whole_U[members[0]] else units.keys(members, context).ravel())
        distance = units.distances(members, width)
        on_device = None if distance is None else torch.from_numpy(distance).to(device)
        buckets.append(Bucket(count, width, context, on_device))
    restore_T = units.restore(offset_U)
    padding_P = np.ones(end, dtype=np.bool_)
    padding_P[restore_T] = False
    return BucketPlan(
        buckets,
        torch.from_numpy(np.concatenate(queries)).to(device),
        torch.from_numpy(np.concatenate(keys)).to(device) if histories else None,
        torch.from_numpy(restore_T).to(device),
        torch.from_numpy(padding_P).to(device),
    )


def _rounded_widths(lengths_U: Longs) -> Longs:
    distinct, inverse = np.unique(lengths_U, return_inverse=True)
    return np.array([bucket_width(length) if length else 0 for length in distinct.tolist()])[inverse]


def bucket_width(length: int) -> int:
    """Round up to one of a few widths per octave: at most an eighth of padding, few distinct shapes."""
    octave = 1 << (length.bit_length() - 1)
    step = max(MIN_WIDTH, octave // WIDTHS_PER_OCTAVE)
    return -(-length // step) * step


class _Pad(torch.autograd.Function):
    """Gather tokens into the padded buckets. Backward is a gather too, because gradients of padding are zero."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, plan: BucketPlan) -> Tensor:
        ctx.plan = plan
        return states.index_select(0, plan.queries_P)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.plan.restore_T), None


class _Unpad(torch.autograd.Function):
    """Gather the tokens from the padded buckets."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, plan: BucketPlan) -> Tensor:
        ctx.plan = plan
        return states.index_select(0, plan.restore_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        padded = grad.index_select(0, ctx.plan.queries_P)
        return padded.masked_fill_(ctx.plan.padding_P[:, None, None], 0.0), None


def _attend_buckets(
    plan: BucketPlan, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
) -> Tensor:
    index = plan.keys
    queries: Tensor = _Pad.apply(query, plan)  # type: ignore[no-untyped-call]
    keys, values = (
        _Pad.apply(states, plan) if index is None else states.index_select(0, index)  # type: ignore[no-untyped-call]
        for states in (key, value)
    )
    query_sizes = [bucket.count * bucket.queries for bucket in plan.buckets]
    key_sizes = [bucket.count * bucket.keys for bucket in plan.buckets]
    split = torch.split(queries, query_sizes), torch.split(keys, key_sizes), torch.split(values, key_sizes)
    padded = [
        _attend_bucket(*parts, scaling=scaling, sliding_window=sliding_window)
        for parts in zip(plan.buckets, *split, strict=True)
    ]
    out: Tensor = _Unpad.apply(padded[0] if len(padded) == 1 else torch.cat(padded), plan)  # type: ignore[no-untyped-call]
    return out


def _attend_bucket(
    bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, sliding_window: int | None
) -> Tensor:
    def by_unit(states: Tensor) -> Tensor:  # [B, heads, width, D]
        return states.view(bucket.count, -1, *states.shape[1:]).transpose(1, 2)

    if sliding_window not in bucket.masks:
        bucket.masks[sliding_window] = _mask(bucket, sliding_window, query)
    mask = bucket.masks[sliding_window]
    out = functional.scaled_dot_product_attention(
        by_unit(query),
        by_unit(key),
        by_unit(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)  # [B * Q, H, D]


def _mask(bucket: Bucket, sliding_window: int | None, query: Tensor) -> Tensor | None:
    """Return the additive mask: -inf for keys that a query does not see. None if every query sees all keys up to it."""
    distance_BQC = bucket.distance_BQC
    if distance_BQC is None:
        if sliding_window is None or sliding_window >= bucket.queries:
            return None
        index = torch.arange(bucket.queries, device=query.device)
        distance_BQC = (index[:, None] - index[None, :])[None]
    hidden = distance_BQC < 0
    if sliding_window is not None:
        hidden |= distance_BQC >= sliding_window
    return query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Plan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: [1, heads, T, D] in, [1, T, H, D] out. Dropout is never applied: the sampler
    has none, and importance weights compare with the sampler."""
    if segments is None or attention_mask is not None or query.shape[0] != 1:
        raise PackingUnsupported("attention was called without segments, with a mask, or with a batch dimension")
    if softcap is not None or s_aux is not None:
        raise PackingUnsupported("packing does not support soft-capped attention or attention sinks")
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, D]
    if isinstance(segments, FlashPlan):
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings are applied in float32
        return _attend_flash(segments, query, key, value, scaling, sliding_window).unsqueeze(0), None
    return _attend_buckets(segments, query, key, value, scaling, sliding_window).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, segment_attention)
