"""When journal segments may be deleted: as soon as a checkpoint covers every group in them, and never before."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outpace.controller.groups import CheckpointMark, JournalUsage
from outpace.types import GroupReport, JournalLocation


def report(group: int, segment: str = "w-00000") -> GroupReport:
    return GroupReport(group, f"task/{group}", "finished", place=JournalLocation(f"{segment}.journal", 0, 1))


def commit(usage: JournalUsage) -> None:
    usage.committed(usage.start_checkpoint())


def test_a_segment_is_releasable_once_a_checkpoint_covers_it_and_its_writer_uses_the_next_one() -> None:
    usage = JournalUsage()
    old, current = report(0), report(1, "w-00001")
    usage.opened(old)
    usage.opened(current)
    usage.closed(old)
    usage.closed(current)
    assert usage.releasable() == []
    commit(usage)
    assert usage.releasable() == ["w-00000.journal"]
    assert usage.releasable() == [], "each segment is returned once"


def test_groups_closed_after_a_checkpoint_started_wait_for_the_next_checkpoint() -> None:
    usage = JournalUsage()
    for each in (first := report(0)), (second := report(1)), report(2, "w-00001"):
        usage.opened(each)
    usage.closed(first)
    mark = usage.start_checkpoint()
    usage.closed(second)
    usage.committed(mark)
    assert usage.releasable() == []
    commit(usage)
    assert usage.releasable() == ["w-00000.journal"]


def test_a_checkpoint_that_was_never_committed_covers_nothing() -> None:
    usage = JournalUsage()
    for each in (old := report(0)), report(1, "w-00001"):
        usage.opened(each)
    usage.closed(old)
    usage.start_checkpoint()
    assert usage.releasable() == []


def test_an_older_checkpoint_that_is_committed_late_changes_nothing() -> None:
    usage = JournalUsage()
    older = usage.start_checkpoint()
    usage.opened(old := report(0))
    usage.closed(old)
    usage.opened(report(1, "w-00001"))
    commit(usage)
    usage.committed(older)
    assert usage.releasable() == ["w-00000.journal"]


def test_a_segment_stays_for_a_report_that_arrives_after_a_report_from_the_next_segment() -> None:
    usage = JournalUsage()
    first, overtaken, next_one = report(0), report(1), report(2, "w-00001")
    usage.opened(first)
    usage.closed(first)
    mark = usage.start_checkpoint()
    usage.opened(next_one)
    usage.committed(mark)
    assert usage.releasable() == [], "some groups that the writer put into the old segment may not be reported yet"
    usage.opened(overtaken)
    commit(usage)
    assert usage.releasable() == []
    usage.closed(overtaken)
    commit(usage)
    assert usage.releasable() == ["w-00000.journal"]


def test_restored_segments_are_releasable_without_a_writer_moving_on() -> None:
    usage = JournalUsage()
    found = report(0, "kept-00000")
    usage.restored(found)
    usage.closed(found)
    commit(usage)
    assert usage.releasable() == ["kept-00000.journal"]


def test_segments_are_ordered_by_number_rather_than_by_name() -> None:
    usage = JournalUsage()
    for each in report(0, "w-99999"), report(1, "w-100000"):
        usage.opened(each)
        usage.closed(each)
    commit(usage)
    assert usage.releasable() == ["w-99999.journal"]


class JournalUsageMachine(RuleBasedStateMachine):
    """Groups, checkpoints and releases in any order, compared with a model that remembers everything."""

    @initialize(restored=st.integers(0, 5))
    def begin(self, restored: int) -> None:
        self.usage = JournalUsage()
        self.number = 0
        self.open: list[GroupReport] = []
        self.uncovered: dict[str, set[int]] = defaultdict(set)  # by segment: groups that no committed checkpoint covers
        self.closed: set[int] = set()
        self.started: list[tuple[CheckpointMark, frozenset[int], frozenset[str]]] = []
        self.current = {"w-0": 0, "w-1": 0}
        self.left: set[str] = set()  # segments whose writers are reported to have moved on
        self.left_before_commit: set[str] = set()  # the same, before the start of a committed checkpoint
        self.released: set[str] = set()
        self.known: set[str] = set()
        for index in range(restored):
            self._open(f"kept-{index // 2:05d}", self.usage.restored)
        self.left = set(self.known)

    def _open(self, segment: str, register: object) -> None:
        new = report(self.number, segment)
        self.number += 1
        assert callable(register)
        register(new)
        self.open.append(new)
        self.known.add(f"{segment}.journal")
        self.uncovered[f"{segment}.journal"].add(new.group)

    @rule(writer=st.sampled_from(["w-0", "w-1"]), moves_on=st.booleans())
    def journal(self, writer: str, moves_on: bool) -> None:
        if moves_on:
            self.left.add(f"{writer}-{self.current[writer]:05d}.journal")
            self.current[writer] += 1
        self._open(f"{writer}-{self.current[writer]:05d}", self.usage.opened)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        closing = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.usage.closed(closing)
        self.closed.add(closing.group)

    @rule()
    def start_checkpoint(self) -> None:
        self.started.append((self.usage.start_checkpoint(), frozenset(self.closed), frozenset(self.left)))

    @precondition(lambda self: self.started)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Commit any started checkpoint, in any order; some are never committed."""
        mark, covered, left = self.started.pop(data.draw(st.integers(0, len(self.started) - 1)))
        self.usage.committed(mark)
        self.left_before_commit |= left
        for groups in self.uncovered.values():
            groups -= covered

    @rule()
    def release(self) -> None:
        for segment in self.usage.releasable():
            assert segment not in self.released, "each segment is returned once"
            assert not self.uncovered[segment], "a resume may need it"
            assert segment in self.left_before_commit, "its writer may still be appending to it"
            self.released.add(segment)

    @invariant()
    def unneeded_segments_are_released(self) -> None:
        idle = {segment for segment in self.known if not self.uncovered[segment]}
        self.release()
        assert (idle & self.left_before_commit) - self.released == set()


TestJournalUsageMachine = JournalUsageMachine.TestCase


@given(st.lists(st.integers(0, 3), max_size=20))
def test_when_all_groups_are_closed_and_covered_only_the_current_segment_stays(moves: list[int]) -> None:
    usage, number, segments = JournalUsage(), 0, set()
    for group, move in enumerate([0, *moves]):
        number += move
        group_report = report(group, f"w-{number:05d}")
        usage.opened(group_report)
        usage.closed(group_report)
        segments.add(f"w-{number:05d}.journal")
    commit(usage)
    assert set(usage.releasable()) == segments - {f"w-{number:05d}.journal"}
