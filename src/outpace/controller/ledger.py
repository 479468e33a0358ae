"""Ledger: the state of every prompt visit. No visit is lost and none is counted twice.

A visit is a position in the task order (position // tasks is its epoch). Each visit goes
planned -> running -> finished -> trained, or leaves early as filtered, failed, dropped or (task resting) skipped. It is
finalized exactly once. A visit that must run again (`requeue`, or a resumed run) is planned ahead of all new ones. A
visit whose finished group a resume has recovered starts as finished.

A re-roll (`RerollQueue`) is also a visit, with its own position. A due re-roll is issued before any new visit; after
the last new visit none is issued. Re-rolls belong to no epoch: they share one set of counts for the whole run, and
epochs end without waiting for them.

Memory is bounded: new positions are issued in order, so a position below the cursor that is not open is finalized, and
only the counts of its epoch are kept. Epochs that ended long ago share one set of counts.

`OutcomeRecords` decides which record in batches.jsonl a finalized visit belongs to. `ledger_report` (`outpace ledger`)
shows the ledger of a run's newest complete checkpoint.
"""

from __future__ import annotations

import json
from bisect import insort
from collections import Counter, deque
from collections.abc import Collection
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from outpace.checkpoint import commit
from outpace.controller.curriculum import RerollQueue, RerollState
from outpace.controller.events import Action, Finalize, WriteRecord
from outpace.errors import BadInput
from outpace.monitoring.line_file import read_lines
from outpace.tasks.order import REROLL
from outpace.tasks.stream import ENDLESS
from outpace.types import Version

FinalOutcome = Literal["trained", "filtered", "failed", "dropped", "skipped"]

KEPT_EPOCHS = 256
"""Number of ended epochs that keep their own counts. Keeping all would leak memory when an epoch is a few tasks."""


class EpochCounts(msgspec.Struct):
    """Number of visits of one epoch by final outcome."""

    epoch: int
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    dropped: int = 0
    skipped: int = 0

    @property
    def finalized(self) -> int:
        return sum(self.as_counts().values())

    def add(self, outcome: str, count: int = 1) -> None:
        setattr(self, outcome, getattr(self, outcome) + count)

    def as_counts(self) -> dict[str, int]:
        return {outcome: getattr(self, outcome) for outcome in get_args(FinalOutcome)}


class LedgerState(msgspec.Struct, frozen=True):
    """Checkpointed ledger. A restore plans open visits again, in order and first, unless their groups are recovered."""

    cursor: int = 0
    queued: list[int] = []
    running: list[int] = []
    finished: list[int] = []
    epochs: list[EpochCounts] = []  # started, oldest first
    earlier: EpochCounts = msgspec.field(
        default_factory=lambda: EpochCounts(epoch=-1)
    )  # sum over ended epochs not in `epochs`
    requeued: int = 0  # visits cancelled and planned again
    extended: int = 0  # deadlines extended
    rerolls: RerollState = RerollState()  # planned
    rerolled: EpochCounts = msgspec.field(default_factory=lambda: EpochCounts(epoch=-1))  # finalized

    @property
    def open(self) -> set[int]:
        """Visits that were issued and are not finalized."""
        return {*self.queued, *self.running, *self.finished}


class Ledger:
    """Tracks visits from issue to final outcome. Every transition asserts the state it starts from."""

    def __init__(
        self,
        tasks: int,
        epochs: int | None,
        state: LedgerState,
        finished: Collection[int] = frozenset(),
        streamed: bool = False,
        rerolls: RerollQueue | None = None,
    ) -> None:
        """`finished`: open visits whose groups were recovered, including those issued after `state` was taken.
        `streamed`: tasks arrive with `extend`."""
        self.rerolls = rerolls or RerollQueue(None, False, state.rerolls)
        self.tasks = tasks
        self.limit = 0 if streamed else None if epochs is None else tasks * epochs
        self._arriving = streamed
        issued = [position for position in finished if position < REROLL]
        self.cursor = max([state.cursor, *(position + 1 for position in issued)])
        self.requeued = state.requeued
        self.extended = state.extended
        opened = state.open | set(range(state.cursor, self.cursor))
        assert opened.issuperset(finished), "a finalized visit cannot be finished again"
        self._queue = deque(sorted(opened.difference(finished)))
        self._open: dict[int, Literal["running", "finished"]] = dict.fromkeys(sorted(finished), "finished")
        self._earlier = msgspec.structs.replace(state.earlier)
        self._epochs = {tally.epoch: msgspec.structs.replace(tally) for tally in state.epochs}
        self.new_epochs = sorted({position // tasks for position in issued} - self._epochs.keys())
        """Epochs of recovered visits that are not in `state`."""
        self._epochs |= {epoch: EpochCounts(epoch) for epoch in self.new_epochs}
        self._rerolled = msgspec.structs.replace(state.rerolled)
        self._finalized = sum(tally.finalized for tally in self._tallies)

    def state(self) -> LedgerState:
        return LedgerState(
            cursor=self.cursor,
            queued=list(self._queue),
            running=[position for position, state in self._open.items() if state == "running"],
            finished=[position for position, state in self._open.items() if state == "finished"],
            epochs=[msgspec.structs.replace(tally) for tally in self._epochs.values()],
            earlier=msgspec.structs.replace(self._earlier),
            requeued=self.requeued,
            extended=self.extended,
            rerolls=self.rerolls.state(),
            rerolled=msgspec.structs.replace(self._rerolled),
        )

    @property
    def _tallies(self) -> list[EpochCounts]:
        return [self._earlier, *self._epochs.values(), self._rerolled]

    @property
    def finalized(self) -> int:
        """Number of visits finalized since the run began."""
        return self._finalized

    @property
    def left(self) -> int | None:
        """Number of visits that can still be issued; None: no limit."""
        if self.limit is None:
            return None
        left = max(0, self.limit - self.cursor) + len(self._queue)
        return left + self.rerolls.due if left or self._arriving else 0

    @property
    def oldest_open(self) -> int:
        """The first visit that is not finalized, excluding re-rolls."""
        return min((position for position in (*self._open, *self._queue) if position < REROLL), default=self.cursor)

    @property
    def exhausted(self) -> bool:
        """Whether no visit can be issued, now or later."""
        return self.left == 0 and not self._arriving

    def extend(self, total: int, ended: bool) -> None:
        """Record that a stream has given `total` tasks, and whether it has ended."""
        self.limit, self._arriving = total, not ended

    # ------------------------------------------------------------------------------------------------- transitions

    def issue(self) -> tuple[int, bool]:
        """planned -> running. Return the next position, and whether it is the first of its epoch."""
        assert self.left != 0, "no task left to issue"
        if self._queue:
            position = self._queue.popleft()
        elif self.rerolls.due:
            position = self.rerolls.pop()
        else:
            position = self.cursor
            self.cursor += 1
        assert position not in self._open, f"position {position} is already open"
        self._open[position] = "running"
        epoch = position // self.tasks
        if begins := position < REROLL and epoch not in self._epochs:
            self._epochs[epoch] = EpochCounts(epoch)
        return position, begins

    def finish(self, position: int) -> None:
        assert self._open.get(position) == "running", f"position {position} is not running"
        self._open[position] = "finished"

    def requeue(self, position: int) -> None:
        """running -> planned, ahead of all others."""
        assert self._open.pop(position, None) == "running", f"position {position} is not running"
        self._queue.appendleft(position)
        self.requeued += 1

    def finalize(self, position: int, outcome: FinalOutcome) -> bool:
        """running or finished -> final outcome. Return whether every task of its epoch is now finalized."""
        before = self._open.pop(position, None)
        expected = "finished" if outcome == "trained" else "running"
        assert before == expected, f"position {position} cannot be {outcome}: it is {before or 'not open'}"
        self.rerolls.visit_finalized(position)
        self._finalized += 1
        if position >= REROLL:
            self._rerolled.add(outcome)
            return False
        tally = self._epochs[position // self.tasks]
        tally.add(outcome)
        assert tally.finalized <= self.tasks
        if ended := tally.finalized == self.tasks:
            self._merge_old_epochs()
        return ended

    def _merge_old_epochs(self) -> None:
        ended = [epoch for epoch, tally in self._epochs.items() if tally.finalized == self.tasks]
        for epoch in ended[: max(0, len(ended) - KEPT_EPOCHS)]:
            for outcome, count in self._epochs.pop(epoch).as_counts().items():
                self._earlier.add(outcome, count)

    # ----------------------------------------------------------------------------------------------------- queries

    def counts(self) -> dict[str, int]:
        """Return totals over the whole run: visits by final outcome, visits requeued, deadlines extended."""
        total = EpochCounts(epoch=-1)
        for tally in self._tallies:
            for outcome, count in tally.as_counts().items():
                total.add(outcome, count)
        return {**total.as_counts(), "requeued": self.requeued, "extended": self.extended}


def counts_by_epoch(tasks: int, state: LedgerState) -> list[dict[str, int]]:
    """Return one row per epoch for display: planned, running, finished, and finalized by outcome. They sum to
    `tasks`."""
    rows: list[dict[str, int]] = []
    for tally in state.epochs:
        running, finished = (
            sum(position // tasks == tally.epoch and position < REROLL for position in positions)
            for positions in (state.running, state.finished)
        )
        planned = tasks - tally.finalized - running - finished
        row = {"epoch": tally.epoch, "planned": planned, "running": running, "finished": finished}
        rows.append({**row, **tally.as_counts()})
    return rows


class OutcomeRecords:
    """Decides which record a finalized visit belongs to: the step that follows it, or one before a checkpoint
    between steps.

    Every finalized visit is recorded once, and the records up to a checkpoint contain exactly what its ledger has
    finalized. In deterministic mode a step records the visits admitted up to its last group. All of them have closed by
    then, so completion order has no effect; later visits wait for a later step."""

    def __init__(self, deterministic: bool, finalized: int) -> None:
        """`finalized` visits are already on record."""
        self._deterministic = deterministic
        self._recorded = finalized
        self._waiting: list[tuple[float, Finalize]] = []  # deterministic: (rank in admission order, visit)

    @property
    def complete(self) -> bool:
        """Whether everything finalized is on record."""
        return not self._waiting

    def finalize(self, finalize: Finalize, next_group: int) -> list[Action]:
        """Add a visit finalized without being trained. A skipped visit ranks just before the next group to be
        admitted."""
        if not self._deterministic:
            return [finalize]
        rank = next_group - 0.5 if finalize.group is None else finalize.group
        insort(self._waiting, (rank, finalize), key=itemgetter(0))
        return []

    def step(self, version: Version, last_group: int, finalized: int) -> list[Action]:
        """Return the record of the step that produced `version`. `finalized`: finalized visits in total."""
        ready = [finalize for rank, finalize in self._waiting if rank <= last_group]
        del self._waiting[: len(ready)]
        self._recorded = finalized - len(self._waiting)
        return [*ready, WriteRecord(version, self._recorded, trained=True)]

    def between(self, version: Version, finalized: int) -> list[Action]:
        """Return the record that a checkpoint of `version` relies on, or [] if nothing is missing."""
        ready, self._waiting = [finalize for _, finalize in self._waiting], []
        if finalized == self._recorded:
            return []
        self._recorded = finalized
        return [*ready, WriteRecord(version, finalized, trained=False)]


STATE_FILE = "controller.json"
"""File of a checkpoint that holds the controller's state."""


class _StoredLedger(msgspec.Struct):
    """The part of the checkpointed scheduler state that the report needs."""

    tasks: int
    version: Version = 0
    ledger: LedgerState = LedgerState()


def ledger_report(run: Path) -> dict[str, Any]:
    """Return what became of every task as of the run's newest complete checkpoint (`outpace ledger`).

    Per epoch, and for all re-rolls: the number of visits planned, running, finished and finalized by outcome. From
    batches.jsonl: visits finalized twice, and visits of complete epochs that were never finalized."""
    checkpoint = commit.newest_complete(run / "checkpoints")
    if checkpoint is None:
        raise BadInput(f"ledger: {run} has no complete checkpoint yet")
    snapshot = json.loads((checkpoint / STATE_FILE).read_text())["core"]
    state = msgspec.convert(snapshot, _StoredLedger, strict=False)
    if state.tasks == ENDLESS:
        state.tasks = max(1, state.ledger.cursor)  # a stream has no task count: use the visits issued so far
    epochs = counts_by_epoch(state.tasks, state.ledger)
    ends = _count_finalized(run / "batches.jsonl", state.version, Ledger(state.tasks, None, state.ledger).finalized)
    return {
        "version": state.version,
        "tasks": state.tasks,
        "epochs": epochs,
        "rerolls": _count_rerolls(state.ledger),
        "twice": [_describe_visit(visit) for visit, times in sorted(ends.items()) if times > 1],
        "never": [
            _describe_visit((row["epoch"], task, 0))
            for row in epochs
            if not row["planned"] + row["running"] + row["finished"]
            for task in range(state.tasks)
            if (row["epoch"], task, 0) not in ends
        ],
    }


def _count_rerolls(state: LedgerState) -> dict[str, int]:
    positions = {"planned": state.queued, "running": state.running, "finished": state.finished}
    counts = {name: sum(position >= REROLL for position in found) for name, found in positions.items()}
    counts["planned"] += len(state.rerolls.waiting)
    return {**counts, **state.rerolled.as_counts(), "never_started": state.rerolls.dropped}


def _describe_visit(visit: tuple[int, int, int]) -> str:
    epoch, task, reroll = visit
    return f"epoch {epoch}: task {task}" + (f", re-roll {reroll}" if reroll else "")


def _count_finalized(batches: Path, version: int, accounted: int) -> Counter[tuple[int, int, int]]:
    """Count how often each visit (epoch, task, number of the re-roll) was finalized, up to a checkpoint."""
    return Counter(
        (entry["epoch"], entry["task"], entry.get("reroll", 0))
        for line in read_lines(batches)
        if line["step"] <= version and line.get("accounted", 0) <= accounted
        for entry in [*line["groups"], *line.get("settled", [])]
        if not entry.get("replay")  # a replayed group is not a visit
    )
