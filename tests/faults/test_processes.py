"""Processes that are killed, stop answering or exit: what is replaced, what ends the run, and how soon.

Shown elsewhere: kills at every labelled place and at random moments (tests/drills); graders and environments that
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
    Runs,
    Settings,
    every_task_once,
    steps_of,
    summary_of,
    visits_of,
    words,
)
from outpace.checkpoint import commit

pytestmark = pytest.mark.timeout(400)

ENDS_S = 90.0
"""A run that cannot go on has to be over by then."""
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
    """Some hundred visits, each of which has to be on record once."""
    changes = {"run.steps": None, "run.epochs": EPOCHS, "eval.holdout": 0.0, "checkpoint.every": 5}
    return {key: value for key, value in (settings | changes).items() if value is not None}


def until_step(run: LiveRun, directory: Path, step: int) -> None:
    run.until(lambda: steps_of(directory)[-1:] >= [step])


def is_all_on_record(directory: Path) -> bool:
    count = EPOCHS * 24 // 4
    return steps_of(directory) == list(range(1, count + 1)) and visits_of(directory) == every_task_once(EPOCHS)


# ------------------------------------------------------------------------------------------------- who is started again


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine-0", pytest.param("worker-0", marks=pytest.mark.nightly)])
def test_an_engine_or_a_worker_that_is_killed_is_replaced_and_nothing_is_lost(
    start: Runs, epochs: Settings, tmp_path: Path, victim: str
) -> None:
    directory = tmp_path / "run"
    run = start(*words(epochs))
    until_step(run, directory, 4)
    first = run.part(victim)
    os.kill(first, signal.SIGKILL)
    run.until(lambda: run.part(victim) != first, ENDS_S)
    assert run.end(240) == 0, run.said
    assert is_all_on_record(directory)
    assert run.orphans() == []


@pytest.mark.slow
@pytest.mark.alone
def test_an_engine_that_is_alive_and_answers_nobody_is_taken_for_dead(
    start: Runs, epochs: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*words(epochs, **QUICK_PROBES))
    until_step(run, directory, 4)
    first = run.part("engine-0")
    os.kill(first, signal.SIGSTOP)
    run.until(lambda: run.part("engine-0") != first, ENDS_S)
    assert run.end(240) == 0, run.said
    assert is_all_on_record(directory)
    assert run.orphans() == []


# ---------------------------------------------------------------------------------------------------- what ends the run


@pytest.mark.slow
def test_a_dead_engine_that_may_not_be_replaced_ends_the_run_by_name_and_the_run_can_be_resumed(
    start: Runs, epochs: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*words(epochs, supervise__restarts=0))
    until_step(run, directory, 6)
    os.kill(run.part("engine-0"), signal.SIGKILL)
    assert run.end(ENDS_S) == 4, run.said
    assert re.search(r"\bengine-0: .*SIGKILL", run.said), run.said
    assert summary_of(directory)["exit"] == 4
    assert run.orphans() == []
    newest = commit.newest_complete(directory / "checkpoints")
    assert newest is not None
    assert commit.step_of(newest) >= 5
    again = start("--resume", str(directory))
    assert again.end(240) == 0, again.said
    assert is_all_on_record(directory)


@pytest.mark.slow
def test_a_dead_learner_ends_the_run_commits_nothing_and_the_run_can_be_resumed(
    start: Runs, epochs: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*words(epochs))
    until_step(run, directory, 7)
    before = commit.list_steps(directory / "checkpoints")
    os.kill(run.part("learner"), signal.SIGKILL)
    assert run.end(ENDS_S) == 4, run.said
    assert re.search(r"\blearner: .*SIGKILL", run.said), run.said
    committed = set(commit.list_steps(directory / "checkpoints")) - set(before)
    assert all(step % 5 == 0 for step in committed), "none was made of the death"
    assert run.orphans() == []
    again = start("--resume", str(directory))
    assert again.end(240) == 0, again.said
    assert is_all_on_record(directory)


@pytest.mark.slow
def test_a_worker_that_exits_again_and_again_ends_the_run_with_what_it_said(
    start: Runs, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(EXITING)
    run = start(
        *words(settings, run__steps=100_000, rollout__function=f"{tmp_path}/own.py:exiting", supervise__restarts=1)
    )
    assert run.end(240) == 4, run.said
    assert re.search(r"\bworker-0: .*\bcode 9\b", run.said), run.said
    assert "this worker has had enough" in run.said
    assert run.orphans() == []
