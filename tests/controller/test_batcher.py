from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.controller.batcher import Batcher


def batcher(size: int = 2, chunk_groups: int = 2, in_order: bool = False, version: int = 0) -> Batcher:
    return Batcher(size, chunk_groups, in_order, version)


def admitted(batch: Batcher, *deadlines: int) -> Batcher:
    for group, deadline in enumerate(deadlines):
        batch.admit(group, deadline)
    return batch


def test_the_earliest_deadline_goes_first_and_ties_go_by_admission_order() -> None:
    batch = admitted(batcher(size=3), 2, 1, 1, 2)
    for group in (3, 0, 2, 1):
        batch.finish(group)
    batch.fill()
    assert batch.batch == [1, 2, 0]


def test_a_finished_group_does_not_take_the_slot_of_a_due_group_that_is_still_running() -> None:
    batch = admitted(batcher(size=2), 0, 1, 1)
    batch.finish(1)
    batch.finish(2)
    batch.fill()
    assert batch.batch == [1]
    assert batch.awaited() == [0]
    batch.finish(0)
    batch.fill()
    assert batch.batch == [1, 0]


def test_slots_are_also_reserved_for_later_deadlines() -> None:
    # Two batches of two must take the four groups due by batch 1; the early one with deadline 2 has to wait.
    batch = admitted(batcher(size=2), 1, 1, 1, 1, 2)
    batch.finish(4)
    batch.fill()
    assert batch.batch == []
    batch.discard(0)
    batch.fill()
    assert batch.batch == [4]


def test_a_straggler_is_overdue_only_when_the_batch_could_be_filled_without_it() -> None:
    batch = admitted(batcher(size=2), 0, 1, 1)
    batch.finish(1)
    batch.fill()
    assert batch.overdue() is None
    batch.finish(2)
    batch.fill()
    assert batch.overdue() == 0


def test_extending_a_deadline_lets_other_groups_go_first() -> None:
    batch = admitted(batcher(size=1), 0, 1)
    batch.finish(1)
    batch.fill()
    assert batch.overdue() == 0
    batch.extend(0)
    batch.fill()
    assert batch.batch == [1]
    assert batch.overdue() is None
    assert batch.next_chunk(complete=True) == (1,)
    batch.close()
    assert batch.awaited() == [0]


def test_a_chunk_is_ready_when_it_is_large_enough_and_a_complete_batch_releases_the_rest() -> None:
    batch = admitted(batcher(size=4, chunk_groups=3), 0, 0, 0, 0)
    for group in (0, 1):
        batch.finish(group)
    batch.fill()
    assert batch.next_chunk(complete=False) == ()
    batch.finish(2)
    batch.fill()
    assert batch.next_chunk(complete=False) == (0, 1, 2)
    batch.finish(3)
    batch.fill()
    assert batch.next_chunk(complete=True) == (3,)
    assert batch.next_chunk(complete=True) == ()
    assert batch.close() == [0, 1, 2, 3]
    assert batch.version == 1
    assert batch.outstanding == 0


def test_in_order_a_running_group_holds_back_later_groups_and_chunks_have_a_fixed_size() -> None:
    batch = admitted(batcher(size=4, chunk_groups=2, in_order=True), 0, 0, 0, 0)
    for group in (1, 2, 3):
        batch.finish(group)
    batch.fill()
    assert batch.batch == []
    assert batch.overdue() is None
    batch.finish(0)
    batch.fill()
    assert batch.next_chunk(complete=True) == (0, 1)
    assert batch.next_chunk(complete=True) == (2, 3)


def test_outstanding_counts_running_and_finished_groups_and_the_open_batch() -> None:
    batch = admitted(batcher(size=1), 0, 1, 1)
    batch.finish(0)
    batch.finish(1)
    batch.fill()
    assert (batch.running, batch.finished, batch.outstanding) == (1, 2, 3)


def test_a_group_whose_deadline_has_passed_cannot_be_admitted() -> None:
    with pytest.raises(AssertionError):
        batcher(version=5).admit(0, 4)


@st.composite
def outstanding_sets(draw: st.DrawFn) -> tuple[int, list[tuple[int, bool]]]:
    """A batch size and feasible groups (deadline, finished): at most (d + 1) * size groups are due by batch d."""
    size = draw(st.integers(1, 4))
    groups: list[tuple[int, bool]] = []
    for deadline, done in draw(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20)):
        later = [*groups, (deadline, done)]
        if all(sum(due <= d for due, _ in later) <= (d + 1) * size for d in range(5)):
            groups = later
    return size, groups


@given(outstanding_sets())
def test_a_batch_takes_exactly_as_many_groups_as_the_reservation_rule_allows(
    case: tuple[int, list[tuple[int, bool]]],
) -> None:
    size, groups = case
    batch = admitted(batcher(size=size), *(deadline for deadline, _ in groups))
    for group, (_, done) in enumerate(groups):
        if done:
            batch.finish(group)
    batch.fill()

    def fits(taken: set[int]) -> bool:
        """The reservation rule: the remaining groups due by batch d still fit into the slots of batches up to d."""
        left = [deadline for group, (deadline, _) in enumerate(groups) if group not in taken]
        return all(sum(due <= d for due in left) <= d * size + size - len(taken) for d in range(5))

    taken = set(batch.batch)
    assert len(taken) <= size
    assert fits(taken)
    ready = {group for group, (_, done) in enumerate(groups) if done} - taken
    if len(taken) < size:
        assert not any(fits(taken | {group}) for group in ready)
        running = len(groups) - len(taken) - len(ready)
        assert running or not ready, "the batch only ever waits for a running group"


# ------------------------------------------------------------------------------------------- places of filtered groups


def test_the_place_of_a_filtered_group_is_taken_by_deadline_like_a_finished_group() -> None:
    batch = batcher(size=3)
    batch.allow_filled(1)
    admitted(batch, 1, 0, 0)
    batch.finish(2)
    batch.vacate(0)
    batch.fill()
    assert (batch.batch, batch.filled, batch.missing) == ([2], [0], 1)
    assert (batch.finished, batch.outstanding, batch.last_group) == (1, 3, 2)


def test_a_kept_place_does_not_crowd_out_a_due_group() -> None:
    batch = batcher(size=1)
    batch.allow_filled(1)
    admitted(batch, 0, 1)
    batch.vacate(1)
    batch.fill()
    assert (batch.filled, batch.undecided) == ([], True)
    batch.finish(0)
    batch.fill()
    assert batch.batch == [0]


def test_no_more_places_are_kept_than_the_batch_may_fill() -> None:
    batch = batcher(size=4)
    batch.allow_filled(2)
    admitted(batch, 0, 0, 0, 0)
    for group in (0, 1, 2):
        batch.vacate(group)
    batch.fill()
    assert (batch.filled, batch.outstanding) == ([0, 1], 3)


def test_places_that_the_next_batch_cannot_fill_are_given_up() -> None:
    batch = batcher(size=2, chunk_groups=1)
    batch.allow_filled(2)
    admitted(batch, 0, 0, 2, 1)
    for group in (0, 1):
        batch.finish(group)
    for group in (2, 3):
        batch.vacate(group)
    batch.fill()
    batch.next_chunk(complete=True)
    batch.close()
    assert batch.outstanding == 2
    batch.allow_filled(1)
    batch.fill()
    assert (batch.filled, batch.outstanding) == ([3], 1), "the one that is due first is kept"
    assert (batch.undecided, batch.finished) == (False, 0)


def test_in_order_a_place_is_filled_or_given_up_when_its_turn_comes() -> None:
    batch = batcher(size=2, in_order=True)
    admitted(batch, 1, 1, 1, 1)
    for group in (1, 3):
        batch.vacate(group)
    batch.fill()
    assert (batch.undecided, batch.outstanding) == (True, 4)
    batch.finish(0)
    batch.finish(2)
    batch.fill()
    assert batch.batch == [0, 2], "the first batch may not fill places: group 1 is replaced"
    assert batch.undecided
    batch.next_chunk(complete=True)
    batch.close()
    batch.allow_filled(1)
    batch.fill()
    assert (batch.filled, batch.undecided) == ([3], False)
