"""What a loss may look at: the trained tokens of one forward pass, laid end to end.

Importing this module loads no torch: losses use methods of the tensors they are given, so that the tables of what can
be configured stay light.

Legend: _N one entry per trained token, _S one per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios beyond this are clamped before `exp`: e^20 is far above any cap, and its square still fits a float32."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio that can neither overflow nor, later, turn into NaN."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@dataclass(frozen=True)
class Tokens:
    """`logp_N` is the current policy's and carries the gradient; everything else is constant.

    `anchor_logp_N` belongs to the policy that a surrogate's ratio is taken to (`algorithm.anchor`), `sampler_logp_N` to
    the policy that drew the token, whenever that was. `sequence_N` numbers the sequence each token is of; sequences are
    whole: no pass ever sees a part of one.
    """

    logp_N: Tensor
    anchor_logp_N: Tensor
    sampler_logp_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    sequences: int

    @cached_property
    def log_ratio_N(self) -> Tensor:
        """log(current / anchor), with gradient, bounded."""
        return (self.logp_N - self.anchor_logp_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def ratio_N(self) -> Tensor:
        """current / anchor, with gradient."""
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
        """Every token gets the value of its sequence."""
        return values_S[self.sequence_N]
