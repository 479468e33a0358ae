"""Which journal segments still hold a group that somebody needs. Pure bookkeeping.

A group is needed until it is closed and a committed checkpoint knows that it is: whoever resumes from an older one
trains it again. So a checkpoint takes two words: `cut` when its state is taken, `committed` when it has its name.

A segment goes when it holds no such group and its writer has moved on to another. Reports may overtake each other: one
of an older segment may be on its way when the first of the next arrives. So a writer has moved on once a checkpoint was
both begun and committed after that: every worker is asked for its random state in between.
"""

from __future__ import annotations

from collections import Counter

from outpace.types import GroupReport

Mark = int
"""A moment at which the state of a checkpoint was taken."""


class JournalUse:
    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # groups that are not closed, by segment
        self._closed_at: dict[str, Mark] = {}  # how many cuts there were when a group of the segment was last closed
        self._written: dict[str, str] = {}  # the segment that each writer is at
        self._left_at: dict[str, Mark] = {}  # how many cuts there were when its writer was known to have moved on
        self._cuts: Mark = 0
        self._covered: Mark = 0

    def opened(self, report: GroupReport) -> None:
        """A worker has journalled a group."""
        segment = self._note(report)
        writer = _writer(segment)
        older, newer = sorted((self._written.get(writer, segment), segment), key=_number)
        self._written[writer] = newer
        if older != newer:
            self._left_at.setdefault(older, self._cuts)

    def restored(self, report: GroupReport) -> None:
        """A group was found in the journal, in a segment that nobody writes to."""
        self._left_at.setdefault(self._note(report), self._cuts)

    def closed(self, report: GroupReport) -> None:
        """A journalled group is accounted for, one way or another."""
        assert report.place is not None
        self._open[report.place.segment] -= 1
        self._closed_at[report.place.segment] = self._cuts

    def cut(self) -> Mark:
        """The state of a checkpoint is being taken: it knows of everything that was closed so far."""
        self._cuts += 1
        return self._cuts

    def committed(self, mark: Mark) -> None:
        """The checkpoint whose state was taken then is complete."""
        self._covered = max(self._covered, mark)

    def releasable(self) -> list[str]:
        """Segments to delete; each is named once. Any worker can delete them."""
        free = [segment for segment in self._left_at if self._is_covered(segment)]
        for segment in free:
            del self._open[segment], self._closed_at[segment], self._left_at[segment]
        return free

    def _note(self, report: GroupReport) -> str:
        assert report.place is not None
        self._open[report.place.segment] += 1
        return report.place.segment

    def _is_covered(self, segment: str) -> bool:
        if self._open[segment] > 0:
            return False
        return max(self._closed_at[segment], self._left_at[segment]) < self._covered


def _writer(segment: str) -> str:
    return segment.rpartition("-")[0]


def _number(segment: str) -> int:
    return int(segment.rpartition("-")[2].partition(".")[0])
