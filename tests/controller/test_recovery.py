"""Which groups of an earlier start a resumed run continues with."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from controller.scripted import SMALL, Script
from controller.simulated import make_scheduler
from outpace.controller.batcher import ReplayEntry
from outpace.controller.events import Admit, BatchTrained, ChunkTrained, EngineLoaded, Published, RunStarted, TrainChunk
from outpace.controller.ledger import LedgerState
from outpace.controller.recovery import RecoveredWork, SchedulerState, choose_recovered, recorded
from outpace.controller.scheduler import Scheduler
from outpace.tasks.order import REROLL, TaskOrder
from outpace.types import FinishedGroup, GroupOrder, GroupReport, Version

OPEN = SchedulerState(10, 0, True, version=3, ledger=LedgerState(cursor=8, queued=[4, 5]))
SETTINGS = replace(SMALL, max_lag=1, groups_per_step=2, steps=None)


def journaled(group: int, position: int, min_version: Version = 3, newest: Version | None = None) -> FinishedGroup:
    order = GroupOrder(
        group, task=position % 10, epoch=position // 10, min_version=min_version, size=2, position=position
    )
    return FinishedGroup(
        order, GroupReport(group, "t", "finished", oldest=min_version, newest=min_version if newest is None else newest)
    )


def groups(found: tuple[FinishedGroup, ...]) -> list[int]:
    return [each.order.group for each in found]


def test_a_group_with_a_token_newer_than_the_checkpoint_is_sampled_again() -> None:
    assert groups(choose_recovered([journaled(0, 4, newest=4), journaled(1, 5)], OPEN, SETTINGS).finished) == [1]


def test_groups_of_finalized_visits_are_left_out_and_groups_of_later_visits_are_kept() -> None:
    assert groups(
        choose_recovered([journaled(0, 3), journaled(1, 7), journaled(2, 8), journaled(3, 11)], OPEN, SETTINGS).finished
    ) == [2, 3]


def test_a_visit_beyond_the_last_epoch_is_left_out() -> None:
    assert groups(
        choose_recovered([journaled(0, 8), journaled(1, 10)], OPEN, replace(SETTINGS, epochs=1)).finished
    ) == [0]


def test_a_group_whose_deadline_has_passed_is_sampled_again() -> None:
    assert groups(
        choose_recovered([journaled(0, 4, min_version=1), journaled(1, 5, min_version=2)], OPEN, SETTINGS).finished
    ) == [1]


def test_only_one_of_two_groups_of_the_same_visit_is_kept() -> None:
    assert groups(choose_recovered([journaled(0, 4), journaled(9, 4)], OPEN, SETTINGS).finished) == [0]


def test_no_more_groups_are_kept_than_can_be_trained_before_their_deadlines() -> None:
    due_now = [journaled(group, group, min_version=2) for group in range(8, 12)]  # all due in batch 3, which takes two
    later = [journaled(group, group) for group in range(12, 16)]  # due in batch 4
    assert groups(choose_recovered([*later, *due_now], OPEN, SETTINGS).finished) == [8, 9, 12, 13]


def test_no_more_groups_are_kept_than_the_remaining_steps_need() -> None:
    found = [journaled(group, group) for group in range(8, 12)]
    assert groups(choose_recovered(found, OPEN, replace(SETTINGS, steps=4)).finished) == [8, 9]


def test_pooled_groups_are_found_by_number_even_though_their_visit_has_ended() -> None:
    found = choose_recovered(
        [journaled(0, 1), journaled(1, 2)], msgspec.structs.replace(OPEN, replay={1: ReplayEntry(0.5, 2, 1)}), SETTINGS
    )
    assert groups(found.pooled) == [1]
    assert found.finished == ()


def test_a_reroll_is_kept_only_if_it_was_open_at_the_checkpoint() -> None:
    state = msgspec.structs.replace(OPEN, ledger=LedgerState(cursor=8, running=[REROLL + 2]))
    found = [journaled(0, REROLL + 2), journaled(1, REROLL + 3)]
    for epochs in (None, 9):
        assert groups(choose_recovered(found, state, replace(SETTINGS, epochs=epochs)).finished) == [0]
    assert recorded({REROLL + 2: 3, REROLL + 3: 3}, [], state, SETTINGS) == {REROLL + 2: 3}


def test_a_pooled_group_may_be_a_reroll() -> None:
    state = msgspec.structs.replace(OPEN, replay={1: ReplayEntry(0.5, 2, 1)})
    assert groups(choose_recovered([journaled(1, REROLL + 2)], state, SETTINGS).pooled) == [1]


def test_recorded_completions_count_only_for_visits_that_are_still_open() -> None:
    min_versions = {3: 3, 4: 3, 5: 2, 9: 3, 10: 4}
    assert recorded(min_versions, [journaled(0, 4)], OPEN, SETTINGS) == {5: 2, 9: 3}


# ----------------------------------------------------------------------------------------------------- in the scheduler


STATE = SchedulerState(
    10, 0, True, version=3, next_group=8, ledger=LedgerState(cursor=8, running=[4, 5], finished=[6, 7])
)


def resumed(recovered: RecoveredWork) -> Script:
    settings = replace(SMALL, max_lag=1, steps=6)
    scheduler = Scheduler(settings, TaskOrder(10, 0, True), STATE, recovered, evaluated=3)
    script = Script(settings, scheduler)
    script.send(RunStarted({"e0": 0}), Published(3))
    return script


def test_recovered_groups_are_trained_at_once_and_their_visits_are_not_repeated() -> None:
    script = resumed(RecoveredWork(finished=(journaled(6, 6), journaled(7, 7))))
    assert script.of(TrainChunk) == [TrainChunk(3, (6, 7))]
    script.scheduler.handle(ChunkTrained(3))
    assert script.scheduler.counts["trained"] == 0
    script.scheduler.handle(BatchTrained(4))
    assert script.scheduler.counts["trained"] == 2


def test_a_recovered_group_admitted_after_the_checkpoint_keeps_its_number_for_itself() -> None:
    script = resumed(RecoveredWork(finished=(journaled(11, 11),)))
    admitted = admissions(script)
    assert min(admit.group for admit in admitted) == 12
    assert 11 not in {admit.position for admit in admitted}


def test_recorded_completions_keep_the_min_version_under_which_they_were_sampled() -> None:
    script = resumed(RecoveredWork(recorded={4: 2, 5: 3}))
    by_position = {admit.position: admit for admit in admissions(script)}
    assert (by_position[4].min_version, by_position[4].recorded) == (2, True)
    assert (by_position[5].min_version, by_position[5].recorded) == (3, True)
    assert (by_position[6].min_version, by_position[6].recorded) == (3, False)


def test_an_old_min_version_is_raised_where_its_deadline_could_not_be_met() -> None:
    script = resumed(RecoveredWork(finished=(journaled(6, 6), journaled(7, 7)), recorded={4: 2}))
    by_position = {admit.position: admit for admit in admissions(script)}
    assert (by_position[4].min_version, by_position[4].recorded) == (3, True)


def admissions(script: Script) -> list[Admit]:
    script.send(EngineLoaded("e0", 3))
    return script.of(Admit)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(0, 2)), max_size=40), st.integers(0, 3))
def test_the_scheduler_can_resume_from_any_journal_contents(found: list[tuple[int, int, int]], lag: int) -> None:
    entries = [
        journaled(100 + n, position, min_version, min_version + newer)
        for n, (position, min_version, newer) in enumerate(found)
    ]
    settings = replace(SMALL, max_lag=lag, steps=None)
    recovered = choose_recovered(entries, STATE, settings)
    scheduler = Scheduler(settings, make_scheduler(settings).order, STATE, recovered)
    assert scheduler.finished == len(recovered.finished)
    assert all(each.report.newest <= 3 for each in recovered.finished)
    positions = [each.order.position for each in recovered.finished]
    assert len(set(positions)) == len(positions)
    assert set(positions) <= {4, 5, 6, 7} | set(range(8, 31))
