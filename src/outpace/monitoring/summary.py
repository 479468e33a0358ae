"""`summary.json`: the results of a run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

import msgspec

from outpace.types import Failure

STOPPED = "stopped"
"""`Summary.reason` of a run that was stopped early and saved a checkpoint to resume from."""

WINDOW = 10
"""Maximum number of steps averaged for `reward_first` and `reward_last`."""

MAX_DISTINCT_FAILURES = 100
"""Number of distinct failures counted separately. Further reasons are counted together, per source."""


def averaged_steps(steps: int) -> int:
    """Return the number of steps averaged for `reward_first` and `reward_last`, at either end of a run."""
    return max(1, min(WINDOW, steps // 4))


class EvalResult(msgspec.Struct, frozen=True):
    """Mean held-out reward of a version over `tasks` tasks, with its standard error (None for fewer than two tasks)."""

    version: int
    reward: float
    stderr: float | None = None
    tasks: int = 0
    binary: bool = False  # every reward was 0 or 1: the mean is an accuracy


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run. Tokens, seconds and failures include all starts of the run. None: nothing to measure."""

    steps: int
    wall_s: float
    train_s: float  # wall-clock time of the training loop, without startup and the last evaluation
    seed: int
    reward_first: float | None
    reward_last: float | None
    eval_first: float | None
    eval_last: float | None
    eval_first_stderr: float | None = None
    eval_last_stderr: float | None = None
    eval_tasks: int = 0  # number of tasks scored in the last evaluation
    tokens_trained: int
    tokens_sampled: int
    tokens_filtered: int = 0  # sampled tokens of filtered groups
    groups_skipped: int = 0  # prompt visits skipped by the difficulty curriculum
    waste_fraction: float
    lag_max: int  # without replayed groups
    efficiency: float | None
    exit: int  # exit code of the process
    reason: str = ""  # why the run ended: "done", "stopped", or the error
    evals: list[EvalResult] = []
    failures: list[Failure] = []  # most frequent first
    extra: dict[str, float] = {}


class SummaryBuilder:
    """Accumulates step metrics into a `Summary`. After a resume, add the kept log records first."""

    def __init__(self) -> None:
        self.steps = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._trained = self._sampled = self._wasted = self._filtered = self._skipped = 0.0
        self._lag_max = 0.0
        self._efficiency: float | None = None
        self._evals: dict[int, EvalResult] = {}
        self._failures: Counter[tuple[str, str]] = Counter()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps = max(self.steps, step)
        reward = metrics.get("reward/mean")
        if reward is not None:
            self._last.append(reward)
            if len(self._first) < WINDOW:
                self._first.append(reward)
        self.add_totals(metrics)
        self._lag_max = max(self._lag_max, metrics.get("lag/max", 0.0))
        self._efficiency = metrics.get("efficiency", self._efficiency)

    def add_totals(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics that are summed over a run, from a step or from what is recorded after the last step."""
        self._trained += metrics.get("throughput/trained_tokens", 0.0)
        self._sampled += metrics.get("throughput/sampled_tokens", 0.0)
        self._wasted += metrics.get("waste/tokens", 0.0)
        self._filtered += metrics.get("waste/filtered_tokens", 0.0)
        self._skipped += metrics.get("groups/skipped", 0.0)

    def evaluation(self, result: EvalResult) -> None:
        self._evals[result.version] = result

    def failures(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            key = failure.source, failure.reason
            if key not in self._failures and len(self._failures) >= MAX_DISTINCT_FAILURES:
                key = failure.source, "other reasons"
            self._failures[key] += failure.count

    def build(
        self,
        *,
        wall_s: float,
        train_s: float,
        seed: int,
        exit: int,
        reason: str = "",
        extra: Mapping[str, float] | None = None,
    ) -> Summary:
        evals = [self._evals[version] for version in sorted(self._evals)]
        window = averaged_steps(self.steps)
        return Summary(
            steps=self.steps,
            wall_s=wall_s,
            train_s=train_s,
            seed=seed,
            reward_first=_mean(self._first[:window]),
            reward_last=_mean(list(self._last)[-window:]),
            eval_first=evals[0].reward if evals else None,
            eval_last=evals[-1].reward if evals else None,
            eval_first_stderr=evals[0].stderr if evals else None,
            eval_last_stderr=evals[-1].stderr if evals else None,
            eval_tasks=evals[-1].tasks if evals else 0,
            tokens_trained=round(self._trained),
            tokens_sampled=round(self._sampled),
            tokens_filtered=round(self._filtered),
            groups_skipped=round(self._skipped),
            waste_fraction=min(self._wasted / self._sampled, 1.0) if self._sampled else 0.0,
            lag_max=round(self._lag_max),
            efficiency=self._efficiency,
            exit=exit,
            reason=reason,
            evals=evals,
            failures=[Failure(*key, count) for key, count in self._failures.most_common()],
            extra=dict(extra or {}),
        )


def parse_eval_result(version: int, metrics: Mapping[str, float], prefix: str = "eval") -> EvalResult | None:
    """Parse the result from a record of evals.jsonl; None if no task could be scored."""
    if f"{prefix}/reward" not in metrics:
        return None
    return EvalResult(
        version,
        metrics[f"{prefix}/reward"],
        metrics.get(f"{prefix}/stderr"),
        round(metrics.get(f"{prefix}/count", 0)),
        bool(metrics.get(f"{prefix}/binary", 0)),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
