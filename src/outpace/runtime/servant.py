"""A servant, a disposable process that runs code of the user, as its parent sees it.

    start ─▶ ask, ask, … ─▶ end, which leaves nothing of it behind

Its inside is `outpace.runtime.servant_child`.

Invariants
- An order ends at its time limit, or when the process ends, whatever the process does with its socket.
- What comes up is decoded as one of a few structs of bounded size. Anything else, or the answer to another order,
  means that the process makes no sense any more.
- After any outcome but an answer the process is not used again: `usable` says so.
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
"""How long a process may take to start and to import what it is to run: some import large libraries."""
END_LIMIT_S = 2.0
"""How long an idle process may take to leave by itself before it is killed."""


class CallRaised(Exception):
    """User code raised in another process. Shown to people, this is the traceback it had there."""

    def __init__(self, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(remote_traceback)
        self.kind = kind
        self.message = message

    @property
    def said(self) -> str:
        """The exception on one line."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


class ServantDied(Exception):
    """The process ended, or stopped making sense, in the middle of the call; the text says how."""


class ServantKilled(ServantDied):
    """By somebody else, an operator or the kernel short of memory: what it was at need not be the cause."""


@dataclass(frozen=True)
class Kind:
    """What sort of servant: the module it runs, what it may answer, and what people call the code in it."""

    module: str
    answers: Any
    code_of: str
    max_answer: int = 1 << 22


class Servant:
    def __init__(self, kind: Kind, memory_mb: int | None = None) -> None:
        """`memory_mb` limits the address space of the process."""
        self._kind = kind
        self._memory_mb = memory_mb or 0
        self._mark = secrets.token_hex(16)
        self._ids = itertools.count()
        self._sound = True
        # A task of its own, so that somebody who is cancelled while he waits for it leaves no half-started process.
        self._starting = asyncio.create_task(self._start())

    @property
    def usable(self) -> bool:
        """Nothing is known against it; it may still be starting."""
        if not self._sound or not self._starting.done():
            return self._sound
        return self._started() and not self._ended.done()

    def next_id(self) -> int:
        """The number of the next order."""
        return next(self._ids)

    async def started(self) -> None:
        """Raises `ServantDied` if the system could not start it."""
        try:
            await asyncio.shield(self._starting)
        except OSError as error:
            raise ServantDied(f"could not be started: {error}") from error

    async def ask(self, order: Numbered, timeout_s: float) -> Any:
        """The answer to `order`; `CallRaised`, `ServantDied` or `TimeLimitError` otherwise.

        Until it is here the process counts as unsound: whoever is cancelled leaves it so."""
        await self.started()
        self._sound = False
        self._output.allow()
        exchange = asyncio.create_task(self._exchange(order))
        try:
            await asyncio.wait({exchange, self._ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not exchange.done():
                exchange.cancel()
        if not exchange.done():
            if self._ended.done():
                raise self._death()
            raise TimeLimitError
        answer = await self._understood(exchange, order.id)
        self._sound = True
        if isinstance(answer, Raised):
            raise CallRaised(answer.kind, answer.message, answer.traceback)
        return answer

    def broken(self, how: str) -> ServantDied:
        """The error to raise when an answer makes no sense; the process is not used again."""
        self._sound = False
        return ServantDied(how)

    async def end(self, patience_s: float = 0.0) -> None:
        """End the process and all it has started; with patience, after it had the time to leave by itself."""
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
            log.warning("%s left processes of group %d that cannot be ended", self._kind.code_of, self._process.pid)

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

    async def _exchange(self, order: Numbered) -> Any:
        await self._channel.send(order)
        return await self._channel.receive(self._kind.answers, self._kind.max_answer)

    async def _understood(self, exchange: asyncio.Task[Any], order: int) -> Any:
        try:
            answer = exchange.result()
        except (wire.WireError, RecursionError) as error:  # RecursionError: lists in lists, a thousand deep
            raise self.broken(f"sent something else than an answer: {error}") from None
        except ConnectionError:
            answer = None
        if answer is None:
            await asyncio.wait({self._ended}, timeout=END_LIMIT_S)  # a socket closes a moment before its process ends
            raise self._death()
        if answer.id != order:
            raise self.broken("answered a question that was not asked")
        return answer

    def _death(self) -> ServantDied:
        if not self._ended.done():
            return ServantDied("closed its connection")
        status = self._ended.result()
        kind = ServantKilled if status == -signal.SIGKILL else ServantDied
        return kind(how_it_ended(status))
