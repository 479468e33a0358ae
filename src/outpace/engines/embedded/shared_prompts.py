"""Attention over prompts whose keys and values several rows share.

The attempts of a group have the same prompt. Its keys and values are stored once, in a slot of the prompt cache, and a
decode step reads them once for all the rows that use them: the queries of these rows form one matrix. Attention over
each row's own tokens is computed separately, and the two results are weighted by their share of the softmax:

    softmax([p, o]) @ [P, O]  =  a * softmax(p) @ P  +  (1 - a) * softmax(o) @ O      a = sigmoid(lse(p) - lse(o))

where p and o are the scores of the prompt's keys and of the row's own, P and O their values, and lse is log-sum-exp.

Queries are padded to the largest number of rows per prompt. If one prompt has many more rows than the others, its
surplus rows become a separate block.

Shapes: B rows, P prompts of a block, N padded rows per prompt, W key window, K key-value heads, G query heads per
key-value head, D head size, T capacity of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.engines.embedded.row_blocks import SHORTEST, Indices, split

MIN_SHARED = SHORTEST + 1
"""Minimum number of tokens to share. With fewer, attention in two parts costs more than it saves."""

MIN_REQUESTS = 4
"""Minimum number of requests with the same prompt to share it. If one row shares, all rows pay for the second part."""

MAX_TIMES_MEAN = 2
"""A prompt's rows beyond this multiple of the mean become a separate block."""


class SharedPrompts(NamedTuple):
    """For each row, the slot of the prompt cache with the first tokens of its sequence, and their number. A row that
    shares nothing has slot -1 and length 0."""

    slot_B: Indices
    length_B: Indices


@dataclass(frozen=True)
class _Block:
    """Neighboring prompt slots and rows that use them, attended in one product."""

    start: int
    row_P_N: Indices  # -1 is padding
    length_P: Indices


class PromptAttention:
    """Attention of one decode step over the shared prompts. Every layer uses it with its own queries and cache."""

    def __init__(self, prompts: SharedPrompts, kv_heads: int, dtype: torch.dtype) -> None:
        heads = np.arange(kv_heads)
        place_B_K = np.zeros((len(prompts.slot_B), kv_heads), dtype=np.int64)  # in the results of all blocks
        self._products: list[tuple[slice, Tensor, Tensor]] = []  # heads of the cache, index of the queries, mask
        places = 0
        for block in _blocks(prompts):
            query_P_K_N = np.maximum(block.row_P_N, 0)[:, None] * kv_heads + heads[:, None]
            place_P_K_N = places + np.arange(query_P_K_N.size).reshape(query_P_K_N.shape)
            places += query_P_K_N.size
            used_P_N = block.row_P_N >= 0
            place_B_K[block.row_P_N[used_P_N]] = place_P_K_N.swapaxes(1, 2)[used_P_N]
            hidden_P_W = torch.from_numpy(np.arange(block.length_P.max()) >= block.length_P[:, None])
            mask_P_W = torch.zeros(hidden_P_W.shape, dtype=dtype).masked_fill_(hidden_P_W, -torch.inf)
            self._products.append((
                slice(block.start * kv_heads, (block.start + len(block.length_P)) * kv_heads),
                torch.from_numpy(query_P_K_N.flatten()),
                mask_P_W.repeat_interleave(kv_heads, 0).unsqueeze(1),
            ))  # fmt: skip
        self._place_BK = torch.from_numpy(place_B_K.flatten())
        absent_B_K = np.repeat(prompts.slot_B[:, None] < 0, kv_heads, axis=1)
        self._absent_BK_1_1 = torch.from_numpy(absent_B_K.reshape(-1, 1, 1)) if absent_B_K.any() else None

    def __call__(self, q_BK_G_D: Tensor, keys_SK_T_D: Tensor, values_SK_T_D: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attended values of each row's prompt and the log-sum-exp of its scores: 0 and -inf for a row that
        shares nothing. Keys and values come from the prompt cache with S slots."""
        groups, size = q_BK_G_D.shape[1:]
        outputs, lses = [], []
        for heads, queries, mask_PK_1_W in self._products:
            q_PK_NG_D = q_BK_G_D.index_select(0, queries).view(len(mask_PK_1_W), -1, size)
            keys_PK_W_D, values_PK_W_D = (each[heads, : mask_PK_1_W.shape[-1]] for each in (keys_SK_T_D, values_SK_T_D))
            output, scores, weights = attend(q_PK_NG_D, keys_PK_W_D, values_PK_W_D, mask_PK_1_W)
            outputs.append(output.view(-1, groups, size))
            lses.append(log_sum_exp(scores, weights).view(-1, groups, 1))
        attended_BK_G_D = torch.cat(outputs).index_select(0, self._place_BK)
        lse_BK_G_1 = torch.cat(lses).index_select(0, self._place_BK)
        if self._absent_BK_1_1 is not None:
            attended_BK_G_D.masked_fill_(self._absent_BK_1_1, 0)
            lse_BK_G_1.masked_fill_(self._absent_BK_1_1, -torch.inf)
        return attended_BK_G_D, lse_BK_G_1


def _blocks(prompts: SharedPrompts) -> Iterator[_Block]:
    slot_B, length_B = prompts
    rows = np.argsort(slot_B, kind="stable")[np.count_nonzero(slot_B < 0) :]
    counts = np.bincount(slot_B[rows])
    firsts = np.cumsum(counts) - counts  # where the rows of a slot begin in `rows`
    lengths = np.zeros(len(counts), dtype=np.int64)
    lengths[slot_B[rows]] = length_B[rows]
    for start, end, _ in split(lengths, int(lengths.max())):
        used = np.count_nonzero(counts[start:end])
        if used == 0:
            continue
        most = min(counts[start:end].max(), MAX_TIMES_MEAN * -(-counts[start:end].sum() // used))
        index_P_N = firsts[start:end, None] + np.arange(most)
        row_P_N = np.where(np.arange(most) < counts[start:end, None], rows[np.minimum(index_P_N, len(rows) - 1)], -1)
        yield _Block(start, row_P_N, lengths[start:end])
        for slot in (start + np.flatnonzero(counts[start:end] > most)).tolist():
            surplus = rows[firsts[slot] + most : firsts[slot] + counts[slot]]
            yield _Block(slot, surplus[None], lengths[slot : slot + 1])


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return batched attention, its scores and its weights."""
    scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    weights = scores.softmax(-1, dtype=torch.float32)
    return torch.bmm(weights.to(values.dtype), values), scores, weights


def log_sum_exp(scores: Tensor, weights: Tensor) -> Tensor:
    """Return the log-sum-exp of scores from their softmax: the largest weight is exp(largest score - lse)."""
    return scores.amax(-1, keepdim=True).float() - weights.amax(-1, keepdim=True).log()


def merge(own: Tensor, own_lse: Tensor, prompt: Tensor, prompt_lse: Tensor) -> Tensor:
    """Combine attention over two disjoint sets of keys into attention over both."""
    return torch.lerp(own.float(), prompt.float(), torch.sigmoid(prompt_lse - own_lse)).to(own.dtype)
