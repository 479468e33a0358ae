"""Held-out evaluation of one pinned version, beside training: bounded in concurrency, never pausing anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from outpace.errors import PartFailed
from outpace.types import EpisodeView, GroupOrder, GroupReport, Version


@dataclass(frozen=True)
class Evaluation:
    """What came of one evaluation. `reward` is the mean over the tasks that could be judged, None if none could."""

    version: Version
    reward: float | None
    count: int
    failed: int
    tokens: int
    views: list[EpisodeView] = field(default_factory=list)
    reason: str = ""  # why one failed, if any did
    newest: Version = 0  # of all that was sampled; `version` where that was pinned

    def metrics(self) -> dict[str, float]:
        judged = {} if self.reward is None else {"eval/reward": self.reward}
        return judged | {
            "eval/version": float(self.version),
            "eval/version_newest": float(max(self.version, self.newest)),
            "eval/count": float(self.count),
            "eval/failed": float(self.failed),
            "eval/mean_tokens": self.tokens / max(self.count, 1),
        }


class Evaluator:
    """Every evaluation takes the same tasks with the same noise, so two of them differ by the policy alone."""

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
        """Measure `version`: by the engine's pinned weight set, or by whatever serves where nothing is training.

        `make` has a worker carry out an order."""
        room = asyncio.Semaphore(self._max_running)

        async def one(index: int) -> GroupReport:
            async with room:
                order = GroupOrder(
                    index, index, 0, version, 1, heldout=True, pinned=version if pinned else None, show=True
                )
                report = await make(order)
                progress()
                return report

        tasks = [asyncio.create_task(one(index)) for index in range(self._count)]
        try:
            reports = await asyncio.gather(*tasks)
        except PartFailed:
            for task in tasks:
                task.cancel()
            raise
        return summarise(version, reports)


def summarise(version: Version, reports: list[GroupReport]) -> Evaluation:
    rewards = [reward for report in reports for reward in report.rewards]
    return Evaluation(
        version=version,
        reward=sum(rewards) / len(rewards) if rewards else None,
        count=len(rewards),
        failed=sum(report.failed_episodes for report in reports),
        tokens=sum(report.tokens_sampled for report in reports),
        views=[view for report in reports for view in report.views],
        reason=next((report.reason for report in reports if report.failed_episodes), ""),
        newest=max((report.newest for report in reports), default=version),
    )
