"""What a process of torchrun does with the config, before any other process is there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from outpace import Trainer, cli
from outpace.config.load import make_config
from outpace.errors import BadInput, ComponentFailed
from outpace.monitoring.run_directory import WEIGHTS_FOLDER
from outpace.run.plan import UserObjects, make_plan
from outpace.run.start import launch
from outpace.run.torchrun_rank import serve_rank, with_ranks
from outpace.runtime.components import Resources
from outpace.runtime.local import LocalRuntime
from outpace.runtime.remote import RemoteProcesses, StartOrder
from outpace.runtime.torchrun import TorchrunProcess, resume_command, torchrun_process, without_torchrun
from runtime_support import start_toy
from support import naming

VARIABLES = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
"""Of the last of four processes, two on each machine."""

LAST = TorchrunProcess(3, 4, 1, 2, "node1", 29500)


def under_torchrun(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in (VARIABLES | changes).items():
        monkeypatch.setenv(name, value)


def test_torchrun_is_recognized_by_its_variables() -> None:
    assert torchrun_process(VARIABLES) == LAST
    assert LAST.several_machines


def test_one_process_or_another_launcher_is_not_torchrun() -> None:
    others = {name: value for name, value in VARIABLES.items() if not name.startswith("TORCHELASTIC")}
    assert torchrun_process(others) is None
    assert torchrun_process(VARIABLES | {"WORLD_SIZE": "1"}) is None


def test_an_incomplete_environment_names_the_variable() -> None:
    with pytest.raises(BadInput, match=naming("MASTER_PORT")):
        torchrun_process({name: value for name, value in VARIABLES.items() if name != "MASTER_PORT"})


def test_a_torchrun_without_a_store_to_share_is_refused_with_the_variable_to_unset() -> None:
    with pytest.raises(BadInput, match=naming("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")):
        torchrun_process(VARIABLES | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert torchrun_process(VARIABLES | {"TORCHELASTIC_USE_AGENT_STORE": "True"}) == LAST


def test_a_run_under_torchrun_is_resumed_with_as_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path("runs/large")
    assert resume_command(run) == "outpace train --resume runs/large"
    under_torchrun(monkeypatch)
    command = resume_command(run)
    assert command.startswith("torchrun")
    assert "train --resume runs/large" in command
    assert "4" in command


def test_children_get_no_variables_of_torchrun() -> None:
    own = {"PATH": "/bin", "GROUP_OF_MINE": "1"}
    assert without_torchrun(VARIABLES | own) == own


@pytest.mark.parametrize("given", [{}, {"learner.devices": 4}])
def test_the_learner_has_a_rank_for_every_process(given: dict[str, int]) -> None:
    assert with_ranks(make_config({"run.dir": "runs/x", **given}), LAST).learner.devices == 4


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"run.dir": "runs/x", "learner.devices": 8}, "learner.devices"),
        ({"run.dir": "runs/x", "learner.devices": 1}, "learner.devices"),
        ({}, "run.dir"),
        ({"run.dir": "runs/x", "engine.kind": "vllm", "weights.delta": True}, "weights.delta"),
    ],
)
def test_settings_that_do_not_work_under_torchrun_are_refused(settings: dict[str, object], key: str) -> None:
    with pytest.raises(BadInput, match=naming(key)):
        with_ranks(make_config(settings), LAST)


def test_a_dry_run_prints_the_device_of_every_rank_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--dry-run", "--run.dir", "runs/x", "--run.device", "cpu"]
    under_torchrun(monkeypatch)
    assert cli.main(command) == 0
    assert capsys.readouterr().out == ""
    under_torchrun(monkeypatch, RANK="0", LOCAL_RANK="0")
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "# learner-1: CPU\n" in shown
    assert "# learner-3: CPU of machine 2\n" in shown


async def test_a_start_removes_the_weights_that_a_killed_run_has_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    under_torchrun(monkeypatch, RANK="0", LOCAL_RANK="0")
    servers = {"engine.kind": "vllm", "engine.urls": ["http://node3:8000"], "weights.dir": str(tmp_path / "shared")}
    settings = {**servers, "run.dir": str(tmp_path / "run"), "run.device": "cpu"}
    plan = make_plan(with_ranks(make_config(settings), replace(LAST, rank=0)), UserObjects(), quiet=True)
    (tmp_path / "run").mkdir()
    async with launch(plan, tmp_path / "run") as launcher:
        folders = launcher.specs.weight_folders
    other_run = tmp_path / "shared" / "other"
    for folder in (*folders, other_run):
        (folder / "learner").mkdir(parents=True)
    async with launch(plan, tmp_path / "run"):
        assert list((tmp_path / "shared").iterdir()) == [other_run]
        assert not (tmp_path / "run" / WEIGHTS_FOLDER).exists()


class Became(Exception):
    """A process would have become a component that sees these GPUs."""


@pytest.fixture
async def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[LocalRuntime]:
    """Accepts rank 1. A process that would become it raises `Became` instead."""

    def become(connection: socket.socket, start: StartOrder, gpus: dict[str, str]) -> NoReturn:
        connection.close()
        raise Became(gpus)

    monkeypatch.setattr("outpace.run.torchrun_rank.become_component", become)
    monkeypatch.setattr("outpace.run.torchrun_rank.die_with_parent", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    remote = RemoteProcesses(tmp_path, [1], loopback=True, within_s=60.0)
    await remote.open()
    runtime = LocalRuntime(tmp_path / "logs", remote=remote)
    yield runtime
    await runtime.stop()
    await remote.close()


def serving(directory: Path, local_rank: int, several_machines: bool) -> asyncio.Task[NoReturn]:
    """Rank 1 of two, or the first of another machine, in a thread."""
    config = make_config({"run.dir": str(directory), "run.device": "cuda"})
    size = 1 if several_machines else 2
    process = TorchrunProcess(1, 2, local_rank, size, "127.0.0.1", 29500)
    return asyncio.create_task(asyncio.to_thread(serve_rank, config, process))


@pytest.mark.parametrize(
    ("several_machines", "gpus", "chosen"),
    [
        (False, ["5"], {"CUDA_VISIBLE_DEVICES": "5"}),
        (True, ["5"], {"CUDA_VISIBLE_DEVICES": "7"}),
        (True, None, {}),
    ],
)
async def test_a_rank_that_needs_a_gpu_gets_its_own_or_that_of_its_place_on_another_machine(
    runtime: LocalRuntime, tmp_path: Path, several_machines: bool, gpus: list[str] | None, chosen: dict[str, str]
) -> None:
    process = serving(tmp_path, 1, several_machines)
    with pytest.raises(ComponentFailed):
        await start_toy(runtime, "learner-1", remote=1, resources=Resources(gpus=gpus))
    with pytest.raises(Became) as became:
        await process
    assert became.value.args == (chosen,)


async def test_a_rank_without_a_gpu_is_an_error_on_both_sides(runtime: LocalRuntime, tmp_path: Path) -> None:
    process = serving(tmp_path, 2, several_machines=True)
    for each in (start_toy(runtime, "learner-1", remote=1, resources=Resources(gpus=["5"])), process):
        with pytest.raises(BadInput, match=naming("learner.devices", "--nproc-per-node")):
            await each


def test_only_one_process_of_a_machine_checks_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    under_torchrun(monkeypatch)
    assert cli.main(["doctor", "--run.dir", "runs/x"]) == 0
    assert capsys.readouterr().out == ""


def test_other_commands_and_scripts_are_refused_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    under_torchrun(monkeypatch)
    assert cli.main(["eval", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("outpace: outpace eval: ")
    with pytest.raises(BadInput, match=naming("Trainer")):
        Trainer().train()


def test_the_last_rank_without_a_run_to_join_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    under_torchrun(monkeypatch)
    monkeypatch.setattr("outpace.run.torchrun_rank.die_with_parent", lambda: None)  # it would outlive the test
    command = ["train", "--run.dir", str(tmp_path / "run"), "--learner.collective_timeout_s", "0.1"]
    assert cli.main(command) == 2
    assert capsys.readouterr().err.startswith("outpace: run.dir: ")
