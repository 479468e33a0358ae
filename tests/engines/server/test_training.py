"""Training runs on real vLLM servers: they learn, weights change during sequences, and stopped or killed servers cost
only time."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from drills.checks import accounting, ledger_of
from engines.server.stopping_proxy import StoppingProxy
from servers_support import RunningVllm
from support import journalled, kill_processes, needs_bfloat16, read_lines

PYTHON = os.environ.get("OUTPACE_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="OUTPACE_VLLM_PYTHON names no Python with vLLM"),
]

COMMON = (
    "--engine.kind=vllm", "--run.device=cpu", "--pacing.groups_per_step=16", "--pacing.chunk_groups=8",
    "--rollout.group_size=8", "--learner.lr=5e-4", "--eval.count=128",
)  # fmt: skip
LAUNCHED = (f"--launch.python={PYTHON}", "--launch.env=VLLM_CPU_KVCACHE_SPACE=1")


class Running:
    """A training process and the servers that it started."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.directory = directory
        self._output = directory.with_suffix(".txt")
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "outpace.cli", "train", f"--run.dir={directory}", *COMMON, *settings],
                stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"COLUMNS": "160"},
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output.read_text()

    def servers(self) -> list[psutil.Process]:
        """Return the API process of each server, ordered by port."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = {
            _port(arguments): child for child in children if "api_server" in " ".join(arguments := _command_line(child))
        }
        return [found[port] for port in sorted(found)]

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.directory / name
        return read_lines(path) if path.exists() else []

    def until(self, true: Callable[[], object], patience_s: float = 300) -> None:
        deadline = time.monotonic() + patience_s
        while not true():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, f"the condition was not met:\n{self.output}"
            time.sleep(0.2)

    def end(self, exit_code: int = 0, patience_s: float = 600) -> dict[str, Any]:
        """Wait for the run to end without leaving servers behind, and return its summary."""
        servers = self.servers() if self.process.poll() is None else []
        assert self.process.wait(timeout=patience_s) == exit_code, self.output
        _, left = psutil.wait_procs(servers, timeout=10)
        assert not left, "servers outlive their run"
        summary: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return summary

    def kill(self) -> None:
        kill_processes(self.servers() if self.process.poll() is None else [])
        self.process.kill()
        self.process.wait()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _port(arguments: list[str]) -> int:
    return int(arguments[arguments.index("--port") + 1]) if "--port" in arguments else 0


def process_tree(server: psutil.Process) -> list[psutil.Process]:
    return [server, *server.children(recursive=True)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    runs: list[Running] = []

    def start(*settings: str) -> Running:
        runs.append(Running(tmp_path / f"run{len(runs)}", *settings))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def swapped_inside(run: Path) -> int:
    """Return how many trained sequences were sampled from more than one version."""
    rows = [row for record in journalled(run / "journal").values() for row in record.rows]
    return sum(len(set(row.versions[row.mask].tolist())) > 1 for row in rows)


def test_a_run_on_a_real_server_learns_and_weights_change_during_sequences(start: Callable[..., Running]) -> None:
    run = start(*LAUNCHED, "--run.steps=12", "--checkpoint.every=0")
    summary = run.end()
    assert summary["eval_last"] > summary["eval_first"] + 0.08
    lines = run.lines()
    loads = [line for line in lines if line["sync/loads"]]
    assert len(loads) >= 6
    assert all(line["sync/pause_s"] > 0 and line["sync/bytes"] > 0 for line in loads)
    assert max(line["completions/mixed_versions"] for line in lines) > 0
    assert swapped_inside(run.directory) > 0
    assert summary["lag_max"] <= 4
    first = next(line for line in lines if line["lag/max"] == 0)
    assert first["offpolicy/kl"] < 1e-4, "sampler and learner agree while they have the same weights"


@pytest.mark.parametrize(
    "travelling",
    [
        ("--lora.rank=8", "--learner.lr=5e-3"),
        pytest.param(("--weights.delta=true", "--model.dtype=bfloat16"), marks=[needs_bfloat16, pytest.mark.nightly]),
    ],
    ids=["adapters", "deltas"],
)
def test_a_run_learns_with_every_weight_transport(start: Callable[..., Running], travelling: tuple[str, ...]) -> None:
    run = start(*LAUNCHED, "--run.steps=10", *travelling)
    summary = run.end()
    assert summary["eval_last"] > summary["eval_first"] + 0.04
    whole = 2 * 900_000  # bytes of the model in bfloat16
    bytes_per_load = [line["sync/bytes"] / line["sync/loads"] for line in run.lines() if line["sync/loads"]]
    assert 0 < min(bytes_per_load) < whole


@pytest.mark.parametrize(
    "also_stopped", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["killed", "killed, then stopped"]
)
def test_a_server_killed_under_load_and_a_suspended_server_cost_no_group(
    start: Callable[..., Running], tmp_path: Path, also_stopped: bool
) -> None:
    waits = tmp_path / "waits.py"  # with all cores busy, starting a server would take minutes
    waits.write_text(
        "import asyncio\n\n"
        "async def second(completions):\n"
        "    await asyncio.sleep(1)\n"
        "    return [0.0 for _ in completions]\n"
    )
    run = start(
        *LAUNCHED, "--run.steps=5000", "--engine.count=2", "--engine.probe_s=1", "--engine.probe_deadline_s=4",
        "--engine.control_s=10", "--pacing.max_lag=4", "--supervise.probe_s=2", "--eval.count=0",
        f"--rewards.functions=countdown,{waits}:second",
    )  # fmt: skip
    run.until(lambda: len(run.lines()) >= 3)
    killed, stopped = run.servers()
    before = len(run.lines())
    killed.send_signal(signal.SIGKILL)
    run.until(lambda: len(run.lines()) >= before + 3)  # the other server serves the run meanwhile
    run.until(lambda: len(run.servers()) == 2)
    run.until(lambda: run.lines()[-1]["fleet/healthy"] == 2)
    if also_stopped:
        for process in process_tree(stopped):
            process.send_signal(signal.SIGSTOP)  # its port still accepts
        before = len(run.lines())
        run.until(lambda: len(run.lines()) >= before + 3)
        run.until(lambda: not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE)
        run.until(lambda: run.output.count("it is started again") == 2)
    run.process.send_signal(signal.SIGTERM)
    run.end(exit_code=3)
    assert accounting(run.directory, _tasks(run.directory), None) == []
    assert not _failed_visits(run), "no request was lost"
    assert max(line["offpolicy/kl"] for line in run.lines()) < 0.1, "nothing was sampled by weights of another version"


@pytest.mark.nightly
def test_a_run_whose_last_server_dies_ends_with_the_cause_and_can_be_resumed(start: Callable[..., Running]) -> None:
    run = start(*LAUNCHED, "--run.steps=5000", "--supervise.restarts=0", "--eval.count=0", "--checkpoint.every=2")
    run.until(lambda: len(run.lines()) >= 3)
    for process in process_tree(run.servers()[0]):
        process.send_signal(signal.SIGKILL)
    run.end(exit_code=4)
    assert re.search(r"^outpace: engine-0: http://\S+: .*SIGKILL.*; supervise\.restarts = 0$", run.output, re.MULTILINE)
    assert ledger_of(run.directory)["version"] >= 2, "the newest checkpoint is whole"


def test_a_server_suspended_during_an_update_blocks_neither_publishing_nor_training(
    start: Callable[..., Running], vllm: RunningVllm
) -> None:
    server = psutil.Process(vllm.pid)
    stopped = threading.Event()

    def stop(update: int) -> None:
        if update == 4:
            for process in process_tree(server):
                process.suspend()
            stopped.set()

    with proxied(vllm.url, stop) as url:
        run = start(
            f'--engine.urls=["{url}"]', "--weights.transport=memory", "--engine.context=256", "--engine.slots=16",
            "--engine.control_s=4", "--engine.probe_s=1", "--engine.probe_deadline_s=3", "--run.steps=8",
            "--eval.count=0", "--checkpoint.every=0", "--pacing.max_lag=3",
        )  # fmt: skip
        try:
            run.until(stopped.is_set)
            run.until(lambda: "did not take version" in run.output)
            run.until(lambda: _finished(run) - _trained(run) < 16)  # complete batches are still trained and published
        finally:
            for process in process_tree(server):
                process.resume()
        run.end()
    assert _trained(run) == 8 * 16
    assert accounting(run.directory, _tasks(run.directory), None) == []
    assert not _failed_visits(run)


def _finished(run: Running) -> int:
    return len(journalled(run.directory / "journal"))


def _trained(run: Running) -> int:
    return sum(len(line["groups"]) for line in run.lines("batches.jsonl"))


def _failed_visits(run: Running) -> list[dict[str, Any]]:
    finalized = [visit for line in run.lines("batches.jsonl") for visit in line.get("settled", [])]
    return [visit for visit in finalized if visit["outcome"] == "failed"]


@contextmanager
def proxied(target: str, before_update: Callable[[int], None]) -> Iterator[str]:
    """Start a proxy in its own thread and yield its address."""
    port, ended = free_port(), threading.Event()

    async def live() -> None:
        async with StoppingProxy(target, before_update).serving(port):
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        ended.set()
        thread.join()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _tasks(run: Path) -> int:
    found: int = json.loads((run / "tasks.json").read_text())["count"]
    return found
