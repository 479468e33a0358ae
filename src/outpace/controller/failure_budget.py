"""Failure budget: end the run after too many failed or filtered groups in a row, and warn early if no group is usable.

Pure: both classes only count group reports.
"""

from __future__ import annotations

from collections import Counter

from outpace.config.sections import PacingConfig
from outpace.errors import ComponentFailed, one_line, plural
from outpace.monitoring.format import number, printable
from outpace.types import GroupReport

FIRST_FILTERED = 512
"""Default `pacing.max_filtered` before the first usable group. If 2 % of the groups are usable, the first 512 are all
filtered in one of 30,000 runs."""

FILTERED = 1024
"""Default `pacing.max_filtered` after the first usable group. The count restarts at every usable group, so false alarms
must be rarer: one in 10^9."""


class UserCodeFailed(ComponentFailed):
    """User code failed and the run must end, after a checkpoint of the steps trained so far."""


class LimitReached(UserCodeFailed):
    """Too many groups in a row failed or were filtered."""


class FailureBudget:
    """Ends the run after too many failed groups in a row (user code is broken) or filtered ones (the policy cannot
    learn from these tasks)."""

    def __init__(self, settings: PacingConfig, resumed: bool) -> None:
        """`resumed`: a step was trained before, so a group was usable."""
        self._settings = settings
        self._usable = resumed
        self._failed = 0
        self._filtered = 0
        self._causes: Counter[tuple[str, str]] = Counter()  # causes of the failed groups in a row
        self._rewards: Counter[float] = Counter()  # rewards of the filtered groups in a row
        self._example: GroupReport | None = None  # a filtered group with a rollout to show
        self._failures = 0  # over the whole run
        self._next_failure_notice = 1
        self._next_filtered_notice = 4 * settings.groups_per_step

    def note(self, report: GroupReport) -> str | None:
        """Count a group and return a console message if one is due. Raise `LimitReached` at a limit."""
        self._count(report)
        if self._failed >= self._settings.max_failed:
            raise LimitReached("rollouts", self._why_failed(report), report.traceback)
        if self._filtered >= self._filtered_limit:
            raise LimitReached("rollouts", self._why_filtered(report))
        return self._failure_notice(report) or self._filtered_notice(report)

    @property
    def _filtered_limit(self) -> int:
        return self._settings.max_filtered or (FILTERED if self._usable else FIRST_FILTERED)

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
        """Name the function that failed, the reason, and the line of user code."""
        causes = [
            f"{source}: {one_line(reason, 200)} ({count} of {self._failed})"
            for (source, reason), count in self._causes.most_common(2)
        ]
        where = f" [{place}]" if (place := _last_code_line(last.traceback)) else ""
        return (
            f"{plural(self._failed, 'group')} in a row failed (pacing.max_failed): "
            f"{'; '.join(causes) or one_line(last.reason)}{where}"
        )

    def _why_filtered(self, last: GroupReport) -> str:
        """List the rewards, an example, and what to change."""
        values = ", ".join(f"{number(reward)} ({count:,} times)" for reward, count in self._rewards.most_common(4))
        others = ", …" if len(self._rewards) > 4 else ""
        rewards = f"; rewards: {values}{others}" if values else ""
        return (
            f"{plural(self._filtered, 'group')} in a row were filtered (pacing.max_filtered): "
            f"{one_line(last.reason)}{rewards}{_example(self._example)}. {self._advice()}"
        )

    def _advice(self) -> str:
        if len(self._rewards) > 1:
            return "All attempts at a task get the same reward: increase rollout.group_size or rollout.temperature"
        if self._usable:
            return "The tasks give no training signal any more: use harder or easier ones, or stop here"
        return (
            "Check that the reward function recognizes a good completion; if it does, use easier tasks, a better model "
            "or a larger rollout.group_size"
        )

    # -------------------------------------------------------------------------------------------------------- notices

    def _failure_notice(self, report: GroupReport) -> str | None:
        """Report failure 1, 2, 4, …: a few bad tasks fail again in every epoch."""
        self._failures += report.outcome == "failed"
        if report.outcome != "failed" or self._failures < self._next_failure_notice:
            return None
        self._next_failure_notice *= 2
        count = "a group" if self._failures == 1 else f"{self._failures} groups so far"
        return f"{count} failed: {report.reason}"

    def _filtered_notice(self, report: GroupReport) -> str | None:
        """Report long runs of filtered groups, at doubling intervals."""
        if self._filtered < self._next_filtered_notice:
            return None
        self._next_filtered_notice *= 2
        return (
            f"the last {plural(self._filtered, 'group')} were all filtered: {report.reason}; "
            f"the run ends after {self._filtered_limit} (pacing.max_filtered)"
        )


def _last_code_line(traceback: str) -> str:
    """Return the innermost line of user code in a traceback, such as `File "rewards.py", line 3, in score`."""
    places = [line.strip() for line in traceback.splitlines() if line.strip().startswith("File ")]
    return one_line(places[-1], 200) if places else ""


class FirstGroupsCheck:
    """Warns once if none of the first groups can be trained on."""

    def __init__(self, count: int, run: str) -> None:
        """Warn after `count` groups without a finished one; `run` is the run directory to look at."""
        self._count = count
        self._run = run
        self._seen = 0
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._done = False

    def note(self, report: GroupReport) -> str | None:
        """Count a group; return the warning if it is due."""
        if self._done or report.cancelled:
            return None
        if report.outcome == "finished":
            self._done = True
            return None
        self._seen += 1
        self._reasons[report.outcome, report.reason] += 1
        if self._seen < self._count:
            return None
        self._done = True
        return (
            f"none of the first {self._seen} groups can be trained on: {self._causes()}{_example(report)}; "
            f"to inspect them: outpace show {self._run}"
        )

    def _causes(self) -> str:
        """List the two most frequent reasons, because many may differ only in details."""
        causes = [
            f"{count} {outcome} ({printable(reason)})" for (outcome, reason), count in self._reasons.most_common(2)
        ]
        others = self._seen - sum(count for _, count in self._reasons.most_common(2))
        return ", ".join([*causes, *([f"{others} for other reasons"] if others else [])])


def _example(report: GroupReport | None) -> str:
    if report is None or not report.views:
        return ""
    view = report.views[0]
    prompt, completion = (one_line(text, 160) for text in (view.prompt, view.completion))
    scored = "" if report.outcome == "failed" else f", reward {number(view.reward)}"
    return f"; for example task {printable(view.task_id)}: prompt {prompt!r}, completion {completion!r}{scored}"
