"""MERGED"""

from __future__ import annotations

from collections import Counter

from outpace.errors import clip
from outpace.observe.format import number, printable
from outpace.types import GroupReport

EXAMPLE_CHARS = 120


class FirstGroups:
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
        """List the two most frequent reasons. Reasons may differ in details only."""
        causes = [
            f"{count} {outcome} ({printable(reason)})" for (outcome, reason), count in self._reasons.most_common(2)
        ]
        others = self._seen - sum(count for _, count in self._reasons.most_common(2))
        return ", ".join([*causes, *([f"{others} for other reasons"] if others else [])])


def _example(report: GroupReport) -> str:
    if not report.views:
        return ""
    view = report.views[0]
    prompt, completion = (clip(printable(text), EXAMPLE_CHARS) for text in (view.prompt, view.completion))
    scored = "" if report.outcome == "failed" else f", reward {number(view.reward)}"
    return f"; for example task {printable(view.task_id)}: prompt {prompt!r}, completion {completion!r}{scored}"
