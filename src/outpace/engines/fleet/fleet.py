"""Many engines as one, for a worker: every request is answered while there is somebody to answer it.

                 ┌── nobody can serve it: wait for news ◀─┐
    request ─▶ choose ─▶ an engine ─▶ answer              │
                 ▲            ├─▶ lost, with partial output ──▶ go on from there ─┐
                 │            └─▶ gone, with all that it had ─▶ ask again ────────┤
                 └────────────────────────────────────────────────────────────────┘

Invariants
- A request that an engine has lost goes on at another one, or at the same one when it is back, from the tokens that are
  known: none is sampled twice, each keeps its logprob and its version. Who asked sees one answer.
- A request is moved at most MAX_MOVES times and then fails, with the causes; it may be what kills the engines. To wait
  while nobody serves is no move. An engine's own failure that another process would not mend moves a request to the
  others, each once, and goes up where there are none.
- A request that is aborted ends at once with what is known of it, wherever it is.
- Nothing is polled: waiting requests wake when members change, a connection does, or they are aborted. An engine that
  has just failed is asked again after a pause, which grows, and only where there is no other.
- Everything runs on one event loop, and no state is half-changed across an await.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from outpace.engines.continuing import Continued
from outpace.engines.embedded.stopping import Decode
from outpace.engines.fleet.flight import Flight
from outpace.engines.fleet.links import Connect, Links, no_way
from outpace.engines.fleet.router import Router, Wish
from outpace.errors import ContextFull, OutpaceError, PartFailed, PartLost, RequestFailed, one_line
from outpace.protocols import Engine
from outpace.runtime.waits import waiting
from outpace.types import EngineStats, Generation, Ints, LoadReport, Manifest, Member, Sampling, Version
from outpace.wording import plural

log = logging.getLogger(__name__)

MAX_MOVES = 8
"""So many failures of engines a request survives."""


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
"""Before a request goes to an engine that has just failed, because there is no other: long enough in all for a server
that loses whatever it is given to be found dead."""

ANY_VERSION: Version = sys.maxsize
"""Of an engine that nothing was said about: it has to judge for itself."""


def pause_s(failures: int) -> float:
    return min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LONGEST_PAUSE_S)


class Fleet:
    """Implements `outpace.protocols.Engine` as far as a worker needs it."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        members: Sequence[Member] | None = None,
        connect: Connect = no_way,
        decode: Decode | None = None,
    ) -> None:
        """`engines` are those there is a way to already, `connect` makes one to those that join. Without `members`
        all of `engines` serve, whatever the version, until `update`. `decode` finds stop strings across the parts of
        an answer."""
        self._links = Links(engines, connect, self._tell)
        unheard_of = [Member(name, "", True, version=ANY_VERSION) for name in engines]
        self._router = Router(unheard_of if members is None else list(members))
        self._decode = decode
        self._flights: dict[str, Flight] = {}
        self._news = asyncio.Event()
        self._updates = 0
        self.moves = 0  # requests that had to go on elsewhere, since the beginning

    async def update(self, members: Sequence[Member]) -> None:
        """Who samples, as of now. Those that are gone finish what they have."""
        self._updates += 1
        self._router.update(members)
        self._links.call(members)
        self._forget_gone()
        self._tell()

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        if request_id in self._flights:
            raise RequestFailed(f"request {request_id} is under way already")
        wish = Wish(request_id, min_version, pinned)
        flight = Flight(wish, Continued(token_ids, sampling, self._decode), came_at=self._updates)
        self._flights[request_id] = flight
        try:
            while (engine := await self._engine_for(flight)) is not None:
                if (answer := await self._asked(flight, engine)) is not None:
                    return answer
            return flight.answer.generation("aborted")
        finally:
            del self._flights[request_id]
            flight.land()

    async def abort(self, request_ids: list[str]) -> None:
        at_engines: defaultdict[str, list[str]] = defaultdict(list)
        for request_id in request_ids:
            flight = self._flights.get(request_id)
            if flight is not None:
                flight.aborted = True
                if flight.engine is not None:
                    at_engines[flight.engine].append(request_id)
        self._tell()
        await asyncio.gather(*(self._abort_at(engine, ids) for engine, ids in at_engines.items()))

    async def peek(self, request_id: str, after: int) -> Ints:
        flight = self._flights.get(request_id)
        while flight is not None and not flight.landed:
            turned = flight.turned
            known = flight.answer.generation("lost").tokens[after:]
            found = known if len(known) else await self._peeked(flight, after - len(flight.answer))
            if len(found):
                return found
            if turned is flight.turned:  # nothing more comes from there: it leaves, or it ends
                await turned.wait()
        return np.zeros(0, dtype=np.int32)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        raise NotImplementedError("engines are loaded one by one, by the controller")

    async def release_pinned(self) -> None:
        raise NotImplementedError("engines are loaded one by one, by the controller")

    async def stats(self) -> EngineStats:
        raise NotImplementedError("engines are measured one by one, by the controller")

    async def close(self) -> None:
        self._links.close()

    async def _engine_for(self, flight: Flight) -> str | None:
        """Waits for one that can serve it. None: nobody wants it any more."""
        while not flight.aborted:
            news = self._news
            names = {member.name for member in self._router.members}
            barred = flight.unfit | {name for name in names if not self._links.reaches(name)}
            self._refuse_in_vain(flight, names)
            now = time.monotonic()
            engine = self._router.choose(flight.wish, now, barred)
            if engine is not None and (now >= flight.rests_until or self._router.trusts(engine, now)):
                return engine
            with waiting(f"request {flight.wish.request_id}: for an engine"):
                await _heard(news, None if engine is None else flight.rests_until - now)
        return None

    def _refuse_in_vain(self, flight: Flight, names: set[str]) -> None:
        """Where all that are left have failed it for good; and where its weights are not there, but not before there
        was word of the members since it came: it may have overtaken that of the weights."""
        wish = flight.wish
        if names and flight.unfit >= names:
            causes = "; ".join(dict.fromkeys(flight.causes))
            raise RequestFailed(f"request {wish.request_id}: no engine is left that could serve it: {causes}")
        if self._updates > flight.came_at and self._router.waits_in_vain(wish):
            raise RequestFailed(f"request {wish.request_id}: no engine has the weights of version {wish.pinned} pinned")

    async def _asked(self, flight: Flight, engine: str) -> Generation | None:
        """The answer, or None where it has to be gone on with."""
        wish, answer = flight.wish, flight.answer
        with self._at(flight, engine):
            try:
                part = await self._links[engine].generate(
                    wish.request_id, answer.prompt, answer.sampling, wish.min_version, wish.pinned
                )
            except ContextFull:
                if not len(answer):
                    raise
                return answer.generation("length")  # the parts before have filled it
            except PartFailed as error:
                self._failed(flight, engine, error)
                return None
            return self._joined(flight, engine, part)

    def _joined(self, flight: Flight, engine: str, part: Generation) -> Generation | None:
        answer = flight.answer
        if part.stop != "lost" and not len(answer):
            return part
        answer.add(part)
        ended = answer.ended
        if part.stop != "lost":
            return answer.generation("stop" if ended == "stop" else part.stop)
        if ended is not None:
            return answer.generation(ended)
        self._failed(flight, engine, PartLost(engine, "lost the request"))
        return None

    def _failed(self, flight: Flight, engine: str, error: PartFailed) -> None:
        """Raises where the request cannot be gone on with."""
        if flight.aborted:
            return
        self._router.failed(engine, time.monotonic())
        flight.causes.append(one_line(error))
        if not isinstance(error, PartLost):
            flight.unfit.add(engine)
            if flight.unfit >= {member.name for member in self._router.members}:
                raise error
        request_id = flight.wish.request_id
        if len(flight.causes) > MAX_MOVES:
            causes = "; ".join(dict.fromkeys(flight.causes))
            raise RequestFailed(
                f"request {request_id} was lost {plural(len(flight.causes), 'time')}: {causes}"
            ) from error
        self.moves += 1
        flight.rests_until = time.monotonic() + pause_s(len(flight.causes))
        log.info("request %s goes on from token %d: %s", request_id, len(flight.answer), error)

    async def _peeked(self, flight: Flight, after: int) -> Ints:
        """What the engine that has it can show; nothing where it has not got it, or is gone."""
        try:
            if flight.engine is not None:
                return await self._links[flight.engine].peek(flight.wish.request_id, after)
        except OutpaceError as error:
            log.debug("no look at request %s: %s", flight.wish.request_id, error)
        return np.zeros(0, dtype=np.int32)

    async def _abort_at(self, engine: str, request_ids: list[str]) -> None:
        try:
            if self._links.reaches(engine):
                await self._links[engine].abort(request_ids)
        except PartLost:  # and the requests with it: they end as they are
            log.info("%s went away over an abort", engine)

    @contextmanager
    def _at(self, flight: Flight, engine: str) -> Iterator[None]:
        self._router.sent(engine, flight.wish)
        flight.at(engine)
        try:
            yield
        finally:
            flight.at(None)
            self._router.ended(engine)
            self._forget_gone()

    def _forget_gone(self) -> None:
        self._links.keep_only({member.name for member in self._router.members} | self._router.load.keys())

    def _tell(self) -> None:
        """Wake whoever waits."""
        self._news.set()
        self._news = asyncio.Event()


async def _heard(news: asyncio.Event, within_s: float | None) -> None:
    """Waits for news, but not for longer than that."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await news.wait()
