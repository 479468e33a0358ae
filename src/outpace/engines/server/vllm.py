"""Client of a vLLM server, version 0.25 or later.

Requests use `/inference/v1/generate`, which takes and returns token ids, or `/v1/completions` if the server lacks that
route (it needs `--enable-scale-out`). Pause, resume and update need its dev mode (`VLLM_SERVER_DEV_MODE=1`).

Version differences are detected from the server's routes: 0.25 neither aborts requests by id nor reports weight
versions.

A chunk has the tokens since the last chunk, with their logprobs. An error may arrive mid-stream as a separate chunk.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import (
    QUERY_S,
    STALE,
    Piece,
    Pressure,
    Server,
    ServerFacts,
    ServerRequest,
    VersionOf,
    VersionSpan,
    check_logprobs,
    decode_chunk,
    read_models,
    sampling_parameters,
    stream_error,
)
from outpace.errors import ServerFailed, ServerFaulty, ServerRefused, one_line, plural
from outpace.types import Sampling, StopReason, Version

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
ABORT = "/abort_requests"
LABEL = "/update_weight_version"
PAUSE = "/pause"
LOAD_ADAPTER = "/v1/load_lora_adapter"

_ROUTES = (GENERATE, COMPLETIONS, ABORT, LABEL, PAUSE, LOAD_ADAPTER)
_SEED_MASK = 2**63 - 1  # the range that the server accepts
_INFO_S = 60.0  # the first call inspects the whole machine
_START_TIME = "process_start_time_seconds"
_PROBE_TOKENS = 64


class VllmServer(Server):
    """Client of one vLLM server."""

    _facts: ServerFacts | None = None

    async def facts(self) -> ServerFacts:
        self._facts = await read_facts(self.http)
        return self._facts

    async def tokenized(self, text: str) -> list[int] | None:
        facts = await self._cached_info()
        return await self._tokenized({"model": facts.model, "prompt": text, "add_special_tokens": False})

    async def stream(self, request: ServerRequest) -> AsyncGenerator[Piece, None]:
        facts = await self._cached_info()
        route = _route(facts)
        data = request_body(route, request, request.adapter or facts.model, seeded=self._seeded)
        where = f"{self.url}{route}"
        async with aclosing(self.http.events(route, data)) as payloads:
            async for payload in payloads:
                piece = parse_chunk(where, payload, self._version_of)
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
            await self.http.post(ABORT, {"request_ids": names}, deadline_s=QUERY_S, repeatable=True)
        return True

    async def pressure(self) -> Pressure:
        return await read_pressure(self.http)

    async def pause(self) -> None:
        await self._control(PAUSE, query={"mode": "keep", "clear_cache": "false"})

    async def resume(self, recompute: bool) -> None:
        if recompute:
            await self._control("/reset_prefix_cache", query={"reset_running_requests": "true"})
        await self._control("/resume")

    async def paused(self) -> bool | None:
        try:
            reply = await self.http.get("/is_paused", deadline_s=QUERY_S)
        except ServerRefused:
            return None
        return bool(reply["is_paused"]) if isinstance(reply, dict) and "is_paused" in reply else None

    async def label(self, version: Version) -> None:
        if LABEL in (await self._cached_info()).details["routes"]:
            await self._control(LABEL, {"new_version": self.label_of(version)})

    async def _cached_info(self) -> ServerFacts:
        return self._facts or await self.facts()

    async def _probe_length(self) -> int:
        """A probe is often a server's first request. On CPUs with AMX, vLLM 0.32 in bfloat16 crashes if its first
        prompt has 3 tokens but not if it has 40. After a longer prompt, short ones work."""
        context = (await self._cached_info()).context
        return _PROBE_TOKENS if context is None else max(1, min(_PROBE_TOKENS, context - 2))


def _route(facts: ServerFacts) -> str:
    return GENERATE if GENERATE in facts.details["routes"] else COMPLETIONS


def request_body(route: str, request: ServerRequest, model: str, *, seeded: bool) -> dict[str, Any]:
    """Request body for a stream of tokens and logprobs.

    The end-of-sequence token matters only if it is one of our stop ids, hence `ignore_eos`. As in the embedded engine,
    the output includes the stop token, or the token that completes a stop string."""
    parameters = _sampling(request.sampling, seeded)
    common = {"model": model, "request_id": request.id, "cache_salt": request.salt, "stream": True}
    if route == GENERATE:
        return {**common, "token_ids": request.token_ids.tolist(), "sampling_params": parameters}
    del parameters["detokenize"]  # this route always detokenizes
    prompt = {"prompt": request.token_ids.tolist(), **parameters}
    return {**common, **prompt, "add_special_tokens": False, "return_token_ids": True}


def server_request_id(route: str, ask_id: str) -> str:
    """The server's own id of the request sent as `ask_id`."""
    return f"generate-tokens-{ask_id}" if route == GENERATE else f"cmpl-{ask_id}-0"


def _sampling(sampling: Sampling, seeded: bool) -> dict[str, Any]:
    return sampling_parameters(sampling) | {
        "max_tokens": sampling.max_tokens,
        "min_tokens": 0,
        "top_k": sampling.top_k,
        "seed": sampling.seed & _SEED_MASK if seeded else None,
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token only
        "detokenize": bool(sampling.stop_strings),
    }


async def read_facts(http: HttpClient) -> ServerFacts:
    """Query the server's info. `details` has its `routes`, the model name or path (`root`), the maximum number of
    concurrent sequences (`slots`), its `device` and `max_lora_rank`."""
    version, models, routes, config = await _query_all(http)
    own = models[0]
    model_config = _section(config, "model_config")
    dtype = model_config.get("dtype")
    return ServerFacts(
        kind="vllm",
        version=version,
        model=str(own.get("id")),
        context=model_config.get("max_model_len") or own.get("max_model_len"),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        logprobs=model_config.get("logprobs_mode"),
        controls=PAUSE in routes,
        plugin=_section(config, "weight_transfer_config").get("backend") == "outpace",
        adapters=LOAD_ADAPTER in routes and bool(_section(config, "lora_config")),
        details={
            "routes": sorted(routes),
            "root": model_config.get("model") or own.get("root"),
            "slots": _section(config, "scheduler_config").get("max_num_seqs"),
            "device": _section(config, "device_config").get("device"),
            "max_lora_rank": _section(config, "lora_config").get("max_lora_rank"),
        },
    )


async def _query_all(http: HttpClient) -> tuple[str, list[dict[str, Any]], set[str], dict[str, Any] | None]:
    """Send all queries concurrently, since each may be slow. The first failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            version, models = group.create_task(_version(http)), group.create_task(read_models(http))
            routes, config = group.create_task(_routes(http)), group.create_task(_config(http))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return version.result(), models.result(), routes.result(), config.result()


async def read_pressure(http: HttpClient) -> Pressure:
    """Read the load over all engines of the server: total requests, highest KV cache usage."""
    found: dict[str, list[float]] = {}
    for line in (await http.text("/metrics", deadline_s=QUERY_S)).splitlines():
        if line.startswith(("vllm:", _START_TIME)):
            name = line.partition("{")[0].partition(" ")[0]
            found.setdefault(name, []).append(_number(http.url, line.rpartition(" ")[2]))
    if "vllm:num_requests_running" not in found:
        raise ServerFaulty(f"{http.url}/metrics: no vllm:num_requests_running")
    used = found.get("vllm:kv_cache_usage_perc") or found.get("vllm:gpu_cache_usage_perc") or [0.0]
    return Pressure(
        running=int(sum(found["vllm:num_requests_running"])),
        waiting=int(sum(found.get("vllm:num_requests_waiting", []))),
        cache_used=max(used),
        preemptions=int(sum(found.get("vllm:num_preemptions_total", []))),
        began=max(found.get(_START_TIME) or found.get("vllm:num_preemptions_created") or [], default=None),
    )


async def _version(http: HttpClient) -> str:
    reply = await http.get("/version", deadline_s=QUERY_S)
    if not isinstance(reply, dict) or not isinstance(reply.get("version"), str):
        raise ServerFaulty(f"{http.url}/version: no version in the response; is this a vLLM server?")
    return str(reply["version"])


async def _routes(http: HttpClient) -> set[str]:
    """The routes we use that the server has. If its OpenAPI listing is disabled, probe each with a wrong method: an
    existing route replies 405."""
    try:
        reply = await http.get("/openapi.json", deadline_s=_INFO_S)
        return {route for route in _ROUTES if route in _section(reply, "paths")}
    except ServerRefused:
        return {route for route in _ROUTES if await _exists(http, route)}


async def _exists(http: HttpClient, route: str) -> bool:
    try:
        await http.text(route, deadline_s=QUERY_S)
    except ServerRefused as refusal:
        return refusal.status == 405
    return True


async def _config(http: HttpClient) -> dict[str, Any] | None:
    """The server's configuration; None if it is not in dev mode."""
    try:
        reply = await http.get("/server_info", deadline_s=_INFO_S, query={"config_format": "json"})
    except ServerRefused:
        return None
    return _section(reply, "vllm_config")


def _section(content: Any, name: str) -> dict[str, Any]:
    found = content.get(name) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def _number(url: str, text: str) -> float:
    """Parse a metric. A gauge that was never set may be NaN, which is rejected."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ServerFaulty(f"{url}/metrics: {text!r} is not a number")
    return number


_STOPS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "aborted", "repetition": "stop"}


class _Entry(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None  # of /inference/v1/generate
    token_logprobs: list[float | None] | None = None  # of /v1/completions


class _WeightSpan(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_WeightSpan] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


def parse_chunk(where: str, payload: bytes, version_of: VersionOf) -> Piece | None:
    """Parse one chunk; None if it carries no output."""
    chunk = decode_chunk(where, _DECODER, payload)
    if chunk.error is not None:
        raise _stream_error(where, chunk.error)
    if not chunk.choices:
        return None
    choice = chunk.choices[0]
    tokens = choice.token_ids or []
    return Piece(tokens, _logprobs(where, choice, len(tokens)), _stop(where, choice), _spans(choice, version_of))


def _logprobs(where: str, choice: _Choice, count: int) -> list[float]:
    found: list[float | None] = []
    if choice.logprobs is not None and choice.logprobs.content is not None:
        found = [entry.logprob for entry in choice.logprobs.content]
    elif choice.logprobs is not None and choice.logprobs.token_logprobs is not None:
        found = choice.logprobs.token_logprobs
    if len(found) != count:
        raise ServerFaulty(f"{where}: {plural(count, 'token')} came with {len(found)} logprobs")
    return check_logprobs(where, found)


def _stop(where: str, choice: _Choice) -> StopReason | None:
    if choice.finish_reason is None:
        return None
    if choice.finish_reason not in _STOPS:
        raise ServerFaulty(f"{where}: a request ended with finish reason {one_line(choice.finish_reason)!r}")
    return _STOPS[choice.finish_reason]


def _spans(choice: _Choice, version_of: VersionOf) -> list[VersionSpan] | None:
    """Spans of weight versions. Tokens with a foreign label (another run, or a restarted server) are STALE."""
    spans: list[VersionSpan] = []
    for span in choice.weight_versions or []:
        version = version_of(str(span.version))
        spans.append((STALE if version is None else version, span.start, span.end))
    return spans or None


def _stream_error(where: str, error: Any) -> ServerFailed:
    details = error if isinstance(error, dict) else {"message": error}
    code = details.get("code")
    return stream_error(where, details.get("message", error), code if isinstance(code, int) else None)
