"""Client of an SGLang server, version 0.5.8 or later.

Requests use `/generate`, which takes and returns token ids. Pitfalls of its protocol that shape this module:

- An abort ends every request whose id starts with the given one: our ids are random and of equal length.
- A request that is not queued yet, because the server is paused, cannot be aborted: we stop reading it at its first
  token.
- Pause mode `in_place` keeps the KV cache. `retract` drops that of running requests, but not the prefixes cached under
  their salt, and the cache cannot be flushed while requests are queued: trying to as part of an update kills the
  server. So to recompute, we retract and abort the requests, flush the cache, and send them again with the tokens they
  have, under another salt. Pause mode `abort` polls until nothing runs and is not used.
- Changing the weight label aborts all requests unless told otherwise. Tokens still in transit through the server get
  the new label too, so the label is changed only after the pause has lasted a moment.
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

from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import Piece, Pressure, ServerFacts, ServerRequest, VersionSpan
from outpace.engines.server.sglang_replies import (
    ABORT,
    CONTINUE,
    FLUSH,
    GENERATE,
    LABEL,
    PAUSE,
    TOKENIZE,
    ChunkReader,
    pressure_of,
    read_facts,
    read_label,
    read_loads,
    request_body,
)
from outpace.errors import ServerFailed, ServerFaulty, ServerRefused, one_line
from outpace.types import Sampling, Version

_QUERY_S = 20.0
_ABORT_S = 5.0
_TRANSIT_S = 0.05  # upper bound from sampling a token to sending it; a swap usually takes longer


@dataclass
class _HttpRequest:
    """One HTTP request, for all or the rest of a ServerRequest. `stop_reading`: why to stop reading it."""

    rid: str
    stop_reading: Literal["aborted", "restarted"] | None = None


class SglangServer:
    """`seeded`: send each request's seed. `control_s`: timeout of pause, resume and label calls."""

    def __init__(self, http: HttpClient, *, control_s: float = 120.0, seeded: bool = False) -> None:
        self.url = http.url
        self.http = http
        self._control_s = control_s
        self._seeded = seeded
        self._label_prefix = f"outpace-{uuid.uuid4().hex[:12]}-"  # unique prefix of our weight labels
        self._version: Version | None = None  # current label
        self._restarts = 0  # how often running requests had to recompute
        self._retracted = 0
        self._paused_at = 0.0  # when it was paused
        self._active: dict[str, _HttpRequest] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    async def facts(self) -> ServerFacts:
        return await read_facts(self.http)

    async def tokenized(self, text: str) -> list[int] | None:
        body = {"prompt": text, "add_special_tokens": False}
        try:
            reply = await self.http.post(TOKENIZE, body, deadline_s=_QUERY_S, repeatable=True)
        except ServerRefused:
            return None
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        return [int(token) for token in tokens] if isinstance(tokens, list) else None

    async def stream(self, request: ServerRequest) -> AsyncGenerator[Piece, None]:
        """Sample tokens. A request that is restarted to recompute continues from its tokens; the spans cover all of its
        HTTP requests. With an adapter there are no spans, since the label is that of the base model."""
        tokens: list[int] = []
        spans: list[VersionSpan] | None = []
        while True:
            sent = None if request.adapter else self._version
            reader = ChunkReader(f"{self.url}{GENERATE}", sent, self._version_of)
            began = len(tokens)
            rest = _rest(request, tokens)
            if rest is None:
                yield Piece([], [], _stop_reason(request, tokens), spans)
                return
            async with aclosing(self._stream_once(request.id, rest, reader)) as pieces:
                async for piece in pieces:
                    tokens += piece.tokens
                    if piece.stop is not None:
                        yield replace(piece, spans=_append_spans(spans, reader, began, len(tokens)))
                        return
                    yield piece
            spans = _append_spans(spans, reader, began, len(tokens))

    async def _stream_once(
        self, ask_id: str, request: ServerRequest, reader: ChunkReader
    ) -> AsyncGenerator[Piece, None]:
        """Stream one HTTP request to its end, or until it is restarted: then the last piece has no stop reason."""
        sent = self._active[ask_id] = _HttpRequest(uuid.uuid4().hex)
        body = request_body(request, sent.rid, f"{request.salt}/{self._restarts}", seeded=self._seeded)
        ended = False
        try:
            async with aclosing(self.http.events(GENERATE, body)) as payloads:
                async for payload in payloads:
                    piece = reader.parse_chunk(payload)
                    ended = piece.stop is not None
                    if sent.stop_reading == "restarted" and piece.stop in (None, "aborted"):
                        yield replace(piece, stop=None)
                        return
                    if sent.stop_reading == "aborted" and piece.stop is None:
                        piece = replace(piece, stop="aborted")
                    yield piece
                    if piece.stop is not None:
                        return
            raise ServerFaulty(f"{self.url}{GENERATE}: a stream ended without a finish reason")
        finally:
            if self._active.get(ask_id) is sent:
                del self._active[ask_id]
            if not ended:
                self._abort_later(sent.rid)

    async def abort(self, request_ids: list[str]) -> bool:
        await self._cut([sent for name in request_ids if (sent := self._active.get(name))], "aborted")
        return True

    async def probe(self, deadline_s: float) -> None:
        request = ServerRequest("probe", np.zeros(1, dtype=np.int32), Sampling(max_tokens=1, seed=0), salt="probe")
        body = {**request_body(request, uuid.uuid4().hex, request.salt, seeded=False), "stream": False}
        reply = await self.http.post(GENERATE, body, deadline_s=deadline_s)
        piece = ChunkReader(f"{self.url}{GENERATE}", None, self._version_of).parse_chunk(msgspec.json.encode(reply))
        if not piece.tokens:
            raise ServerFaulty(f"{self.url}: a probe returned no token")

    async def pressure(self) -> Pressure:
        pressure = pressure_of(await read_loads(self.http), self._retracted)
        self._retracted = pressure.preemptions
        return replace(pressure, began=await self._began())

    async def _began(self) -> float | None:
        """A stand-in for the start time, which SGLang does not report: it changes if the server lost our label."""
        if self._version is None:
            return None
        label = await read_label(self.http)
        return 0.0 if label is not None and self._version_of(label) is not None else 1.0

    async def pause(self) -> None:
        await self._control(PAUSE, {"mode": "in_place"})
        self._paused_at = time.monotonic()

    async def resume(self, recompute: bool) -> None:
        if recompute:
            self._restarts += 1
            await self._control(PAUSE, {"mode": "retract"})
            await self._cut([sent for sent in self._active.values() if sent.stop_reading is None], "restarted")
            await self._flush()
        await self._control(CONTINUE, {})

    async def paused(self) -> bool | None:
        """None: SGLang does not report it. Raises `ServerFailed` if it does not answer. `facts` resumes the server."""
        await read_label(self.http)
        return None

    async def label(self, version: Version) -> None:
        await asyncio.sleep(max(0.0, self._paused_at + _TRANSIT_S - time.monotonic()))
        await self._control(LABEL, {"new_version": f"{self._label_prefix}{version}", "abort_all_requests": False})
        self._version = version

    async def close(self) -> None:
        await asyncio.gather(*self._aborting)
        await self.http.close()

    async def _control(self, route: str, body: dict[str, Any]) -> None:
        """POST a control call. All of them are idempotent."""
        reply = await self.http.post(route, body, deadline_s=self._control_s, repeatable=True)
        if isinstance(reply, dict) and reply.get("success") is False:
            raise ServerFaulty(f"{self.url}{route}: {one_line(reply.get('message', 'failed'))}")

    async def _flush(self) -> None:
        """Flush the cache. Its entries are of old weights and only waste memory, since their salts are not used any
        more. So it does not matter if the server refuses because other requests are queued."""
        with suppress(ServerRefused):
            await self.http.text(FLUSH, deadline_s=self._control_s)

    async def _cut(self, requests: list[_HttpRequest], why: Literal["aborted", "restarted"]) -> None:
        for sent in requests:
            sent.stop_reading = why
        await asyncio.gather(
            *(self.http.post(ABORT, {"rid": sent.rid}, deadline_s=_QUERY_S, repeatable=True) for sent in requests)
        )

    def _abort_later(self, rid: str) -> None:
        """Abort a request that is no longer read. The server would notice by itself, but seconds later."""
        task = asyncio.ensure_future(self._abort_quietly(rid))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self.http.post(ABORT, {"rid": rid}, deadline_s=_ABORT_S)
        except ServerFailed:
            return  # requests and probes will report the failure

    def _version_of(self, label: str) -> Version | None:
        own = label.removeprefix(self._label_prefix)
        return int(own) if own != label and own.isdecimal() else None


def _rest(request: ServerRequest, tokens: list[int]) -> ServerRequest | None:
    """The rest of a request after these tokens; None if it is complete. A request aborted in its very last step is
    reported as aborted although it is complete."""
    left = request.sampling.max_tokens - len(tokens)
    if not tokens:
        return request
    if left <= 0 or tokens[-1] in request.sampling.stop_ids:
        return None
    return replace(
        request,
        token_ids=np.concatenate([request.token_ids, np.asarray(tokens, dtype=np.int32)]),
        sampling=msgspec.structs.replace(request.sampling, max_tokens=left),
    )


def _stop_reason(request: ServerRequest, tokens: list[int]) -> Literal["stop", "length"]:
    return "stop" if tokens[-1] in request.sampling.stop_ids else "length"


def _append_spans(
    spans: list[VersionSpan] | None, reader: ChunkReader, began: int, total: int
) -> list[VersionSpan] | None:
    """Append the spans of one HTTP request that started at token `began`. None if the version of a token is unknown."""
    accounted = reader.spans[-1][2] if reader.spans else 0
    if spans is None or accounted < total - began:
        return None
    return spans + [(version, start + began, end + began) for version, start, end in reader.spans]
