"""Batch formation: which finished groups make up the open batch, and which past groups are replayed in it.

Batcher invariants (v = open batch, B = batch size, k = places already taken in the open batch)
- For every d >= v, at most (d - v) * B + (B - k) outstanding groups outside the batch, including running ones, have a
  deadline <= d, so they fit into the batches up to d. A finished group is taken only if this still holds afterwards.
  Groups that are due therefore come first, even if the batch must wait for a running one, and a group with a later
  deadline never takes their place.
- With replay.mode = "fill", a replayed group may take the place of a filtered one. Until the batch with this place is
  trained or the place is given up, it counts as an outstanding group with the filtered group's deadline, and enters a
  batch like a finished group. So the invariant above still holds. Replayed groups take at most `fillable` of a batch's
  B places, always fewer than B.
- Finished groups are taken by earliest deadline, ties by admission. When nothing is running, the first in this order
  can always be taken, so the batch only ever waits for a running group.
- With `in_order`, groups are taken strictly in admission order and sent in chunks of a fixed size, so completion order
  has no effect. In this mode, and only in this mode, deadlines must not decrease in admission order.
- With `in_order`, a place is filled or given up when its turn comes, because `fillable` belongs to the batch that takes
  it. Until then engines must not load weights: otherwise the min_version of the task that replaces a given-up place
  would depend on the learner's speed. Without `in_order`, a place that the open batch cannot fill is given up at once.

Without `in_order`, deadlines may decrease from one group to the next (the governor lowers the allowed lag). The first
invariant still holds. A group with deadline D is admitted only while fewer than (D + 1 - v) * B groups are outstanding,
whatever their deadlines. With the new group, at most (D + 1 - v) * B - k are outside the batch, which bounds the groups
due by any d >= D; for d < D nothing changes. Taking a group raises k by one: for d at or past its deadline the group
also leaves the count, and for earlier d the condition is checked explicitly.

Replay invariants
- Batch v replays at most floor(fraction * B) groups, each first trained in one of the batches v - max_age to v - 1, and
  each at most `times` times in total. It replays fewer if the pool is smaller. In mode `add`, they are added to the
  batch's B groups. In mode `fill`, they are among the B groups, at most one for each kept place of a filtered group.
- Groups with the largest reward standard deviation go first, ties by newest. Groups with zero deviation carry no
  signal and never enter the pool. The choice depends only on what was trained.
- A replayed group is not a prompt visit: the ledger does not change, and its lag may exceed max_lag by design.
- Every trained group is retired exactly once, at the end of some batch. Until then its journal entry must be kept.
- The pool is checkpointed. A resume restores the groups that the journal still has: all of them from the newest
  checkpoint, possibly fewer from an older one.

The pool holds numbers only. Tokens and sampling logprobs stay in the journal. Old-policy logprobs are recomputed from
the current weights each time a group is trained and are never stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Literal

import msgspec

from outpace.config.algorithm import ReplayConfig
from outpace.controller.events import CloseBatch, TrainChunk
from outpace.errors import plural
from outpace.types import Version


class Batcher:
    """Fills the open batch from finished groups by deadline, and splits it into chunks for the learner."""

    def __init__(self, size: int, chunk_groups: int, in_order: bool, version: Version) -> None:
        self.size = size
        self.chunk_groups = chunk_groups
        self.in_order = in_order
        self.version = version
        self.batch: list[int] = []
        self.filled: list[int] = []  # filtered groups whose places in the batch go to replayed groups
        self._fillable = 0  # maximum of such places in the batch
        self._vacant: set[int] = set()  # filtered groups outside the batch whose places are kept; also in `_ready`
        self._sent = 0  # groups of the batch sent to the learner
        self._deadlines: dict[int, Version] = {}  # group outside the batch -> deadline, in admission order
        self._due: Counter[Version] = Counter()  # number of those groups by deadline
        self._running: dict[int, None] = {}  # in admission order
        self._ready: list[tuple[Version, int]] = []  # heap of finished groups

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def finished(self) -> int:
        """Number of finished groups that are not yet trained, including those in the open batch."""
        return len(self._ready) - len(self._vacant) + len(self.batch)

    @property
    def outstanding(self) -> int:
        """Number of running and finished groups, plus places kept for replayed groups."""
        return self.running + len(self._ready) + len(self.batch) + len(self.filled)

    @property
    def missing(self) -> int:
        """Number of groups the open batch still needs."""
        return self.size - len(self.batch) - len(self.filled)

    @property
    def started(self) -> bool:
        """Whether the learner has trained on groups of the open batch."""
        return self._sent > 0

    @property
    def undecided(self) -> bool:
        """Whether any kept place is yet to be filled or given up."""
        return bool(self._vacant)

    @property
    def last_group(self) -> int:
        """The last group in admission order that has a place in the open batch."""
        return max([*self.batch, *self.filled])

    # ------------------------------------------------------------------------------------------------------ groups

    def admit(self, group: int, deadline: Version) -> None:
        assert group not in self._deadlines
        assert deadline >= self.version
        self._deadlines[group] = deadline
        self._due[deadline] += 1
        self._running[group] = None

    def adopt(self, group: int, deadline: Version) -> None:
        """Add a group that finished before this start of the run."""
        self.admit(group, deadline)
        self.finish(group)

    def finish(self, group: int) -> None:
        del self._running[group]
        heappush(self._ready, (self._deadlines[group], group))

    def discard(self, group: int) -> None:
        """Remove a running group that will not be trained."""
        del self._running[group]
        self._forget(group)

    def vacate(self, group: int) -> None:
        """Remove a running group that was filtered, and keep its place for a replayed one if that is possible."""
        if self.in_order or len(self._vacant) + len(self.filled) < self._fillable:
            self._vacant.add(group)
            self.finish(group)
        else:
            self.discard(group)

    def allow_filled(self, count: int) -> None:
        """Set how many places of the open batch replayed groups may take, and give up any others that are kept."""
        assert not self.batch, "the batch has just been opened"
        self._fillable = count
        if self.in_order:
            return
        for group in sorted(self._vacant, key=lambda group: (self._deadlines[group], group))[count:]:
            self._vacant.remove(group)
            self._ready.remove((self._forget(group), group))
        heapify(self._ready)

    def extend(self, group: int) -> None:
        """Move the deadline of a running group one version later."""
        assert group in self._running
        deadline = self._deadlines[group]
        self._uncount(deadline)
        self._deadlines[group] = deadline + 1  # in place: keeps the admission order
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
        """Take every finished group and every kept place that may be taken."""
        while self.missing and self._ready and self._may_take_first():
            _, group = heappop(self._ready)
            deadline = self._forget(group)
            assert deadline >= self.version, f"group {group} was due in batch {deadline}, not {self.version}"
            if group not in self._vacant:
                self.batch.append(group)
                continue
            self._vacant.remove(group)
            if len(self.filled) < self._fillable:
                self.filled.append(group)

    def _may_take_first(self) -> bool:
        deadline, group = self._ready[0]
        if self.in_order:  # deadlines never decrease here, so the first ready group is the oldest finished one
            return group == next(iter(self._deadlines))
        return self._crowded(deadline) is None

    def _crowded(self, deadline: Version) -> Version | None:
        """Return the first deadline whose groups would no longer fit if a group with this later `deadline` were
        taken."""
        outstanding = 0
        for due in sorted(self._due):
            if due >= deadline:
                return None
            outstanding += self._due[due]
            if outstanding > (due - self.version) * self.size + self.missing - 1:
                return due
        return None

    def overdue(self) -> int | None:
        """If enough groups have finished to complete the batch, but a running one is due before them, return it (of
        several with its deadline, the oldest); otherwise None."""
        if self.in_order or not self.missing or len(self._ready) < self.missing:
            return None
        due = self._crowded(self._ready[0][0])
        if due is None:
            return None
        # All finished groups have later deadlines, so a group with this one is running.
        return next(group for group in self._running if self._deadlines[group] == due)

    def waiting_for(self) -> str:
        """Describe what the open batch waits for."""
        if not (due := self.awaited()):
            return f"{plural(self.missing, 'more group')} for batch {self.version}"
        names = ", ".join(map(str, due[:10])) + (", …" if len(due) > 10 else "")
        return f"running group{'' if len(due) == 1 else 's'} {names} (needed for batch {self.version})"

    def awaited(self) -> list[int]:
        """Return the running groups that the open batch cannot close without."""
        if not self.missing:
            return []
        due = self._crowded(self._ready[0][0]) if self._ready and not self.in_order else self.version
        return [group for group in self._running if due is not None and self._deadlines[group] <= due]

    def next_chunk(self, complete: bool) -> tuple[int, ...]:
        """Return the groups to send to an idle learner, or () if there are too few. `complete`: the batch gets no
        more groups."""
        unsent = self.batch[self._sent :]
        if len(unsent) < self.chunk_groups and not complete:
            return ()
        chunk = tuple(unsent[: self.chunk_groups] if self.in_order else unsent)
        self._sent += len(chunk)
        return chunk

    def close(self) -> list[int]:
        """Return the groups that the step trained, and open the next batch."""
        assert self._sent == len(self.batch)
        trained, self.batch, self.filled, self._sent = self.batch, [], [], 0
        self.version += 1
        return trained


class LearnerCalls:
    """Orders the learner's calls for the open batch, one at a time: its chunks, replayed groups, the step."""

    def __init__(self, batcher: Batcher, replay: ReplayPool) -> None:
        self._batcher = batcher
        self._replay = replay
        self._call: Literal["chunk", "step"] | None = None

    @property
    def idle(self) -> bool:
        return self._call is None

    @property
    def current(self) -> str | None:
        """What the learner is doing, as text that precedes the batch number; None if it is idle."""
        steps = {"chunk": "training a chunk of batch", "step": "taking the optimizer step of batch"}
        return None if self._call is None else steps[self._call]

    def next(self, complete: bool) -> list[TrainChunk | CloseBatch]:
        """Return the call to make now, or []. `complete`: the batch gets no more groups."""
        batch, version = self._batcher.batch, self._batcher.version
        if not self.idle or not batch:
            return []
        if chunk := self._batcher.next_chunk(complete):
            self._call = "chunk"
            return [TrainChunk(version, chunk)]
        if not complete:
            return []
        if self._replay.chosen is None and (replayed := self._replay.choose(len(self._batcher.filled))):
            self._call = "chunk"
            return [TrainChunk(version, replayed, replayed=True)]
        self._call = "step"
        return [CloseBatch(version, tuple(batch), self._replay.chosen or ())]

    def done(self, call: Literal["chunk", "step"]) -> None:
        assert self._call == call
        self._call = None


class ReplayEntry(msgspec.Struct):
    """A trained group that may be trained again. Its fields are stored in checkpoints."""

    spread: float  # standard deviation of the group's rewards
    trained: Version  # the batch that first trained it
    left: int  # replays left


class ReplayPool:
    """Chooses past groups to train again. Disabled without settings, or if the fraction rounds down to zero groups."""

    def __init__(
        self, settings: ReplayConfig | None, groups_per_step: int, pool: Mapping[int, ReplayEntry] | None = None
    ) -> None:
        self._settings = settings
        self._count = 0 if settings is None else settings.groups_of(groups_per_step)
        kept = pool if pool is not None and self._count > 0 else {}
        self._pool = {group: msgspec.structs.replace(pooled) for group, pooled in kept.items()}
        self._spreads: dict[int, float] = {}  # finished, untrained group -> reward spread
        self.chosen: tuple[int, ...] | None = None
        """Groups that the open batch replays; None: not chosen yet."""
        self.fills = settings is not None and settings.mode == "fill" and self._count > 0
        """Whether replayed groups take the places of filtered ones."""

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups that may be replayed."""
        return tuple(self._pool)

    @property
    def fillable(self) -> int:
        """Number of filtered groups whose places the open batch can fill."""
        return min(self._count, len(self._pool)) if self.fills else 0

    def state(self) -> dict[int, ReplayEntry]:
        return {group: msgspec.structs.replace(pooled) for group, pooled in self._pool.items()}

    @property
    def replay_enabled(self) -> bool:
        """Whether trained groups are kept for replay."""
        return self._count > 0

    def choose(self, filled: int = 0) -> tuple[int, ...]:
        """Choose the groups that the open batch replays, highest reward standard deviation first. In mode `fill`,
        these are `filled` groups, one for each place of a filtered group."""
        ranked = sorted(self._pool, key=lambda group: (-self._pool[group].spread, -group))
        self.chosen = tuple(ranked[: filled if self.fills else self._count])
        return self.chosen

    def group_finished(self, group: int, spread: float) -> None:
        """Record the standard deviation of the rewards of a group that will be trained."""
        self._spreads[group] = spread

    def batch_trained(self, batch: Version, trained: Iterable[int]) -> tuple[int, ...]:
        """Update the pool after `batch`, which trained its own groups and the chosen ones. Return the groups no longer
        needed."""
        spreads = {group: self._spreads.pop(group) for group in trained}
        replayed, self.chosen = self.chosen or (), None
        if self._settings is None or not self.replay_enabled:
            return ()
        for group in replayed:
            self._pool[group].left -= 1
        oldest = batch + 1 - self._settings.max_age  # oldest batch whose groups the next batch may replay
        gone = [group for group, pooled in self._pool.items() if not pooled.left or pooled.trained < oldest]
        for group in gone:
            del self._pool[group]
        for group, spread in spreads.items():
            if spread > 0:
                self._pool[group] = ReplayEntry(spread, batch, self._settings.times)
            else:
                gone.append(group)
        return tuple(gone)
