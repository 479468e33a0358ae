"""Group lifecycle, from admission on: rollout by a worker, training, recording, and journal retention.

    Admit ─▶ a worker runs the group ─▶ GroupClosed ─▶ kept until trained, cancelled, or retired from replay
    Finalize ─▶ held until the record of a step or a checkpoint includes it

Journal retention (`JournalUsage`). A group is needed until it is closed and a committed checkpoint includes that: a
resume from an older checkpoint trains it again. So each checkpoint makes two calls: `start_checkpoint` when its state
is captured, `committed` when it is complete. A segment may be deleted when it holds no needed group and its writer has
moved on to another segment. Reports may arrive out of order: a report of an older segment may still be in flight when
the first one of the next segment arrives. A writer therefore counts as moved on only when a checkpoint has been both
started and committed after that first report, because in between every worker is called for its RNG state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from itertools import count

import msgspec

from outpace.config import Config
from outpace.controller import events as ev
from outpace.controller.engine_registry import Components, PostEvent
from outpace.controller.failure_budget import FailureBudget, FirstGroupsCheck
from outpace.controller.recorder import FinalizedVisit, Recorder
from outpace.controller.recovery import RecoveredWork, group_closed_event
from outpace.controller.supervisor import ComponentSupervisor
from outpace.monitoring.run_directory import UntrainedVisit
from outpace.runtime import diagnostics
from outpace.runtime.diagnostics import waiting
from outpace.types import FinishedGroup, GroupOrder, GroupReport, Version

CheckpointMark = int
"""Identifies the moment at which the state of a checkpoint was captured."""


class JournalUsage:
    """Tracks which journal segments still hold a needed group. Pure."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # open groups by segment
        self._closed_at: dict[str, CheckpointMark] = {}  # newest mark when a group of the segment was last closed
        self._written: dict[str, str] = {}  # current segment of each writer
        self._abandoned_at: dict[str, CheckpointMark] = {}  # newest mark when its writer was seen to have moved on
        self._marks: CheckpointMark = 0
        self._newest_committed: CheckpointMark = 0

    def opened(self, report: GroupReport) -> None:
        """Record that a worker journaled a group."""
        segment = self._add(report)
        writer = _writer(segment)
        older, newer = sorted((self._written.get(writer, segment), segment), key=_number)
        self._written[writer] = newer
        if older != newer:
            self._abandoned_at.setdefault(older, self._marks)

    def restored(self, report: GroupReport) -> None:
        """Record a group recovered from the journal. No worker writes to its segment."""
        self._abandoned_at.setdefault(self._add(report), self._marks)

    def closed(self, report: GroupReport) -> None:
        """Record that a journaled group is finalized."""
        assert report.place is not None
        self._open[report.place.segment] -= 1
        self._closed_at[report.place.segment] = self._marks

    def start_checkpoint(self) -> CheckpointMark:
        """Mark the start of a checkpoint: its state contains everything closed so far."""
        self._marks += 1
        return self._marks

    def committed(self, mark: CheckpointMark) -> None:
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


WARN_AFTER_GROUPS = 6
"""Warn if none of this many first groups can be trained on."""


class GroupTracker:
    """Tracks every group the controller holds: its order, report, journal entry and final outcome."""

    def __init__(
        self,
        components: Components,
        supervisor: ComponentSupervisor,
        recorder: Recorder,
        config: Config,
        recovered: RecoveredWork,
        resumed: bool,
        post: PostEvent,
    ) -> None:
        """`recovered` is the work recovered from the journal, as given to the scheduler. `resumed`: a step was trained
        before."""
        self._components = components
        self._supervisor = supervisor
        self._recorder = recorder
        self._config = config
        self._post = post
        self._names = list(components.workers)
        self._budget = FailureBudget(config.pacing, resumed)
        has_trained = resumed or bool(recovered.finished)
        self._first_groups = None if has_trained else FirstGroupsCheck(WARN_AFTER_GROUPS, str(recorder.log.dir))
        self._orders = {kept.order.group: kept.order for kept in recovered.finished}
        self._reports = {kept.order.group: kept.report for kept in recovered.finished}
        self._pooled = {kept.order.group: kept for kept in recovered.pooled}  # trained, kept for replay until retired
        self._cancelled: set[int] = set()  # cancelled, report not received yet
        self._untrained: dict[int, GroupReport] = {}  # reports of untrained groups, until finalized
        self._finalized: list[FinalizedVisit] = []  # not recorded yet
        self.journal = JournalUsage()
        for kept in (*recovered.finished, *recovered.pooled):
            self.journal.restored(kept.report)

    async def run(self, order: GroupOrder) -> None:
        """Run an admitted group and post `GroupClosed`."""
        diagnostics.crash_point("controller.admit")
        self._recorder.callbacks.post("on_rollout_start", order)
        self._orders[order.group] = order
        with waiting(f"group {order.group}"):
            report = await self.run_order(order)
        diagnostics.crash_point("controller.group_closed")
        self._group_closed(report)
        self._post(group_closed_event(report))

    async def run_order(self, order: GroupOrder) -> GroupReport:
        """Run an order on a worker and return its report. If the worker dies, its replacement may reuse recorded
        completions."""
        name = self._worker_of(order.group)
        attempts = count()

        def attempt() -> Awaitable[GroupReport]:
            first = next(attempts) == 0
            return self._components.workers[name].run(order if first else msgspec.structs.replace(order, recorded=True))

        return await self._supervisor.call(name, attempt)

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
            await self._supervisor.call(name, lambda: self._components.workers[name].cancel(group))

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

    def trained(self, groups: Iterable[int], replay_enabled: bool) -> list[FinishedGroup]:
        """Release trained groups and return them. Groups that may be replayed stay in the pool."""
        done = [FinishedGroup(self._orders.pop(group), self._reports.pop(group)) for group in groups]
        if replay_enabled:
            self._pooled |= {kept.order.group: kept for kept in done}
        else:
            for kept in done:
                self.journal.closed(kept.report)
        return done

    def pooled(self, groups: Iterable[int]) -> list[FinishedGroup]:
        return [self._pooled[group] for group in groups]

    def retire(self, groups: Iterable[int]) -> None:
        for group in groups:
            self.journal.closed(self._pooled.pop(group).report)

    async def release(self) -> None:
        """Delete journal segments that are no longer needed."""
        if segments := self.journal.releasable():
            name = self._names[0]
            await self._supervisor.call(name, lambda: self._components.workers[name].release(segments))

    async def record_rollouts(self, step: Version, groups: Sequence[FinishedGroup]) -> None:
        """Have a worker write evenly spaced sample groups of a step to `rollouts/`."""
        count = min(self._config.run.save_rollouts, len(groups))
        chosen = [groups[index * len(groups) // count] for index in range(count)]
        places = [kept.report.place for kept in chosen if kept.report.place]
        if places:
            name = self._names[0]
            await self._supervisor.call(name, lambda: self._components.workers[name].record_rollouts(step, places))

    # ------------------------------------------------------------------------------------------------ records

    def add_finalized(self, finalize: ev.Finalize) -> None:
        """Hold a finalized visit for the next record."""
        if finalize.outcome == "skipped":
            self._recorder.visit_skipped()
        report = self._untrained.pop(finalize.group, None) if finalize.group is not None else None
        task_id, reason = (report.task_id, report.reason) if report else ("", "")
        group = -1 if finalize.group is None else finalize.group
        visit = UntrainedVisit(finalize.task, finalize.epoch, finalize.outcome, reason, task_id, group, finalize.reroll)
        self._finalized.append((visit, report))

    def take_finalized(self) -> list[FinalizedVisit]:
        """Return the visits finalized since the last call."""
        finalized, self._finalized = self._finalized, []
        return finalized
