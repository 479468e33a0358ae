"""MERGED"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this before `exp`: e^20 is far above any cap, and its square still fits in float32."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a clamped log-ratio: never overflows, never leads to NaN."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of one forward pass, concatenated: the input of a policy loss.

    `logp_N` is from the current policy and carries the gradient; everything else is constant. `old_logp_N` is from the
    old policy of the ratio (`algorithm.anchor`), `sampler_logp_N` from the policy that sampled the token. `sequence_N`
    is the index of each token's sequence. A pass always contains whole sequences.
    """

    logp_N: Tensor
    anchor_logp_N: Tensor
    sampler_logp_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    sequences: int

    @cached_property
    def log_ratio_N(self) -> Tensor:
        """log(current / old), with gradient, clamped."""
        return (self.logp_N - self.anchor_logp_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def ratio_N(self) -> Tensor:
        """current / old, with gradient."""
        return self.log_ratio_N.exp()

    @cached_property
    def lengths_S(self) -> Tensor:
        """Trained tokens of each sequence, at least 1."""
        return self.sum_by_sequence(self.advantages_N.new_ones(self.advantages_N.shape)).clamp(min=1)

    def sum_by_sequence(self, values_N: Tensor) -> Tensor:
        return values_N.new_zeros(self.sequences).index_add(0, self.sequence_N, values_N)

    def mean_by_sequence(self, values_N: Tensor) -> Tensor:
        return self.sum_by_sequence(values_N) / self.lengths_S

    def spread(self, values_S: Tensor) -> Tensor:
        """Expand values per sequence to values per token."""
        return values_S[self.sequence_N]
