"""When journal segments may be deleted: never before a checkpoint covers every group in them, and then at last."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outpace.controller.groups import CheckpointMark, JournalUsage
from outpace.types import GroupReport, JournalLocation


def report(group: int, segment: str = "w-00000") -> GroupReport:
    return GroupReport(group, f"task/{group}", "finished", place=JournalLocation(f"{segment}.journal", 0, 1))


def commit(use: JournalUsage) -> None:
    use.committed(use.start_checkpoint())


def test_a_segment_goes_when_a_checkpoint_covers_it_and_its_writer_has_moved_on() -> None:
    use = JournalUsage()
    old, current = report(0), report(1, "w-00001")
    use.opened(old)
    use.opened(current)
    use.closed(old)
    use.closed(current)
    assert use.releasable() == []
    commit(use)
    assert use.releasable() == ["w-00000.journal"]
    assert use.releasable() == [], "each is named once"


def test_what_was_closed_after_the_cut_waits_for_the_next_checkpoint() -> None:
    use = JournalUsage()
    for each in (first := report(0)), (second := report(1)), report(2, "w-00001"):
        use.opened(each)
    use.closed(first)
    mark = use.start_checkpoint()
    use.closed(second)
    use.committed(mark)
    assert use.releasable() == []
    commit(use)
    assert use.releasable() == ["w-00000.journal"]


def test_a_checkpoint_that_was_never_committed_covers_nothing() -> None:
    use = JournalUsage()
    for each in (old := report(0)), report(1, "w-00001"):
        use.opened(each)
    use.closed(old)
    use.start_checkpoint()
    assert use.releasable() == []


def test_an_older_checkpoint_that_is_committed_late_takes_nothing_back() -> None:
    use = JournalUsage()
    older = use.start_checkpoint()
    use.opened(old := report(0))
    use.closed(old)
    use.opened(report(1, "w-00001"))
    commit(use)
    use.committed(older)
    assert use.releasable() == ["w-00000.journal"]


def test_a_report_that_was_overtaken_by_one_of_the_next_segment_still_finds_its_own() -> None:
    use = JournalUsage()
    first, overtaken, next_one = report(0), report(1), report(2, "w-00001")
    use.opened(first)
    use.closed(first)
    mark = use.start_checkpoint()
    use.opened(next_one)
    use.committed(mark)
    assert use.releasable() == [], "what its writer wrote before it moved on may not all be reported yet"
    use.opened(overtaken)
    commit(use)
    assert use.releasable() == []
    use.closed(overtaken)
    commit(use)
    assert use.releasable() == ["w-00000.journal"]


def test_restored_segments_have_no_writer_to_wait_for() -> None:
    use = JournalUsage()
    found = report(0, "kept-00000")
    use.restored(found)
    use.closed(found)
    commit(use)
    assert use.releasable() == ["kept-00000.journal"]


def test_segments_are_ordered_by_number_and_not_by_name() -> None:
    use = JournalUsage()
    for each in report(0, "w-99999"), report(1, "w-100000"):
        use.opened(each)
        use.closed(each)
    commit(use)
    assert use.releasable() == ["w-99999.journal"]


class Use(RuleBasedStateMachine):
    """Groups, checkpoints and releases in any order, beside a model that remembers everything."""

    @initialize(restored=st.integers(0, 5))
    def begin(self, restored: int) -> None:
        self.use = JournalUsage()
        self.number = 0
        self.open: list[GroupReport] = []
        self.uncovered: dict[str, set[int]] = defaultdict(set)  # groups by segment that no committed checkpoint covers
        self.closed: set[int] = set()
        self.cuts: list[tuple[CheckpointMark, frozenset[int], frozenset[str]]] = []
        self.at = {"w-0": 0, "w-1": 0}
        self.left: set[str] = set()  # segments whose writers have moved on, as far as was reported
        self.left_for_good: set[str] = set()  # so that a committed checkpoint was begun after it
        self.released: set[str] = set()
        self.known: set[str] = set()
        for index in range(restored):
            self._open(f"kept-{index // 2:05d}", self.use.restored)
        self.left = set(self.known)

    def _open(self, segment: str, tell: object) -> None:
        new = report(self.number, segment)
        self.number += 1
        assert callable(tell)
        tell(new)
        self.open.append(new)
        self.known.add(f"{segment}.journal")
        self.uncovered[f"{segment}.journal"].add(new.group)

    @rule(writer=st.sampled_from(["w-0", "w-1"]), moves_on=st.booleans())
    def journal(self, writer: str, moves_on: bool) -> None:
        if moves_on:
            self.left.add(f"{writer}-{self.at[writer]:05d}.journal")
            self.at[writer] += 1
        self._open(f"{writer}-{self.at[writer]:05d}", self.use.opened)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        closing = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.use.closed(closing)
        self.closed.add(closing.group)

    @rule()
    def start_checkpoint(self) -> None:
        self.cuts.append((self.use.start_checkpoint(), frozenset(self.closed), frozenset(self.left)))

    @precondition(lambda self: self.cuts)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Any that was cut and not committed yet, in any order: some never are."""
        mark, covered, left = self.cuts.pop(data.draw(st.integers(0, len(self.cuts) - 1)))
        self.use.committed(mark)
        self.left_for_good |= left
        for groups in self.uncovered.values():
            groups -= covered

    @rule()
    def release(self) -> None:
        for segment in self.use.releasable():
            assert segment not in self.released, "each is named once"
            assert not self.uncovered[segment], "a resume may need it"
            assert segment in self.left_for_good, "its writer may be at it"
            self.released.add(segment)

    @invariant()
    def what_nobody_needs_goes(self) -> None:
        idle = {segment for segment in self.known if not self.uncovered[segment]}
        self.release()
        assert (idle & self.left_for_good) - self.released == set()


TestUse = Use.TestCase


@given(st.lists(st.integers(0, 3), max_size=20))
def test_when_all_is_closed_and_covered_only_what_is_being_written_stays(moves: list[int]) -> None:
    use, number, segments = JournalUsage(), 0, set()
    for group, move in enumerate([0, *moves]):
        number += move
        made = report(group, f"w-{number:05d}")
        use.opened(made)
        use.closed(made)
        segments.add(f"w-{number:05d}.journal")
    commit(use)
    assert set(use.releasable()) == segments - {f"w-{number:05d}.journal"}
