"""Disposable processes that run user code (graders, environments), and pools of them.

    UserCodeProcess:  start ─▶ call, call, ... ─▶ end, which kills the whole process tree
    ProcessPool:      take ─▶ use ─▶ put_back ─▶ take ...

The child side is `outpace.runtime.user_code_child`. What a child prints goes to its parent's log, up to a limit per
call (`ProcessOutput`).

Invariants
- A call ends at its time limit or when the process ends, whatever the process does with its socket.
- Replies are decoded as one of a few structs of bounded size. Any other data, or a reply to another request, means that
  the process is broken.
- After any outcome other than a valid reply the process is not used again: `usable` is False.
- A pooled process belongs to one caller at a time. A process that is not usable is ended, never handed out.
- After `ProcessPool.close` no process, task or file descriptor is left.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from outpace.runtime import wire
from outpace.runtime.async_tools import TimeLimitError
from outpace.runtime.process_tree import TREE_MARK_VARIABLE, child_environment, describe_exit, end_process_tree_async
from outpace.runtime.rpc import Channel
from outpace.runtime.user_code_child import NumberedMessage, RaisedReply

MAX_OUTPUT = 64 * 1024
"""Bytes of output that are kept per call."""
OUTPUT_CHUNK = 64 * 1024
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
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=OUTPUT_CHUNK)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        return cls(reader, transport, whose)

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
        while chunk := await self._reader.read(OUTPUT_CHUNK):
            self._tail = (self._tail + chunk)[-MAX_TAIL:]
            if self._left <= 0:
                await asyncio.sleep(DROP_PAUSE_S)
                continue
            kept, self._left = chunk[: self._left], self._left - len(chunk)
            sys.stderr.write(kept.decode(errors="replace"))
            if self._left <= 0:
                sys.stderr.write(f"\n[{self._whose} printed more than {MAX_OUTPUT} bytes; the rest is dropped]\n")
            sys.stderr.flush()


log = logging.getLogger(__name__)

LOAD_LIMIT_S = 300.0
"""How long a process may take to start and import the user's code, which may import large libraries."""
END_LIMIT_S = 2.0
"""How long an idle process may take to exit before it is killed."""


class UserCodeError(Exception):
    """User code raised in another process. `str()` of this error is the remote traceback."""

    def __init__(self, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(remote_traceback)
        self.kind = kind
        self.message = message

    @property
    def said(self) -> str:
        """The remote exception on one line."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


class UserCodeDied(Exception):
    """The process ended or sent an invalid reply during a call. The message says how."""


class UserCodeKilled(UserCodeDied):
    """The process was killed from outside, by an operator or the OOM killer. The call need not be the cause."""


@dataclass(frozen=True)
class UserCodeKind:
    """A kind of process: the module it runs, the type of its replies, and the name of its code in messages."""

    module: str
    answers: Any
    code_of: str
    max_answer: int = 1 << 22


class UserCodeProcess:
    """Parent side of a process that runs user code."""

    def __init__(self, kind: UserCodeKind, memory_mb: int | None = None) -> None:
        """`memory_mb` limits the address space of the process."""
        self._kind = kind
        self._memory_mb = memory_mb or 0
        self._mark = secrets.token_hex(16)
        self._ids = itertools.count()
        self._sound = True
        # In its own task, so that cancelling a waiting caller leaves no half-started process.
        self._starting = asyncio.create_task(self._start())

    @property
    def usable(self) -> bool:
        """Whether the process may be used for further calls. It may still be starting."""
        if not self._sound or not self._starting.done():
            return self._sound
        return self._started() and not self._ended.done()

    def next_id(self) -> int:
        """Return the id for the next request."""
        return next(self._ids)

    async def started(self) -> None:
        """Wait until the process has started. Raises `UserCodeDied` if it could not be started."""
        try:
            await asyncio.shield(self._starting)
        except OSError as error:
            raise UserCodeDied(f"could not be started: {error}") from error

    async def call(self, request: NumberedMessage, timeout_s: float) -> Any:
        """Send a request and return the reply. Raises `UserCodeError`, `UserCodeDied` or `TimeLimitError`.

        The process is not usable until the reply has arrived, so a cancelled call makes it unusable."""
        await self.started()
        self._sound = False
        self._output.allow()
        exchange = asyncio.create_task(self._exchange(request))
        try:
            await asyncio.wait({exchange, self._ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not exchange.done():
                exchange.cancel()
        if not exchange.done():
            if self._ended.done():
                raise self._death()
            raise TimeLimitError
        reply = await self._checked_reply(exchange, request.id)
        self._sound = True
        if isinstance(reply, RaisedReply):
            raise UserCodeError(reply.kind, reply.message, reply.traceback)
        return reply

    def broken(self, how: str) -> UserCodeDied:
        """Mark the process as unusable after an invalid reply and return the error to raise."""
        self._sound = False
        return UserCodeDied(how)

    async def end(self, patience_s: float = 0.0) -> None:
        """Kill the process and everything it started, after giving it `patience_s` to exit by itself."""
        self._sound = False
        await asyncio.wait({self._starting})
        if not self._started():
            return
        self._channel.close()
        if patience_s:
            await asyncio.wait({self._ended}, timeout=patience_s)
        gone = await end_process_tree_async(self._process.pid, self._mark)
        await asyncio.wait({self._ended}, timeout=END_LIMIT_S)
        await self._output.finish()
        if not gone or not self._ended.done():
            log.warning("%s: processes of group %d could not be killed", self._kind.code_of, self._process.pid)

    def _started(self) -> bool:
        return not self._starting.cancelled() and self._starting.exception() is None

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        environment = {**os.environ, **child_environment(1), TREE_MARK_VARIABLE: self._mark}
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._kind.module, str(theirs.fileno()), str(self._memory_mb), str(os.getpid()),
                pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL, stdout=writing, stderr=writing,
            )  # fmt: skip
        except BaseException:
            ours.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        self._ended = asyncio.create_task(self._process.wait())
        self._channel = Channel(*await asyncio.open_connection(sock=ours))
        self._output = await ProcessOutput.of(reading, self._kind.code_of)

    async def _exchange(self, request: NumberedMessage) -> Any:
        await self._channel.send(request)
        return await self._channel.receive(self._kind.answers, self._kind.max_answer)

    async def _checked_reply(self, exchange: asyncio.Task[Any], request_id: int) -> Any:
        try:
            reply = exchange.result()
        except (wire.WireError, RecursionError) as error:  # RecursionError: lists nested a thousand deep
            raise self.broken(f"sent an invalid answer: {error}") from None
        except ConnectionError:
            reply = None
        if reply is None:
            await asyncio.wait({self._ended}, timeout=END_LIMIT_S)  # the socket closes shortly before the process ends
            raise self._death()
        if reply.id != request_id:
            raise self.broken("sent an answer to another request")
        return reply

    def _death(self) -> UserCodeDied:
        if not self._ended.done():
            return UserCodeDied("closed its connection")
        status = self._ended.result()
        kind = UserCodeKilled if status == -signal.SIGKILL else UserCodeDied
        return kind(describe_exit(status))


class PooledProcess(Protocol):
    """A process in a pool, or an object that owns one."""

    @property
    def usable(self) -> bool: ...

    async def end(self, patience_s: float = 0.0) -> None: ...


M = TypeVar("M", bound=PooledProcess)


class ProcessPool(Generic[M]):
    """Keeps processes for reuse: starts them on demand and replaces those that had to be killed."""

    def __init__(self, make: Callable[[], M]) -> None:
        self._make = make
        self._idle: list[M] = []
        self._busy: set[M] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def take(self) -> M:
        """Return an idle process, preferring a used one, or start one. Raises `UserCodeDied` after `close`."""
        if self._closed:
            raise UserCodeDied("was closed")
        self._drop_unusable()
        member = self._idle.pop() if self._idle else self._make()
        self._busy.add(member)
        return member

    def start_spares(self, spare: int) -> None:
        """Start processes ahead of time until `spare` are idle, so that the next caller does not wait for a start.
        Does nothing after `close`. New processes are used last."""
        missing = 0 if self._closed else spare - len(self._idle)
        self._idle[:0] = [self._make() for _ in range(missing)]

    def put_back(self, member: M) -> None:
        """Return a process to the pool. It is ended if it is not usable."""
        self._busy.discard(member)
        if self._closed:
            return  # `close` ends it
        if member.usable:
            self._idle.append(member)
        else:
            self._end(member)

    async def close(self) -> None:
        self._closed = True
        for member in self._busy:
            self._end(member)
        for member in self._idle:
            self._end(member, END_LIMIT_S)
        self._idle.clear()
        await asyncio.gather(*self._endings)

    def _drop_unusable(self) -> None:
        """Remove idle processes that ended since their last call."""
        idle, self._idle = self._idle, []
        for member in idle:
            if member.usable:
                self._idle.append(member)
            else:
                self._end(member)

    def _end(self, member: M, patience_s: float = 0.0) -> None:
        """End a process in a background task, so that callers do not wait for it."""
        ending = asyncio.create_task(member.end(patience_s))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
