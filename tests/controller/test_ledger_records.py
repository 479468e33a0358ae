from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outpace.controller.events import Action, Finalize, WriteRecord
from outpace.controller.ledger import OutcomeRecords


def filtered(group: int) -> Finalize:
    return Finalize(group, 0, "filtered", group)


def test_finalized_groups_are_recorded_with_the_next_step() -> None:
    records = OutcomeRecords(deterministic=False, finalized=5)
    assert records.finalize(filtered(7), next_group=9) == [filtered(7)]
    assert records.step(3, last_group=6, finalized=10) == [WriteRecord(3, 10, trained=True)]


def test_a_checkpoint_between_two_steps_gets_its_own_record_if_groups_were_finalized() -> None:
    records = OutcomeRecords(deterministic=False, finalized=5)
    assert records.between(3, finalized=5) == []
    records.finalize(filtered(7), next_group=9)
    assert records.between(3, finalized=6) == [WriteRecord(3, 6, trained=False)]
    assert records.between(3, finalized=6) == []


def test_in_deterministic_mode_groups_admitted_after_the_last_group_of_a_step_are_recorded_with_a_later_step() -> None:
    records = OutcomeRecords(deterministic=True, finalized=0)
    assert records.finalize(filtered(9), next_group=10) == []
    assert records.finalize(filtered(2), next_group=10) == []
    assert records.finalize(filtered(6), next_group=10) == []
    assert records.finalize(Finalize(5, 0, "skipped"), next_group=4) == []
    step = records.step(1, last_group=6, finalized=8)  # a replayed group has the place of group 6
    assert step == [filtered(2), Finalize(5, 0, "skipped"), filtered(6), WriteRecord(1, 7, trained=True)]
    assert records.between(1, finalized=8) == [filtered(9), WriteRecord(1, 8, trained=False)]


@given(st.permutations(range(12)))
def test_in_deterministic_mode_the_order_in_which_groups_close_does_not_change_the_records(order: list[int]) -> None:
    """Groups 3, 7 and 11 are the last of their steps; all groups before them must have closed by then."""

    def run(order: list[int]) -> list[Action]:
        records, actions, finalized = OutcomeRecords(deterministic=True, finalized=0), [], 0
        closed: set[int] = set()
        due = [3, 7, 11]
        for group in order:
            closed.add(group)
            if group not in (3, 7, 11):
                finalized += 1
                actions += records.finalize(filtered(group), next_group=12)
            while due and closed.issuperset(range(due[0] + 1)):
                finalized += 1
                actions += records.step(len(actions), due.pop(0), finalized)
        return [action for action in actions if isinstance(action, Finalize)]

    assert run(order) == run(list(range(12)))
