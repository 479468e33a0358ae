"""MERGED"""

from __future__ import annotations

from collections import Counter

from outpace.types import GroupReport

Mark = int
"""Identifies the moment at which the state of a checkpoint was taken."""


class JournalUse:
    """Tracks which journal segments still hold a needed group. Pure."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # open groups by segment
        self._closed_at: dict[str, Mark] = {}  # newest mark when a group of the segment was last closed
        self._written: dict[str, str] = {}  # current segment of each writer
        self._abandoned_at: dict[str, Mark] = {}  # newest mark when its writer was seen to have moved on
        self._marks: Mark = 0
        self._newest_committed: Mark = 0

    def opened(self, report: GroupReport) -> None:
        """Record that a worker journaled a group."""
        segment = self._add(report)
        writer = _writer(segment)
        older, newer = sorted((self._written.get(writer, segment), segment), key=_number)
        self._written[writer] = newer
        if older != newer:
            self._abandoned_at.setdefault(older, self._marks)

    def restored(self, report: GroupReport) -> None:
        """Record a group found in the journal, in a segment that no worker writes to."""
        self._abandoned_at.setdefault(self._add(report), self._marks)

    def closed(self, report: GroupReport) -> None:
        """Record that a journaled group is finalized."""
        assert report.place is not None
        self._open[report.place.segment] -= 1
        self._closed_at[report.place.segment] = self._marks

    def cut(self) -> Mark:
        """Mark the start of a checkpoint: its state contains everything closed so far."""
        self._marks += 1
        return self._marks

    def committed(self, mark: Mark) -> None:
        """Record that the checkpoint with this mark is complete."""
        self._newest_committed = max(self._newest_committed, mark)

    def releasable(self) -> list[str]:
        """Return the segments to delete; each is returned once. Any worker can delete them."""
        free = [segment for segment in self._abandoned_at if self._is_releasable(segment)]
        for segment in free:
            del self._open[segment], self._closed_at[segment], self._abandoned_at[segment]
        return free

    def _add(self, report: GroupReport) -> str:
        assert report.place is not None
        self._open[report.place.segment] += 1
        return report.place.segment

    def _is_releasable(self, segment: str) -> bool:
        if self._open[segment] > 0:
            return False
        return max(self._closed_at[segment], self._abandoned_at[segment]) < self._newest_committed


def _writer(segment: str) -> str:
    return segment.rpartition("-")[0]


def _number(segment: str) -> int:
    return int(segment.rpartition("-")[2].partition(".")[0])
