"""Signals and second runs: who leaves, how soon, and what is left.

Shown elsewhere: one signal makes a checkpoint from which the run goes on, also when it is sent to the whole process
group; children die with a killed controller; a second run on one directory is refused naming the first
(tests/system/test_training.py); the next run removes shared memory of a killed one
(tests/runtime/test_runtime_directory.py).
"""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from faults.watching import Runs, Settings, steps_of, summary_of, words
from outpace.checkpoint import commit
from support import run_command, start_command

pytestmark = pytest.mark.timeout(400)

HANGING = """
import time

def hanging(prompts, completions, **columns):
    time.sleep(600)
"""


def scratch_of(pid: int) -> list[Path]:
    """Directories outside of the run's own that this process holds the lock of."""
    files = [Path(file.path) for file in psutil.Process(pid).open_files()]
    return [file.parent for file in files if file.name == "owner.lock"]


def test_a_second_signal_ends_the_run_at_once_and_leaves_no_process_and_no_memory(
    start: Runs, settings: Settings, tmp_path: Path
) -> None:
    """The run hangs in its rewards, so that the first signal, which waits for the step under way, would take long."""
    (tmp_path / "hang.py").write_text(HANGING)
    hanging = {"rewards__functions": [f"{tmp_path}/hang.py:hanging"], "rewards__timeout_s": 500, "run__stall_s": 500}
    run = start(*words(settings, run__steps=100_000, **hanging))
    run.until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and scratch_of(run.pid))
    scratch = scratch_of(run.pid)
    run.signal(signal.SIGINT)
    run.signal(signal.SIGTERM)
    assert run.end(90) == 130, run.said
    assert run.orphans() == []
    assert [directory for directory in scratch if directory.exists()] == []
    assert summary_of(tmp_path / "run")["exit"] == 130
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.mark.slow
def test_a_run_that_left_at_once_goes_on_from_its_newest_checkpoint(
    start: Runs, settings: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*words(settings, run__steps=400, checkpoint__every=2))
    run.until(lambda: commit.list_steps(directory / "checkpoints"))
    run.signal(signal.SIGTERM)
    run.signal(signal.SIGTERM)
    assert run.end(90) in (3, 130), run.said
    kept = commit.newest_complete(directory / "checkpoints")
    assert kept is not None
    more = commit.step_of(kept) + 3
    result = run_command("train", "--quiet", "--resume", str(directory), f"--run.steps={more}")
    assert result.returncode == 0, result.stderr
    assert steps_of(directory) == list(range(1, more + 1))


@pytest.mark.slow
def test_a_run_killed_outright_leaves_its_directory_free_for_the_next(
    start: Runs, settings: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*words(settings, run__steps=100_000, checkpoint__every=2))
    run.until(lambda: commit.list_steps(directory / "checkpoints"))
    run.signal(signal.SIGKILL)
    run.end(90)
    assert run.orphans() == []
    kept = commit.newest_complete(directory / "checkpoints")
    assert kept is not None
    more = commit.step_of(kept) + 2
    result = run_command("train", "--quiet", "--resume", str(directory), f"--run.steps={more}")
    assert result.returncode == 0, result.stderr
    assert steps_of(directory) == list(range(1, more + 1))


def test_a_signal_while_the_parts_are_starting_ends_the_run_with_nothing_left_behind(tmp_path: Path) -> None:
    process = start_command("train", f"--run.dir={tmp_path / 'run'}", "--engine.count=2")
    assert process.stdout is not None
    assert "starting" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 3
    assert said.startswith("outpace: ")
    assert said.count("\n") == 1
    assert "start" in said
    assert "--resume" not in said
    assert not (tmp_path / "run").exists()
