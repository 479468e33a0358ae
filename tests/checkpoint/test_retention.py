import json
from pathlib import Path

from outpace.checkpoint.commit import begin, best_first, best_step, commit


def make_run(run: Path, checkpoints: list[int], evaluations: list[dict[str, object]]) -> Path:
    for step in checkpoints:
        commit(begin(run / "checkpoints", step))
    (run / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    return run


def reward(step: int, value: float) -> dict[str, object]:
    return {"step": step, "eval/reward": value}


def test_the_best_checkpoint_has_the_highest_reward_and_ties_go_to_the_newest(tmp_path: Path) -> None:
    evaluations = [reward(0, 0.1), reward(20, 0.8), reward(40, 0.8), reward(60, 0.3)]
    assert best_first(make_run(tmp_path, [20, 40, 60], evaluations)) == [40, 20, 60]


def test_versions_without_a_checkpoint_or_without_a_reward_do_not_count(tmp_path: Path) -> None:
    evaluations = [reward(10, 0.9), {"step": 20, "eval/failed": 1.0}, reward(40, 0.2)]
    run = make_run(tmp_path, [20, 40], evaluations)
    with (run / "evals.jsonl").open("a") as file:
        file.write('{"step": 20, "eval/rew')
    assert best_step(run) == 40


def test_the_later_of_two_evaluations_of_a_version_counts(tmp_path: Path) -> None:
    assert best_step(make_run(tmp_path, [1, 2], [reward(1, 0.9), reward(2, 0.5), reward(1, 0.4)])) == 2


def test_a_run_without_evaluations_or_checkpoints_has_no_best_step(tmp_path: Path) -> None:
    assert best_step(tmp_path) is None
    assert best_step(make_run(tmp_path / "run", [1], [])) is None
