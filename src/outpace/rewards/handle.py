"""One grader process, as the rollout worker sees it.

    start ─▶ load, once per function ─▶ call, call, … ─▶ end, which leaves nothing of it behind

Invariants
- A call ends at its time limit, or when the process ends, whatever the process does with its socket.
- What comes up is decoded as one of a few structs of bounded size and checked again. Anything else, or the answer to
  another question, means that the process makes no sense any more.
- After any outcome but an answer the process is not used again: `usable` says so.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import secrets
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from outpace import wire
from outpace.errors import RewardFailed
from outpace.resources import child_environment
from outpace.rewards.arguments import packed
from outpace.rewards.grader import Answer, Ask, Load, Order, Raised, Refused, Scores
from outpace.rewards.outcomes import CallRaised, GraderDied, TimeLimitError
from outpace.rewards.output import Output
from outpace.runtime.family import MARK, end_family
from outpace.runtime.rpc import Channel

log = logging.getLogger(__name__)

LOAD_LIMIT_S = 300.0
"""How long a process may take to start and to import a function: some import large libraries."""
END_LIMIT_S = 2.0
"""How long an idle process may take to leave by itself before it is killed."""
MAX_ANSWER = 1 << 22


@dataclass(frozen=True)
class Source:
    """Where a grader gets a function from: `reference`, or `code` where that is empty."""

    reference: str = ""
    code: bytes = b""


class Grader:
    def __init__(self, memory_mb: int | None = None) -> None:
        self._memory_mb = memory_mb or 0
        self._mark = secrets.token_hex(16)
        self._ids = itertools.count()
        self._loaded: set[str] = set()
        self._sound = False
        # A task of its own, so that somebody who is cancelled while he waits for it leaves no half-started process.
        self._starting = asyncio.create_task(self._start())

    @property
    def usable(self) -> bool:
        return self._sound and not self._ended.done()

    async def load(self, name: str, source: Source) -> None:
        """Have the function ready in the process; `CallRaised`, `GraderDied` or `TimeLimitError` otherwise."""
        await asyncio.shield(self._starting)
        if name in self._loaded:
            return
        await self._ask(Load(next(self._ids), name, source.reference, source.code), LOAD_LIMIT_S)
        self._loaded.add(name)

    async def call(self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float) -> Scores:
        """What the function gave: `RewardFailed` if it is unusable, else as `load`."""
        body, by_value = packed(arguments)
        self._output.allow()
        answer = await self._ask(Ask(next(self._ids), name, count, body, by_value), timeout_s)
        if not isinstance(answer, Scores) or not _are_scores(answer.values, count):
            raise self._broken("gave an answer that is none")
        return answer

    async def end(self, patience_s: float = 0.0) -> None:
        """End the process and all it has started; with patience, after it had the time to leave by itself."""
        self._sound = False
        await asyncio.wait({self._starting})
        if self._starting.exception() is not None:
            return
        self._channel.close()
        if patience_s:
            await asyncio.wait({self._ended}, timeout=patience_s)
        gone = await asyncio.to_thread(end_family, self._process.pid, self._mark)
        await asyncio.wait({self._ended}, timeout=END_LIMIT_S)
        await self._output.finish()
        if not gone or not self._ended.done():
            log.warning("a reward function left processes of group %d that cannot be ended", self._process.pid)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        environment = {**os.environ, **child_environment(1, gpu=False), MARK: self._mark}
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "outpace.rewards.grader", str(theirs.fileno()), str(self._memory_mb),
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
        self._output = await Output.of(reading)

    async def _ask(self, order: Order, timeout_s: float) -> Answer:
        """The answer to `order`. Until it is here the process counts as unsound: whoever is cancelled leaves it so."""
        self._sound = False
        exchange = asyncio.create_task(self._exchange(order))
        try:
            await asyncio.wait({exchange, self._ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not exchange.done():
                exchange.cancel()
        if not exchange.done():
            if self._ended.done():
                raise GraderDied(self._how_it_ended())
            raise TimeLimitError
        answer = await self._understood(exchange, order.id)
        self._sound = True
        if isinstance(answer, Raised):
            raise CallRaised(answer.kind, answer.message, answer.traceback)
        if isinstance(answer, Refused):
            raise RewardFailed(answer.message)
        return answer

    async def _exchange(self, order: Order) -> Any:
        await self._channel.send(order)
        return await self._channel.receive(Answer, MAX_ANSWER)

    async def _understood(self, exchange: asyncio.Task[Any], order: int) -> Answer:
        try:
            answer: Answer | None = exchange.result()
        except wire.WireError as error:
            raise self._broken(f"sent something else than an answer: {error}") from None
        except ConnectionError:
            answer = None
        if answer is None:
            await asyncio.wait({self._ended}, timeout=END_LIMIT_S)  # a socket closes a moment before its process ends
            raise GraderDied(self._how_it_ended())
        if answer.id != order:
            raise self._broken("answered a question that was not asked")
        return answer

    def _how_it_ended(self) -> str:
        if not self._ended.done():
            return "closed its connection"
        status = self._ended.result()
        if status < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-status).name}"
        return f"exited with code {status}"

    def _broken(self, how: str) -> GraderDied:
        self._sound = False
        return GraderDied(how)


def _are_scores(values: list[float | None], count: int) -> bool:
    return len(values) == count and all(value is None or math.isfinite(value) for value in values)
