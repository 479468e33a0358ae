"""Says early that a run is not getting anywhere: the first groups, and not one of them can be trained on. Pure."""

from __future__ import annotations

from collections import Counter

from outpace.errors import clip
from outpace.observe.format import number, printable
from outpace.types import GroupReport

EXAMPLE_CHARS = 120


class FirstGroups:
    def __init__(self, count: int, run: str) -> None:
        """`count` groups without a single finished one are worth a warning; `run` is where to look."""
        self._count = count
        self._run = run
        self._seen = 0
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._is_over = False

    def note(self, report: GroupReport) -> str | None:
        """The warning, once, if this group makes it due."""
        if self._is_over or report.cancelled:
            return None
        if report.outcome == "finished":
            self._is_over = True
            return None
        self._seen += 1
        self._reasons[report.outcome, report.reason] += 1
        if self._seen < self._count:
            return None
        self._is_over = True
        return (
            f"none of the first {self._seen} groups can be trained on: {self._causes()}{_example(report)}; "
            f"see: outpace show {self._run}"
        )

    def _causes(self) -> str:
        """The most frequent ones; reasons may differ in details only."""
        causes = [
            f"{count} {outcome} ({printable(reason)})" for (outcome, reason), count in self._reasons.most_common(2)
        ]
        others = self._seen - sum(count for _, count in self._reasons.most_common(2))
        return ", ".join([*causes, *([f"{others} for other reasons"] if others else [])])


def _example(report: GroupReport) -> str:
    if not report.views:
        return ""
    view = report.views[0]
    prompt, answer = (clip(printable(text), EXAMPLE_CHARS) for text in (view.prompt, view.completion))
    judged = "" if report.outcome == "failed" else f", reward {number(view.reward)}"
    return f"; for example task {printable(view.task_id)}: {prompt!r} was answered {answer!r}{judged}"
