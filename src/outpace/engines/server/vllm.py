"""Client of a vLLM server, version 0.25 or later.

Requests use `/inference/v1/generate`, which takes and returns token ids, or `/v1/completions` if the server lacks that
route (it needs `--enable-scale-out`). Pause, resume and update need its dev mode (`VLLM_SERVER_DEV_MODE=1`).

Version differences are detected from the server's routes: 0.25 neither aborts requests by id nor reports weight
versions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import Piece, Pressure, ServerFacts, ServerRequest
from outpace.engines.server.vllm_replies import (
    ABORT,
    COMPLETIONS,
    GENERATE,
    LABEL,
    PAUSE,
    label_of,
    parse_chunk,
    read_facts,
    read_pressure,
    request_body,
    server_request_id,
)
from outpace.errors import ServerFaulty, ServerRefused
from outpace.types import Sampling, Version

_QUERY_S = 20.0
_PROBE_TOKENS = 64


class VllmServer:
    """`seeded`: send each request's seed. `control_s`: timeout of pause, resume and label calls. `incarnation`: of the
    run that labels the weights."""

    def __init__(
        self, http: HttpClient, *, control_s: float = 120.0, seeded: bool = False, incarnation: str = "outpace"
    ) -> None:
        self.url = http.url
        self.http = http
        self._control_s = control_s
        self._seeded = seeded
        self._incarnation = incarnation
        self._facts: ServerFacts | None = None
        self._probes = 0

    async def facts(self) -> ServerFacts:
        self._facts = await read_facts(self.http)
        return self._facts

    async def tokenized(self, text: str) -> list[int] | None:
        facts = await self._cached_info()
        data = {"model": facts.model, "prompt": text, "add_special_tokens": False}
        try:
            reply = await self.http.post("/tokenize", data, deadline_s=_QUERY_S, repeatable=True)
        except ServerRefused:
            return None
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        return [int(token) for token in tokens] if isinstance(tokens, list) else None

    async def stream(self, request: ServerRequest) -> AsyncGenerator[Piece, None]:
        facts = await self._cached_info()
        route = _route(facts)
        data = request_body(route, request, request.adapter or facts.model, seeded=self._seeded)
        where = f"{self.url}{route}"
        async with aclosing(self.http.events(route, data)) as payloads:
            async for payload in payloads:
                piece = parse_chunk(where, payload, self._incarnation)
                if piece is None:
                    continue
                yield piece
                if piece.stop is not None:
                    return
        raise ServerFaulty(f"{where}: a stream ended without a finish reason")

    async def abort(self, request_ids: list[str]) -> bool:
        facts = await self._cached_info()
        if ABORT not in facts.details["routes"]:
            return False
        if request_ids:  # an empty list would abort all requests
            names = [server_request_id(_route(facts), ask_id) for ask_id in request_ids]
            await self.http.post(ABORT, {"request_ids": names}, deadline_s=_QUERY_S, repeatable=True)
        return True

    async def probe(self, deadline_s: float) -> None:
        facts = await self._cached_info()
        self._probes += 1
        prompt = np.zeros(_probe_length(facts.context), dtype=np.int32)
        request = ServerRequest(f"probe-{self._probes}", prompt, Sampling(max_tokens=1, seed=0), salt="probe")
        data = request_body(_route(facts), request, facts.model, seeded=False)
        async with aclosing(self.http.events(_route(facts), data, first_s=deadline_s, idle_s=deadline_s)) as payloads:
            async for payload in payloads:
                piece = parse_chunk(self.url, payload, self._incarnation)
                if piece is not None and piece.tokens:
                    return
        raise ServerFaulty(f"{self.url}: a probe returned no token")

    async def pressure(self) -> Pressure:
        return await read_pressure(self.http)

    async def pause(self) -> None:
        keep = {"mode": "keep", "clear_cache": "false"}
        await self.http.post(PAUSE, query=keep, deadline_s=self._control_s, repeatable=True)

    async def resume(self, recompute: bool) -> None:
        if recompute:
            running = {"reset_running_requests": "true"}
            await self.http.post("/reset_prefix_cache", query=running, deadline_s=self._control_s, repeatable=True)
        await self.http.post("/resume", deadline_s=self._control_s, repeatable=True)

    async def paused(self) -> bool | None:
        try:
            reply = await self.http.get("/is_paused", deadline_s=_QUERY_S)
        except ServerRefused:
            return None
        return bool(reply["is_paused"]) if isinstance(reply, dict) and "is_paused" in reply else None

    async def label(self, version: Version) -> None:
        label = label_of(self._incarnation, version)
        if LABEL in (await self._cached_info()).details["routes"]:
            await self.http.post(LABEL, {"new_version": label}, deadline_s=self._control_s, repeatable=True)

    async def close(self) -> None:
        await self.http.close()

    async def _cached_info(self) -> ServerFacts:
        return self._facts or await self.facts()


def _probe_length(context: int | None) -> int:
    """Prompt length of a probe, which is often a server's first request. On CPUs with AMX, vLLM 0.32 in bfloat16
    crashes if its first prompt has 3 tokens but not if it has 40. After a longer prompt, short ones work."""
    return _PROBE_TOKENS if context is None else max(1, min(_PROBE_TOKENS, context - 2))


def _route(facts: ServerFacts) -> str:
    return GENERATE if GENERATE in facts.details["routes"] else COMPLETIONS
