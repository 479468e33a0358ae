"""Groups from their admission to their end: who makes them, what came of them, where they lie in the journal.

Admit ─▶ a worker makes it ─▶ GroupClosed ─▶ kept until it is trained, given up, or retired from being replayed
Settle ─▶ booked, until the record of a step or a checkpoint takes it
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from outpace import crash
from outpace.observe.runlog import BatchSettled
from outpace.pipeline import events as ev
from outpace.pipeline.budget import Budget, Limits
from outpace.pipeline.caretaker import Caretaker
from outpace.pipeline.first_groups import FirstGroups
from outpace.pipeline.journal_use import JournalUse
from outpace.pipeline.recorder import Recorder, Settled
from outpace.pipeline.staff import Parts, Tell
from outpace.pipeline.survivors import Survivors, group_closed
from outpace.runtime.waits import waiting
from outpace.types import GroupOrder, GroupReport, Kept, Version

ANOTHER = 1 << 40
"""Noise from here on is that of visits which were given up and are made again: no position is as high."""

FIRST_GROUPS = 6
"""So many groups without one that can be trained on, and people are told."""


@dataclass(frozen=True)
class MakingSettings:
    group_size: int
    show_rollouts: int  # groups per step
    limits: Limits


class Making:
    def __init__(
        self,
        parts: Parts,
        care: Caretaker,
        recorder: Recorder,
        settings: MakingSettings,
        survivors: Survivors,
        tell: Tell,
    ) -> None:
        """`survivors` are what the core was told of: where they lie in the journal."""
        self._parts = parts
        self._care = care
        self._recorder = recorder
        self._settings = settings
        self._tell = tell
        self._names = list(parts.workers)
        self._budget = Budget(settings.limits)
        has_trained = settings.limits.resumed or bool(survivors.finished)
        self._first_groups = None if has_trained else FirstGroups(FIRST_GROUPS, str(recorder.log.dir))
        self._orders = {kept.order.group: kept.order for kept in survivors.finished}
        self._reports = {kept.order.group: kept.report for kept in survivors.finished}
        self._pooled = {kept.order.group: kept for kept in survivors.pooled}  # trained, and kept until they are retired
        self._given_up: set[int] = set()  # groups that were cancelled and have not come back yet
        self._untrained: dict[int, GroupReport] = {}  # of groups that have left, until they are booked
        self._booked: list[Settled] = []  # and not on record yet
        self.journal = JournalUse()
        for kept in (*survivors.finished, *survivors.pooled):
            self.journal.restored(kept.report)

    async def run(self, admit: ev.Admit) -> None:
        crash.reached("controller.admit")
        order = GroupOrder(
            admit.group,
            admit.task,
            admit.epoch,
            admit.min_version,
            self._settings.group_size,
            position=admit.position,
            recorded=admit.recorded,
            # By its visit: whoever makes it once more after a kill gets the same, so that no answer is drawn until it
            # is a short one. What was given up for being slow must have another chance, though.
            draw=ANOTHER + admit.group if admit.again else admit.position,
        )
        self._recorder.group_started(order)
        self._orders[admit.group] = order
        with waiting(f"group {admit.group}"):
            report = await self.made(order)
        crash.reached("controller.group_closed")
        self._close_group(report)
        self._tell(group_closed(report))

    async def made(self, order: GroupOrder) -> GroupReport:
        """A worker's report on an order. If it dies over it, its successor may use what it has recorded."""
        name = self._worker_of(order.group)
        attempts = count()

        def attempt() -> Awaitable[GroupReport]:
            first = next(attempts) == 0
            return self._parts.workers[name].run(order if first else msgspec.structs.replace(order, recorded=True))

        return await self._care.ask(name, attempt)

    def _close_group(self, report: GroupReport) -> None:
        if report.outcome == "finished":
            self._reports[report.group] = report
            self.journal.opened(report)
        if report.group in self._given_up:
            self._given_up.remove(report.group)
            self._give_up(report)
            return
        if report.outcome != "finished":
            self._orders.pop(report.group)
            self._untrained[report.group] = msgspec.structs.replace(report, views=[])
        self._recorder.group_closed(report)
        if self._first_groups is not None and (warning := self._first_groups.note(report)):
            self._recorder.console.warning(warning)
        if notice := self._budget.note(report):
            self._recorder.console.status(notice)

    async def cancel(self, group: int) -> None:
        """The core has given this group up; one that came back before we asked is given up all the same."""
        self._untrained.pop(group, None)
        if report := self._reports.get(group):
            self._give_up(report)
        elif group in self._orders:
            self._given_up.add(group)
            name = self._worker_of(group)
            await self._care.ask(name, lambda: self._parts.workers[name].cancel(group))

    def _give_up(self, report: GroupReport) -> None:
        self._orders.pop(report.group)
        if self._reports.pop(report.group, None):
            self.journal.closed(report)
        self._recorder.group_given_up(report)

    def _worker_of(self, group: int) -> str:
        return self._names[group % len(self._names)]

    # ------------------------------------------------------------------------------------------------ to be trained

    def finished(self, groups: Iterable[int], replayed: bool) -> list[GroupReport]:
        return [self._pooled[group].report if replayed else self._reports[group] for group in groups]

    def trained(self, groups: Iterable[int], pools: bool) -> list[Kept]:
        """These are: they leave, unless they may be replayed."""
        done = [Kept(self._orders.pop(group), self._reports.pop(group)) for group in groups]
        if pools:
            self._pooled |= {kept.order.group: kept for kept in done}
        else:
            for kept in done:
                self.journal.closed(kept.report)
        return done

    def pooled(self, groups: Iterable[int]) -> list[Kept]:
        return [self._pooled[group] for group in groups]

    def retire(self, groups: Iterable[int]) -> None:
        for group in groups:
            self.journal.closed(self._pooled.pop(group).report)

    async def release(self) -> None:
        """Delete the segments of the journal that nobody needs any more."""
        if segments := self.journal.releasable():
            name = self._names[0]
            await self._care.ask(name, lambda: self._parts.workers[name].release(segments))

    async def record_rollouts(self, step: Version, groups: Sequence[Kept]) -> None:
        """Have a worker write some groups of a step, spread over all of them, to `rollouts/`."""
        count = min(self._settings.show_rollouts, len(groups))
        chosen = [groups[index * len(groups) // count] for index in range(count)]
        places = [kept.report.place for kept in chosen if kept.report.place]
        if places:
            name = self._names[0]
            await self._care.ask(name, lambda: self._parts.workers[name].record_rollouts(step, places))

    # ------------------------------------------------------------------------------------------------ booked

    def book(self, settle: ev.Settle) -> None:
        if settle.outcome == "skipped":
            self._recorder.visit_skipped()
        report = self._untrained.pop(settle.group, None) if settle.group is not None else None
        task_id, reason = (report.task_id, report.reason) if report else ("", "")
        group = -1 if settle.group is None else settle.group
        self._booked.append((BatchSettled(settle.task, settle.epoch, settle.outcome, reason, task_id, group), report))

    def booked(self) -> list[Settled]:
        """What was settled since this was last asked."""
        settled, self._booked = self._booked, []
        return settled
