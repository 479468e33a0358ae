from __future__ import annotations

from dataclasses import replace

from controller.simulated import PLAIN
from outpace.controller.pacing import Pacing, PipelineLoad

IDLE = PipelineLoad(version=0, oldest=0, running=0, outstanding=0, tasks_left=None, lag=1)


def test_an_idle_pipeline_admits_the_open_batch_and_the_depth_beyond_it() -> None:
    assert Pacing(replace(PLAIN, depth=1.0)).room(IDLE) == 8
    assert Pacing(replace(PLAIN, depth=0.0)).room(IDLE) == 4
    assert Pacing(replace(PLAIN, depth=0.3)).room(IDLE) == 6


def test_a_depth_without_an_exact_float_admits_no_extra_group() -> None:
    assert Pacing(replace(PLAIN, groups_per_step=10, depth=0.1)).room(IDLE) == 11


def test_running_episodes_never_exceed_max_running() -> None:
    pacing = Pacing(replace(PLAIN, max_running=7))
    assert pacing.room(IDLE) == 3
    assert pacing.room(replace(IDLE, running=2, outstanding=2)) == 1
    assert pacing.room(replace(IDLE, running=3, outstanding=3)) == 0


def test_a_group_larger_than_max_running_runs_alone() -> None:
    pacing = Pacing(replace(PLAIN, group_size=8, max_running=4))
    assert pacing.room(IDLE) == 1
    assert pacing.room(replace(IDLE, running=1, outstanding=1)) == 0


def test_each_version_that_the_engines_are_behind_reduces_the_room_by_one_batch() -> None:
    pacing = Pacing(replace(PLAIN, max_lag=2, depth=9.0, steps=None))
    rooms = [
        pacing.room(PipelineLoad(version=9, oldest=oldest, running=0, outstanding=1, tasks_left=None, lag=2))
        for oldest in (9, 8, 7, 6, 5)
    ]
    assert rooms == [11, 7, 3, 0, 0]


def test_a_deadline_is_the_min_version_plus_the_lag() -> None:
    assert Pacing(replace(PLAIN, max_lag=2)).deadline(PipelineLoad(9, 8, 0, 0, None, lag=2)) == 10


def test_room_and_deadline_follow_the_governed_lag() -> None:
    pacing = Pacing(replace(PLAIN, max_lag=4, depth=9.0, steps=None))
    assert pacing.deadline(PipelineLoad(9, 8, 0, 0, None, lag=2)) == 10
    assert [pacing.room(PipelineLoad(9, 9, 0, 6, None, lag=lag)) for lag in (4, 2, 1, 0)] == [14, 6, 2, 0]


def test_warm_up_allows_no_lag() -> None:
    pacing = Pacing(replace(PLAIN, max_lag=2, warmup_steps=3, depth=9.0, steps=None))
    assert pacing.room(PipelineLoad(2, 2, 0, 0, None, lag=2)) == 4
    assert pacing.room(PipelineLoad(2, 1, 0, 0, None, lag=2)) == 0
    assert pacing.deadline(PipelineLoad(2, 2, 0, 0, None, lag=2)) == 2
    assert pacing.room(PipelineLoad(3, 2, 0, 0, None, lag=2)) == 8
    assert pacing.deadline(PipelineLoad(3, 3, 0, 0, None, lag=2)) == 5


def test_in_deterministic_mode_min_version_decides_whether_a_group_belongs_to_the_warm_up() -> None:
    pacing = Pacing(replace(PLAIN, max_lag=2, warmup_steps=3, deterministic=True))
    assert pacing.room(PipelineLoad(3, 2, 0, 0, None, lag=2)) == 0


def test_no_more_groups_are_admitted_than_the_remaining_steps_and_tasks_need() -> None:
    pacing = Pacing(replace(PLAIN, steps=6, depth=9.0, max_lag=5))
    assert pacing.room(PipelineLoad(5, 5, 0, 1, None, lag=5)) == 3
    assert pacing.room(PipelineLoad(6, 6, 0, 0, None, lag=5)) == 0
    assert pacing.room(PipelineLoad(5, 5, 0, 1, tasks_left=2, lag=5)) == 2


def test_in_deterministic_mode_no_group_beyond_the_next_checkpoint_is_admitted_before_it() -> None:
    pacing = Pacing(replace(PLAIN, deterministic=True, max_lag=3, checkpoint_every=2, steps=None))
    assert pacing.room(PipelineLoad(4, 4, 0, 0, None, lag=3)) == 8
    assert pacing.room(PipelineLoad(5, 5, 0, 0, None, lag=3)) == 4
    assert pacing.room(PipelineLoad(6, 5, 0, 0, None, lag=3)) == 0


def test_in_deterministic_mode_depth_has_no_effect() -> None:
    assert Pacing(replace(PLAIN, deterministic=True, max_lag=3, depth=0.0)).room(replace(IDLE, lag=3)) == 16


def test_versions_needed_by_warm_up_evaluation_checkpoint_or_end_are_published_out_of_turn() -> None:
    settings = replace(PLAIN, publish_every=4, max_lag=3, warmup_steps=2, steps=15, eval_every=5, eval_enabled=True)
    published = [version for version in range(16) if settings.is_published(version, lag=3)]
    assert published == [0, 1, 2, 4, 5, 8, 10, 12, 15]
    deterministic = replace(settings, deterministic=True, checkpoint_every=7)
    assert [version for version in range(16) if deterministic.is_published(version, lag=3)] == sorted(
        [*published, 7, 14]
    )


def test_every_version_is_published_while_the_current_lag_is_too_small_for_every_kth() -> None:
    settings = replace(PLAIN, publish_every=3, max_lag=4, steps=None)
    assert [version for version in range(7) if settings.is_published(version, lag=2)] == [0, 3, 6]
    assert all(settings.is_published(version, lag) for version in range(7) for lag in (0, 1))


def test_evaluations_at_the_ends_can_be_turned_off() -> None:
    settings = replace(PLAIN, steps=7, eval_every=3, eval_enabled=True, eval_start=False, eval_end=False)
    assert [version for version in range(8) if settings.is_evaluated(version)] == [3, 6]
    assert [settings.newest_evaluated(version) for version in (0, 2, 5, 7)] == [-1, -1, 3, 6]
