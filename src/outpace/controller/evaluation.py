"""Held-out evaluation of one policy version. Runs beside training with bounded concurrency, and never pauses it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from outpace.monitoring.summary import EvalResult, parse_eval_result
from outpace.runtime.async_tools import gather_or_cancel
from outpace.types import EpisodeView, Failure, GroupOrder, GroupReport, Version

MAX_VIEWS = 512
"""Maximum number of tasks whose rollouts are kept for inspection."""


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation.

    `reward` is the mean over the `count` tasks that were scored, None if there are none. `stderr` is its standard
    error over those tasks, None for fewer than two. `rewards` are the means of the single reward functions,
    before weighting."""

    version: Version
    reward: float | None
    count: int
    failed: int
    tokens: int
    views: list[EpisodeView] = field(default_factory=list)
    reason: str = ""  # why an attempt failed, if any did
    newest: Version = 0  # newest version that sampled; `version` if pinned
    stderr: float | None = None
    binary: bool = False  # all rewards are 0 or 1, so the mean is an accuracy

    failures: list[Failure] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)

    @property
    def result(self) -> EvalResult | None:
        return parse_eval_result(self.version, self.metrics())

    def metrics(self) -> dict[str, float]:
        scored = {} if self.reward is None else {"eval/reward": self.reward}
        if self.stderr is not None:
            scored["eval/stderr"] = self.stderr
        return scored | {
            "eval/version": float(self.version),
            "eval/version_newest": float(max(self.version, self.newest)),
            "eval/count": float(self.count),
            "eval/failed": float(self.failed),
            "eval/mean_tokens": self.tokens / max(self.count, 1),
            "eval/binary": float(self.binary),
        }


class Evaluator:
    """Runs evaluations on the same tasks with the same sampling seeds, so results differ only by the policy."""

    def __init__(self, count: int, max_running: int) -> None:
        self._count = count
        self._max_running = max_running

    async def run(
        self,
        version: Version,
        make: Callable[[GroupOrder], Awaitable[GroupReport]],
        pinned: bool = True,
        progress: Callable[[], None] = lambda: None,
    ) -> Evaluation:
        """Evaluate `version`, on the engines' pinned weights or, if nothing is training, on whatever they serve.

        `make` runs an order on a worker. At most `max_running` orders are in flight."""
        waiting = iter(range(self._count))
        reports: dict[int, GroupReport] = {}

        async def run_tasks() -> None:
            for index in waiting:  # shared iterator: each index is taken once
                order = GroupOrder(
                    index,
                    index,
                    0,
                    version,
                    1,
                    heldout=True,
                    pinned=version if pinned else None,
                    show=index < MAX_VIEWS,
                )
                reports[index] = await make(order)
                progress()

        await gather_or_cancel(*(run_tasks() for _ in range(min(self._max_running, self._count))))
        return summarize(version, [reports[index] for index in range(self._count)])


def summarize(version: Version, reports: Sequence[GroupReport]) -> Evaluation:
    rewards = [reward for report in reports for reward in report.rewards]
    return Evaluation(
        version=version,
        reward=fmean(rewards) if rewards else None,
        count=len(rewards),
        failed=sum(report.failed_episodes for report in reports),
        tokens=sum(report.tokens_sampled for report in reports),
        views=[view for report in reports for view in report.views],
        reason=next((report.reason for report in reports if report.failed_episodes), ""),
        newest=max((report.newest for report in reports), default=version),
        stderr=stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None,
        binary=bool(rewards) and set(rewards) <= {0.0, 1.0},
        failures=[failure for report in reports for failure in report.failures],
        rewards=_means([report.reward_parts for report in reports]),
    )


def _means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: fmean(each[name] for each in parts if name in each) for name in names}
