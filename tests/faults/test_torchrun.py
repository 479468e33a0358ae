"""A learner over two machines: two torchruns on this one, each with a process of its own. It trains; a rank or the
controller is killed, or all get SIGTERM: everything ends, and the run resumes with nothing skipped or doubled."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.watching import LiveRun, Settings, StartRun, arguments, every_task_once, steps_of, summary_of, visits_of
from outpace.monitoring.run_directory import WEIGHTS_FOLDER
from outpace.runtime.remote import INVITATION_FILE

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

END_LIMIT_S = 90.0
"""Also longer than torchrun waits for its processes after SIGTERM."""
EPOCHS = 2
STEPS = EPOCHS * 24 // 4


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the machine that runs the tests may have no address."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


class Machines:
    """The same command under one torchrun for each machine."""

    def __init__(self, start: StartRun, logs: Path, *command: str) -> None:
        """`logs`: for torchrun, which otherwise leaves an empty directory behind."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.first, self.second = (
            start(
                *command,
                launcher=[
                    *("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)),
                    *("--master-addr", "127.0.0.1", "--master-port", str(port), "--log-dir", str(logs)),
                ],
            )
            for node in range(2)
        )

    def end(self, within_s: float = END_LIMIT_S) -> tuple[int, int]:
        """Wait for both, and return the exit codes of torchrun."""
        codes = self.first.end(within_s), self.second.end(within_s)
        assert self.first.remaining_processes() == self.second.remaining_processes() == [], self.output
        return codes

    @property
    def output(self) -> str:
        return f"{self.first.output}\n{self.second.output}"


def of_run(settings: Settings, **changes: object) -> list[str]:
    of_all = {"run__steps": None, "run__epochs": EPOCHS, "eval__holdout": 0.0, "checkpoint__every": 3}
    return arguments(settings, **{**of_all, **changes})


def until_step(run: LiveRun, directory: Path, step: int) -> None:
    run.until(lambda: steps_of(directory)[-1:] >= [step])


def controller_of(directory: Path) -> int:
    return int((directory / "run.lock").read_text())


def test_a_learner_on_two_machines_trains_and_both_torchruns_succeed(
    start: StartRun, settings: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    machines = Machines(start, tmp_path, *of_run(settings))
    assert machines.end(300) == (0, 0), machines.output
    assert steps_of(directory) == list(range(1, STEPS + 1))
    assert visits_of(directory) == every_task_once(EPOCHS)
    assert summary_of(directory)["lag_max"] <= 4
    assert (directory / "checkpoints" / f"step-{STEPS:06d}").is_dir()
    assert not {WEIGHTS_FOLDER, INVITATION_FILE} & set(os.listdir(directory))


def kill_rank(machines: Machines, directory: Path) -> None:
    os.kill(machines.second.component_pid("learner-1"), signal.SIGKILL)


def stop_rank(machines: Machines, directory: Path) -> None:
    os.kill(machines.second.component_pid("learner-1"), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("break_rank", "more"),
    [
        pytest.param(kill_rank, {}, id="killed"),
        pytest.param(
            stop_rank,
            {"supervise__probe_s": 0.5, "supervise__silent_s": 3.0},
            id="stopped, found by a probe",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_rank_of_another_machine_that_fails_ends_the_run_by_name_and_the_run_resumes_exactly(
    start: StartRun,
    settings: Settings,
    tmp_path: Path,
    break_rank: Callable[[Machines, Path], None],
    more: Settings,
) -> None:
    directory = tmp_path / "run"
    machines = Machines(start, tmp_path, *of_run(settings, **more))
    until_step(machines.first, directory, 4)
    break_rank(machines, directory)
    assert machines.first.end(END_LIMIT_S) != 0
    assert re.search(r"\blearner-1\b", machines.first.output), machines.first.output
    assert summary_of(directory)["exit"] == 4
    machines.second.kill()  # a stopped process cannot end by itself
    resumed = Machines(start, tmp_path, "--resume", str(directory))
    assert resumed.end(300) == (0, 0), resumed.output
    assert steps_of(directory) == list(range(1, STEPS + 1))
    assert visits_of(directory) == every_task_once(EPOCHS)


def test_the_ranks_of_other_machines_end_with_a_killed_controller(
    start: StartRun, settings: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    machines = Machines(start, tmp_path, *of_run(settings))
    until_step(machines.first, directory, 4)
    os.kill(controller_of(directory), signal.SIGKILL)
    assert 0 not in machines.end()


def test_the_run_stops_with_a_checkpoint_if_the_torchrun_of_the_controller_is_killed(
    start: StartRun, settings: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    machines = Machines(start, tmp_path, *of_run(settings))
    until_step(machines.first, directory, 4)
    machines.first.signal(signal.SIGKILL)
    machines.end()
    assert summary_of(directory)["exit"] == 3, machines.output


def test_a_signal_to_both_torchruns_writes_a_checkpoint_before_the_ranks_end(
    start: StartRun, settings: Settings, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    machines = Machines(start, tmp_path, *of_run(settings, checkpoint__every=0))
    until_step(machines.first, directory, 4)
    for each in (machines.second, machines.first):
        each.signal(signal.SIGTERM)
    machines.end()
    assert summary_of(directory)["exit"] == 3, machines.output
    (kept,) = (directory / "checkpoints").iterdir()
    assert int(kept.name.removeprefix("step-")) == steps_of(directory)[-1]
