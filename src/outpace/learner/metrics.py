"""Sums over the tokens of a step, and the step metrics computed from them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.algorithms.corrections import RATIO_BINS, effective_sample_size
from outpace.learner.loss import LossGradient
from outpace.learner.packing import PackedBatch
from outpace.monitoring.metrics import percentile
from outpace.types import Version

LOSS_SUMS = ("policy", "entropy", "kl_reference", "value")
"""Sums of loss terms, over all trained tokens."""

STALENESS_SUMS = ("weight", "weight_sq", "kl", "kl_fresh", "tokens_fresh", *RATIO_BINS)
"""Sums about off-policyness: over fresh (not replayed) groups, before the first update of the step. Replayed groups are
older on purpose, and later updates would measure a distance that the step itself created.

Sums in neither list, such as masked or clipped tokens, are over fresh groups in every update."""

MEASURED_TOKENS = "measured"
"""Number of tokens in the `STALENESS_SUMS` sums."""


@dataclass
class StepTotals:
    """Sums over a pass, a chunk, an update or a step. They are additive."""

    tokens: int = 0
    sequences: int = 0
    loss_sum: float = 0.0
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)
    lag_counts: Counter[int] = field(default_factory=Counter)
    replay_lag_counts: Counter[int] = field(default_factory=Counter)

    @classmethod
    def from_pass(
        cls, packed: PackedBatch, gradient: LossGradient, version: Version, replayed: bool, before_first_update: bool
    ) -> StepTotals:
        """Return the totals of one pass. `before_first_update`: the step has made no update yet."""
        tokens, measured = len(packed.targets_N), before_first_update and not replayed
        scalars = read_scalars({"loss": gradient.loss_sum, **gradient.sums, **gradient.maxima})
        lags = Counter((version - packed.versions_N).tolist())
        counted = {
            name: scalars[name]
            for name in gradient.sums
            if name in LOSS_SUMS or (measured if name in STALENESS_SUMS else not replayed)
        }
        return cls(
            tokens=tokens,
            sequences=packed.rows,
            loss_sum=scalars["loss"],
            sums=defaultdict(float, counted, **{MEASURED_TOKENS: tokens * measured}),
            maxima={name: scalars[name] for name in gradient.maxima} if measured else {},
            lag_counts=Counter() if replayed else lags,
            replay_lag_counts=lags if replayed else Counter(),
        )

    def add(self, other: StepTotals) -> None:
        self.tokens += other.tokens
        self.sequences += other.sequences
        self.loss_sum += other.loss_sum
        for name, value in other.sums.items():
            self.sums[name] += value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)
        self.lag_counts.update(other.lag_counts)
        self.replay_lag_counts.update(other.replay_lag_counts)


TotalsParts = tuple[int, int, float, dict[str, float], dict[str, float], dict[int, int], dict[int, int]]
"""The fields of `StepTotals` as plain values, to send to other processes."""


def totals_parts(totals: StepTotals) -> TotalsParts:
    return (
        totals.tokens,
        totals.sequences,
        totals.loss_sum,
        dict(totals.sums),
        totals.maxima,
        dict(totals.lag_counts),
        dict(totals.replay_lag_counts),
    )


def totals_from(parts: TotalsParts) -> StepTotals:
    tokens, sequences, loss_sum, sums, maxima, lags, replayed = parts
    return StepTotals(tokens, sequences, loss_sum, defaultdict(float, sums), maxima, Counter(lags), Counter(replayed))


def step_metrics(step: StepTotals, engine_kl: float, passes: int = 1) -> dict[str, float]:
    """Return means and fractions over the tokens of a step. All are finite, even for a step without tokens."""
    own, measured = sum(step.lag_counts.values()), int(step.sums[MEASURED_TOKENS])
    over = dict.fromkeys(LOSS_SUMS, step.tokens) | dict.fromkeys(STALENESS_SUMS, measured)
    mean = {name: value / max(1, over.get(name, own)) for name, value in step.sums.items()}
    metrics = {
        "offpolicy/ess": effective_sample_size(step.sums, measured),
        "offpolicy/kl": mean.get("kl", 0.0),
        "offpolicy/kl_engine": engine_kl,
        "offpolicy/kl_staleness": max(0.0, mean.get("kl", 0.0) - engine_kl),
        "offpolicy/ratio_max": step.maxima.get("ratio", 0.0),
        "entropy": mean.get("entropy", 0.0),
    }
    metrics |= {f"offpolicy/{name}": mean.get(name, 0.0) for name in RATIO_BINS}
    for sums_name, metric in (("kl_reference", "kl"), ("value", "loss/value")):
        if sums_name in mean:
            metrics[metric] = mean[sums_name]
    return metrics | _rejected_fractions(step, own) | _lag_metrics(step.lag_counts, passes)


def _rejected_fractions(step: StepTotals, own: int) -> dict[str, float]:
    """Return the fractions of masked and of clipped tokens: of all tokens, and of those with positive or negative
    advantage."""
    sums = step.sums
    sums["clipped"] = sums["clipped_positive"] + sums["clipped_negative"]
    return {
        f"{metric}{suffix}": sums[f"{name}{suffix}"] / max(1.0, count)
        for metric, name in (("offpolicy/masked", "masked"), ("clip_ratio", "clipped"))
        for suffix, count in (
            ("", own),
            ("_positive", sums["tokens_positive"]),
            ("_negative", sums["tokens_negative"]),
        )
    }


def _lag_metrics(lag_counts: Counter[int], passes: int) -> dict[str, float]:
    """Return the distribution of lag. `lag_counts` counts each token once per pass over the batch."""
    lags = sorted(lag_counts.items())
    tokens = max(1, sum(lag_counts.values()))
    metrics = {
        "lag/mean": sum(lag * count for lag, count in lags) / tokens,
        "lag/p95": percentile(lag_counts, 0.95) if lags else 0.0,
        "lag/max": float(lags[-1][0]) if lags else 0.0,
    }
    return metrics | {f"lag/tokens_{lag}": count / passes for lag, count in lags}


def read_scalars(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Copy scalars to the host in one transfer."""
    if not scalars:
        return {}
    return dict(zip(scalars, torch.stack([value.double() for value in scalars.values()]).tolist(), strict=True))
