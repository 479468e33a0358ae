"""A server that we have started, and that nothing of it is left."""

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


async def test_what_it_prints_is_in_its_log(launch: Launch) -> None:
    server = await launch("import sys; print('to one'); print('to the other', file=sys.stderr)")
    assert (await server.ended()).endswith("code 0")
    assert set(server.log_path.read_text().splitlines()) == {"to one", "to the other"}
    assert not server.alive


async def test_a_terminals_ctrl_c_does_not_reach_it(launch: Launch) -> None:
    server = await launch("import time; time.sleep(600)")
    assert os.getsid(server.pid) == server.pid


async def test_a_second_start_goes_on_with_the_log_and_says_only_its_own(launch: Launch) -> None:
    await (await launch("print('the first')")).ended()
    second = await launch("print('the second')")
    await second.ended()
    assert second.log_tail() == "the second"
    assert second.log_path.read_text() == "the first\nthe second\n"


async def test_a_tail_is_so_many_lines(launch: Launch) -> None:
    server = await launch("for i in range(100): print(i)")
    await server.ended()
    assert server.log_tail(2) == "98\n99"


async def test_a_log_that_somebody_removed_says_nothing(launch: Launch) -> None:
    server = await launch("print('hello')")
    await server.ended()
    server.log_path.unlink()
    assert server.log_tail() == ""


async def test_it_says_how_it_ended(launch: Launch) -> None:
    assert (await (await launch("raise SystemExit(3)")).ended()).endswith("code 3")
    killed = await launch("import time; time.sleep(600)")
    os.kill(killed.pid, signal.SIGKILL)
    assert "SIGKILL" in await killed.ended()


async def test_a_program_that_is_not_there_is_a_line_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^launch\.python /no/such/python: .*No such file"):
        await ServerProcess.launch(["/no/such/python", "-c", ""], {}, tmp_path / "log")


async def test_it_gets_exactly_the_environment_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_OURS", "1")
    program = "import os; print(os.environ.get('OF_OURS'), os.environ.get('ITS_OWN'))"
    server = await ServerProcess.launch([sys.executable, "-c", program], {"ITS_OWN": "2"}, tmp_path / "log")
    await server.ended()
    assert server.log_tail() == "None 2"


@pytest.mark.parametrize("detached", [False, True])
async def test_stopping_ends_what_it_has_started_too(launch: Launch, detached: bool) -> None:
    server = await launch(WITH_A_CHILD.format(detached=detached))
    child = await child_of(server)
    await server.stop()
    assert not server.alive
    assert gone(child)


async def test_what_a_dead_server_has_left_behind_ends_with_a_stop(launch: Launch) -> None:
    server = await launch(WITH_A_CHILD.format(detached=True))
    child = await child_of(server)
    os.kill(server.pid, signal.SIGKILL)
    await server.ended()
    assert not gone(child)
    await server.stop()
    assert gone(child)


async def test_a_server_that_can_leave_by_itself_does(launch: Launch) -> None:
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
async def test_one_that_does_not_leave_is_killed(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(server_process, "TERMINATE_S", 0.1)
    server = await launch(DEAF)
    await log_text(server, "deaf")
    if stopped:
        os.kill(server.pid, signal.SIGSTOP)
    await server.stop()
    assert "SIGKILL" in await server.ended()


async def test_stopping_goes_on_when_whoever_waits_is_cancelled(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "TERMINATE_S", 0.1)
    server = await launch(DEAF)
    await log_text(server, "deaf")
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    async with asyncio.timeout(60):
        await server.ended()


async def test_processor_time_is_of_the_whole_tree_and_never_falls(launch: Launch) -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint('burnt', flush=True)\ntime.sleep(600)"
    server = await launch(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])")
    await log_text(server, "burnt")
    spent = server.cpu_s()
    assert spent >= 0.5
    await server.stop()
    assert server.cpu_s() >= spent


def test_it_dies_with_whoever_started_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    owner = subprocess.Popen(
        [
            sys.executable, "-c",
            "import asyncio, os, sys, pathlib\n"
            "from outpace.engines.server.server_process import ServerProcess\n"
            "from outpace.runtime.cleanup import CleanupProcess\n"
            "async def main():\n"
            f"    guardian = CleanupProcess(pathlib.Path({str(tmp_path / 'index')!r}))\n"
            "    env = {**os.environ, **guardian.marked(guardian.new_mark())}\n"
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


def test_a_free_port_can_be_had() -> None:
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", free_port()))


def test_a_port_that_was_taken_is_told_from_other_ends() -> None:
    assert port_was_taken("OSError: [Errno 98] Address already in use")
    assert not port_was_taken("torch.OutOfMemoryError: CUDA out of memory")


async def test_temporary_files_and_sockets_of_a_server_are_removed_when_it_has_been_stopped(launch: Launch) -> None:
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


async def test_the_directory_of_a_server_is_in_the_temporary_directory_it_was_given(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"]
    server = await ServerProcess.launch(argv, {**os.environ, "TMPDIR": str(tmp_path)}, tmp_path / "server.log")
    await server.ended()
    assert Path(server.log_text()).is_relative_to(tmp_path)
    await server.stop()
