"""Components in processes that this one did not start. They connect over TCP, from this machine or others.

    controller                                            another process
    RemoteProcesses ── Invitation: port, secrets ──────▶  file in a directory that both see
                    ◀────────────── token, Hello ───────  connect
                    ── Accepted or Refused ────────────▶
                    ── StartOrder: threads, variables ─▶  become_component: exec `outpace.runtime.child`
                    ── ComponentSpec, calls ───────────▶

From then on the process is a component like a child: it serves the RPC of `outpace.runtime.rpc` on this connection.

Invariants
- The controller reads nothing from a peer before its token, and only a small frame before it accepts the peer. The
  secrets are in a file that only the user can read. Until the controller has proved that it knows the second secret,
  the peer reads only one small frame and starts nothing: another program may listen on the port of a killed controller.
- Nothing is unpickled: the spec of such a component has no `code`, and `outpace.runtime.child` refuses one that has.
- Connections are not encrypted, like those of torch.distributed: use them on a private network.
- A peer whose machine acknowledges nothing for `SILENT_S` is treated as gone.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from outpace.errors import BadInput, ComponentFailed, OutpaceError
from outpace.runtime import wire
from outpace.runtime.process_tree import child_environment
from outpace.runtime.rpc import TOKEN_S, Channel, RpcFailure, RpcFrame, check_token
from outpace.runtime.torchrun import without_torchrun
from outpace.runtime.wire import HEADER, WireError

log = logging.getLogger(__name__)

INVITATION_FILE = "learner_ranks.json"
"""In the run directory from `RemoteProcesses.open` to `close`."""

HELLO_BYTES = 4096
"""Maximum bytes of a frame from a process that is not accepted yet."""

SILENT_S = 60
"""A connection is closed if the other machine acknowledges nothing for this long."""

RETRY_S = 0.5


class Invitation(msgspec.Struct, frozen=True):
    """How to reach the controller. `token`: what the other process sends first. `answer`: what the controller sends
    back."""

    directory: str
    port: int
    token: str
    answer: str


class Hello(msgspec.Struct, frozen=True):
    """Which process this is: its number and, for messages, its pid and machine."""

    number: int
    pid: int
    host: str


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    answer: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    why: str


class StartOrder(msgspec.Struct, frozen=True):
    """How the process becomes a component. `gpus`: those it gets if it is on the controller's machine; none if it needs
    no GPU. `log`: file for its output."""

    threads: int
    gpus: list[str]
    environment: dict[str, str]
    log: str


M = TypeVar("M")


# ----------------------------------------------------------------------------------------------------------- controller


class _WatchedChannel(Channel):
    """Sets `lost` when the other side is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.lost = asyncio.Event()

    async def receive(self, kind: Any = RpcFrame) -> Any:
        try:
            message = await super().receive(kind)
        except WireError:
            self.lost.set()
            raise
        if message is None:
            self.lost.set()
        return message

    def abort(self) -> None:
        self._writer.transport.abort()


class RemoteProcess:
    """The controller's side of a process that has connected. It has the interface of `ChildProcess`."""

    def __init__(self, channel: _WatchedChannel, hello: Hello) -> None:
        self.channel: Channel = channel
        self.where = f"process {hello.pid} on {hello.host}"
        self._watched = channel

    @property
    def lives(self) -> bool:
        return not self._watched.lost.is_set()

    def kill(self) -> None:
        """Close its connection, which ends it if it can still run."""
        self._watched.abort()

    async def gone(self, within_s: float) -> bool:
        """Close the connection once everything is sent. The process then ends by itself; its end cannot be observed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.channel.finish()
        return True

    async def wait_end(self) -> str:
        """Wait until the connection is lost, and describe that."""
        await self._watched.lost.wait()
        return f"has lost its connection ({self.where})"

    async def describe_end(self, within_s: float) -> str:
        return f"closed its connection ({self.where})"


class RemoteProcesses:
    """Accepts the processes with these numbers, each once."""

    def __init__(self, directory: Path, numbers: Collection[int], loopback: bool, within_s: float) -> None:
        """`directory`: seen by all. `loopback`: all are on this machine. They may take `within_s` to connect."""
        self._file = directory / INVITATION_FILE
        self._loopback = loopback
        self._within_s = within_s
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + within_s
        self._connected: dict[int, asyncio.Future[RemoteProcess]] = {number: loop.create_future() for number in numbers}
        self._token, self._answer = secrets.token_hex(16), secrets.token_hex(16)
        self._greeting: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen, and write the invitation."""
        listening = _listening_socket(self._loopback)
        self._server = await asyncio.start_server(self._greet, sock=listening)
        port: int = listening.getsockname()[1]
        invitation = Invitation(str(self._file.parent.absolute()), port, self._token, self._answer)
        await asyncio.to_thread(_write_private, self._file, msgspec.json.encode(invitation))

    async def take(self, name: str, number: int) -> RemoteProcess:
        """Wait for a process to connect. `name` is the name of its component."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await asyncio.shield(self._connected[number])
        except TimeoutError:
            raise ComponentFailed(
                name,
                f"its process of torchrun did not connect within learner.collective_timeout_s = {self._within_s:g} s; "
                "run.dir must be in a folder that all machines share, and they must reach this one over TCP",
            ) from None

    async def close(self) -> None:
        """Close the port and all connections. Does not wait for the processes."""
        if self._server is not None:
            self._server.close()
        for task in self._greeting:
            task.cancel()
        for connected in self._connected.values():
            if connected.done() and not connected.cancelled():
                connected.result().channel.close()
            connected.cancel()
        await asyncio.to_thread(self._file.unlink, missing_ok=True)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server runs this in a task"
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)
        _keep_alive(writer.get_extra_info("socket"))
        channel = Channel(reader, writer, HELLO_BYTES)
        try:
            await check_token(channel, self._token)
            async with asyncio.timeout(TOKEN_S):
                hello = await channel.receive(Hello)
            if hello is None:
                raise WireError("closed before it said which process it is")
        except asyncio.CancelledError:
            channel.close()
            return  # the run is ending; re-raised, asyncio would log it as an error
        except (WireError, TimeoutError) as error:
            log.warning("rejected a connection to the learner's port: %s", error)
            channel.close()
            return
        self._admit(hello, _WatchedChannel(reader, writer))

    def _admit(self, hello: Hello, channel: _WatchedChannel) -> None:
        connected = self._connected.get(hello.number)
        if connected is None or connected.done():
            why = "is not expected" if connected is None else f"is {connected.result().where} already"
            channel.send(Refused(f"process {hello.number} of torchrun {why}"))
            channel.close()
            return
        channel.send(Accepted(self._answer))
        connected.set_result(RemoteProcess(channel, hello))
        if self._server is not None and all(each.done() for each in self._connected.values()):
            self._server.close()  # all have connected


def _listening_socket(loopback: bool) -> socket.socket:
    if loopback:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read. Readers never see a part of it."""
    unnamed = path.with_name(f".{path.name}.new")
    unnamed.unlink(missing_ok=True)
    descriptor = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    unnamed.rename(path)


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel close the connection if the other machine is silent. Otherwise a machine that loses power or its
    network would never be noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    linux = {"TCP_KEEPIDLE": SILENT_S // 3, "TCP_KEEPINTVL": SILENT_S // 6, "TCP_KEEPCNT": 4}
    for name, value in (*linux.items(), ("TCP_USER_TIMEOUT", 1000 * SILENT_S)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# -------------------------------------------------------------------------------------------------- the other processes


def connect(directory: Path, number: int, host: str, within_s: float) -> socket.socket:
    """Connect to the controller, whose invitation is in `directory`, as process `number`. Blocks.

    Retries, because the controller may still be starting, and the invitation may be left from an earlier one."""
    deadline = time.monotonic() + within_s
    problem = f"{directory / INVITATION_FILE} did not appear; is it the same folder on all machines?"
    while time.monotonic() < deadline:
        invitation = _read_invitation(directory)
        if invitation is not None:
            try:
                return _say_hello(invitation, directory, number, host, min(deadline, time.monotonic() + SILENT_S))
            except (OSError, WireError) as error:
                problem = f"cannot connect to {host}, port {invitation.port}: {error}"
        time.sleep(RETRY_S)
    raise BadInput(f"run.dir: {problem} (learner.collective_timeout_s = {within_s:g} s)")


def _read_invitation(directory: Path) -> Invitation | None:
    with suppress(OSError, msgspec.DecodeError):
        os.listdir(directory)  # makes an NFS client refresh the directory
        return msgspec.json.decode((directory / INVITATION_FILE).read_bytes(), type=Invitation)
    return None


def _say_hello(invitation: Invitation, directory: Path, number: int, host: str, deadline: float) -> socket.socket:
    connection = socket.create_connection((host, invitation.port), timeout=min(TOKEN_S, _remaining(deadline)))
    try:
        _keep_alive(connection)
        for message in (invitation.token, Hello(number, os.getpid(), socket.gethostname())):
            connection.sendall(wire.frame(wire.encode(message)))
        reply: Accepted | Refused | None = _receive(connection, Accepted | Refused, HELLO_BYTES, deadline)
        if reply is None:
            raise WireError("the connection was closed")
        if isinstance(reply, Refused):
            raise OutpaceError(reply.why)
        if not hmac.compare_digest(reply.answer.encode(), invitation.answer.encode()):
            raise WireError("another program listens there")
        if not _is_same(directory, invitation.directory):
            raise BadInput(f"run.dir: is {invitation.directory} there; use the same path on all machines")
        connection.settimeout(None)
        return connection
    except BaseException:
        connection.close()
        raise


def _is_same(directory: Path, other: str) -> bool:
    try:
        return directory.samefile(other)
    except OSError:
        return False


def _receive(connection: socket.socket, kind: Any, limit: int = wire.MAX_FRAME, deadline: float | None = None) -> Any:
    """Return the next frame, None if the connection is closed. Reads no further: the component reads the rest."""
    header = _read(connection, HEADER.size, deadline)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    if size > limit:
        raise WireError(f"a frame of {size} bytes")
    body = _read(connection, size, deadline)
    return None if body is None else wire.decode(body, kind)


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        connection.settimeout(None if deadline is None else _remaining(deadline))
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def _remaining(deadline: float) -> float:
    """Return the seconds until the deadline. Raises `TimeoutError` if it has passed."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("it did not reply in time")
    return remaining


def await_start(connection: socket.socket) -> StartOrder:
    """Wait until the controller starts this component. Blocks."""
    with suppress(OSError, WireError):
        start: StartOrder | None = _receive(connection, StartOrder)
        if start is not None:
            return start
    raise OutpaceError("the controller ended before it started this learner process")


def decline(connection: socket.socket, error: OutpaceError) -> None:
    """Tell the controller why this process cannot become the component."""
    connection.sendall(wire.frame(wire.encode(RpcFailure.of(0, error))))
    connection.close()


def become_component(connection: socket.socket, start: StartOrder, gpus: dict[str, str]) -> NoReturn:
    """Replace this program with that of a component, which reads its spec from the connection."""
    environment = without_torchrun(os.environ) | child_environment(start.threads) | start.environment | gpus
    try:
        output = os.open(start.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as problem:
        error = BadInput(f"run.dir: {socket.gethostname()} cannot write to {start.log}: {problem.strerror}")
        decline(connection, error)
        raise error from None
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.set_inheritable(connection.fileno(), True)
    name = os.path.splitext(os.path.basename(start.log))[0]
    command = [sys.executable, "-m", "outpace.runtime.child", str(connection.fileno()), str(os.getppid()), name]
    os.execve(sys.executable, command, environment)
