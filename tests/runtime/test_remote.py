"""Processes that connect over TCP and become components: handshake, service, death, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from outpace.errors import BadInput, ComponentFailed, ComponentLost, OutpaceError
from outpace.runtime import wire
from outpace.runtime.local import LocalRuntime
from outpace.runtime.remote import (
    HELLO_BYTES,
    INVITATION_FILE,
    Accepted,
    Invitation,
    RemoteProcesses,
    await_start,
    become_component,
    connect,
)
from runtime_support import start_toy, until
from support import naming

pytestmark = pytest.mark.timeout(120)

WITHIN_S = 60.0
TESTS = Path(__file__).parents[1]

JOIN = """
import sys
from pathlib import Path

from outpace.runtime.remote import await_start, become_component, connect

connection = connect(Path(sys.argv[1]), 1, "127.0.0.1", 60.0)
become_component(connection, await_start(connection), {})
"""


@contextlib.contextmanager
def joining(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that becomes component 1."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", JOIN, str(directory)], env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


async def exit_code(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, WITHIN_S)


@pytest.fixture
async def remote(tmp_path: Path) -> AsyncIterator[RemoteProcesses]:
    """Accepts process 1."""
    processes = RemoteProcesses(tmp_path, [1], loopback=True, within_s=WITHIN_S)
    await processes.open()
    yield processes
    await processes.close()


@pytest.fixture
async def runtime(tmp_path: Path, remote: RemoteProcesses) -> AsyncIterator[LocalRuntime]:
    local = LocalRuntime(tmp_path / "logs", remote=remote)
    yield local
    await local.stop()


def invitation(directory: Path) -> Invitation:
    return msgspec.json.decode((directory / INVITATION_FILE).read_bytes(), type=Invitation)


async def offer(directory: Path, *messages: object) -> bytes:
    """Send frames to the controller and return everything that it replies until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", invitation(directory).port)
    for message in messages:
        writer.write(wire.frame(wire.encode(message)))
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_a_process_that_connects_serves_until_the_run_has_ended(runtime: LocalRuntime, tmp_path: Path) -> None:
    with joining(tmp_path) as process:
        toy = await start_toy(runtime, "learner-1", remote=1)
        assert await toy.pid() == process.pid
        assert await runtime.ping("learner-1", 10)
        await runtime.stop(finished=True)
        assert await exit_code(process) == 0


async def test_its_exit_code_is_not_0_if_the_connection_just_closes(runtime: LocalRuntime, tmp_path: Path) -> None:
    with joining(tmp_path) as process:
        await start_toy(runtime, "learner-1", remote=1)
        await runtime.stop()
        assert await exit_code(process) == 1


async def test_a_component_that_does_not_close_does_not_keep_its_process(runtime: LocalRuntime, tmp_path: Path) -> None:
    with joining(tmp_path) as process:
        await start_toy(runtime, "learner-1", remote=1, settings={"closes_for_s": 10**6})
        await runtime.stop()
        assert await exit_code(process) == 1


async def test_a_process_that_is_killed_is_a_death_with_the_end_of_its_log(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    with joining(tmp_path):
        toy = await start_toy(runtime, "learner-1", remote=1)
        with pytest.raises(ComponentLost):
            await toy.die(3)
        death = await runtime.deaths.get()
        assert death.component == "learner-1"
        assert "these are my last words" in death.remote_traceback
        with pytest.raises(ComponentLost):
            await toy.pid()


async def test_a_process_that_does_not_respond_loses_its_connection_and_is_a_death(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    with joining(tmp_path) as process:
        await start_toy(runtime, "learner-1", remote=1)
        process.send_signal(signal.SIGSTOP)
        assert not await runtime.ping("learner-1", 0.1)
        await runtime.kill("learner-1")
        assert (await runtime.deaths.get()).component == "learner-1"


async def test_a_process_that_builds_its_component_ends_with_the_controller(
    runtime: LocalRuntime, remote: RemoteProcesses, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    settings = {"builds": str(begun), "builds_for_s": 10**6}
    with joining(tmp_path) as process:
        starting = asyncio.create_task(start_toy(runtime, "learner-1", remote=1, settings=settings))
        await asyncio.to_thread(until, begun.exists)
        await remote.close()
        assert await exit_code(process) == 1
        with pytest.raises(ComponentFailed):
            await starting


async def test_signals_of_the_launcher_do_not_end_it(runtime: LocalRuntime, tmp_path: Path) -> None:
    with joining(tmp_path) as process:
        toy = await start_toy(runtime, "learner-1", remote=1)
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        assert await toy.pid() == process.pid


async def test_an_error_of_the_process_is_that_of_its_start(runtime: LocalRuntime, tmp_path: Path) -> None:
    with joining(tmp_path), pytest.raises(BadInput, match="that cannot work"):
        await start_toy(runtime, "learner-1", remote=1, settings={"bad": True})


async def test_pickled_code_is_refused_over_tcp(runtime: LocalRuntime, tmp_path: Path) -> None:
    with joining(tmp_path), pytest.raises(ComponentFailed) as raised:
        await start_toy(runtime, "learner-1", remote=1, code=b"pickled")
    assert raised.value.component == "learner-1"


async def test_a_process_that_does_not_connect_in_time_is_named_with_the_settings(tmp_path: Path) -> None:
    processes = RemoteProcesses(tmp_path, [1, 2], loopback=True, within_s=0.2)
    await processes.open()
    with pytest.raises(ComponentFailed) as raised:
        await processes.take("learner-2", 2)
    await processes.close()
    assert raised.value.component == "learner-2"
    assert {"run.dir", "learner.collective_timeout_s"} <= set(raised.value.message.replace(",", "").split())


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(["wrong"], id="wrong token"),
        pytest.param(["wörng"], id="wrong token that is not ASCII"),
        pytest.param([{"number": 1, "pid": 1, "host": ""}], id="no token"),
        pytest.param(["x" * 10_000], id="too long"),
    ],
)
async def test_a_client_without_the_token_is_dropped_without_a_reply(
    runtime: LocalRuntime, tmp_path: Path, messages: list[object]
) -> None:
    assert await offer(tmp_path, *messages) == b""
    with joining(tmp_path) as process:  # the place is still free
        assert await (await start_toy(runtime, "learner-1", remote=1)).pid() == process.pid


async def test_a_client_that_never_speaks_holds_up_nobody(runtime: LocalRuntime, tmp_path: Path) -> None:
    with socket.create_connection(("127.0.0.1", invitation(tmp_path).port)), joining(tmp_path) as process:
        assert await (await start_toy(runtime, "learner-1", remote=1)).pid() == process.pid


@pytest.mark.usefixtures("remote")
async def test_a_process_that_is_not_expected_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="7"):
        await asyncio.to_thread(connect, tmp_path, 7, "127.0.0.1", WITHIN_S)


async def test_a_second_process_with_the_same_number_is_refused(tmp_path: Path) -> None:
    processes = RemoteProcesses(tmp_path, [1, 2], loopback=True, within_s=WITHIN_S)
    await processes.open()
    first = await asyncio.to_thread(connect, tmp_path, 1, "127.0.0.1", WITHIN_S)
    with first, pytest.raises(OutpaceError, match=str(os.getpid())):
        await asyncio.to_thread(connect, tmp_path, 1, "127.0.0.1", WITHIN_S)
    await processes.close()


async def test_nobody_can_connect_when_all_are_there(tmp_path: Path, remote: RemoteProcesses) -> None:
    port = invitation(tmp_path).port
    with await asyncio.to_thread(connect, tmp_path, 1, "127.0.0.1", WITHIN_S):
        await remote.take("learner-1", 1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


def test_a_process_that_does_not_see_the_run_directory_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=naming("run.dir")):
        connect(tmp_path, 1, "127.0.0.1", 0.1)


@pytest.mark.usefixtures("remote")
async def test_a_run_directory_of_another_path_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / INVITATION_FILE).write_bytes((tmp_path / INVITATION_FILE).read_bytes())
    with pytest.raises(BadInput, match=naming("run.dir")):
        await asyncio.to_thread(connect, elsewhere, 1, "127.0.0.1", WITHIN_S)


async def test_a_program_that_got_the_port_of_an_earlier_controller_is_not_obeyed(tmp_path: Path) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(wire.frame(wire.encode(Accepted("a guess"))))
        writer.close()

    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        old = Invitation(str(tmp_path), port, "token", "answer")
        (tmp_path / INVITATION_FILE).write_bytes(msgspec.json.encode(old))
        connecting = asyncio.create_task(asyncio.to_thread(connect, tmp_path, 1, "127.0.0.1", WITHIN_S))
        processes = RemoteProcesses(tmp_path, [1], loopback=True, within_s=WITHIN_S)
        await processes.open()  # with a new invitation
        with await connecting:
            await processes.take("learner-1", 1)
        await processes.close()


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(wire.MAX_FRAME, id="a large frame"),
        pytest.param(HELLO_BYTES, id="a frame that never ends"),
    ],
)
async def test_a_program_that_is_not_the_controller_does_not_hold_up_a_process(tmp_path: Path, size: int) -> None:
    left = asyncio.Event()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.HEADER.pack(size))
        with contextlib.suppress(ConnectionError):
            while True:
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.write(b"\0")
        left.set()

    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        old = Invitation(str(tmp_path), server.sockets[0].getsockname()[1], "token", "answer")
        (tmp_path / INVITATION_FILE).write_bytes(msgspec.json.encode(old))
        with pytest.raises(BadInput, match=naming("run.dir")):
            await asyncio.to_thread(connect, tmp_path, 1, "127.0.0.1", 0.5)
        await left.wait()


async def test_a_log_that_cannot_be_written_is_an_error_on_both_sides_that_names_the_setting(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    def join() -> None:
        connection = connect(tmp_path, 1, "127.0.0.1", WITHIN_S)
        start = await_start(connection)
        become_component(connection, msgspec.structs.replace(start, log=str(tmp_path / "missing" / "log")), {})

    joining = asyncio.create_task(asyncio.to_thread(join))
    for each in (start_toy(runtime, "learner-1", remote=1), joining):
        with pytest.raises(BadInput, match=naming("run.dir")):
            await each


async def test_a_process_that_waits_ends_with_the_controller(tmp_path: Path) -> None:
    processes = RemoteProcesses(tmp_path, [1, 2], loopback=True, within_s=WITHIN_S)
    await processes.open()
    with joining(tmp_path) as process:
        await processes.take("learner-1", 1)
        await processes.close()
        assert await exit_code(process) == 1


@pytest.mark.usefixtures("remote")
async def test_only_the_user_can_read_the_invitation(tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / INVITATION_FILE).stat().st_mode) == 0o600


async def test_the_invitation_is_withdrawn_at_the_end(tmp_path: Path) -> None:
    processes = RemoteProcesses(tmp_path, [1], loopback=True, within_s=WITHIN_S)
    await processes.open()
    await processes.close()
    assert os.listdir(tmp_path) == []
