"""When groups that fail or teach nothing end a run. Pure: counts what groups came to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from outpace.errors import PartFailed, one_line
from outpace.observe.format import number
from outpace.types import GroupReport
from outpace.wording import plural

FIRST_FILTERED = 512
"""Filtered groups in a row that end a run in which no group was usable yet, where `pacing.max_filtered` is not set. If
2 % of the groups are usable, 512 in a row are filtered once in 30,000 times."""

FILTERED = 1024
"""The same once a group was usable. This is tried after every usable group, so it must be rarer: once in 10^9."""


@dataclass(frozen=True)
class Limits:
    """Groups in a row. `filtered` None: `FIRST_FILTERED`, and `FILTERED` once a group was usable."""

    failed: int
    filtered: int | None
    notice_every: int
    resumed: bool = False  # after a step: a group was usable before


class LimitReached(PartFailed):
    """Too many groups in a row failed or were filtered. What was trained until then is worth a checkpoint."""


class Budget:
    """Failed groups in a row end the run, since user code is broken; so do filtered ones, since the policy cannot learn
    from these tasks."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._usable = limits.resumed
        self._failed = 0
        self._filtered = 0
        self._causes: Counter[tuple[str, str]] = Counter()  # of the failed groups in a row
        self._rewards: Counter[float] = Counter()  # of the filtered groups in a row
        self._example: GroupReport | None = None  # a filtered group that can be shown
        self._failures = 0  # of the whole run
        self._next_failure = 1
        self._next_notice = limits.notice_every

    def note(self, report: GroupReport) -> str | None:
        """A message for the console, if one is due; raises when a limit is reached."""
        self._count(report)
        if self._failed >= self._limits.failed:
            raise LimitReached("rollouts", self._why_failed(report), report.traceback)
        if self._filtered >= self._most_filtered:
            raise LimitReached("rollouts", self._why_filtered(report))
        return self._notice_of_failures(report) or self._notice_of_dry_spell(report)

    @property
    def _most_filtered(self) -> int:
        return self._limits.filtered or (FILTERED if self._usable else FIRST_FILTERED)

    def _count(self, report: GroupReport) -> None:
        if report.outcome == "failed":
            self._failed += 1
            self._causes.update((failure.source, failure.reason) for failure in report.failures)
        else:
            self._failed = 0
            self._causes.clear()
        if report.outcome == "filtered":
            self._filtered += 1
            self._rewards.update(report.rewards)
            self._example = report if report.views else self._example
        else:
            self._filtered = 0
            self._rewards.clear()
            self._example = None
        self._usable = self._usable or report.outcome == "finished"

    # ------------------------------------------------------------------------------------------------ why the run ends

    def _why_failed(self, last: GroupReport) -> str:
        """Which function failed, why, and where in the user's code."""
        causes = [
            f"{source}: {one_line(reason, 200)} ({count} of {self._failed})"
            for (source, reason), count in self._causes.most_common(2)
        ]
        where = f" [{place}]" if (place := _last_place(last.traceback)) else ""
        return (
            f"{plural(self._failed, 'group')} in a row failed (pacing.max_failed): "
            f"{'; '.join(causes) or one_line(last.reason)}{where}"
        )

    def _why_filtered(self, last: GroupReport) -> str:
        """Which rewards there were, an example, and what to change."""
        values = ", ".join(f"{number(reward)} ({count:,} times)" for reward, count in self._rewards.most_common(4))
        others = ", …" if len(self._rewards) > 4 else ""
        rewards = f"; rewards: {values}{others}" if values else ""
        return (
            f"{plural(self._filtered, 'group')} in a row were filtered (pacing.max_filtered): "
            f"{one_line(last.reason)}{rewards}{self._shown_example()}. {self._advice()}"
        )

    def _shown_example(self) -> str:
        if self._example is None:
            return ""
        view = self._example.views[0]
        prompt, completion = (one_line(text, 160) for text in (view.prompt, view.completion))
        return f"; example: {prompt!r} was answered {completion!r}, reward {number(view.reward)}"

    def _advice(self) -> str:
        if len(self._rewards) > 1:
            return "Attempts at one task all get the same reward: use a larger rollout.group_size or temperature"
        if self._usable:
            return "The tasks teach nothing any more: use harder or easier ones, or stop here"
        return (
            "Check that the reward function recognises a good answer; if it does, use easier tasks, a better model or "
            "a larger rollout.group_size"
        )

    # -------------------------------------------------------------------------------------------------------- notices

    def _notice_of_failures(self, report: GroupReport) -> str | None:
        """The first, the second, the fourth …: a few bad tasks come round again in every epoch."""
        self._failures += report.outcome == "failed"
        if report.outcome != "failed" or self._failures < self._next_failure:
            return None
        self._next_failure *= 2
        count = "a group" if self._failures == 1 else f"{self._failures} groups so far have"
        return f"{count} failed: {report.reason}"

    def _notice_of_dry_spell(self, report: GroupReport) -> str | None:
        """At ever longer intervals."""
        if self._filtered < self._next_notice:
            return None
        self._next_notice *= 2
        return (
            f"the last {plural(self._filtered, 'group')} were all filtered: {report.reason}; "
            f"the run ends after {self._most_filtered} (pacing.max_filtered)"
        )


def _last_place(traceback: str) -> str:
    """The innermost line of user code in a traceback, such as `File "rewards.py", line 3, in score`."""
    places = [line.strip() for line in traceback.splitlines() if line.strip().startswith("File ")]
    return one_line(places[-1], 200) if places else ""
