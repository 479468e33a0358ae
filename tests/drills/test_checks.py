"""The checks of the drills find the faults that they exist for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drills import checks
from drills.following import StepLog, last_step
from drills.measuring import ProcessHistory, ProcessSample, costs, growing
from support import names

Line = dict[str, Any]


def a_run() -> list[Line]:
    """Two epochs over three tasks, one of which is filtered and one of which fails."""
    return [
        {"step": 1, "version": 0, "groups": [{"epoch": 0, "task": 0}, {"epoch": 0, "task": 1}], "settled": []},
        {
            "step": 2,
            "version": 1,
            "groups": [{"epoch": 1, "task": 0}, {"epoch": 0, "task": 1, "replay": True}],
            "settled": [{"epoch": 0, "task": 2, "outcome": "failed"}, {"epoch": 1, "task": 1, "outcome": "filtered"}],
        },
        {"step": 3, "version": 2, "groups": [{"epoch": 1, "task": 2}], "settled": [], "accounted": 6},
    ]


def complaints(batches: list[Line], epochs: int | None = 2) -> list[str]:
    return [*checks.in_sequence(batches), *checks.complete(batches, tasks=3, epochs=epochs)]


def test_a_run_in_which_every_visit_ended_once_passes() -> None:
    assert complaints(a_run()) == []
    assert checks.outcomes(a_run()) == {"trained": 4, "failed": 1, "filtered": 1}


def lose_a_task(batches: list[Line]) -> None:
    batches[1]["settled"].pop()


def train_a_task_again(batches: list[Line]) -> None:
    batches[2]["groups"].append({"epoch": 0, "task": 1})


def train_a_filtered_task(batches: list[Line]) -> None:
    batches[2]["groups"].append({"epoch": 1, "task": 1})


def invent_a_task(batches: list[Line]) -> None:
    batches[2]["groups"].append({"epoch": 2, "task": 0})


def skip_a_step(batches: list[Line]) -> None:
    batches[2]["step"] = 4


def repeat_a_step(batches: list[Line]) -> None:
    batches.insert(1, {**batches[0], "groups": []})


def go_back_a_version(batches: list[Line]) -> None:
    batches[2]["version"] = 1


def miscount_visits(batches: list[Line]) -> None:
    batches[2]["accounted"] = 5


@pytest.mark.parametrize(
    ("corrupt", "expected", "visits"),
    [
        (lose_a_task, "missing", "[(1, 1)]"),
        (train_a_task_again, "twice", "[(0, 1)]"),
        (train_a_filtered_task, "twice", "[(1, 1)]"),
        (invent_a_task, "planned", "[(2, 0)]"),
        (skip_a_step, "steps 4 3", ""),
        (repeat_a_step, "steps 1 2", ""),
        (go_back_a_version, "version", ""),
        (miscount_visits, "accounted 5 6", ""),
    ],
)
def test_lost_duplicate_and_unplanned_visits_and_steps_out_of_order_are_found(
    corrupt: Callable[[list[Line]], None], expected: str, visits: str
) -> None:
    batches = a_run()
    corrupt(batches)
    assert any(names(found, expected) and visits in found for found in complaints(batches)), complaints(batches)


def test_without_a_number_of_epochs_only_ended_epochs_must_be_complete() -> None:
    batches = a_run()
    batches[2]["groups"].append({"epoch": 2, "task": 0})
    batches[2]["accounted"] = 7
    assert complaints(batches, epochs=None) == []
    batches[1]["settled"].pop(0)
    batches[2]["accounted"] = 6
    [complaint] = complaints(batches, epochs=None)
    assert names(complaint, "missing")
    assert "[(0, 2)]" in complaint


def test_a_ledger_that_contradicts_batches_jsonl_is_found() -> None:
    counts = {"trained": 2, "filtered": 0, "failed": 1, "dropped": 0, "skipped": 0}
    ledger = {"version": 3, "twice": [], "never": [], "epochs": [{"epoch": 0, **counts}, {"epoch": 1, **counts}]}
    filtered, failed = checks.ledger_differences(a_run(), ledger, tasks=3)
    assert names(filtered, "epoch 1 filtered 0")
    assert names(failed, "epoch 1 failed 0")


def write_run(home: Path, loss: float, seconds: float, weights: bytes) -> Path:
    (home / "checkpoints" / "step-000003").mkdir(parents=True)
    (home / "checkpoints" / "step-000003" / "model.safetensors").write_bytes(weights)
    (home / "batches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in a_run()))
    (home / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss/policy": loss, "time/step_s": seconds}) + "\n")
    (home / "evals.jsonl").write_text("")
    return home


def test_equal_runs_may_differ_only_in_timing_metrics(tmp_path: Path) -> None:
    reference = write_run(tmp_path / "a", 0.5, 1.0, b"w")
    assert checks.equality(write_run(tmp_path / "b", 0.5, 2.0, b"w"), reference) == []
    [loss] = checks.equality(write_run(tmp_path / "c", 0.5000001, 1.0, b"w"), reference)
    assert names(loss, "loss/policy 0.5000001 0.5")
    [weights] = checks.equality(write_run(tmp_path / "d", 0.5, 1.0, b"v"), reference)
    assert names(weights, "model.safetensors")


def test_a_finalized_visit_that_moved_to_another_line_is_found(tmp_path: Path) -> None:
    reference, moved = (write_run(tmp_path / name, 0.5, 1.0, b"w") for name in "ab")
    batches = a_run()
    batches[0]["settled"], batches[1]["settled"] = batches[1]["settled"], []
    (moved / "batches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in batches))
    [complaint] = checks.equality(moved, reference)
    assert names(complaint, "batches.jsonl settled")


def test_recovery_lasts_until_the_first_step_trained_after_the_rollback() -> None:
    steps = StepLog()
    steps.seen = [(10.0, 1), (11.0, 2), (12.0, 3), (15.0, 2), (17.0, 3)]
    assert steps.recovery_s(12.5) == 4.5  # rolled back to 2 at 15, trained 3 again at 17
    assert steps.recovery_s(10.5) == 0.5
    assert steps.recovery_s(18.0) is None


def test_last_step_reads_the_last_complete_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step":1}\n{"step":2}\n{"step":3')
    assert last_step(file) == 2
    file.write_text('{"step"')
    assert last_step(file) == 0


def history(role: str, grows: int, level: int = 100 << 20, descriptors: int = 20) -> ProcessHistory:
    return ProcessHistory(
        role, [ProcessSample(step, level + grows * max(step, 500), 8, descriptors) for step in range(0, 3000, 10)]
    )


def test_memory_growth_is_found_late_in_the_life_of_a_process_and_ignored_during_warm_up() -> None:
    [steady] = costs([history("engine", 0), history("engine", 0)])
    assert list(growing(steady, steps=10_000)) == []
    [leaky] = costs([history("engine", 2000), history("engine", 2000)])
    assert leaky.bytes_per_step == pytest.approx(2000, rel=0.01)
    assert names(next(growing(leaky, steps=10_000)), "engine memory 2000")
    warming_up = ProcessHistory(
        "engine", [ProcessSample(step, min(step, 900) << 15, 8, 20) for step in range(0, 1000, 10)]
    )
    assert list(growing(costs([warming_up])[0], steps=10_000)) == []


def test_restarted_processes_with_ever_more_memory_or_descriptors_are_found() -> None:
    [larger] = costs([history("worker", 0, level=(100 + 20 * number) << 20) for number in range(3)])
    assert names(next(growing(larger, steps=10_000)), "worker processes")
    [more] = costs([history("worker", 0, descriptors=20 + 3 * number) for number in range(3)])
    [complaint] = growing(more, steps=10_000)
    assert names(complaint, "worker descriptors 20 26")
