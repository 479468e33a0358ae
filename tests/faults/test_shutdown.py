"""Signals and second runs: how soon a run ends and what it leaves behind.

Tested elsewhere: one signal to the whole process group makes a checkpoint from which the run resumes; a second run in
the same directory is rejected, naming the first (tests/system/test_training.py); children die with a killed controller
(tests/runtime/test_cleanup.py, without models); the next run removes the shared memory of a killed one
(tests/runtime/test_runtime_directory.py).
"""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from faults.watching import Settings, StartRun, arguments, steps_of, summary_of
from outpace.checkpoint import commit
from support import run_command, start_command

pytestmark = pytest.mark.timeout(400)

HANGING = """
import time

def hanging(prompts, completions, **columns):
    time.sleep(600)
"""


def runtime_directories_of(pid: int) -> list[Path]:
    """Runtime directories whose lock this process holds."""
    files = [Path(file.path) for file in psutil.Process(pid).open_files()]
    return [file.parent for file in files if file.name == "owner.lock"]


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once_and_leaves_no_process_and_no_runtime_directory(
    start: StartRun, settings: Settings, tmp_path: Path
) -> None:
    """The run hangs in its rewards, so a first signal, which waits for the current step, would take long. Its rewards
    have processes; a run whose components have processes too is tested below, more slowly."""
    (tmp_path / "hang.py").write_text(HANGING)
    hanging = {"rewards__functions": [f"{tmp_path}/hang.py:hanging"], "rewards__timeout_s": 500, "run__stall_s": 500}
    run = start(*arguments(settings, run__steps=100_000, run__runtime="inline", **hanging))
    run.until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and runtime_directories_of(run.pid))
    runtime_directories = runtime_directories_of(run.pid)
    run.signal(signal.SIGINT)
    run.signal(signal.SIGTERM)
    assert run.end(90) == 130, run.output
    assert run.remaining_processes() == []
    assert [directory for directory in runtime_directories if directory.exists()] == []
    assert summary_of(tmp_path / "run")["exit"] == 130
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.mark.slow
def test_a_run_ended_by_two_signals_resumes_from_its_newest_checkpoint(
    start: StartRun, settings: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*arguments(settings, run__steps=400, checkpoint__every=2))
    run.until(lambda: commit.list_steps(directory / "checkpoints"))
    run.signal(signal.SIGTERM)
    run.signal(signal.SIGTERM)
    assert run.end(90) in (3, 130), run.output
    assert run.remaining_processes() == []
    kept = commit.newest_complete(directory / "checkpoints")
    assert kept is not None
    more = commit.step_of(kept) + 3
    result = run_command("train", "--quiet", "--resume", str(directory), f"--run.steps={more}")
    assert result.returncode == 0, result.stderr
    assert steps_of(directory) == list(range(1, more + 1))


@pytest.mark.slow
def test_a_run_killed_by_sigkill_can_be_resumed_in_its_directory(
    start: StartRun, settings: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*arguments(settings, run__steps=100_000, checkpoint__every=2))
    run.until(lambda: commit.list_steps(directory / "checkpoints"))
    run.signal(signal.SIGKILL)
    run.end(90)
    assert run.remaining_processes() == []
    kept = commit.newest_complete(directory / "checkpoints")
    assert kept is not None
    more = commit.step_of(kept) + 2
    result = run_command("train", "--quiet", "--resume", str(directory), f"--run.steps={more}")
    assert result.returncode == 0, result.stderr
    assert steps_of(directory) == list(range(1, more + 1))


def test_a_signal_during_startup_ends_the_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start_command("train", f"--run.dir={tmp_path / 'run'}", "--engine.count=2")
    assert process.stdout is not None
    assert "starting" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=200)
    assert process.returncode == 3
    assert output.startswith("outpace: ")
    assert output.count("\n") == 1
    assert "start" in output
    assert "--resume" not in output
    assert not (tmp_path / "run").exists()
