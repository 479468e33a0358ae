"""Held-out evaluation of one policy version. Runs beside training with bounded concurrency, and never pauses it.

    sets × tasks × attempts ─▶ one order per attempt, at most `eval.max_running` in flight ─▶ scores of each set

Failed attempts have no score. A task's reward is the mean over its scored attempts; pass@k covers the tasks with at
least k of them. Standard errors are over tasks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from statistics import fmean, stdev

from outpace.config.sections import EvalConfig
from outpace.monitoring.metrics import percentile
from outpace.monitoring.summary import EvalResult, parse_eval_result
from outpace.runtime.async_tools import gather_or_cancel
from outpace.types import EpisodeView, Failure, GroupOrder, GroupReport, Version

PERCENTILES = (10, 50, 90)

Reports = Mapping[str, Mapping[int, Sequence[GroupReport]]]
"""The reports on all attempts, by set and task."""


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks and its standard error (None for fewer than two tasks)."""

    mean: float
    stderr: float | None


@dataclass(frozen=True)
class SetScores:
    """The scores of one held-out set.

    `reward` is the mean over the `count` scored tasks, None if there are none; `stderr` is its standard error, None
    for fewer than two. `rewards` has the mean of each reward function over all attempts, before weighting.
    `percentiles` are over the rewards of all attempts, `reward_percentiles` over the values of each function."""

    reward: float | None
    count: int
    failed: int  # attempts
    tokens: int
    stderr: float | None = None
    binary: bool = False  # all rewards are 0 or 1, so the mean is an accuracy
    rewards: dict[str, float] = field(default_factory=dict)
    pass_at: dict[int, Estimate] = field(default_factory=dict)  # by k
    percentiles: dict[int, float] = field(default_factory=dict)
    reward_percentiles: dict[str, dict[int, float]] = field(default_factory=dict)
    scored: int = 0  # attempts

    def _metrics(self, prefix: str) -> Iterator[tuple[str, float]]:
        if self.reward is not None:
            yield f"{prefix}/reward", self.reward
        if self.stderr is not None:
            yield f"{prefix}/stderr", self.stderr
        for k, solved in self.pass_at.items():
            yield f"{prefix}/pass@{k}", solved.mean
            if solved.stderr is not None:
                yield f"{prefix}/pass@{k}/stderr", solved.stderr
        yield from ((f"{prefix}/reward/{function}", mean) for function, mean in self.rewards.items())
        by_name = {prefix: self.percentiles}
        by_name |= {f"{prefix}/reward/{function}": values for function, values in self.reward_percentiles.items()}
        yield from ((f"{name}/p{share}", value) for name, values in by_name.items() for share, value in values.items())
        yield f"{prefix}/count", float(self.count)
        yield f"{prefix}/failed", float(self.failed)
        yield f"{prefix}/mean_tokens", self.tokens / max(self.scored, 1)
        yield f"{prefix}/binary", float(self.binary)


@dataclass(frozen=True, kw_only=True)
class Evaluation(SetScores):
    """The result of one evaluation. The inherited fields have the scores of the unnamed held-out set, or of the first
    set if all are named; `sets` has those of each named set."""

    version: Version
    sets: dict[str, SetScores] = field(default_factory=dict)
    views: list[EpisodeView] = field(default_factory=list)
    reason: str = ""  # why an attempt failed, if any did
    newest: Version = 0  # newest version that sampled a token; `version` if pinned
    failures: list[Failure] = field(default_factory=list)

    @property
    def result(self) -> EvalResult | None:
        return parse_eval_result(self.version, self.metrics())

    def metrics(self) -> dict[str, float]:
        versions = {"eval/version": self.version, "eval/version_newest": max(self.version, self.newest)}
        metrics = dict(self._metrics("eval")) | {name: float(version) for name, version in versions.items()}
        for name, scores in self.sets.items():
            metrics |= scores._metrics(f"eval/{name}")
        return metrics


class Evaluator:
    """Runs every evaluation on the same tasks with the same sampling seeds, so only the policy differs."""

    def __init__(self, counts: Mapping[str, int], settings: EvalConfig) -> None:
        """`counts`: the number of tasks of each set to evaluate; "" is the unnamed set."""
        self._counts = dict(counts)
        self._settings = settings

    async def run(
        self,
        version: Version,
        make: Callable[[GroupOrder], Awaitable[GroupReport]],
        pinned: bool = True,
        progress: Callable[[], None] = lambda: None,
    ) -> Evaluation:
        """Evaluate `version` on the engines' pinned weights or, if not `pinned`, on the weights they serve.

        `make` runs an order on a worker. At most `eval.max_running` orders, of one attempt each, are in flight."""
        waiting = self._orders(version, version if pinned else None)
        reports: dict[int, tuple[GroupOrder, GroupReport]] = {}

        async def run_orders() -> None:
            for order in waiting:  # shared iterator: each order is taken once
                reports[order.group] = order, await make(order)
                progress()

        attempts = sum(self._counts.values()) * self._settings.attempts
        await gather_or_cancel(*(run_orders() for _ in range(min(self._settings.max_running, attempts))))
        ordered: defaultdict[str, defaultdict[int, list[GroupReport]]] = defaultdict(lambda: defaultdict(list))
        for _, (order, report) in sorted(reports.items()):
            ordered[order.heldout_set][order.task].append(report)
        return summarize(version, ordered, self._settings)

    def _orders(self, version: Version, pinned: Version | None) -> Iterator[GroupOrder]:
        """Yield one order per attempt. The seed of an attempt depends on its task and number only, so that other sets
        or more attempts do not change it."""
        numbers = count()
        saved = -(-self._settings.save_completions // max(len(self._counts), 1))  # in each set, rounded up
        for name, tasks in self._counts.items():
            for task in range(tasks):
                for attempt in range(self._settings.attempts):
                    yield GroupOrder(
                        next(numbers),
                        task,
                        0,
                        version,
                        1,
                        heldout=True,
                        heldout_set=name,
                        pinned=pinned,
                        show=task * self._settings.attempts + attempt < saved,
                        draw=task,
                        first_attempt=attempt,
                    )


def summarize(version: Version, reports: Reports, settings: EvalConfig) -> Evaluation:
    scores = {name: score_set(tasks.values(), settings) for name, tasks in reports.items()}
    first = next(iter(scores.values()), score_set([], settings))
    each = [report for tasks in reports.values() for attempts in tasks.values() for report in attempts]
    return Evaluation(
        **{entry.name: getattr(first, entry.name) for entry in fields(SetScores)},
        version=version,
        sets={name: score for name, score in scores.items() if name},
        views=[view for report in each for view in report.views],
        reason=next((report.reason for report in each if report.failed_episodes), ""),
        newest=max((report.newest for report in each), default=version),
        failures=[failure for report in each for failure in report.failures],
    )


def score_set(tasks: Iterable[Sequence[GroupReport]], settings: EvalConfig) -> SetScores:
    """Score one set, given the reports on the attempts at each of its tasks."""
    tasks = list(tasks)
    reports = [report for attempts in tasks for report in attempts]
    by_task = [[reward for report in attempts for reward in report.rewards] for attempts in tasks]
    scored = [rewards for rewards in by_task if rewards]
    every = [reward for rewards in scored for reward in rewards]
    reward = _estimate([fmean(rewards) for rewards in scored])
    by_function: defaultdict[str, list[float]] = defaultdict(list)
    for function, value in (part for report in reports for parts in report.parts for part in parts.items()):
        by_function[function].append(value)
    return SetScores(
        reward=None if reward is None else reward.mean,
        count=len(scored),
        failed=sum(report.failed_episodes for report in reports),
        tokens=sum(report.tokens_sampled for report in reports if report.rewards),
        stderr=None if reward is None else reward.stderr,
        binary=bool(every) and set(every) <= {0.0, 1.0},
        rewards={function: fmean(values) for function, values in by_function.items()},
        pass_at=_pass_at(scored, settings),
        percentiles=_percentiles(every) if every else {},
        reward_percentiles={function: _percentiles(values) for function, values in by_function.items()},
        scored=len(every),
    )


def _pass_at(rewards: Sequence[Sequence[float]], settings: EvalConfig) -> dict[int, Estimate]:
    """Return pass@k for each requested k, unless no task has k scored attempts."""
    counts = [(len(task), sum(map(settings.is_solved, task))) for task in rewards]
    estimates = {k: _estimate([pass_at_k(n, c, k) for n, c in counts if n >= k]) for k in settings.k}
    return {k: estimate for k, estimate in estimates.items() if estimate is not None}


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k attempts solves the task: the fraction of
    all k-subsets of the attempts that contain a solved one. Requires attempts >= k."""
    return 1 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def _estimate(values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    return Estimate(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)


def _percentiles(values: Sequence[float]) -> dict[int, float]:
    counts = Counter(values)
    return {share: percentile(counts, share / 100) for share in PERCENTILES}
