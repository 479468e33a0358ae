import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.errors import BadInput
from outpace.monitoring import line_file
from outpace.monitoring.run_directory import BatchGroup, RunLog
from outpace.monitoring.summary import EvalResult, SummaryBuilder, parse_eval_result
from outpace.types import Failure

HOLD = """
import sys
from outpace.monitoring.run_directory import RunLog
log = RunLog.claim(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def started(directory: Path) -> RunLog:
    log = RunLog.claim(directory)
    log.start("[run]\nseed = 0\n")
    return log


def metrics_of(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------------ the logs


def test_a_run_writes_its_config_steps_and_batches(tmp_path: Path) -> None:
    log = started(tmp_path / "run")
    log.step(1, {"reward/mean": 0.5, "loss/policy": float("nan"), "lag/max": float("inf")})
    log.batch(1, 0, [BatchGroup("task-7", 0, 0, 0, 8)])
    log.close()
    assert (tmp_path / "run/config.toml").read_text() == "[run]\nseed = 0\n"
    assert metrics_of(tmp_path / "run") == [{"step": 1, "reward/mean": 0.5}]
    batch = json.loads((tmp_path / "run/batches.jsonl").read_text())
    assert batch["version"] == 0
    assert batch["groups"] == [{"task_id": "task-7", "epoch": 0, "admitted_version": 0, "lag": 0, "episodes": 8}]


def test_a_line_can_be_read_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = started(tmp_path)
    log.step(1, {})
    assert metrics_of(tmp_path) == [{"step": 1}]
    log.close()


def test_rolling_back_removes_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    log = started(tmp_path)
    for step in (1, 2, 3):
        log.step(step, {"reward/mean": step / 10})
        log.batch(step, step - 1, [])
        (tmp_path / "rollouts" / f"step-{step:06d}.jsonl").touch()
    log.summary(SummaryBuilder().build(wall_s=1, train_s=1, seed=0, exit=0))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":4,"rew')

    log = RunLog.claim(tmp_path, resume=True)
    kept = list(log.roll_back(2).steps)
    log.start("resumed = true\n")
    log.step(3, {"reward/mean": 0.9})
    log.close()
    assert [line["step"] for line in kept] == [1, 2]
    assert [line["reward/mean"] for line in metrics_of(tmp_path)] == [0.1, 0.2, 0.9]
    assert len((tmp_path / "batches.jsonl").read_text().splitlines()) == 2
    assert sorted(os.listdir(tmp_path / "rollouts")) == ["step-000001.jsonl", "step-000002.jsonl"]
    assert not (tmp_path / "summary.json").exists()


def test_a_torn_line_in_the_middle_loses_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":2,"a\n[1]\n{"step":3}\n')
    assert [record["step"] for record in line_file.read_lines(path)] == [1, 3]


def test_a_full_disk_neither_loses_lines_nor_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = started(tmp_path)
    log.step(1, {})
    write = os.write

    def half_then_full(fd: int, data: bytes) -> int:
        if len(data) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: len(data) // 2])

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", half_then_full)
        log.step(2, {})
        log.step(3, {})
        assert [line["step"] for line in metrics_of(tmp_path)] == [1]
    log.step(4, {})
    log.close()
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4]


def test_lines_that_never_fit_are_counted_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = line_file.LineFile(tmp_path / "lines")

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(line_file, "MAX_PENDING", 2)
    for step in range(3):
        lines.append({"step": step})
    lines.close()
    assert lines.lost == 3


def test_a_failed_replacement_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        line_file.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


# ---------------------------------------------------------------------------------------------- claiming the directory


def test_a_second_run_on_the_directory_is_refused_naming_the_first(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    try:
        with pytest.raises(BadInput, match=rf"\b{child.pid}\b"):
            RunLog.claim(tmp_path, overwrite=True)
    finally:
        child.kill()
        child.communicate()
    assert (tmp_path / "run.lock").exists()
    RunLog.claim(tmp_path).close()  # the killed run's lock is taken over


def test_a_second_run_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    first = RunLog.claim(tmp_path)
    with pytest.raises(BadInput, match=rf"\b{os.getpid()}\b"):
        RunLog.claim(tmp_path)
    first.close()
    RunLog.claim(tmp_path).close()
    assert os.listdir(tmp_path) == []


def test_a_directory_with_content_is_refused_unless_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"^run\.dir: .*run\.overwrite"):
        RunLog.claim(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_overwriting_removes_the_files_of_a_run_and_no_others(tmp_path: Path) -> None:
    log = started(tmp_path)
    log.step(1, {})
    log.close()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints/step-000001").mkdir()
    again = RunLog.claim(tmp_path, overwrite=True)
    assert metrics_of(tmp_path) == [{"step": 1}]  # until every check has passed
    again.start("")
    again.close()
    assert metrics_of(tmp_path) == []
    assert os.listdir(tmp_path / "checkpoints") == []
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_abandoned_overwrite_leaves_the_earlier_run_unchanged(tmp_path: Path) -> None:
    log = started(tmp_path)
    log.step(1, {})
    log.close()
    RunLog.claim(tmp_path, overwrite=True).abandon()
    assert metrics_of(tmp_path) == [{"step": 1}]
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.parametrize("starts", [False, True])
def test_the_model_of_an_earlier_run_stays_until_the_new_one_has_started(tmp_path: Path, starts: bool) -> None:
    def write_model(name: str, text: str) -> Path:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(text)
        return tmp_path / name

    write_model("run/model", "old")
    log = RunLog.claim(tmp_path / "run", overwrite=True)
    log.replace_model(write_model("run/model.new", "new"))
    if starts:
        log.start("")
        log.close()
    else:
        log.abandon()
    assert (tmp_path / "run" / "model" / "config.json").read_text() == ("new" if starts else "old")
    assert not (tmp_path / "run" / "model.old").exists()


@pytest.mark.parametrize("has_started", [False, True])
def test_an_abandoned_start_leaves_nothing_behind(tmp_path: Path, has_started: bool) -> None:
    log = RunLog.claim(tmp_path / "runs" / "a")
    if has_started:
        log.start("")
    log.abandon()
    assert os.listdir(tmp_path) == []


def test_abandoning_a_start_keeps_files_of_other_runs(tmp_path: Path) -> None:
    log = started(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "b").mkdir()
    log.abandon()
    assert os.listdir(tmp_path / "runs") == ["b"]


def test_abandoning_a_run_that_logged_a_step_keeps_its_files(tmp_path: Path) -> None:
    log = started(tmp_path / "a")
    log.step(1, {})
    log.abandon()
    assert metrics_of(tmp_path / "a") == [{"step": 1}]


def test_a_directory_that_cannot_be_created_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"^run\.dir: .*file/run\b"):
        RunLog.claim(tmp_path / "file" / "run")


def test_a_read_only_directory_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(BadInput, match=r"^run\.dir: .*Read-only"):
        RunLog.claim(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resuming_where_there_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"missing: .*config\.toml"):
        RunLog.claim(tmp_path / "missing", resume=True)
    assert not (tmp_path / "missing").exists()


# -------------------------------------------------------------------------------------------------------- the summary


def test_the_summary_contains_every_documented_field(tmp_path: Path) -> None:
    builder = SummaryBuilder()
    builder.evaluation(EvalResult(0, 0.2, 0.01, 64))
    for step in range(1, 9):
        tokens = {"throughput/sampled_tokens": 10.0, "throughput/trained_tokens": 8.0, "waste/tokens": 1.0}
        builder.step(step, {"reward/mean": float(step), "lag/max": float(step % 3), "efficiency": 0.9, **tokens})
    builder.evaluation(EvalResult(8, 0.7, 0.02, 60))
    log = started(tmp_path)
    log.summary(builder.build(wall_s=12.5, train_s=10.0, seed=3, exit=0, reason="all steps done"))
    log.close()
    summary = json.loads((tmp_path / "summary.json").read_text())
    held_out = {"eval_first_stderr": 0.01, "eval_last_stderr": 0.02, "eval_tasks": 60}
    expected = {"steps": 8, "wall_s": 12.5, "train_s": 10.0, "seed": 3, "eval_first": 0.2, "eval_last": 0.7, "exit": 0}
    counted = {"tokens_trained": 64, "tokens_sampled": 80, "waste_fraction": 0.1, "lag_max": 2, "efficiency": 0.9}
    rewards = {"reward_first": 1.5, "reward_last": 7.5}
    assert (
        expected.items() | held_out.items() | counted.items() | rewards.items()
        <= {name: value for name, value in summary.items() if not isinstance(value, list | dict)}.items()
    )


def test_the_summary_of_a_resumed_run_counts_the_kept_lines(tmp_path: Path) -> None:
    log = started(tmp_path)
    failed = [Failure("reward flaky", "raised", 2)]
    log.evaluation(0, {"eval/reward": 0.25, "eval/stderr": 0.125, "eval/count": 4.0}, failed)
    for step in (1, 2, 3):
        log.batch(step, step - 1, [], [], accounted=step, failures=failed)
        log.step(step, {"reward/mean": step / 10, "throughput/trained_tokens": 5.0, "time/total_s": 10.0 * step})
    past = log.roll_back(2, accounted=2)
    builder = SummaryBuilder()
    for line in past.steps:
        builder.step(line["step"], line)
    builder.failures(past.failures)
    assert [parse_eval_result(line["step"], line) for line in past.evaluations] == [EvalResult(0, 0.25, 0.125, 4)]
    assert past.seconds == 30.0, "the time of removed steps still counts"
    log.close()
    built = builder.build(wall_s=0, train_s=0, seed=0, exit=0)
    assert (built.steps, built.tokens_trained, built.reward_last) == (2, 10, 0.2)
    assert built.failures == [Failure("reward flaky", "raised", 6)]


def test_the_summary_of_a_run_without_steps_or_evaluations_is_empty() -> None:
    summary = SummaryBuilder().build(wall_s=1, train_s=0, seed=0, exit=4)
    assert (summary.reward_first, summary.eval_last, summary.efficiency, summary.waste_fraction) == (None,) * 3 + (0.0,)


def test_every_start_is_recorded_with_its_step_and_the_seconds_before_it(tmp_path: Path) -> None:
    log = started(tmp_path)
    for step in (1, 2):
        log.step(step, {"time/total_s": step * 1.5})
    log.close()
    log = RunLog.claim(tmp_path, resume=True)
    log.start()
    log.roll_back(1)
    log.close()
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [(start["step"], start["seconds"]) for start in starts] == [(0, 0.0), (1, 3.0)]


def test_a_start_that_cannot_be_recorded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = RunLog.claim(tmp_path)
    monkeypatch.setattr(line_file, "_write_all", full)
    with pytest.raises(OSError, match=r"starts\.jsonl"):
        log.start()
    log.close()
