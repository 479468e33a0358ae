"""Groups from admission to their end: rollout by a worker, use by the learner, record, and journal retention.

    Admit ─▶ a worker runs the group ─▶ GroupClosed ─▶ kept until trained, cancelled, or retired from replay
    Finalize ─▶ held until the record of a step or a checkpoint includes it

Journal retention (`JournalUsage`). A group is needed until it is closed and a committed checkpoint contains that fact:
a resume from an older checkpoint trains it again. So each checkpoint makes two calls: `start_checkpoint` when its state
is taken, `committed` when it is complete. A segment may be deleted when it holds no needed group and its writer has
moved on to another segment. Reports may overtake each other: a report of an older segment may still be in flight when
the first one of the next segment arrives. A writer therefore counts as moved on only once a checkpoint was both started
and committed after that, because every worker is called for its RNG state in between.
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

REPEATED_DRAWS = 1 << 40
"""Draw numbers from here on belong to repeated visits that were cancelled before; no position is this high."""

WARN_AFTER_GROUPS = 6
"""Warn if none of this many first groups can be trained on."""


@dataclass(frozen=True)
class MakingSettings:
    group_size: int
    show_rollouts: int  # groups per step
    limits: Limits


class Making:
    """Tracks every group the controller holds: its order, report, journal entry and final outcome."""

    def __init__(
        self,
        components: Parts,
        supervisor: Caretaker,
        recorder: Recorder,
        settings: MakingSettings,
        survivors: Survivors,
        post: Tell,
    ) -> None:
        """`recovered` is the work recovered from the journal, as given to the scheduler."""
        self._components = components
        self._supervisor = supervisor
        self._recorder = recorder
        self._settings = settings
        self._post = post
        self._names = list(components.workers)
        self._budget = Budget(settings.limits)
        has_trained = settings.limits.resumed or bool(survivors.finished)
        self._first_groups = None if has_trained else FirstGroups(WARN_AFTER_GROUPS, str(recorder.log.dir))
        self._orders = {kept.order.group: kept.order for kept in survivors.finished}
        self._reports = {kept.order.group: kept.report for kept in survivors.finished}
        self._pooled = {kept.order.group: kept for kept in survivors.pooled}  # trained, kept for replay until retired
        self._cancelled: set[int] = set()  # cancelled, report not received yet
        self._untrained: dict[int, GroupReport] = {}  # reports of untrained groups, until finalized
        self._finalized: list[Settled] = []  # not on record yet
        self.journal = JournalUse()
        for kept in (*survivors.finished, *survivors.pooled):
            self.journal.restored(kept.report)

    async def run(self, admit: ev.Admit) -> None:
        """Run an admitted group and post `GroupClosed`."""
        crash.reached("controller.admit")
        order = GroupOrder(
            admit.group,
            admit.task,
            admit.epoch,
            admit.min_version,
            self._settings.group_size,
            position=admit.position,
            recorded=admit.recorded,
            # Seeded by the visit: rerunning it after a kill samples the same completions, so that kills do not favor
            # short ones. A visit that was cancelled for being slow gets a fresh draw.
            draw=REPEATED_DRAWS + admit.group if admit.again else admit.position,
        )
        self._recorder.group_started(order)
        self._orders[admit.group] = order
        with waiting(f"group {admit.group}"):
            report = await self.made(order)
        crash.reached("controller.group_closed")
        self._group_closed(report)
        self._post(group_closed(report))

    async def made(self, order: GroupOrder) -> GroupReport:
        """Run an order on a worker and return its report. If the worker dies, its replacement may reuse recorded
        completions."""
        name = self._worker_of(order.group)
        attempts = count()

        def attempt() -> Awaitable[GroupReport]:
            first = next(attempts) == 0
            return self._components.workers[name].run(order if first else msgspec.structs.replace(order, recorded=True))

        return await self._supervisor.ask(name, attempt)

    def _group_closed(self, report: GroupReport) -> None:
        if report.outcome == "finished":
            self._reports[report.group] = report
            self.journal.opened(report)
        if report.group in self._cancelled:
            self._cancelled.remove(report.group)
            self._discard(report)
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
        """Cancel a group that the scheduler gave up, even if its report arrived before this call."""
        self._untrained.pop(group, None)
        if report := self._reports.get(group):
            self._discard(report)
        elif group in self._orders:
            self._cancelled.add(group)
            name = self._worker_of(group)
            await self._supervisor.ask(name, lambda: self._components.workers[name].cancel(group))

    def _discard(self, report: GroupReport) -> None:
        self._orders.pop(report.group)
        if self._reports.pop(report.group, None):
            self.journal.closed(report)
        self._recorder.group_given_up(report)

    def _worker_of(self, group: int) -> str:
        return self._names[group % len(self._names)]

    # ------------------------------------------------------------------------------------------------ training

    def finished(self, groups: Iterable[int], replayed: bool) -> list[GroupReport]:
        return [self._pooled[group].report if replayed else self._reports[group] for group in groups]

    def trained(self, groups: Iterable[int], pools: bool) -> list[Kept]:
        """Release trained groups and return them. Groups that may be replayed stay in the pool."""
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
        """Delete journal segments that are no longer needed."""
        if segments := self.journal.releasable():
            name = self._names[0]
            await self._supervisor.ask(name, lambda: self._components.workers[name].release(segments))

    async def record_rollouts(self, step: Version, groups: Sequence[Kept]) -> None:
        """Have a worker write evenly spaced sample groups of a step to `rollouts/`."""
        count = min(self._settings.show_rollouts, len(groups))
        chosen = [groups[index * len(groups) // count] for index in range(count)]
        places = [kept.report.place for kept in chosen if kept.report.place]
        if places:
            name = self._names[0]
            await self._supervisor.ask(name, lambda: self._components.workers[name].record_rollouts(step, places))

    # ------------------------------------------------------------------------------------------------ records

    def book(self, settle: ev.Settle) -> None:
        """Hold a finalized visit for the next record."""
        if settle.outcome == "skipped":
            self._recorder.visit_skipped()
        report = self._untrained.pop(settle.group, None) if settle.group is not None else None
        task_id, reason = (report.task_id, report.reason) if report else ("", "")
        group = -1 if settle.group is None else settle.group
        visit = BatchSettled(settle.task, settle.epoch, settle.outcome, reason, task_id, group)
        self._finalized.append((visit, report))

    def booked(self) -> list[Settled]:
        """Return the visits finalized since the last call."""
        finalized, self._finalized = self._finalized, []
        return finalized
