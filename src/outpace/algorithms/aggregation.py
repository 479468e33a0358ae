"""MERGED"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.algorithms.registry import Aggregation
from outpace.algorithms.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor


def token_weights(aggregation: Aggregation, tokens: Tokens) -> Tensor:
    """Return the weight of each token: 1, or 1 / the trained tokens of its sequence for `seq_mean_token_mean`."""
    if aggregation == "seq_mean_token_mean":
        return tokens.spread(1 / tokens.lengths_S)
    return tokens.advantages_N.new_ones(tokens.advantages_N.shape)


def denominator(aggregation: Aggregation, tokens: int, sequences: int, longest: int) -> float:
    """Return what the loss of a step is divided by.

    `tokens` and `sequences` count the whole step; `max_completion_tokens` is the limit per sequence. Never below 1, so
    a step without tokens has loss 0."""
    if aggregation == "token_mean":
        return float(max(1, tokens))
    return float(max(1, sequences * longest if aggregation == "dr_grpo" else sequences))
