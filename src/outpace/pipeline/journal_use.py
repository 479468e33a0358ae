"""Which journal segments still hold a group that somebody needs. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter

from outpace.types import GroupReport


class JournalUse:
    """Counts the groups per segment; a segment that a worker has moved on from and nobody needs can go."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._needed: Counter[tuple[int, str]] = Counter()
        self._newest: dict[int, str] = {}

    def opened(self, report: GroupReport) -> None:
        """A group was journalled."""
        assert report.place is not None
        worker = report.group % self._workers
        self._needed[worker, report.place.segment] += 1
        self._newest[worker] = max(self._newest.get(worker, ""), report.place.segment)

    def closed(self, report: GroupReport) -> None:
        """A journalled group is accounted for."""
        assert report.place is not None
        self._needed[report.group % self._workers, report.place.segment] -= 1

    def releasable(self) -> list[tuple[int, list[str]]]:
        """Segments to delete, by worker; each is named once."""
        free: dict[int, list[str]] = {}
        for worker, segment in [key for key, count in self._needed.items() if count == 0]:
            if segment != self._newest[worker]:
                free.setdefault(worker, []).append(segment)
                del self._needed[worker, segment]
        return list(free.items())
