"""Sampling a token per row from logits: temperature, then top_k, then top_p, renormalized.

Invariants
- The sampled token of a row does not depend on the other rows, bit for bit: an operation is skipped only if it would
  change no row.
- The logprob is under the distribution that the token was drawn from. At temperature 0 the token is the argmax, and its
  logprob is under the softmax at temperature 1.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sample(
    logits_B_V: Tensor,
    temperature_B: NDArray[np.float32],
    top_k_B: NDArray[np.int64],
    top_p_B: NDArray[np.float32],
    uniform_B: NDArray[np.float64],
) -> tuple[Tensor, Tensor]:
    """Return one token per row and its logprob, on the device of the logits."""
    device = logits_B_V.device
    greedy_B = temperature_B == 0
    scaled_B_V = logits_B_V.float()
    if not np.all(greedy_B | (temperature_B == 1)):
        divisor_B = np.where(greedy_B, np.float32(1), temperature_B)
        scaled_B_V = scaled_B_V / torch.from_numpy(divisor_B).to(device).unsqueeze(1)
    truncated_B = ~greedy_B & ((top_k_B > 0) | (top_p_B < 1))
    if truncated_B.any():
        scaled_B_V = _truncate(scaled_B_V, np.where(truncated_B, top_k_B, 0), np.where(truncated_B, top_p_B, 1))
    logprobs_B_V = torch.log_softmax(scaled_B_V, dim=-1)
    if greedy_B.all():
        tokens_B = scaled_B_V.argmax(dim=-1)
    else:
        tokens_B = _draw(logprobs_B_V, torch.from_numpy(uniform_B).to(device))
        if greedy_B.any():
            tokens_B = torch.where(torch.from_numpy(greedy_B).to(device), scaled_B_V.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_B_V.gather(1, tokens_B.unsqueeze(1)).squeeze(1)


def _draw(logprobs_B_V: Tensor, uniform_B: Tensor) -> Tensor:
    """Draw by inverse CDF: the first token whose cumulative mass exceeds uniform * total.

    In float64, the total times a uniform below 1 stays below the total, so a token with zero mass is never drawn. Only
    non-finite logits can push the index past the end; the caller detects those by their logprob.
    """
    mass_B_V = logprobs_B_V.exp().cumsum(dim=-1, dtype=torch.float64)
    threshold_B_1 = uniform_B.unsqueeze(1) * mass_B_V[:, -1:]
    index_B = torch.searchsorted(mass_B_V, threshold_B_1, right=True).squeeze(1)
    return index_B.clamp_(max=logprobs_B_V.shape[-1] - 1)


def _truncate(scaled_B_V: Tensor, top_k_B: NDArray[np.int64], top_p_B: NDArray[np.float32]) -> Tensor:
    """Set logits cut by top_k, then by top_p over the rest, to -inf. Ties are ranked by token id."""
    vocabulary = scaled_B_V.shape[-1]
    device = scaled_B_V.device
    ranked_B_V, order_B_V = scaled_B_V.sort(dim=-1, descending=True, stable=True)
    limit_B_1 = torch.from_numpy(np.where(top_k_B > 0, top_k_B, vocabulary)).to(device).unsqueeze(1)
    beyond_k_B_V = torch.arange(vocabulary, device=device) >= limit_B_1
    mass_B_V = ranked_B_V.masked_fill(beyond_k_B_V, -torch.inf).softmax(dim=-1, dtype=torch.float64)
    before_B_V = mass_B_V.cumsum(dim=-1) - mass_B_V
    share_B_1 = torch.from_numpy(np.where(top_p_B < 1, top_p_B, np.inf)).to(device).unsqueeze(1)
    cut_ranked_B_V = beyond_k_B_V | (before_B_V >= share_B_1)
    cut_B_V = torch.zeros_like(cut_ranked_B_V).scatter_(1, order_B_V, cut_ranked_B_V)
    return scaled_B_V.masked_fill(cut_B_V, -torch.inf)
