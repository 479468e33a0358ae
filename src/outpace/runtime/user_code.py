"""Disposable processes that run user code (graders, environments), and pools of them.

    UserCodeProcess:  start ─▶ call, call, ... ─▶ end, which kills the whole process tree
    ProcessPool:      take ─▶ use ─▶ put_back ─▶ take ...

The child side is `outpace.runtime.user_code_child`. It serves the RPC of `outpace.runtime.rpc`, one call at a time.
What a child prints goes to its parent's log, up to a limit per call.

Invariants
- A call ends at its time limit or when the process ends, whatever the process does with its socket.
- Replies have a bounded size and the type that the protocol declares. Any other data, or a reply to a call that was not
  made, means that the process is broken.
- After any outcome other than a valid reply the process is not used again: `usable` is False.
- A pooled process belongs to one caller at a time. A process that is not usable is ended, never handed out.
- After `ProcessPool.close` no process, task or file descriptor is left.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar, cast

from outpace.errors import ComponentFailed, ComponentLost, one_line
from outpace.runtime.async_tools import with_time_limit
from outpace.runtime.child_process import ChildProcess, ProcessOutput
from outpace.runtime.process_table import MARK_VARIABLE, new_mark
from outpace.runtime.process_tree import child_environment
from outpace.runtime.rpc import RpcFailure, RpcProxy
from outpace.runtime.wire import WireError

LOAD_LIMIT_S = 300.0
"""How long a process may take to start and import the user's code, which may import large libraries."""
END_LIMIT_S = 2.0
"""How long an idle process may take to exit before it is killed."""


class UserCodeError(Exception):
    """User code raised. `str()` of this error is the traceback, `kind` the qualified name of the exception class."""

    def __init__(self, failure: RpcFailure) -> None:
        super().__init__(failure.traceback)
        self.kind = failure.kind
        self.name = failure.name
        self.message = one_line(failure.message)

    @property
    def said(self) -> str:
        """The exception on one line."""
        return f"{self.name}: {self.message}" if self.message else self.name


class UserCodeDied(Exception):
    """The process ended or sent an invalid reply during a call. The message says how."""


class UserCodeKilled(UserCodeDied):
    """The process was killed from outside, by an operator or the OOM killer. The call need not be the cause."""


P = TypeVar("P")
T = TypeVar("T")


class UserCodeProcess(Generic[P]):
    """Parent side of a process that runs user code."""

    def __init__(
        self, module: str, protocol: type[P], whose: str, memory_mb: int | None, max_answer: int = 1 << 22
    ) -> None:
        """Start `python -m module`, which serves `protocol`. `whose` names its code in messages, `memory_mb` limits its
        address space, `max_answer` the bytes of a reply."""
        self._module = module
        self._protocol = protocol
        self._whose = whose
        self._memory_mb = memory_mb or 0
        self._max_answer = max_answer
        self._mark = new_mark()
        self._sound = True
        # In its own task, so that cancelling a waiting caller leaves no half-started process.
        self._starting = asyncio.create_task(self._start())

    @property
    def usable(self) -> bool:
        """Whether the process may be used for further calls. It may still be starting."""
        if not self._sound or not self._starting.done():
            return self._sound
        return self._started() and self._child.lives

    async def call(self, request: Callable[[P], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Make one call and return its result. Raises `UserCodeError`, `UserCodeDied` or `TimeLimitError`.

        The process is not usable until the reply has arrived, so a cancelled call makes it unusable."""
        try:
            await asyncio.shield(self._starting)
        except OSError as error:
            raise UserCodeDied(f"could not be started: {error}") from error
        self._sound = False
        self._output.allow()
        try:
            result = await with_time_limit(timeout_s, request(cast(P, self._remote)))
        except UserCodeError:
            self._sound = True
            raise
        except ComponentLost:
            raise await self._death() from None
        except ComponentFailed as error:
            raise UserCodeDied(error.message) from None
        except (WireError, RecursionError) as error:  # RecursionError: lists nested a thousand deep
            raise UserCodeDied(f"sent an invalid answer: {error}") from None
        self._sound = True
        return result

    def broken(self) -> UserCodeDied:
        """Mark the process as unusable after an invalid result and return the error to raise."""
        self._sound = False
        return UserCodeDied("sent an invalid answer")

    async def end(self, patience_s: float = 0.0) -> None:
        """Kill the process and everything it started, after giving it `patience_s` to exit by itself."""
        self._sound = False
        await asyncio.wait({self._starting})
        if not self._started():
            return
        self._remote.detach(ComponentLost(self._whose, "was ended"))
        if patience_s:
            await self._child.gone(patience_s)
        await self._child.end(self._mark, self._whose)
        await self._output.finish()

    def _started(self) -> bool:
        return not self._starting.cancelled() and self._starting.exception() is None

    async def _start(self) -> None:
        reading, writing = os.pipe()
        try:
            self._child = await ChildProcess.start(
                self._module, str(self._memory_mb),
                environment={**child_environment(1), MARK_VARIABLE: self._mark}, output=writing, new_session=True,
                max_frame=self._max_answer,
            )  # fmt: skip
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        try:
            self._output = await ProcessOutput.of(reading, self._whose)
        except BaseException:
            self._child.kill()
            raise
        self._remote = RpcProxy(self._protocol, self._child.channel, self._whose, math.inf, UserCodeError)
        # Pending calls fail when the process ends, even if a forked copy of it holds the socket open.
        lost = ComponentLost(self._whose, "has ended")
        self._child.ended.add_done_callback(lambda _: self._remote.detach(lost))

    async def _death(self) -> UserCodeDied:
        how = await self._child.describe_end(END_LIMIT_S)
        killed = self._child.ended.done() and self._child.ended.result() == -signal.SIGKILL
        return (UserCodeKilled if killed else UserCodeDied)(how)


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
