"""`outpace serve` and server startup, with a fake vLLM that starts at once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.server.scripted_vllm import laid_out
from outpace.cli import main
from outpace.commands.serve import serving_config
from outpace.config.load import make_config
from outpace.engines.server.build import build_server_engine
from outpace.engines.server.launch import PORTS_TRIED, LaunchPlan, launch_server
from outpace.engines.server.server_process import free_port
from outpace.errors import BadInput
from outpace.runtime import cleanup_process
from outpace.runtime.cleanup import RuntimeDirectory
from servers_support import SMALL, vllm_python
from support import kill_processes, start_command

WITHIN_S = 60


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return laid_out(tmp_path / "site")


def settings(env: dict[str, str], **more: Any) -> dict[str, Any]:
    chosen = {"launch.env": env, "launch.python": sys.executable, "weights.transport": "files", "run.device": "cpu"}
    return {"engine.kind": "vllm", **chosen, **{key.replace("__", "."): value for key, value in more.items()}}


def flags(env: dict[str, str], **more: Any) -> list[str]:
    given = settings(env, **more)
    return [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}" for key, value in given.items()]


class Served:
    """A running `outpace serve` that has printed the URLs of its servers."""

    def __init__(self, *given: str) -> None:
        self.process = start_command("serve", *given)
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        self.printed = tomllib.loads("".join(self._until(lines, "urls")))
        self.urls: list[str] = self.printed["engine"]["urls"]
        self.processes = psutil.Process(self.process.pid).children(recursive=True)

    @staticmethod
    def _until(lines: Iterator[str], word: str) -> Iterator[str]:
        for line in lines:
            yield line
            if word in line:
                return

    def end(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=WITHIN_S)
        return self.process.returncode, err

    def left(self) -> list[psutil.Process]:
        return psutil.wait_procs(self.processes, timeout=WITHIN_S)[1]


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/version", timeout=WITHIN_S) as answer:
        content: dict[str, Any] = json.loads(answer.read())
        return content


def test_servers_run_until_a_signal_and_leave_no_processes_behind(env: dict[str, str]) -> None:
    served = Served(*flags(env, engine__count=2))
    assert served.printed["engine"]["kind"] == "vllm"
    assert [get(url) for url in served.urls] == [{"version": "0.99.0"}] * 2
    assert len(served.processes) >= 5, "two servers, a child of each, the cleanup process"
    code, output = served.end(signal.SIGTERM)
    assert code == 0, output
    assert served.left() == []
    assert "server-0.log" in output
    assert "server-1.log" in output


def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate folder for temporary files of the commands started after this call."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def created(listing: Path) -> list[Path]:
    segments = [Path(line) for line in listing.read_text().split()]
    assert segments
    return segments


def left_of(segments: list[Path]) -> list[Path]:
    return [segment for segment in segments if segment.exists()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_an_ended_serve_command_leaves_neither_processes_nor_shared_memory_nor_temporary_files(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    folder = temporary(tmp_path, monkeypatch)
    served = Served(*flags({**env, "STAND_IN_SEGMENTS": str(tmp_path / "segments")}))
    segments = created(tmp_path / "segments")
    assert left_of(segments) == segments
    code, _ = served.end(number)
    assert code == (0 if number == signal.SIGINT else -signal.SIGKILL)
    assert served.left() == []
    assert left_of(segments) == []
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_leftovers_of_a_command_killed_with_all_its_processes_are_removed_at_the_next_start(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = temporary(tmp_path, monkeypatch)
    served = Served(*flags({**env, "STAND_IN_SEGMENTS": str(tmp_path / "segments")}))
    segments = created(tmp_path / "segments")
    kill_together([psutil.Process(served.process.pid), *served.processes])
    served.process.communicate(timeout=WITHIN_S)
    assert served.left() == []
    RuntimeDirectory().remove()  # a concurrent test's runtime directory may have removed it already
    assert left_of(segments) == []
    assert list(folder.iterdir()) == []


def kill_together(processes: list[psutil.Process]) -> None:
    """Kill the processes, suspended first so that none can clean up after another."""
    for process in processes:
        process.suspend()
    kill_processes(processes)


@pytest.mark.slow
def test_a_server_that_was_killed_with_all_its_processes_leaves_no_shared_memory(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary(tmp_path, monkeypatch)
    served = Served(*flags({**env, "STAND_IN_SEGMENTS": str(tmp_path / "segments")}))
    segments = created(tmp_path / "segments")
    leader = next(each for each in served.processes if "--port" in each.cmdline())
    kill_together([leader, *leader.children(recursive=True)])
    served.process.communicate(timeout=WITHIN_S)
    assert left_of(segments) == []


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "killed",
    [
        pytest.param("command", marks=pytest.mark.nightly),
        pytest.param("server", marks=pytest.mark.nightly),
        "server with all its processes",
    ],
)
def test_a_real_vllm_leaves_nothing_in_shared_memory_or_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    folder = temporary(tmp_path, monkeypatch)
    given = SMALL | {"launch.python": vllm_python(), "weights.transport": "files"}
    served = Served(
        *(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}" for key, value in given.items())
    )
    leader = next(each for each in served.processes if "--port" in each.cmdline())
    processes = [leader, *leader.children(recursive=True)]
    segments = [Path("/dev/shm", name) for name, _ in cleanup_process.mapped_segments(each.pid for each in processes)]
    assert segments
    if killed == "command":
        served.process.kill()
    elif killed == "server":
        leader.kill()
    else:
        kill_together(processes)
    served.process.communicate(timeout=WITHIN_S)
    assert served.left() == []
    assert left_of(segments) == []
    assert [path.name for path in folder.iterdir() if path.suffix != ".log"] == []


@pytest.mark.slow
def test_a_server_that_dies_ends_the_command_with_the_cause_and_its_log_is_kept(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = temporary(tmp_path, monkeypatch)
    served = Served(*flags(env))
    next(each for each in served.processes if "--port" in each.cmdline()).kill()
    _, err = served.process.communicate(timeout=WITHIN_S)
    assert served.process.returncode not in (0, None)
    last_line = err.splitlines()[-1]
    assert last_line.startswith("outpace: ")
    assert "SIGKILL" in last_line
    assert served.left() == []
    (log,) = folder.iterdir()
    assert str(log) in last_line
    assert "child" in log.read_text()


def test_a_dry_run_prints_a_runnable_command(env: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["serve", "--dry-run", *flags(env, launch__port=port)]) == 0
    shown = capsys.readouterr().out.strip()
    typed = subprocess.Popen(["bash", "-c", f"exec {shown}"], stdout=subprocess.PIPE, text=True)
    try:
        assert typed.stdout is not None
        child = psutil.Process(int(typed.stdout.readline().split()[1]))
        child.kill()
    finally:
        typed.kill()
        typed.communicate(timeout=WITHIN_S)
    assert f"--port {port}" in shown


def test_servers_for_a_learner_on_another_machine_get_all_gpus(
    env: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.hardware.placement.torch_has_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    given = flags(env, engine__count=2, run__device="cuda")
    assert main(["serve", "--dry-run", "--all-gpus", *given]) == 0
    first, second = capsys.readouterr().out.strip().splitlines()
    assert "CUDA_VISIBLE_DEVICES=3" in first
    assert "CUDA_VISIBLE_DEVICES=5" in second
    assert main(["serve", "--dry-run", *given]) == 0
    for line in capsys.readouterr().out.strip().splitlines():
        assert "CUDA_VISIBLE_DEVICES=5" in line, "without the option the first GPU is left to the learner"


def test_a_missing_launch_python_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--launch.python=/no/python"]) == 2
    output = capsys.readouterr().err
    assert re.fullmatch(r"outpace: launch\.python /no/python: .*No such file or directory\n", output)


# ------------------------------------------------------------------------------------------------------------ config


def test_the_default_server_kind_is_vllm() -> None:
    assert serving_config(None, []).engine.kind == "vllm"
    assert serving_config(None, ["--engine.kind=sglang"]).engine.kind == "sglang"


def test_another_server_kind_keeps_the_launch_settings_of_a_file_that_names_no_kind(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("[launch]\nport = 9000\n")
    config = serving_config(file, ["--engine.kind=sglang"])
    assert (config.engine.kind, config.launch.port) == ("sglang", 9000)


def test_an_embedded_engine_cannot_be_served() -> None:
    with pytest.raises(BadInput, match=r"^engine\.kind: .*vllm"):
        serving_config(None, ["--engine.kind=embedded"])


def test_serve_ignores_engine_urls_of_a_run_config_and_prints_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[engine]\nkind = "vllm"\nurls = ["http://127.0.0.1:8000"]\nslots = 7\n')
    config = serving_config(file, ["--launch.port=8000"])
    assert (config.engine.urls, config.engine.slots, config.launch.port) == ([], 7, 8000)
    output = capsys.readouterr().err
    assert output.startswith("outpace: engine.urls")
    assert "http://127.0.0.1:8000" in output


# ---------------------------------------------------------------------------------------------------------- starting


async def test_another_port_is_tried_when_a_free_port_was_taken_meanwhile(env: dict[str, str], tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("xx")
    config = make_config(settings({**env, "STAND_IN_TAKEN": str(taken)}))
    output: list[str] = []
    started = await launch_server(await LaunchPlan.of(config, tmp_path), 0, tmp_path / "log", output.append)
    await started.stop()
    assert sum("port" in line for line in output) == 2


async def test_the_number_of_ports_tried_is_limited(env: dict[str, str], tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("x" * PORTS_TRIED)
    config = make_config(settings({**env, "STAND_IN_TAKEN": str(taken)}))
    with pytest.raises(BadInput, match=r"Address already in use.*launch\.port") as refusal:
        await launch_server(await LaunchPlan.of(config, tmp_path), 0, tmp_path / "log", print)
    assert type(refusal.value) is BadInput, "errors cross the RPC channel by class name"


async def test_a_configured_port_that_is_in_use_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        config = make_config(settings(env, launch__port=holder.getsockname()[1]))
        with pytest.raises(BadInput, match=r"^launch\.port \d+: .*Address already in use"):
            await launch_server(await LaunchPlan.of(config, tmp_path), 0, tmp_path / "log", print)


async def test_servers_use_consecutive_ports_from_the_first_port(env: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    recipe = await LaunchPlan.of(make_config(settings(env, launch__port=port - 1, engine__count=2)), tmp_path)
    started = await launch_server(recipe, 1, tmp_path / "log", print)
    await started.stop()
    assert started.server.url == f"http://127.0.0.1:{port}"


@pytest.mark.usefixtures("tokenizer_in_this_process")
@pytest.mark.parametrize(("stale", "health"), [(False, "healthy"), (True, "stale")])
async def test_a_started_server_has_the_first_version_unless_the_run_has_progressed(
    env: dict[str, str], tmp_path: Path, stale: bool, health: str
) -> None:
    config = make_config(settings(env, engine__slots=500))
    engine = await build_server_engine(
        config, "engine-0", 0, url="", incarnation="i", scratch=tmp_path, logs=tmp_path / "logs", stale=stale
    )
    try:
        assert (await engine.stats()).health == health
        assert (tmp_path / "logs" / "engine-0-server.log").read_text().startswith("child")
    finally:
        await engine.close()


@pytest.mark.usefixtures("tokenizer_in_this_process")
async def test_a_started_server_that_fails_its_checks_is_stopped(env: dict[str, str], tmp_path: Path) -> None:
    config = make_config(settings(env, launch__args=["--logprobs-mode", "raw_logprobs"]))
    with pytest.raises(BadInput, match="--logprobs-mode processed_logprobs"):
        await build_server_engine(config, "e", 0, url="", incarnation="i", scratch=tmp_path, logs=tmp_path, stale=False)
    child = int((tmp_path / "e-server.log").read_text().split()[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


async def test_a_cancelled_server_start_leaves_no_processes(env: dict[str, str], tmp_path: Path) -> None:
    config = make_config(settings(env, launch__args=["--host", "127.0.0.2"]))  # an address that outpace does not probe
    recipe = await LaunchPlan.of(config, tmp_path)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            await launch_server(recipe, 0, tmp_path / "log", print)
    assert not [each for each in psutil.Process(os.getpid()).children() if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.usefixtures("tokenizer_in_this_process")
async def test_the_log_of_a_server_that_did_not_start_outlives_the_run_directory(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    config = make_config(settings(env, launch__args=["--max-num-seqs", "many"]))
    logs = tmp_path / "logs"
    with pytest.raises(BadInput) as refusal:
        await build_server_engine(
            config, "engine-0", 0, url="", incarnation="i", scratch=tmp_path, logs=logs, stale=False
        )
    (named,) = re.findall(r"/\S+\.log\b", str(refusal.value))
    copy = Path(named)
    assert copy.parent == tmp_path / "elsewhere"
    assert "engine-0-server" in copy.name
    assert "many" in await asyncio.to_thread(copy.read_text)
    with pytest.raises(BadInput, match=str(logs)):  # a resumed run keeps its own log
        await build_server_engine(
            config, "engine-0", 0, url="", incarnation="i", scratch=tmp_path, logs=logs, stale=True
        )
    assert list((tmp_path / "elsewhere").iterdir()) == [copy]
