"""A learner sharded over two processes, one of which is killed, stops responding or runs out of memory: the run ends,
names it, and resumes with nothing skipped or doubled, also with another number of processes."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from faults.watching import LiveRun, Settings, StartRun, arguments, every_task_once, steps_of, visits_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

END_LIMIT_S = 90.0
EPOCHS = 4
STEPS = EPOCHS * 24 // 4


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


HUNGRY = """
import pathlib

import torch

import outpace


@outpace.policy_loss
def hungry(tokens):
    if (pathlib.Path(__file__).parent / "more").exists():
        torch.empty(2**30, dtype=torch.uint8)
    return -tokens.advantages_N * tokens.logp_N
"""


def exhaust_memory(pid: int) -> None:
    """Set a limit that only this process has, for what every process then allocates."""
    used = psutil.Process(pid).memory_info().vms
    resource.prlimit(pid, resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    for argument in psutil.Process(psutil.Process(pid).ppid()).cmdline():
        if argument.endswith("hungry.py:hungry"):
            Path(argument.partition("=")[2].partition(":")[0]).with_name("more").touch()


PROBED = {"supervise__probe_s": 0.5, "supervise__silent_s": 3.0}
COLLECTIVE = {"learner__collective_timeout_s": 5.0}


@pytest.mark.parametrize(
    ("break_rank", "timeouts", "resumed_with"),
    [
        pytest.param(kill, {}, 2, id="killed"),
        pytest.param(stop, PROBED, 1, id="stopped, found by a probe", marks=pytest.mark.nightly),
        pytest.param(stop, COLLECTIVE, 2, id="stopped, found by a collective", marks=pytest.mark.nightly),
        pytest.param(exhaust_memory, {}, 2, id="out of memory", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_fails_ends_the_run_by_name_and_the_run_resumes_exactly(
    start: StartRun,
    settings: Settings,
    tmp_path: Path,
    break_rank: Callable[[int], None],
    timeouts: Settings,
    resumed_with: int,
) -> None:
    directory = tmp_path / "run"
    (tmp_path / "hungry.py").write_text(HUNGRY)
    of_run = {"run__steps": None, "run__epochs": EPOCHS, "eval__holdout": 0.0, "checkpoint__every": 3}
    loss = {"policy_loss__name": f"{tmp_path / 'hungry.py'}:hungry"}
    run = start(*arguments(settings, **of_run, **loss, learner__devices=2, **timeouts))
    until_step(run, directory, 4)
    break_rank(run.component_pid("learner-1"))
    assert run.end(END_LIMIT_S) == 4, run.output
    assert re.search(r"\blearner-1\b", run.output), run.output
    assert run.remaining_processes() == []
    (tmp_path / "more").unlink(missing_ok=True)
    resumed = start("--resume", str(directory), "--learner.devices", str(resumed_with))
    assert resumed.end(300) == 0, resumed.output
    assert steps_of(directory) == list(range(1, STEPS + 1))
    assert visits_of(directory) == every_task_once(EPOCHS)
    assert resumed.remaining_processes() == []


def until_step(run: LiveRun, directory: Path, step: int) -> None:
    run.until(lambda: steps_of(directory)[-1:] >= [step])
