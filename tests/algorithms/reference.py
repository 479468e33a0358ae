"""Independent reference for policy losses and corrections: one sequence at a time, token by token, in float64.

Shares no code with the library. `Token` holds the logprobs under the current policy, the old policy and the sampler,
and the advantage; a pass is a list of sequences, which may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from outpace.algorithms import MASKS
from outpace.algorithms.losses import Tokens
from outpace.algorithms.registry import ConfiguredFunction, MaskRegistration


class Token(NamedTuple):
    logp: float
    old: float
    sampler: float
    advantage: float


Sequence = list[Token]
Pass = list[Sequence]

# Width 32: no clip or mask bound is a float32 value, so no example lies exactly on a kink.
_drift = st.floats(-1.5, 1.5, width=32)
_token = st.builds(
    lambda logp, old, sampler, advantage: Token(logp, min(logp - old, -0.125), min(logp - sampler, -0.125), advantage),
    st.floats(-6.0, -0.0625, width=32),
    _drift,
    _drift,
    st.sampled_from([0.0, 1.0, -1.0]) | st.floats(-3, 3, width=32),
)
"""A token whose three policies are close to one another."""

passes: st.SearchStrategy[Pass] = st.lists(st.lists(_token, max_size=4), max_size=4)


def with_one_advantage(sequences: Pass) -> Pass:
    """Give every token of a sequence the advantage of its first token."""
    return [[token._replace(advantage=sequence[0].advantage) for token in sequence] for sequence in sequences]


def on_rollout(sequences: Pass) -> Pass:
    """Use the sampler as the old policy."""
    return [[token._replace(old=token.sampler) for token in sequence] for sequence in sequences]


def masks_of(settings: Mapping[str, Mapping[str, float]]) -> list[ConfiguredFunction[MaskRegistration]]:
    """Return masks by name, with their settings."""
    return [ConfiguredFunction(MASKS.built_in[name], values) for name, values in settings.items()]


def lay_out(sequences: Pass, dtype: torch.dtype = torch.float64) -> Tokens:
    flat = [token for sequence in sequences for token in sequence]
    columns = torch.tensor(flat, dtype=torch.float64).reshape(len(flat), 4).to(dtype).unbind(1)
    numbers = [number for number, sequence in enumerate(sequences) for _ in sequence]
    logp_N, old_N, sampler_N, advantages_N = columns
    return Tokens(
        logp_N.clone().requires_grad_(),
        old_N,
        sampler_N,
        advantages_N,
        torch.tensor(numbers, dtype=torch.int64),
        len(sequences),
    )


def flatten(values: list[list[float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([value for sequence in values for value in sequence], dtype=np.float64)


def by_sequence(function: Callable[..., list[float]], sequences: Pass, **settings: Any) -> Any:
    return flatten([function(sequence, **settings) if sequence else [] for sequence in sequences])


def _bound(x: float) -> float:
    return max(-20.0, min(20.0, x))


def _log_ratios(sequence: Sequence) -> list[float]:
    return [_bound(token.logp - token.old) for token in sequence]


def log_rho(sequence: Sequence) -> list[float]:
    return [token.old - token.sampler for token in sequence]


# Policy losses: the loss of each token of one sequence.


def reinforce(sequence: Sequence) -> list[float]:
    return [-token.advantage * token.logp for token in sequence]


def truncated_is(sequence: Sequence, cap: float) -> list[float]:
    ratios = [math.exp(x) for x in _log_ratios(sequence)]
    return [-min(r, cap) * token.advantage * token.logp for r, token in zip(ratios, sequence, strict=True)]


cispo = truncated_is


def importance(sequence: Sequence) -> list[float]:
    return [-math.exp(x) * token.advantage for x, token in zip(_log_ratios(sequence), sequence, strict=True)]


def _ppo_of(ratio: float, advantage: float, low: float, high: float) -> float:
    clipped = max(1 - low, min(1 + high, ratio))
    return -min(ratio * advantage, clipped * advantage)


def ppo(sequence: Sequence, clip_low: float, clip_high: float, dual_clip: float | None) -> list[float]:
    losses = []
    for x, token in zip(_log_ratios(sequence), sequence, strict=True):
        loss = _ppo_of(math.exp(x), token.advantage, clip_low, clip_high)
        if dual_clip is not None and token.advantage < 0:
            loss = min(loss, -dual_clip * token.advantage)
        losses.append(loss)
    return losses


def gspo(sequence: Sequence, clip_low: float, clip_high: float) -> list[float]:
    ratio = math.exp(sum(_log_ratios(sequence)) / len(sequence))
    return [_ppo_of(ratio, token.advantage, clip_low, clip_high) for token in sequence]


def gmpo(sequence: Sequence, clip_low: float, clip_high: float) -> list[float]:
    total = 0.0
    for x, token in zip(_log_ratios(sequence), sequence, strict=True):
        clipped = max(-clip_low, min(clip_high, x))
        total += min(x, clipped) if token.advantage > 0 else max(x, clipped)
    return [-math.exp(total / len(sequence)) * token.advantage for token in sequence]


def sapo(sequence: Sequence, tau_positive: float, tau_negative: float) -> list[float]:
    losses = []
    for x, token in zip(_log_ratios(sequence), sequence, strict=True):
        tau = tau_positive if token.advantage > 0 else tau_negative
        z = tau * (math.exp(x) - 1)
        gate = 1 / (1 + math.exp(-z)) if z > -700 else 0.0
        losses.append(-(4 / tau) * gate * token.advantage)
    return losses


def vespo(sequence: Sequence) -> list[float]:
    weight = math.exp(max(math.log(1e-8), _bound(sum(_log_ratios(sequence)))))
    losses = []
    for token in sequence:
        k, decay = (2, 3) if token.advantage >= 0 else (3, 2)
        losses.append(-math.exp(decay) * weight**k * math.exp(-decay * weight) * token.advantage * token.logp)
    return losses


def dppo_keeps(token: Token, divergence: str, trust_low: float, trust_high: float) -> bool:
    p, q = math.exp(token.logp), math.exp(token.sampler)
    if divergence == "tv":
        return p - q <= trust_high if token.advantage > 0 else q - p <= trust_low
    p_rest, q_rest = max(1 - p, 1e-12), max(1 - q, 1e-12)
    distance = q * _bound(token.sampler - token.logp) + q_rest * math.log(q_rest / p_rest)
    if token.advantage > 0:
        return p <= q or distance <= trust_high
    return p >= q or distance <= trust_low


def dppo(sequence: Sequence, divergence: str, trust_low: float, trust_high: float, ratio_penalty: float) -> list[float]:
    losses = []
    for x, token in zip(_log_ratios(sequence), sequence, strict=True):
        kept = dppo_keeps(token, divergence, trust_low, trust_high)
        losses.append((-math.exp(x) * token.advantage if kept else 0.0) + ratio_penalty * x**2)
    return losses


POLICY_LOSS_CASES: list[tuple[str, dict[str, Any]]] = [
    ("reinforce", {}),
    ("truncated_is", {"cap": 1.5}),
    ("cispo", {"cap": 1.3}),
    ("importance", {}),
    ("ppo", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}),
    ("ppo", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.7}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.3}),
    ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
    ("gmpo", {"clip_low": 0.4, "clip_high": 0.3}),
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    ("vespo", {}),
    ("dppo", {"divergence": "tv", "trust_low": 0.1, "trust_high": 0.15, "ratio_penalty": 0.0}),
    ("dppo", {"divergence": "kl", "trust_low": 0.02, "trust_high": 0.03, "ratio_penalty": 0.01}),
]
"""Every policy loss, with bounds tight enough that random examples fall on both sides of them."""

FROM_ROLLOUT = ("truncated_is", "importance", "dppo")
"""The policy losses whose old policy is the sampler."""


# Corrections: factors on the loss of each token of one sequence.


def weights(sequence: Sequence, level: str, floor: float, cap: float | None) -> list[float]:
    logs = log_rho(sequence)
    if level == "none":
        return [1.0] * len(logs)
    if level == "sequence":
        logs = [sum(logs)] * len(logs)
    top = math.inf if cap is None else cap
    return [min(top, max(floor, math.exp(_bound(x)))) for x in logs]


def token(sequence: Sequence, token_low: float, token_high: float) -> list[float]:
    return [float(token_low <= math.exp(x) <= token_high) for x in log_rho(sequence)]


def sequence(sequence: Sequence, sequence_low: float, sequence_high: float) -> list[float]:
    product = math.prod(math.exp(x) for x in log_rho(sequence))
    return [float(sequence_low <= product <= sequence_high)] * len(sequence)


def geometric(sequence: Sequence, geometric_low: float, geometric_high: float) -> list[float]:
    mean = math.prod(math.exp(x) for x in log_rho(sequence)) ** (1 / len(sequence))
    return [float(geometric_low <= mean <= geometric_high)] * len(sequence)


def veto(sequence: Sequence, veto_below: float) -> list[float]:
    return [float(all(math.exp(x) >= veto_below for x in log_rho(sequence)))] * len(sequence)


def opsm(sequence: Sequence, opsm_delta: float) -> list[float]:
    distance = sum(token.sampler - token.logp for token in sequence) / len(sequence)
    return [float(not (token.advantage < 0 and distance > opsm_delta)) for token in sequence]


MASK_CASES: list[tuple[str, dict[str, float]]] = [
    ("token", {"token_low": 0.6, "token_high": 1.9}),
    ("sequence", {"sequence_low": 0.3, "sequence_high": 3.1}),
    ("geometric", {"geometric_low": 0.7, "geometric_high": 1.4}),
    ("veto", {"veto_below": 0.4}),
    ("opsm", {"opsm_delta": 0.1}),
]

WEIGHT_CASES: list[dict[str, Any]] = [
    {"level": "none", "floor": 0.0, "cap": 2.0},
    {"level": "token", "floor": 0.0, "cap": 1.7},
    {"level": "token", "floor": 0.6, "cap": None},
    {"level": "sequence", "floor": 0.4, "cap": 2.3},
]


def m2po(log_ratios: list[float], limit: float) -> list[bool]:
    """Remove the largest values, equal values together, until the mean of the rest is below the limit."""
    squared = [x**2 for x in log_ratios]
    left = sorted(set(squared))
    while len(left) > 1 and np.mean([x for x in squared if x <= left[-1]]) >= limit:
        left.pop()
    return [x in left for x in squared]
