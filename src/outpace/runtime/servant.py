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
from dataclasses import dataclass
from typing import Any

from outpace import wire
from outpace.resources import child_environment
from outpace.runtime.family import MARK, family_ended, how_it_ended
from outpace.runtime.limits import TimeLimitError
from outpace.runtime.output import Output
from outpace.runtime.rpc import Channel
from outpace.runtime.servant_child import Numbered, Raised

log = logging.getLogger(__name__)

LOAD_LIMIT_S = 300.0
"""How long a process may take to start and import the user's code, which may import large libraries."""
END_LIMIT_S = 2.0
"""How long an idle process may take to exit before it is killed."""


class CallRaised(Exception):
    """User code raised in another process. `str()` of this error is the remote traceback."""

    def __init__(self, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(remote_traceback)
        self.kind = kind
        self.message = message

    @property
    def said(self) -> str:
        """The remote exception on one line."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


class ServantDied(Exception):
    """The process ended or sent an invalid reply during a call. The message says how."""


class ServantKilled(ServantDied):
    """The process was killed from outside, by an operator or the OOM killer. The call need not be the cause."""


@dataclass(frozen=True)
class Kind:
    """A kind of process: the module it runs, the type of its replies, and the name of its code in messages."""

    module: str
    answers: Any
    code_of: str
    max_answer: int = 1 << 22


class Servant:
    """Parent side of a process that runs user code."""

    def __init__(self, kind: Kind, memory_mb: int | None = None) -> None:
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
            raise ServantDied(f"could not be started: {error}") from error

    async def ask(self, request: Numbered, timeout_s: float) -> Any:
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
        if isinstance(reply, Raised):
            raise CallRaised(reply.kind, reply.message, reply.traceback)
        return reply

    def broken(self, how: str) -> ServantDied:
        """Mark the process as unusable after an invalid reply and return the error to raise."""
        self._sound = False
        return ServantDied(how)

    async def end(self, patience_s: float = 0.0) -> None:
        """Kill the process and everything it started, after giving it `patience_s` to exit by itself."""
        self._sound = False
        await asyncio.wait({self._starting})
        if not self._started():
            return
        self._channel.close()
        if patience_s:
            await asyncio.wait({self._ended}, timeout=patience_s)
        gone = await family_ended(self._process.pid, self._mark)
        await asyncio.wait({self._ended}, timeout=END_LIMIT_S)
        await self._output.finish()
        if not gone or not self._ended.done():
            log.warning("%s: processes of group %d could not be killed", self._kind.code_of, self._process.pid)

    def _started(self) -> bool:
        return not self._starting.cancelled() and self._starting.exception() is None

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        environment = {**os.environ, **child_environment(1), MARK: self._mark}
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
        self._output = await Output.of(reading, self._kind.code_of)

    async def _exchange(self, request: Numbered) -> Any:
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

    def _death(self) -> ServantDied:
        if not self._ended.done():
            return ServantDied("closed its connection")
        status = self._ended.result()
        kind = ServantKilled if status == -signal.SIGKILL else ServantDied
        return kind(how_it_ended(status))
