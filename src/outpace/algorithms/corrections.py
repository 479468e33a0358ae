"""What is done about the distance between the policy that sampled and the one that is trained: weights and rejection.

    rho = anchor / sampler (current / sampler where the surrogate has no ratio), always without gradient

A weight multiplies the loss of a token. A mask rejects tokens, alone or by the sequence: their loss is multiplied by 0,
and denominators stay those of all tokens, so rejecting some never makes the others louder. Bounds are inclusive (but
for the limit of m2po) and compared as logarithms, in float64: what is rejected must not depend on rounding.

Each mask is one function in `MASKS`; its keyword-only arguments are settings of `[correction]`.

Legend: _N one entry per trained token, _S one per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from outpace.algorithms.registry import Facts
from outpace.algorithms.tokens import Tokens, bounded_exp

if TYPE_CHECKING:
    from torch import Tensor

WeightLevel = Literal["none", "token", "sequence"]
Scope = Literal["token", "sequence", "batch"]

F = TypeVar("F", bound=Callable[..., Any])

IMPOSSIBLE = 1e6
"""Log-ratios count as at most this, so that two infinite ones add up to a number. Far beyond every bound."""


@dataclass(frozen=True)
class MaskFacts(Facts):
    """`scope`: what a decision about one token depends on. A mask of the batch waits until the batch is closed and
    takes arrays of numpy; the others take the tokens of one pass."""

    scope: Scope = "token"


MASKS: dict[str, MaskFacts] = {}
"""Every mask by its name in `correction.masks`."""


def mask(scope: Scope) -> Callable[[F], F]:
    def register(function: F) -> F:
        MASKS[function.__name__] = MaskFacts(function, function.__kwdefaults__ or {}, scope)
        return function

    return register


def weights(tokens: Tokens, log_rho_N: Tensor, level: WeightLevel, floor: float, cap: float | None) -> Tensor:
    """rho of each token, or the product over its sequence, truncated to [floor, cap]; 1 at level `none`."""
    if level == "none":
        return log_rho_N.new_ones(log_rho_N.shape)
    exact_N = _exact(log_rho_N)
    if level == "sequence":
        exact_N = tokens.spread(tokens.sum_by_sequence(exact_N))
    return bounded_exp(exact_N).clamp(min=floor, max=cap).to(log_rho_N.dtype)


def keep(tokens: Tokens, log_rho_N: Tensor, masks: Mapping[str, Mapping[str, Any]]) -> Tensor:
    """Which tokens all of these masks keep. `masks` has the settings of each by its name; none is of batch scope."""
    kept_N = log_rho_N.new_ones(log_rho_N.shape).bool()
    for name, settings in masks.items():
        facts = MASKS[name]
        assert facts.scope != "batch", f"{name} is decided over a closed batch"
        kept_N = kept_N & facts.function(tokens, log_rho_N, **settings)
    return kept_N


@mask("token")
def token(tokens: Tokens, log_rho_N: Tensor, *, token_low: float = 0.5, token_high: float = 5.0) -> Tensor:
    """Tokens whose ratio is within bounds."""
    return _within(_exact(log_rho_N), token_low, token_high)


@mask("sequence")
def sequence(tokens: Tokens, log_rho_N: Tensor, *, sequence_low: float = 0.5, sequence_high: float = 2.0) -> Tensor:
    """Sequences whose product of ratios is within bounds. The longer a sequence, the rarer that is."""
    return tokens.spread(_within(tokens.sum_by_sequence(_exact(log_rho_N)), sequence_low, sequence_high))


@mask("sequence")
def geometric(
    tokens: Tokens, log_rho_N: Tensor, *, geometric_low: float = 0.99, geometric_high: float = 1.01
) -> Tensor:
    """Sequences whose geometric mean of ratios is within bounds: the same demand at every length."""
    return tokens.spread(_within(tokens.mean_by_sequence(_exact(log_rho_N)), geometric_low, geometric_high))


@mask("sequence")
def veto(tokens: Tokens, log_rho_N: Tensor, *, veto_below: float = 1e-4) -> Tensor:
    """Sequences none of whose ratios is below the bound: one token that the anchor would hardly say spoils the rest."""
    impossible_N = _exact(log_rho_N) < _log(veto_below)
    return tokens.spread(tokens.sum_by_sequence(impossible_N.double()) == 0)


@mask("sequence")
def opsm(tokens: Tokens, log_rho_N: Tensor, *, opsm_delta: float = 0.1) -> Tensor:
    """All but what is punished in sequences that the current policy has already left: A < 0 and
    mean log(sampler / current) above the bound. Where advantages differ inside a sequence, each token goes by its own.

    Always measured from the current policy to the sampler, whatever `log_rho_N` is."""
    left_N = _exact(tokens.sampler_logp_N) - _exact(tokens.logp_N.detach())
    far_S = tokens.mean_by_sequence(left_N) > opsm_delta
    return ~(tokens.spread(far_S) & (tokens.advantages_N < 0))


@mask("batch")
def m2po(log_rho_N: NDArray[np.floating[Any]], *, m2po_limit: float = 0.04) -> NDArray[np.bool_]:
    """Rejects the largest squared log-ratios of all tokens of a batch until the mean of the rest is below the limit.

    Equal ones are kept or rejected together, so the order of the tokens does not matter. At least one token is kept:
    if even the smallest is above the limit, only those that equal it."""
    squared_N = np.square(np.clip(np.asarray(log_rho_N, dtype=np.float64), -IMPOSSIBLE, IMPOSSIBLE))
    if squared_N.size == 0:
        return np.ones(0, dtype=np.bool_)
    ascending = np.sort(squared_N)
    means = np.cumsum(ascending) / np.arange(1, ascending.size + 1)
    below = int(np.searchsorted(means >= m2po_limit, True))  # the means of ever more tokens only grow
    if below == ascending.size:
        return np.ones(squared_N.shape, dtype=np.bool_)
    kept_N: NDArray[np.bool_] = squared_N < ascending[below]
    return kept_N if kept_N.any() else squared_N == ascending[0]


def _exact(values_N: Tensor) -> Tensor:
    return values_N.detach().double().clamp(-IMPOSSIBLE, IMPOSSIBLE)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    return (log_ratio >= _log(low)) & (log_ratio <= _log(high))


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
