"""From losses of tokens to the loss of a step: sum(weight x loss) / denominator, over everything the step trains on.

The weight of a token depends on its own sequence alone and the division comes once, at the end, so the gradient does
not depend on how the step was cut into passes. Rejected tokens count in every denominator.

Legend: _N one entry per trained token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.algorithms.registry import Aggregation
from outpace.algorithms.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor


def token_weights(aggregation: Aggregation, tokens: Tokens) -> Tensor:
    """1, or 1 / the trained tokens of its sequence where sequences count alike."""
    if aggregation == "seq_mean_token_mean":
        return tokens.spread(1 / tokens.lengths_S)
    return tokens.advantages_N.new_ones(tokens.advantages_N.shape)


def denominator(aggregation: Aggregation, tokens: int, sequences: int, longest: int) -> float:
    """`tokens` and `sequences` are those of the whole step, `longest` is how many tokens a sequence may have. Never
    below 1: a step without tokens has the loss 0."""
    if aggregation == "token_mean":
        return float(max(1, tokens))
    return float(max(1, sequences * longest if aggregation == "dr_grpo" else sequences))
