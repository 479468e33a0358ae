"""Which groups make the open batch.

Invariants (v = the open batch, B = its size, k = the groups it has)
- For every d >= v, the outstanding groups outside the batch with a deadline <= d, running ones included, number at most
  (d - v) * B + (B - k): they fit into the batches up to d. A finished group is taken only if this still holds
  afterwards; so due groups come first, waiting for a running one if need be, and no early group crowds out a due one.
- Among finished groups the earliest deadline goes first, ties by admission. When nothing runs, the first in this order
  may always be taken: waiting is always for a running group.
- With `in_order`, groups are taken strictly in admission order and sent in chunks of a fixed size: who finishes first
  changes nothing. Here, and only here, deadlines must not fall in admission order.

Elsewhere deadlines may fall from one group to the next (a governor lowers the lag in force). The first invariant does
not mind: a group is admitted with deadline D only while all outstanding groups, whatever their deadlines, number less
than (D + 1 - v) * B. With it, those outside the batch are at most (D + 1 - v) * B - k, which bounds the groups due by
any d >= D; for d < D nothing changes. Taking a group raises k by one: for d at or past its deadline it leaves the count
as well, and for d before it that is what is checked.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush

from outpace.types import Version


class Batcher:
    def __init__(self, size: int, chunk_groups: int, in_order: bool, version: Version) -> None:
        self.size = size
        self.chunk_groups = chunk_groups
        self.in_order = in_order
        self.version = version
        self.batch: list[int] = []
        self._sent = 0  # groups of the batch that went to the learner
        self._deadlines: dict[int, Version] = {}  # outstanding and outside the batch, in admission order
        self._due: Counter[Version] = Counter()  # how many of them by deadline
        self._running: dict[int, None] = {}  # in admission order
        self._ready: list[tuple[Version, int]] = []  # heap of the finished ones

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def finished(self) -> int:
        """Finished groups that are not yet trained, those of the open batch included."""
        return len(self._ready) + len(self.batch)

    @property
    def outstanding(self) -> int:
        return self.running + self.finished

    @property
    def missing(self) -> int:
        """How many groups the open batch lacks."""
        return self.size - len(self.batch)

    # ------------------------------------------------------------------------------------------- groups come and go

    def admit(self, group: int, deadline: Version) -> None:
        assert group not in self._deadlines
        assert deadline >= self.version
        self._deadlines[group] = deadline
        self._due[deadline] += 1
        self._running[group] = None

    def adopt(self, group: int, deadline: Version) -> None:
        """A group that had finished before this start of the run."""
        self.admit(group, deadline)
        self.finish(group)

    def finish(self, group: int) -> None:
        del self._running[group]
        heappush(self._ready, (self._deadlines[group], group))

    def discard(self, group: int) -> None:
        """A running group leaves without being trained."""
        del self._running[group]
        self._forget(group)

    def extend(self, group: int) -> None:
        """Let a running group be trained one version later than it should."""
        assert group in self._running
        deadline = self._deadlines[group]
        self._uncount(deadline)
        self._deadlines[group] = deadline + 1  # in place: the admission order stays
        self._due[deadline + 1] += 1

    def _forget(self, group: int) -> Version:
        deadline = self._deadlines.pop(group)
        self._uncount(deadline)
        return deadline

    def _uncount(self, deadline: Version) -> None:
        self._due[deadline] -= 1
        if not self._due[deadline]:
            del self._due[deadline]

    # ------------------------------------------------------------------------------------------------ the open batch

    def fill(self) -> None:
        """Take every finished group that may be taken."""
        while self.missing and self._ready and self._may_take_first():
            _, group = heappop(self._ready)
            deadline = self._forget(group)
            assert deadline >= self.version, f"group {group} was due in batch {deadline}, not {self.version}"
            self.batch.append(group)

    def _may_take_first(self) -> bool:
        deadline, group = self._ready[0]
        if self.in_order:  # deadlines do not fall here, so the first ready is the oldest finished group
            return group == next(iter(self._deadlines))
        return self._crowded(deadline) is None

    def _crowded(self, deadline: Version) -> Version | None:
        """The first deadline whose groups would no longer fit if a group with this later `deadline` were taken."""
        outstanding = 0
        for due in sorted(self._due):
            if due >= deadline:
                return None
            outstanding += self._due[due]
            if outstanding > (due - self.version) * self.size + self.missing - 1:
                return due
        return None

    def overdue(self) -> int | None:
        """A running group that alone keeps finished groups from completing the batch; the oldest, if several."""
        if self.in_order or not self.missing or len(self._ready) < self.missing:
            return None
        due = self._crowded(self._ready[0][0])
        if due is None:
            return None
        # Whatever is finished has a later deadline, so whoever has this one is running.
        return next(group for group in self._running if self._deadlines[group] == due)

    def awaited(self) -> list[int]:
        """The running groups that the open batch cannot do without."""
        if not self.missing:
            return []
        due = self._crowded(self._ready[0][0]) if self._ready and not self.in_order else self.version
        return [group for group in self._running if due is not None and self._deadlines[group] <= due]

    def next_chunk(self, complete: bool) -> tuple[int, ...]:
        """The groups to send to an idle learner; none while there are too few. `complete`: the batch gets no more."""
        unsent = self.batch[self._sent :]
        if len(unsent) < self.chunk_groups and not complete:
            return ()
        chunk = tuple(unsent[: self.chunk_groups] if self.in_order else unsent)
        self._sent += len(chunk)
        return chunk

    def close(self) -> list[int]:
        """The step is done: returns the groups it trained and opens the next batch."""
        assert self._sent == len(self.batch)
        trained, self.batch, self._sent = self.batch, [], 0
        self.version += 1
        return trained
