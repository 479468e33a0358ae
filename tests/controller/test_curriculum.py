from __future__ import annotations

import json
import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from outpace.config.algorithm import DifficultyConfig
from outpace.controller.curriculum import Curriculum, CurriculumState

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
