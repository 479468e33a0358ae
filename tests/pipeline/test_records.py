from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outpace.pipeline.events import Account, Action, Settle
from outpace.pipeline.records import Records


def filtered(group: int) -> Settle:
    return Settle(group, 0, "filtered", group)


def test_what_was_settled_goes_on_the_record_of_the_next_step() -> None:
    records = Records(lockstep=False, settled=5)
    assert records.settle(filtered(7), next_group=9) == [filtered(7)]
    assert records.step(3, last_group=6, settled=10) == [Account(3, 10, trained=True)]


def test_a_checkpoint_between_two_steps_gets_a_record_of_its_own_if_there_is_anything() -> None:
    records = Records(lockstep=False, settled=5)
    assert records.between(3, settled=5) == []
    records.settle(filtered(7), next_group=9)
    assert records.between(3, settled=6) == [Account(3, 6, trained=False)]
    assert records.between(3, settled=6) == []


def test_in_lockstep_what_was_admitted_after_the_last_group_of_a_step_waits_for_its_own() -> None:
    records = Records(lockstep=True, settled=0)
    assert records.settle(filtered(9), next_group=10) == []
    assert records.settle(filtered(2), next_group=10) == []
    assert records.settle(Settle(5, 0, "skipped"), next_group=4) == []
    step = records.step(1, last_group=6, settled=7)
    assert step == [filtered(2), Settle(5, 0, "skipped"), Account(1, 6, trained=True)]
    assert records.between(1, settled=7) == [filtered(9), Account(1, 7, trained=False)]


@given(st.permutations(range(12)))
def test_in_lockstep_the_order_in_which_groups_close_changes_no_record(order: list[int]) -> None:
    """Groups 3, 7 and 11 are the last of their steps; all before them must have closed by then."""

    def run(order: list[int]) -> list[Action]:
        records, said, settled = Records(lockstep=True, settled=0), [], 0
        closed: set[int] = set()
        due = [3, 7, 11]
        for group in order:
            closed.add(group)
            if group not in (3, 7, 11):
                settled += 1
                said += records.settle(filtered(group), next_group=12)
            while due and closed.issuperset(range(due[0] + 1)):
                settled += 1
                said += records.step(len(said), due.pop(0), settled)
        return [action for action in said if isinstance(action, Settle)]

    assert run(order) == run(list(range(12)))
