"""Server processes started by outpace: logs, exit, and complete cleanup."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from outpace.engines.server import server_process
from outpace.engines.server.server_process import ServerProcess, free_port, port_was_taken
from outpace.errors import BadInput

WITH_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={detached})
print("child", child.pid, flush=True)
time.sleep(600)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
Launch = Callable[[str], Awaitable[ServerProcess]]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    started: list[ServerProcess] = []

    async def start(program: str) -> ServerProcess:
        argv = [sys.executable, "-c", textwrap.dedent(program)]
        started.append(await ServerProcess.launch(argv, dict(os.environ), tmp_path / "logs" / "server.log"))
        return started[-1]

    yield start
    for server in started:
        await server.stop()


async def log_text(server: ServerProcess, text: str) -> str:
    async with asyncio.timeout(60):
        while text not in server.log_text():
            assert server.alive, server.log_text()
            await asyncio.sleep(0.02)
    return server.log_text()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def child_of(server: ServerProcess) -> int:
    return int((await log_text(server, "child")).split()[1])


async def test_server_output_is_written_to_the_log(launch: Launch) -> None:
    server = await launch("import sys; print('to one'); print('to the other', file=sys.stderr)")
    assert (await server.ended()).endswith("code 0")
    assert set(server.log_path.read_text().splitlines()) == {"to one", "to the other"}
    assert not server.alive


async def test_ctrl_c_in_the_terminal_does_not_reach_the_server(launch: Launch) -> None:
    server = await launch("import time; time.sleep(600)")
    assert os.getsid(server.pid) == server.pid


async def test_a_second_start_appends_to_the_log_and_reports_only_its_own_output(launch: Launch) -> None:
    await (await launch("print('the first')")).ended()
    second = await launch("print('the second')")
    await second.ended()
    assert second.log_tail() == "the second"
    assert second.log_path.read_text() == "the first\nthe second\n"


async def test_log_tail_returns_the_requested_number_of_lines(launch: Launch) -> None:
    server = await launch("for i in range(100): print(i)")
    await server.ended()
    assert server.log_tail(2) == "98\n99"


async def test_log_tail_of_a_removed_log_is_empty(launch: Launch) -> None:
    server = await launch("print('hello')")
    await server.ended()
    server.log_path.unlink()
    assert server.log_tail() == ""


async def test_the_exit_code_or_signal_of_a_server_is_reported(launch: Launch) -> None:
    assert (await (await launch("raise SystemExit(3)")).ended()).endswith("code 3")
    killed = await launch("import time; time.sleep(600)")
    os.kill(killed.pid, signal.SIGKILL)
    assert "SIGKILL" in await killed.ended()


async def test_a_missing_program_is_reported_by_name_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^launch\.python: .*/no/such/python: No such file"):
        await ServerProcess.launch(["/no/such/python", "-c", ""], {}, tmp_path / "log")


async def test_the_server_gets_exactly_the_given_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_OURS", "1")
    program = "import os; print(os.environ.get('OF_OURS'), os.environ.get('ITS_OWN'))"
    server = await ServerProcess.launch([sys.executable, "-c", program], {"ITS_OWN": "2"}, tmp_path / "log")
    await server.ended()
    assert server.log_tail() == "None 2"


@pytest.mark.parametrize("detached", [False, True])
async def test_stopping_a_server_also_ends_its_child_processes(launch: Launch, detached: bool) -> None:
    server = await launch(WITH_A_CHILD.format(detached=detached))
    child = await child_of(server)
    await server.stop()
    assert not server.alive
    assert gone(child)


async def test_stopping_a_dead_server_ends_its_orphaned_processes(launch: Launch) -> None:
    server = await launch(WITH_A_CHILD.format(detached=True))
    child = await child_of(server)
    os.kill(server.pid, signal.SIGKILL)
    await server.ended()
    assert not gone(child)
    await server.stop()
    assert gone(child)


async def test_a_server_that_handles_sigterm_exits_by_itself(launch: Launch) -> None:
    server = await launch(
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("goodbye", flush=True), sys.exit(0)))
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    await log_text(server, "ready")
    await server.stop()
    assert server.log_tail() == "ready\ngoodbye"


@pytest.mark.parametrize("stopped", [False, True], ids=["deaf", "SIGSTOP"])
async def test_a_server_that_ignores_sigterm_is_killed(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(server_process, "TERMINATE_S", 0.1)
    server = await launch(DEAF)
    await log_text(server, "deaf")
    if stopped:
        os.kill(server.pid, signal.SIGSTOP)
    await server.stop()
    assert "SIGKILL" in await server.ended()


async def test_stopping_continues_when_its_caller_is_cancelled(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "TERMINATE_S", 0.1)
    server = await launch(DEAF)
    await log_text(server, "deaf")
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    async with asyncio.timeout(60):
        await server.ended()


async def test_cpu_time_covers_the_whole_process_tree_and_never_decreases(launch: Launch) -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint('burnt', flush=True)\ntime.sleep(600)"
    server = await launch(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])")
    await log_text(server, "burnt")
    spent = server.cpu_s()
    assert spent >= 0.5
    await server.stop()
    assert server.cpu_s() >= spent


def test_a_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    owner = subprocess.Popen(
        [
            sys.executable, "-c",
            "import asyncio, os, sys, pathlib\n"
            "from outpace.engines.server.server_process import ServerProcess\n"
            "from outpace.runtime.cleanup import CleanupProcess\n"
            "async def main():\n"
            f"    cleanup = CleanupProcess(pathlib.Path({str(tmp_path / 'index')!r}))\n"
            "    env = {**os.environ, **cleanup.marked(cleanup.new_mark())}\n"
            f"    argv = [sys.executable, '-c', {WITH_A_CHILD.format(detached=True)!r}]\n"
            f"    server = await ServerProcess.launch(argv, env, pathlib.Path({str(log)!r}))\n"
            "    while 'child' not in server.log_text(): await asyncio.sleep(0.02)\n"
            "    print(server.pid, server.log_text().split()[1], flush=True)\n"
            "    await asyncio.sleep(600)\n"
            "asyncio.run(main())",
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    with owner, owner.stdout:
        server, child = (psutil.Process(int(pid)) for pid in owner.stdout.readline().split())
        owner.kill()
    _, left = psutil.wait_procs([server, child], timeout=20)
    assert left == []


def test_free_port_returns_an_unused_port() -> None:
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", free_port()))


def test_an_exit_because_of_a_taken_port_is_distinguished_from_other_exits() -> None:
    assert port_was_taken("OSError: [Errno 98] Address already in use")
    assert not port_was_taken("torch.OutOfMemoryError: CUDA out of memory")


async def test_temporary_files_and_sockets_of_a_server_are_removed_when_it_is_stopped(launch: Launch) -> None:
    server = await launch(
        """
        import os, tempfile, time
        os.close(tempfile.mkstemp()[0])
        print(os.environ["VLLM_RPC_BASE_PATH"] == tempfile.gettempdir(), flush=True)
        print("files in " + tempfile.gettempdir() + ".", flush=True)
        time.sleep(600)
        """
    )
    printed = await log_text(server, ".")
    assert "True" in printed
    directory = printed.partition("files in ")[2].removesuffix(".")
    assert os.listdir(directory)
    await server.stop()
    with pytest.raises(FileNotFoundError):
        os.listdir(directory)


async def test_the_directory_of_a_server_is_created_in_the_given_temporary_directory(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"]
    server = await ServerProcess.launch(argv, {**os.environ, "TMPDIR": str(tmp_path)}, tmp_path / "server.log")
    await server.ended()
    assert Path(server.log_text()).is_relative_to(tmp_path)
    await server.stop()
