"""Child processes: start one, connect to it, watch it, forward its output, and end it.

    ChildProcess      a Python module as a child, with a channel over an inherited socket pair
    start_program     any other program, which dies with this process
    ProcessOutput     what a child prints, forwarded to this process's stderr

Components (`outpace.runtime.local`) and user-code processes (`outpace.runtime.user_code`) both use `ChildProcess` and
the RPC of `outpace.runtime.rpc`. `outpace.runtime.process_tree` finds and ends everything that a child starts.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Self

from outpace.errors import BadInput
from outpace.runtime import wire
from outpace.runtime.die_with_parent import command_dying_with_parent
from outpace.runtime.process_tree import end_process_tree_async
from outpace.runtime.rpc import Channel
from outpace.runtime.torchrun import without_torchrun

log = logging.getLogger(__name__)

CHUNK = 64 * 1024
"""Bytes read from a pipe at a time."""


def describe_exit(status: int) -> str:
    """Describe an exit status in words that follow the name of the process."""
    if status < 0:
        with suppress(ValueError):  # a signal without a name in Python
            return f"was killed by {signal.Signals(-status).name}"
    return f"exited with code {status}"


class ChildProcess:
    """A child that runs a Python module as `python -m MODULE FD PARENT ...`, where FD is its end of the channel."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self._process = process
        self.channel = channel
        self.ended = asyncio.create_task(process.wait(), name=f"wait for process {process.pid}")

    @classmethod
    async def start(
        cls,
        module: str,
        *arguments: str,
        environment: dict[str, str],
        output: int | IO[Any],
        new_session: bool = False,
        max_frame: int = wire.MAX_FRAME,
    ) -> Self:
        """Start the child. Stdout and stderr go to `output`; `max_frame` limits the frames that it may send."""
        ours, theirs = socket.socketpair()
        variables = without_torchrun(os.environ) | environment
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid()), *arguments,
                    pass_fds=[theirs.fileno()], env=variables, start_new_session=new_session,
                    stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        try:
            return cls(process, Channel(*await asyncio.open_connection(sock=ours), max_frame))
        except BaseException:  # it has received nothing yet, so it has started nothing
            ours.close()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.returncode is None

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.lives:
            self._process.send_signal(number)

    async def gone(self, within_s: float) -> bool:
        """Wait up to `within_s` for the process to end. Returns whether it has."""
        await asyncio.wait({self.ended}, timeout=within_s)
        return self.ended.done()

    async def wait_end(self) -> str:
        """Wait until the process has ended and describe how."""
        return describe_exit(await asyncio.shield(self.ended))

    async def end(self, mark: str, whose: str) -> None:
        """Kill the process with everything it started. `mark` is the mark in its environment."""
        await end_program(self._process, mark, whose)

    async def describe_end(self, within_s: float) -> str:
        """Describe how the process ended. Call it when the channel has closed, which happens shortly before the end."""
        return describe_exit(self.ended.result()) if await self.gone(within_s) else "closed its connection"


NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR)
"""Errno values that mean a program can never be started."""


async def start_program(
    command: Sequence[str], environment: Mapping[str, str], mark: str, setting: str, **streams: Any
) -> asyncio.subprocess.Process:
    """Start a program in its own session, so that it dies with this process. `mark` is the mark in its environment,
    `setting` names it in messages. Raises `BadInput` if it can never be started, `OSError` if it cannot be now."""
    reading, writing = os.pipe()
    errors, transport = await pipe_reader(reading)
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *command_dying_with_parent(command, writing), pass_fds=[writing], env=environment,
                start_new_session=True, **streams,
            )  # fmt: skip
        finally:
            os.close(writing)
        try:
            number = await errors.read()
            if number:
                raise _not_started(f"{setting}: cannot start {command[0]}", int(number))
        except BaseException:
            await end_program(process, mark, command[0])
            raise
        return process
    finally:
        transport.close()


def _not_started(what: str, number: int) -> BadInput | OSError:
    why = os.strerror(number)
    return BadInput(f"{what}: {why}") if number in NO_PROGRAM else OSError(number, why)


async def end_program(process: asyncio.subprocess.Process, mark: str, whose: str, within_s: float = 2.0) -> None:
    """Kill a child with everything it started and wait up to `within_s` until it is reaped."""
    gone = await end_process_tree_async(process.pid, mark)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), within_s)
    if not gone or process.returncode is None:
        log.warning("%s: processes of group %d could not be killed", whose, process.pid)


async def pipe_reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Return a stream reader for the reading end of a pipe, and its transport, which closes the pipe."""
    stream = asyncio.StreamReader(limit=CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
    )
    return stream, transport


async def write_input(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    """Write `data` to the stdin of a program, or as much as the program reads, then close the stream."""
    assert stream is not None, "the program was started with a stdin pipe"
    with suppress(ConnectionError):  # a program need not read its input
        stream.write(data)
        await stream.drain()
    stream.close()


MAX_OUTPUT = 64 * 1024
"""Bytes of output forwarded per call."""
DROP_PAUSE_S = 0.01
"""Pause between two dropped chunks: at most 6 MB/s are read."""
DRAIN_S = 0.5
MAX_TAIL = 4096
"""Bytes kept from the end of the output, which often show the cause of a failure."""


class ProcessOutput:
    """Forwards what a child process prints to this process's stderr, up to `MAX_OUTPUT` bytes per call.

    A flood of output must neither fill the disk nor keep the event loop busy: output beyond the limit is read slowly,
    which blocks the writer, and dropped."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, whose: str) -> None:
        self._left = MAX_OUTPUT
        self._tail = b""
        self._whose = whose
        self._reader = reader
        self._transport = transport
        self._forwarding = asyncio.create_task(self._forward())

    @classmethod
    async def of(cls, descriptor: int, whose: str) -> ProcessOutput:
        """Read the pipe `descriptor` and close it at the end. `whose` names the writer in messages."""
        return cls(*await pipe_reader(descriptor), whose)

    @property
    def last_line(self) -> str:
        """The last line that is not blank, or an empty string."""
        lines = self._tail.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def allow(self) -> None:
        """Reset the limit for a new call."""
        self._left = MAX_OUTPUT

    async def finish(self) -> None:
        """Forward what is left in the pipe and close it. Waits at most `DRAIN_S`, because another process may still
        hold the write end."""
        await asyncio.wait({self._forwarding}, timeout=DRAIN_S)
        self._forwarding.cancel()
        with suppress(asyncio.CancelledError):
            await self._forwarding
        self._transport.close()

    async def _forward(self) -> None:
        while chunk := await self._reader.read(CHUNK):
            self._tail = (self._tail + chunk)[-MAX_TAIL:]
            if self._left <= 0:
                await asyncio.sleep(DROP_PAUSE_S)
                continue
            kept, self._left = chunk[: self._left], self._left - len(chunk)
            text = kept.decode(errors="replace")
            if self._left <= 0:
                text += f"\n[{self._whose} printed more than {MAX_OUTPUT} bytes; the rest is dropped]\n"
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except OSError as error:  # a full disk, for example; keep reading, or the child would block
                log.warning("cannot forward the output of %s: %s", self._whose, error)
