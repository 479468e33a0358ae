"""Processes that are killed, stop responding or exit: which are restarted, which end the run, and how soon.

Tested elsewhere: kills at every crash point and at random moments (tests/drills); graders and environments that
crash or hang (tests/rewards/test_grader_pool.py, tests/rollouts/environments/test_process.py).
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from faults.watching import (
    LiveRun,
    Settings,
    StartRun,
    arguments,
    every_task_once,
    steps_of,
    summary_of,
    visits_of,
)
from outpace.checkpoint import commit

pytestmark = pytest.mark.timeout(400)

END_LIMIT_S = 90.0
"""A run that cannot continue must end within this time."""
EPOCHS = 12
QUICK_PROBES = {"supervise__probe_s": 0.5, "supervise__silent_s": 3.0}

EXITING = """
import os
import outpace

async def exiting(task, client):
    if task.id == "t7":
        print("this worker has had enough", flush=True)
        os._exit(9)
    await client.sample(task.prompt)
"""


@pytest.fixture
def epochs(settings: Settings) -> Settings:
    """A few hundred visits, each of which must be recorded once."""
    changes = {"run.steps": None, "run.epochs": EPOCHS, "eval.holdout": 0.0, "checkpoint.every": 5}
    return {key: value for key, value in (settings | changes).items() if value is not None}


def until_step(run: LiveRun, directory: Path, step: int) -> None:
    run.until(lambda: steps_of(directory)[-1:] >= [step])


def all_visits_recorded(directory: Path) -> bool:
    count = EPOCHS * 24 // 4
    return steps_of(directory) == list(range(1, count + 1)) and visits_of(directory) == every_task_once(EPOCHS)


# ---------------------------------------------------------------------------------------- components that are restarted


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine-0", pytest.param("worker-0", marks=pytest.mark.nightly)])
def test_a_killed_engine_or_worker_is_restarted_and_no_visit_is_lost(
    start: StartRun, epochs: Settings, tmp_path: Path, victim: str
) -> None:
    directory = tmp_path / "run"
    run = start(*arguments(epochs))
    until_step(run, directory, 4)
    first = run.component_pid(victim)
    os.kill(first, signal.SIGKILL)
    run.until(lambda: run.component_pid(victim) != first, END_LIMIT_S)
    assert run.end(240) == 0, run.output
    assert all_visits_recorded(directory)
    assert run.remaining_processes() == []


@pytest.mark.slow
@pytest.mark.alone
def test_an_engine_that_is_alive_but_unresponsive_is_restarted(
    start: StartRun, epochs: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*arguments(epochs, **QUICK_PROBES))
    until_step(run, directory, 4)
    first = run.component_pid("engine-0")
    os.kill(first, signal.SIGSTOP)
    run.until(lambda: run.component_pid("engine-0") != first, END_LIMIT_S)
    assert run.end(240) == 0, run.output
    assert all_visits_recorded(directory)
    assert run.remaining_processes() == []


# -------------------------------------------------------------------------------------------- failures that end the run


@pytest.mark.slow
def test_a_dead_engine_without_restarts_left_ends_the_run_by_name_and_the_run_can_be_resumed(
    start: StartRun, epochs: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*arguments(epochs, supervise__restarts=0))
    until_step(run, directory, 6)
    os.kill(run.component_pid("engine-0"), signal.SIGKILL)
    assert run.end(END_LIMIT_S) == 4, run.output
    assert re.search(r"\bengine-0: .*SIGKILL", run.output), run.output
    assert summary_of(directory)["exit"] == 4
    assert run.remaining_processes() == []
    newest = commit.newest_complete(directory / "checkpoints")
    assert newest is not None
    assert commit.step_of(newest) >= 5
    again = start("--resume", str(directory))
    assert again.end(240) == 0, again.output
    assert all_visits_recorded(directory)


@pytest.mark.slow
def test_a_dead_learner_ends_the_run_without_an_extra_checkpoint_and_the_run_can_be_resumed(
    start: StartRun, epochs: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*arguments(epochs))
    until_step(run, directory, 7)
    before = commit.list_steps(directory / "checkpoints")
    os.kill(run.component_pid("learner"), signal.SIGKILL)
    assert run.end(END_LIMIT_S) == 4, run.output
    assert re.search(r"\blearner: .*SIGKILL", run.output), run.output
    committed = set(commit.list_steps(directory / "checkpoints")) - set(before)
    assert all(step % 5 == 0 for step in committed), "the death did not cause a checkpoint"
    assert run.remaining_processes() == []
    again = start("--resume", str(directory))
    assert again.end(240) == 0, again.output
    assert all_visits_recorded(directory)


@pytest.mark.slow
def test_a_worker_that_exits_repeatedly_ends_the_run_with_its_output(
    start: StartRun, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(EXITING)
    run = start(
        *arguments(settings, run__steps=100_000, rollout__function=f"{tmp_path}/own.py:exiting", supervise__restarts=1)
    )
    assert run.end(240) == 4, run.output
    assert re.search(r"\bworker-0: .*\bcode 9\b", run.output), run.output
    assert "this worker has had enough" in run.output
    assert run.remaining_processes() == []
