"""How much bad luck is still luck. Pure: counts what groups came to, and says when to speak or to give up."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.errors import PartFailed
from outpace.types import GroupReport


@dataclass(frozen=True)
class Limits:
    """Groups in a row; None: no limit."""

    failed: int | None
    filtered: int | None
    notice_every: int


class Budget:
    """Failures end the run: somebody's code is broken. Filtered groups are a policy that has nothing to learn from
    these tasks, which may pass, so by default people are only told."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._failed = 0
        self._filtered = 0
        self._failures = 0  # of the whole run
        self._next_failure = 1
        self._next_notice = limits.notice_every

    def note(self, report: GroupReport) -> str | None:
        """Something to tell people, if there is; raises when a limit is reached."""
        self._failed = self._failed + 1 if report.outcome == "failed" else 0
        self._filtered = self._filtered + 1 if report.outcome == "filtered" else 0
        if self._limits.failed is not None and self._failed >= self._limits.failed:
            message = f"{self._failed} groups in a row failed, the last one: {report.reason}"
            raise PartFailed("rollouts", message, report.traceback)
        if self._limits.filtered is not None and self._filtered >= self._limits.filtered:
            raise PartFailed(
                "rollouts",
                f"{self._filtered} groups in a row were filtered: {report.reason}; does the reward tell attempts "
                "apart, and can the model do the task at all?",
            )
        return self._notice_of_failures(report) or self._notice_of_dry_spell(report)

    def _notice_of_failures(self, report: GroupReport) -> str | None:
        """The first, the second, the fourth …: a few bad tasks come round again in every epoch."""
        self._failures += report.outcome == "failed"
        if report.outcome != "failed" or self._failures < self._next_failure:
            return None
        self._next_failure *= 2
        count = "a group" if self._failures == 1 else f"{self._failures} groups so far have"
        return f"{count} failed: {report.reason}"

    def _notice_of_dry_spell(self, report: GroupReport) -> str | None:
        """Said at ever longer intervals: once people know, they know."""
        if self._filtered < self._next_notice:
            return None
        self._next_notice *= 2
        return (
            f"the last {self._filtered} groups were all filtered: {report.reason} "
            "(filter.uniform = false trains on such groups, and shows what was said in rollouts/)"
        )
