from __future__ import annotations

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.config.algorithm import DifficultyConfig, RerollConfig
from outpace.controller.curriculum import Curriculum, CurriculumState, RerollQueue, RerollState
from outpace.controller.events import GroupClosed
from outpace.tasks.order import REROLL
from outpace.types import GroupOrder, Outcome

SETTINGS = DifficultyConfig(easy_above=0.9, hard_below=0.1, rest_epochs=2)


def curriculum(tasks: int = 3, deterministic: bool = False, settings: DifficultyConfig | None = SETTINGS) -> Curriculum:
    return Curriculum(settings, tasks, deterministic, CurriculumState())


def visits(subject: Curriculum, epoch: int, tasks: int = 3) -> list[int]:
    """Return the tasks of this epoch that are not skipped, in order."""
    return [task for task in range(tasks) if not subject.should_skip(task, epoch)]


def test_tasks_that_are_too_easy_or_too_hard_are_skipped_for_rest_epochs() -> None:
    subject = curriculum()
    for task, reward in enumerate((0.9, 0.5, 0.1)):
        subject.record(group=task, task=task, epoch=0, reward=reward)
    assert [visits(subject, epoch) for epoch in range(1, 4)] == [[1], [1], [0, 1, 2]]
    assert subject.resting == 0, "tasks that returned are forgotten"


def test_thresholds_that_are_not_set_have_no_effect() -> None:
    subject = curriculum(settings=DifficultyConfig(easy_above=None, hard_below=0.1, rest_epochs=1))
    subject.record(0, task=0, epoch=0, reward=1.0)
    subject.record(1, task=1, epoch=0, reward=0.0)
    assert visits(subject, 1) == [0, 2]
    off = curriculum(settings=None)
    off.record(0, task=0, epoch=0, reward=1.0)
    assert visits(off, 1) == [0, 1, 2]
    assert off.state() == CurriculumState()


def test_a_failed_group_does_not_affect_its_task() -> None:
    subject = curriculum()
    subject.record(0, task=0, epoch=0, reward=None)
    assert subject.resting == 0


def test_a_repeated_visit_of_an_earlier_epoch_is_not_skipped() -> None:
    subject = curriculum()
    subject.record(0, task=0, epoch=3, reward=1.0)
    assert [subject.should_skip(0, epoch) for epoch in (2, 3, 4, 5, 6)] == [False, False, True, True, False]


def test_the_latest_epoch_of_a_task_decides_in_whatever_order_rewards_arrive() -> None:
    for epochs in ((0, 1), (1, 0)):
        subject = curriculum()
        for group, epoch in enumerate(epochs):
            subject.record(group, task=0, epoch=epoch, reward=1.0)
        assert [subject.should_skip(0, epoch) for epoch in (2, 3, 4)] == [True, True, False]


def test_after_a_whole_epoch_of_skipped_visits_no_task_rests() -> None:
    subject = curriculum(settings=DifficultyConfig(easy_above=0.0, hard_below=None, rest_epochs=10**9))
    for task in range(3):
        subject.record(task, task, epoch=0, reward=1.0)
    assert [subject.should_skip(task, 1) for task in range(3)] == [True, True, True]
    assert visits(subject, 2) == [0, 1, 2]
    assert subject.resting == 0


def test_a_visit_resets_the_count_of_consecutive_skips() -> None:
    subject = curriculum(settings=DifficultyConfig(easy_above=0.9, hard_below=None, rest_epochs=100))
    for task in (0, 1):
        subject.record(task, task, epoch=0, reward=1.0)
    assert [visits(subject, epoch) for epoch in range(1, 6)] == [[2]] * 5


def test_the_curriculum_state_is_json_and_restores_exactly() -> None:
    subject = curriculum()
    for task in (2, 0):
        subject.record(task, task, epoch=0, reward=1.0)
    assert subject.should_skip(0, 1)
    built = msgspec.to_builtins(subject.state())
    assert json.loads(json.dumps(built)) == built == {"resting": [[0, 3], [2, 3]], "skipped": 1}
    again = Curriculum(SETTINGS, 3, False, msgspec.convert(built, CurriculumState))
    assert [again.should_skip(task, epoch) for task, epoch in ((1, 1), (2, 1), (0, 2), (2, 3))] == [
        False,
        True,
        True,
        False,
    ]


def test_in_deterministic_mode_an_admission_sees_only_batches_before_its_min_version() -> None:
    subject = curriculum(deterministic=True)
    subject.record(1, task=1, epoch=0, reward=1.0)
    subject.record(0, task=0, epoch=0, reward=1.0)
    subject.record(2, task=2, epoch=0, reward=1.0)
    subject.batch_trained(1, last_group=1)
    subject.batch_trained(2, last_group=2)
    subject.catch_up(0)
    assert subject.resting == 0
    subject.catch_up(1)
    assert subject.resting == 2
    assert [subject.should_skip(task, 1) for task in (0, 1, 2)] == [True, True, False]
    subject.catch_up(2)
    assert subject.should_skip(2, 1)


def test_a_checkpoint_includes_rewards_that_are_recorded_but_not_yet_in_effect() -> None:
    subject = curriculum(deterministic=True)
    subject.record(0, task=1, epoch=0, reward=1.0)
    assert subject.resting == 0
    assert subject.state().resting == [[1, 3]]
    assert subject.resting == 0, "reading the state changes nothing"


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=12, max_size=12), st.integers(0, 2**31))
def test_in_deterministic_mode_the_order_in_which_groups_close_does_not_change_what_is_skipped(
    rewards: list[float], seed: int
) -> None:
    def decisions(rng: random.Random) -> list[list[int]]:
        """Run twelve groups of four tasks in batches of four; each closes at any time before its batch is trained."""
        subject = curriculum(tasks=4, deterministic=True)
        waiting = list(range(12))
        seen = []
        for version in (1, 2, 3):
            last = 4 * version - 1
            due = [group for group in waiting if group <= last or rng.random() < 0.5]
            rng.shuffle(due)
            for group in due:
                subject.record(group, group % 4, group // 4, rewards[group])
            waiting = [group for group in waiting if group not in due]
            subject.batch_trained(version, last)
            if rng.random() < 0.5:
                subject.catch_up(version - 1)  # an admission of the previous min_version, late or not at all
            subject.catch_up(version)
            seen.append(visits(subject, version, tasks=4))
        return seen

    assert decisions(random.Random(seed)) == decisions(random.Random(seed + 1))


# ------------------------------------------------------------------------------------------------------------- re-rolls

TWICE = RerollConfig(max_times=2, after_steps=3, solved_above=0.25, max_waiting=2)


def queue(deterministic: bool = False, settings: RerollConfig | None = TWICE) -> RerollQueue:
    return RerollQueue(settings, deterministic, RerollState())


def end(
    subject: RerollQueue, position: int, best: float | None, outcome: Outcome = "filtered", min_version: int = 0
) -> None:
    """Close the group of a visit, which has the visit's number, and finalize the visit."""
    order = GroupOrder(position % REROLL, 0, 0, min_version, 2, position=position)
    subject.group_closed(order, GroupClosed(order.group, outcome, best=best))
    subject.visit_finalized(position)


def due(subject: RerollQueue, min_version: int) -> list[int]:
    """Return the re-rolls that start with this min_version."""
    subject.catch_up(min_version)
    return [subject.pop() for _ in range(subject.due)]


@pytest.mark.parametrize("outcome", ["filtered", "finished"])
def test_a_task_that_no_attempt_solved_is_visited_again_after_enough_versions(outcome: Outcome) -> None:
    subject = queue()
    end(subject, 4, best=0.25, outcome=outcome, min_version=5)
    end(subject, 5, best=0.5, outcome=outcome, min_version=5)
    assert subject.waiting == 1
    assert [due(subject, version) for version in (5, 7, 8)] == [[], [], [4 + REROLL]]
    assert subject.waiting == 0


def test_a_failed_visit_counts_as_unsolved_and_a_visit_that_was_not_scored_does_not() -> None:
    subject = queue()
    end(subject, 1, best=None, outcome="failed")
    end(subject, 2, best=None, outcome="filtered")
    subject.visit_finalized(3)  # skipped or dropped: no group was closed
    assert due(subject, 9) == [1 + REROLL]


def test_a_visit_is_planned_again_only_when_it_is_finalized() -> None:
    subject = queue()
    subject.group_closed(GroupOrder(0, 0, 0, 0, 2), GroupClosed(0, "finished", best=0.0))
    assert subject.waiting == 0
    subject.visit_finalized(0)
    assert subject.waiting == 1


def test_a_visit_is_repeated_at_most_max_times() -> None:
    subject = queue()
    for position, planned in ((7, 1), (7 + REROLL, 1), (7 + 2 * REROLL, 0)):
        end(subject, position, best=0.0)
        assert len(due(subject, 9)) == planned


def test_rerolls_begin_at_from_step_and_at_most_max_groups_start_with_the_same_version() -> None:
    subject = queue(settings=RerollConfig(max_times=1, after_steps=1, from_step=5, max_groups=2))
    for position in range(3):
        end(subject, position, best=0.0)
    end(subject, 3, best=0.0, min_version=6)
    assert due(subject, 4) == []
    assert due(subject, 5) == [0 + REROLL, 1 + REROLL]
    assert due(subject, 5) == []
    assert due(subject, 6) == [2 + REROLL]
    assert due(subject, 7) == [3 + REROLL]


def test_the_visits_that_have_waited_longest_are_dropped_and_counted_when_too_many_wait() -> None:
    subject = queue()
    for position in (2, 0, 1):
        end(subject, position, best=0.0, min_version=position)
    assert due(subject, 99) == [1 + REROLL, 2 + REROLL]
    assert subject.dropped == 1


def test_a_task_that_came_with_its_attempts_is_not_visited_again() -> None:
    subject = queue()
    subject.group_closed(GroupOrder(0, 0, 0, 0, 2), GroupClosed(0, "filtered", best=0.0, supplied=True))
    subject.visit_finalized(0)
    assert subject.waiting == 0


def test_without_settings_no_visit_is_repeated_and_waiting_ones_are_forgotten() -> None:
    subject = RerollQueue(None, False, RerollState([[0, 1 + REROLL]], dropped=3))
    end(subject, 0, best=0.0)
    assert due(subject, 99) == []
    assert subject.state() == RerollState([], dropped=3)


def test_waiting_rerolls_survive_a_round_trip_through_json() -> None:
    subject = queue()
    end(subject, 0, best=0.0)
    subject.catch_up(1)
    end(subject, 1, best=0.0)
    built = json.loads(json.dumps(msgspec.to_builtins(subject.state())))
    again = RerollQueue(TWICE, False, msgspec.convert(built, RerollState))
    assert again.waiting == 2
    assert due(again, 3) == due(subject, 3) == [REROLL, 1 + REROLL]


@given(st.permutations(range(6)), st.integers(0, 6))
def test_in_deterministic_mode_rerolls_depend_on_the_batch_of_their_group_and_not_on_completion_order(
    order: list[int], early: int
) -> None:
    """The first batch ends with group 3; `early` says how many groups close before an admission with min_version 0."""
    subject = queue(deterministic=True)
    for position in order[:early]:
        end(subject, position, best=0.0)
    assert due(subject, 0) == []
    for position in order[early:]:
        end(subject, position, best=0.0)
    subject.batch_trained(1, last_group=3)
    assert due(subject, 4) == [2 + REROLL, 3 + REROLL], "of groups 0 to 3, two had to be dropped"
    assert subject.waiting == 2
    subject.batch_trained(5, last_group=5)
    assert due(subject, 4) == []
    assert due(subject, 5) == [4 + REROLL, 5 + REROLL]
