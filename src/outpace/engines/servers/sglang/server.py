"""An SGLang server, 0.5.8 or later, over HTTP.

It takes and gives token ids by `/generate`. Traps of its protocol, which shape what is here:

- It ends every request whose name begins with the one given: names are random and of one length.
- A request that it has not queued yet, because it is paused, cannot be ended: we stop reading it at its first token.
- Its pause `in_place` keeps keys and values. `retract` throws away those of running requests, but not the prefixes that
  are cached under their salt, and the cache cannot be flushed while requests are queued: trying to as part of an update
  kills the server. So to recompute, requests are retracted, then ended, the cache is flushed, and they are asked again
  with what they have, under another salt. Its pause `abort` polls until nothing runs, and is not used.
- Changing the label of the weights ends all requests unless told not to. Tokens that are still on their way through the
  server get the label too: so it is changed only when a pause has lasted for a moment.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from outpace.engines.servers.http import Http
from outpace.engines.servers.sglang.chunks import Reader
from outpace.engines.servers.sglang.facts import (
    ABORT,
    CONTINUE,
    FLUSH,
    LABEL,
    PAUSE,
    TOKENIZE,
    pressure_of,
    read_facts,
    read_label,
    read_loads,
)
from outpace.engines.servers.sglang.sampling import GENERATE, body
from outpace.engines.servers.spec import Ask, Facts, Piece, Pressure, Span
from outpace.errors import ServerFailed, ServerFaulty, ServerRefused, one_line
from outpace.types import Sampling, Version

_ASKED_S = 20.0
_LEAVING_S = 5.0
_TRAVEL_S = 0.05  # tokens take less from being sampled to being sent; a swap mostly takes longer


@dataclass
class _Run:
    """One request under way, or one part of it. `cut`: it is to be read no further, and why."""

    rid: str
    cut: Literal["aborted", "moved"] | None = None


class SglangServer:
    """`seeded`: send each request's seed. `control_s`: how long a call that pauses or resumes may take."""

    def __init__(self, http: Http, *, control_s: float = 120.0, seeded: bool = False) -> None:
        self.url = http.url
        self.http = http
        self._control_s = control_s
        self._seeded = seeded
        self._mark = f"outpace-{uuid.uuid4().hex[:12]}-"  # what our labels begin with, and nobody else's
        self._version: Version | None = None  # that it is labelled with
        self._moves = 0  # how often running requests were made to recompute
        self._retracted = 0
        self._still = 0.0  # since when it samples nothing
        self._runs: dict[str, _Run] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def facts(self) -> Facts:
        return await read_facts(self.http)

    async def tokenized(self, text: str) -> list[int] | None:
        asked = {"prompt": text, "add_special_tokens": False}
        try:
            said = await self.http.post(TOKENIZE, asked, deadline_s=_ASKED_S, repeatable=True)
        except ServerRefused:
            return None
        tokens = said.get("tokens") if isinstance(said, dict) else None
        return [int(token) for token in tokens] if isinstance(tokens, list) else None

    async def stream(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Goes on by itself with what was moved. The spans are of all parts together, and there are none where an
        adapter samples: the label is that of the model beneath it."""
        tokens: list[int] = []
        spans: list[Span] | None = []
        while True:
            sent = None if ask.adapter else self._version
            reader = Reader(f"{self.url}{GENERATE}", sent, self._version_of)
            began = len(tokens)
            rest = _rest(ask, tokens)
            if rest is None:
                yield Piece([], [], _ending(ask, tokens), spans)
                return
            async with aclosing(self._part(ask.id, rest, reader)) as pieces:
                async for piece in pieces:
                    tokens += piece.tokens
                    if piece.stop is not None:
                        yield replace(piece, spans=_joined(spans, reader, began, len(tokens)))
                        return
                    yield piece
            spans = _joined(spans, reader, began, len(tokens))

    async def _part(self, ask_id: str, ask: Ask, reader: Reader) -> AsyncGenerator[Piece, None]:
        """Up to its end, or until it is moved: then the last piece has no stop reason."""
        run = self._runs[ask_id] = _Run(uuid.uuid4().hex)
        asked = body(ask, run.rid, f"{ask.salt}/{self._moves}", seeded=self._seeded)
        ended = False
        try:
            async with aclosing(self.http.events(GENERATE, asked)) as payloads:
                async for payload in payloads:
                    piece = reader.piece_of(payload)
                    ended = piece.stop is not None
                    if run.cut == "moved" and piece.stop in (None, "aborted"):
                        yield replace(piece, stop=None)
                        return
                    if run.cut == "aborted" and piece.stop is None:
                        piece = replace(piece, stop="aborted")
                    yield piece
                    if piece.stop is not None:
                        return
            raise ServerFaulty(f"{self.url}{GENERATE}: a stream ended without a finish reason")
        finally:
            if self._runs.get(ask_id) is run:
                del self._runs[ask_id]
            if not ended:
                self._leave(run.rid)

    async def abort(self, request_ids: list[str]) -> bool:
        await self._cut([run for name in request_ids if (run := self._runs.get(name))], "aborted")
        return True

    async def probe(self, deadline_s: float) -> None:
        ask = Ask("probe", np.zeros(1, dtype=np.int32), Sampling(max_tokens=1, seed=0), salt="probe")
        asked = {**body(ask, uuid.uuid4().hex, ask.salt, seeded=False), "stream": False}
        said = await self.http.post(GENERATE, asked, deadline_s=deadline_s)
        piece = Reader(f"{self.url}{GENERATE}", None, self._version_of).piece_of(msgspec.json.encode(said))
        if not piece.tokens:
            raise ServerFaulty(f"{self.url}: a probe got no token")

    async def pressure(self) -> Pressure:
        pressure = pressure_of(await read_loads(self.http), self._retracted)
        self._retracted = pressure.preemptions
        return replace(pressure, began=await self._began())

    async def _began(self) -> float | None:
        """It does not tell when it started. But one that has lost our label did so after it was given it."""
        if self._version is None:
            return None
        label = await read_label(self.http)
        return 0.0 if label is not None and self._version_of(label) is not None else 1.0

    async def pause(self) -> None:
        await self._control(PAUSE, {"mode": "in_place"})
        self._still = time.monotonic()

    async def resume(self, recompute: bool) -> None:
        if recompute:
            self._moves += 1
            await self._control(PAUSE, {"mode": "retract"})
            await self._cut([run for run in self._runs.values() if run.cut is None], "moved")
            await self._flush()
        await self._control(CONTINUE, {})

    async def paused(self) -> bool | None:
        """It answers, and does not say. `facts` sees to it that it goes on."""
        await read_label(self.http)
        return None

    async def label(self, version: Version) -> None:
        await asyncio.sleep(max(0.0, self._still + _TRAVEL_S - time.monotonic()))
        await self._control(LABEL, {"new_version": f"{self._mark}{version}", "abort_all_requests": False})
        self._version = version

    async def close(self) -> None:
        await asyncio.gather(*self._leaving)
        await self.http.close()

    async def _control(self, route: str, asked: dict[str, Any]) -> None:
        """Everything that is controlled here may be said twice."""
        said = await self.http.post(route, asked, deadline_s=self._control_s, repeatable=True)
        if isinstance(said, dict) and said.get("success") is False:
            raise ServerFaulty(f"{self.url}{route}: {one_line(said.get('message', 'failed'))}")

    async def _flush(self) -> None:
        """What is cached is of older weights and only takes up room: nobody asks with those salts any more. So it does
        no harm when the server refuses, because of somebody else's requests."""
        with suppress(ServerRefused):
            await self.http.text(FLUSH, deadline_s=self._control_s)

    async def _cut(self, runs: list[_Run], why: Literal["aborted", "moved"]) -> None:
        for run in runs:
            run.cut = why
        await asyncio.gather(
            *(self.http.post(ABORT, {"rid": run.rid}, deadline_s=_ASKED_S, repeatable=True) for run in runs)
        )

    def _leave(self, rid: str) -> None:
        """Nobody reads that request any more. The server would see so itself, but seconds later."""
        task = asyncio.ensure_future(self._end(rid))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _end(self, rid: str) -> None:
        try:
            await self.http.post(ABORT, {"rid": rid}, deadline_s=_LEAVING_S)
        except ServerFailed:
            return  # it is in trouble, which whoever sends it requests or probes will see

    def _version_of(self, label: str) -> Version | None:
        own = label.removeprefix(self._mark)
        return int(own) if own != label and own.isdecimal() else None


def _rest(ask: Ask, tokens: list[int]) -> Ask | None:
    """What is still to be sampled after these tokens; None: nothing. A request that is ended in the very step that
    would have ended it anyway is reported as aborted."""
    left = ask.sampling.max_tokens - len(tokens)
    if not tokens:
        return ask
    if left <= 0 or tokens[-1] in ask.sampling.stop_ids:
        return None
    return replace(
        ask,
        token_ids=np.concatenate([ask.token_ids, np.asarray(tokens, dtype=np.int32)]),
        sampling=msgspec.structs.replace(ask.sampling, max_tokens=left),
    )


def _ending(ask: Ask, tokens: list[int]) -> Literal["stop", "length"]:
    return "stop" if tokens[-1] in ask.sampling.stop_ids else "length"


def _joined(spans: list[Span] | None, reader: Reader, began: int, total: int) -> list[Span] | None:
    """The spans of what came before, and those of a part that began there. None: of some tokens nobody knows."""
    accounted = reader.spans[-1][2] if reader.spans else 0
    if spans is None or accounted < total - began:
        return None
    return spans + [(version, start + began, end + began) for version, start, end in reader.spans]
