"""One request, from the caller's word to its answer.

    wait until it may be sent ─▶ send ─▶ pieces ─▶ whole                      answer
               ▲                            └─▶ the server failed it
               └── go on from what there is ◀── retries left, server healthy ─┴─▶ neither: answer "lost"

Invariants
- Tokens that have arrived are never thrown away and never asked for again, with one exception: those of a server that
  turns out to hold other weights than ours.
- A caller that goes away takes its request with it: its stream is closed, which ends it on the server.
- A request that the server calls wrong is not asked again anywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from outpace.engines.servers.door.desk import Desk
from outpace.engines.servers.door.gate import Ending
from outpace.engines.servers.door.running import Part, Running
from outpace.engines.servers.http import jittered
from outpace.engines.servers.spec import Ask
from outpace.errors import (
    ContextFull,
    RequestFailed,
    ServerFailed,
    ServerFaulty,
    ServerRefused,
    ServerSilent,
    one_line,
)
from outpace.types import Generation, Ints, Sampling, StopReason, Version
from outpace.wording import plural

log = logging.getLogger(__name__)

_FOREIGN = "it samples by weights that are not ours; was it restarted, or does another run use it too?"
_UNKNOWN = 404  # the model, or adapter, that was asked for
_LAST_WORD_S = 5.0  # how long a server may take to end a request by name


class Sender:
    """`spans`: the server accounts for versions, and they are ours."""

    def __init__(self, desk: Desk, spans: bool) -> None:
        self._desk = desk
        self._spans = spans
        self._serial = itertools.count(1)

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        sampling = self._clamped(token_ids, sampling)
        running = self._desk.under_way.begin(request_id, token_ids, sampling)
        try:
            return running.answer.generation(await self._finished(running, min_version, pinned))
        finally:
            self._desk.under_way.end(running)

    async def abort(self, request_ids: list[str]) -> None:
        """By name, so that the last tokens arrive. Streams that have none yet, or that the server does not end in time
        or cannot end, are closed."""
        ended = self._desk.under_way.of(request_ids)
        for running in ended:
            running.aborted = True
        self._desk.gate.end("aborted", {running.id for running in ended})
        parts = [running.part for running in ended if running.part is not None]
        await self._ended_by_name([part for part in parts if part.tokens])
        for part in parts:
            part.end("aborted")

    async def _ended_by_name(self, parts: list[Part]) -> None:
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                if parts and await self._desk.server.abort([part.ask.id for part in parts]):
                    await asyncio.gather(*(part.ended.wait() for part in parts))
        except (ServerFailed, TimeoutError) as error:
            log.info("requests are ended by closing their streams: %s", one_line(error) or "no last word")

    async def _finished(self, running: Running, min_version: Version, pinned: Version | None) -> StopReason:
        """Why it ended."""
        for failures in itertools.count():
            stop = await self._once(running, min_version, pinned)
            stop = running.answer.ended if stop is None else stop
            if stop is not None:
                return stop
            if running.aborted:
                return "aborted"
            if failures >= self._desk.settings.retries or not self._goes_on_here(running):
                return "lost"
            self._desk.tally.retries += 1
            await asyncio.sleep(jittered(failures))
        raise AssertionError("counting has no end")

    def _goes_on_here(self, running: Running) -> bool:
        """A stop string may begin in one part and end in the next, which only whoever can decode would notice."""
        return self._desk.health.serves and not (running.stop_strings and len(running.answer))

    async def _once(self, running: Running, min_version: Version, pinned: Version | None) -> StopReason | None:
        """Send it, or the rest of it. None: the server has failed it."""
        desk = self._desk
        ending = await self._entered(running, lambda: desk.open and desk.shelf.admits(min_version, pinned))
        if ending is not None:
            return ending
        busy = desk.busy if pinned is None else desk.eval_busy
        version = desk.shelf.take(pinned)
        busy.enter()
        try:
            return await self._sent(running, version, pinned is None)
        finally:
            busy.leave()
            desk.shelf.give_back(version)
            desk.gate.leave()

    async def _entered(self, running: Running, may_enter: Callable[[], bool]) -> Ending | None:
        """Waits for a place at the server; None: there is one. Between being let in and being awake much can happen, so
        whoever wakes looks again."""
        gate = self._desk.gate
        while True:
            if running.aborted:
                return "aborted"
            if self._desk.health.state in ("dead", "draining"):
                return "lost"
            entered = await gate.enter(running.id, may_enter)
            if entered != "admitted":
                return entered
            if not running.aborted and may_enter():
                return None
            gate.leave()

    async def _sent(self, running: Running, version: Version, training: bool) -> StopReason | None:
        part = running.part = Part(self._ask(running, version), version, self._spans)
        try:
            failure = await self._read(running, part)
        finally:
            part.ended.set()
        if part.foreign(self._desk.shelf.newest):
            running.part = None
            self._desk.disown(_FOREIGN)
            return "lost"
        running.join(part)
        self._count(part, training)
        if failure is not None:
            return self._failed(running, part, failure)
        if part.cut is None and part.stop != "aborted":
            self._desk.health.request_passed()
        return self._stop_of(running, part)

    def _failed(self, running: Running, part: Part, failure: ServerFailed) -> StopReason | None:
        if isinstance(failure, ServerRefused):
            if part.ask.adapter is not None and failure.status == _UNKNOWN:
                self._desk.disown(_FOREIGN)
                return "lost"
            raise RequestFailed(f"the server refuses the request: {failure}") from failure
        log.info("%s: request %s was failed: %s", self._desk.settings.name, running.id, failure)
        self._desk.health.request_failed(one_line(failure))
        self._desk.react()
        return None

    def _stop_of(self, running: Running, part: Part) -> StopReason | None:
        """An abort that nobody here has asked for is the server's own failure to go on."""
        if part.stop is None:
            assert isinstance(part.cut, str)
            return part.cut
        return None if part.stop == "aborted" and not running.aborted else part.stop

    async def _read(self, running: Running, part: Part) -> ServerFailed | None:
        """Until the part ends, one way or the other; says how the server failed it, if it did."""
        reader = asyncio.create_task(self._take_pieces(running, part))
        part.read_by(reader)
        watch = asyncio.create_task(self._idle(part))
        try:
            await asyncio.wait({reader})
        finally:
            watch.cancel()
            reader.cancel()
            await asyncio.wait({reader})  # its stream is closed when it has ended
        if isinstance(part.cut, ServerFailed):
            return part.cut
        if reader.cancelled():
            return None
        failure = reader.exception()
        if failure is not None and not isinstance(failure, ServerFailed):
            raise failure
        return failure if part.stop is None else None

    async def _take_pieces(self, running: Running, part: Part) -> None:
        tally = self._desk.tally
        async with aclosing(self._desk.server.stream(part.ask)) as pieces:
            async for piece in pieces:
                part.take(piece)
                tally.pieces += 1
                tally.turns += 1
                running.tell()
                if piece.stop is not None:
                    return
        raise ServerFaulty(f"{self._desk.server.url}: a stream has ended without a finish reason")

    async def _idle(self, part: Part) -> None:
        """Cut the part when it has been silent for too long, times in which the server holds still left out."""
        idle_s, loop = self._desk.settings.idle_s, asyncio.get_running_loop()
        while True:
            left = idle_s if self._desk.held else part.heard + idle_s - loop.time()
            if left <= 0:
                part.end(ServerSilent(f"{self._desk.server.url}: no token for {idle_s:g} s"))
                return
            await asyncio.sleep(left)

    def _ask(self, running: Running, version: Version) -> Ask:
        return Ask(
            id=f"{running.id}.{next(self._serial)}",
            token_ids=running.answer.prompt,
            sampling=running.answer.sampling,
            salt=f"{self._desk.settings.incarnation}.{version}",
            adapter=self._desk.shelf.adapter(version),
        )

    def _count(self, part: Part, training: bool) -> None:
        if training:
            self._desk.tally.tokens += len(part.tokens)
            self._desk.tally.prefill_tokens += len(part.ask.token_ids)

    def _clamped(self, token_ids: Ints, sampling: Sampling) -> Sampling:
        """Refuse what can never be served; let no answer outgrow the context."""
        if len(token_ids) == 0:
            raise RequestFailed("the prompt is empty")
        if sampling.max_tokens < 1:
            raise RequestFailed(f"max_tokens is {sampling.max_tokens}")
        if "" in sampling.stop_strings:
            raise RequestFailed("a stop string is empty")
        context = self._desk.settings.context
        if context is None:
            return sampling
        if len(token_ids) >= context:
            raise ContextFull(f"the prompt has {plural(len(token_ids), 'token')}, the context {context}")
        return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, context - len(token_ids)))
