"""Files in rollouts/: their size limit, rolling back on resume, and reading them from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outpace
from outpace.errors import BadInput
from outpace.monitoring.rollout_files import (
    RecordedAttempt,
    RecordedTrajectory,
    RecordedTurn,
    RolloutWriter,
    recorded_steps,
    untrained_groups,
)
from outpace.monitoring.run_directory import BatchGroup, RunLog, UntrainedVisit
from outpace.types import EpisodeView

LOGPROBS = [-0.1, -1.2345678]


def attempt(group: int, number: int = 0, text: str = "4*6", **changes: Any) -> RecordedAttempt:
    turns = [
        RecordedTurn("prompt", "<|user|>24<|end|>", [1, 2, 3]),
        RecordedTurn("assistant", text, [7, 8], True, [*LOGPROBS], [2, 3], 0.5),
        RecordedTurn("tool", "24", [9]),
    ]
    values: dict[str, Any] = {"outcome": "trained", "task": group, "task_id": f"t{group}", "epoch": 0} | changes
    return RecordedAttempt(group=group, attempt=number, trajectories=[RecordedTrajectory(turns)], **values)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of one group each. Group 1 was filtered by the end of step 1; group 3 failed, not finalized yet."""
    log = RunLog.claim(tmp_path / "run")
    log.start()
    writer = RolloutWriter(log.dir, 10**6)
    writer.untrained("filtered", 1, [attempt(1, outcome="filtered", reason="all rewards are 0")])
    log.batch(1, 0, [BatchGroup("t0", 0, 0, 0, 1, group=0)], [UntrainedVisit(1, 0, "filtered", "", "t1", group=1)], 2)
    writer.step(1, [attempt(0, 0, step=1), attempt(0, 1, text="4+6", step=1)])
    log.batch(2, 1, [BatchGroup("t2", 0, 0, 0, 1, group=2)], [], 3)
    writer.step(2, [attempt(2, step=2)])
    writer.untrained("failed", 3, [attempt(3, outcome="failed", reason="boom")])
    log.close()
    return tmp_path / "run"


def test_read_rollouts_returns_trained_groups_by_step_and_then_the_rest(run: Path) -> None:
    read = [(each.step, each.group, each.attempt, each.outcome) for each in outpace.read_rollouts(run)]
    assert read == [
        (1, 0, 0, "trained"),
        (1, 0, 1, "trained"),
        (2, 2, 0, "trained"),
        (1, 1, 0, "filtered"),
        (None, 3, 0, "failed"),
    ]


def test_the_arrays_of_a_trajectory_have_one_entry_per_token(run: Path) -> None:
    (trajectory,) = next(outpace.read_rollouts(run)).trajectories
    assert trajectory.tokens.tolist() == [1, 2, 3, 7, 8, 9]
    assert trajectory.mask.tolist() == [False, False, False, True, True, False]
    assert trajectory.versions.tolist() == [-1, -1, -1, 2, 3, -1]
    assert trajectory.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0]
    np.testing.assert_array_equal(trajectory.logprobs, np.array([0, 0, 0, *LOGPROBS, 0], np.float32))
    assert trajectory.text == "<|user|>24<|end|>4*624"


@pytest.mark.parametrize(
    ("wanted", "groups"),
    [
        ({"step": 1}, [0, 0, 1]),
        ({"step": 1, "outcome": "trained"}, [0, 0]),
        ({"outcome": "failed"}, [3]),
        ({"task": "t2"}, [2]),
        ({"task": 1}, [1]),
        ({"task": "0", "step": 2}, []),
    ],
)
def test_rollouts_can_be_filtered_by_step_outcome_and_task(
    run: Path, wanted: dict[str, Any], groups: list[int]
) -> None:
    assert [each.group for each in outpace.read_rollouts(run, **wanted)] == groups


def test_rollouts_are_read_lazily(run: Path) -> None:
    reading = outpace.read_rollouts(run)
    next(reading)
    (run / "rollouts/step-000002.jsonl").unlink()
    assert [each.group for each in reading] == [0, 1, 3], "files deleted meanwhile are skipped"


@pytest.mark.parametrize("wanted", [{"step": 3}, {"outcome": "lost"}])
def test_an_impossible_step_or_outcome_is_refused_at_once(run: Path, wanted: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        outpace.read_rollouts(run, **wanted)


def test_a_directory_without_a_run_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.toml"):
        outpace.read_rollouts(tmp_path)


def test_a_torn_line_loses_only_that_line(run: Path) -> None:
    file = run / "rollouts/step-000002.jsonl"
    file.write_text(file.read_text() + '{"outcome":"trai')
    assert [each.group for each in outpace.read_rollouts(run, step=2)] == [2]


def test_rolling_back_removes_later_steps_and_groups_that_are_sampled_again(run: Path) -> None:
    (run / "rollouts/.step-000002.jsonl.x1").write_text("of a worker that was killed")
    log = RunLog.claim(run, resume=True)
    log.roll_back(1, accounted=2)
    log.close()
    assert recorded_steps(run) == [1]
    assert untrained_groups(run) == {1: "filtered"}
    assert not list((run / "rollouts").glob(".*"))


def test_rolling_back_before_a_finalized_group_removes_it(run: Path) -> None:
    log = RunLog.claim(run, resume=True)
    log.roll_back(0, accounted=0)
    log.close()
    assert recorded_steps(run) == []
    assert untrained_groups(run) == {}


def test_the_oldest_files_are_removed_to_stay_within_the_limit(tmp_path: Path) -> None:
    limit = 100_000
    writer = RolloutWriter(tmp_path, limit)
    for number in range(300):
        writer.untrained("filtered", number, [attempt(number, outcome="filtered", text="x" * 1000)])
        writer.step(number, [attempt(number, text="x" * 1000)])
        taken = sum(file.stat().st_size for file in (tmp_path / "rollouts").rglob("*.jsonl"))
        assert taken <= limit
    assert recorded_steps(tmp_path)[-1] == 299
    assert list(untrained_groups(tmp_path))[-1] == 299
    assert len(recorded_steps(tmp_path)) > 5


def test_many_filtered_groups_do_not_displace_failed_groups(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, 100_000)
    writer.untrained("failed", 0, [attempt(0, outcome="failed")])
    for number in range(1, 300):
        writer.untrained("filtered", number, [attempt(number, outcome="filtered", text="x" * 1000)])
    assert untrained_groups(tmp_path)[0] == "failed"


def test_several_workers_stay_within_the_limit_together(tmp_path: Path) -> None:
    limit = 200_000
    writers = [RolloutWriter(tmp_path, limit, writers=4) for _ in range(4)]
    for number in range(400):
        writers[number % 4].untrained("failed", number, [attempt(number, outcome="failed", text="x" * 1000)])
        assert sum(file.stat().st_size for file in (tmp_path / "rollouts").rglob("*.jsonl")) <= limit


def test_a_group_larger_than_the_limit_is_still_recorded(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, 1000)
    writer.untrained("failed", 0, [attempt(0, outcome="failed", text="x" * 5000)])
    assert untrained_groups(tmp_path) == {0: "failed"}


def test_numbers_beyond_six_digits_stay_in_order(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, 10**6)
    for number in (999_999, 1_000_000, 1_000_001):
        writer.step(number, [attempt(number)])
    assert recorded_steps(tmp_path) == [999_999, 1_000_000, 1_000_001]


def test_an_infinite_logprob_is_read_back_as_nan(tmp_path: Path) -> None:
    turn = RecordedTurn("assistant", "x", [1], True, [float("-inf")], 0, 0.0)
    kept = RecordedAttempt(
        outcome="failed", group=0, attempt=0, task=0, task_id="t", epoch=0, trajectories=[RecordedTrajectory([turn])]
    )
    RolloutWriter(tmp_path, 1000).step(1, [kept])
    (tmp_path / "config.toml").write_text("")
    (read,) = outpace.read_rollouts(tmp_path)
    assert np.isnan(read.trajectories[0].logprobs).all()


def test_every_line_is_a_json_object(run: Path) -> None:
    first = json.loads((run / "rollouts/step-000001.jsonl").read_text().splitlines()[0])
    assert (first["group"], first["attempt"], first["task_id"]) == (0, 0, "t0")


def evaluated_versions(run: Path) -> list[str]:
    return sorted(file.name for file in (run / "rollouts/evals").iterdir())


def test_completions_of_evaluations_are_rolled_back_with_the_run(run: Path) -> None:
    writer = RolloutWriter(run, 10**6)
    for version in (0, 1, 2):
        writer.evaluation(version, [EpisodeView("t", "24?", "4*6", 1.0, "stop", version, {"f": 1.0}, "hard", 3)])
    assert recorded_steps(run) == [1, 2], "they are no rollouts of training"
    log = RunLog.claim(run, resume=True)
    log.roll_back(1, accounted=2)
    log.close()
    assert evaluated_versions(run) == ["step-000000.jsonl", "step-000001.jsonl"]
    (line,) = (run / "rollouts/evals/step-000001.jsonl").read_text().splitlines()
    kept = json.loads(line)
    assert (kept["task_id"], kept["heldout_set"], kept["attempt"], kept["rewards"]) == ("t", "hard", 3, {"f": 1.0})


def test_completions_of_the_oldest_evaluations_are_removed_to_stay_within_the_limit(tmp_path: Path) -> None:
    limit = 100_000
    writer = RolloutWriter(tmp_path, limit)
    for version in range(100):
        writer.evaluation(version, [EpisodeView("t", "24?", "x" * 500, 1.0, "stop", version)] * 2)
        assert sum(file.stat().st_size for file in (tmp_path / "rollouts").rglob("*.jsonl")) <= limit
    assert evaluated_versions(tmp_path)[-1] == "step-000099.jsonl"
    assert len(evaluated_versions(tmp_path)) > 2
