"""Client of an SGLang server, version 0.5.8 or later.

Requests use `/generate`, which takes and returns token ids. Pitfalls of its protocol that shape this module:

- An abort ends every request whose id starts with the given one, so our ids are random and of equal length.
- A request that is not queued yet, because the server is paused, cannot be aborted, so we stop reading it at its first
  token.
- Pause mode `in_place` keeps the KV cache. `retract` drops the KV cache of running requests, but not the prefixes
  cached under their salt. The cache cannot be flushed while requests are queued; an attempt as part of an update kills
  the server. So to recompute, we retract and abort the requests, then flush the cache. The requests end as interrupted
  and are sent again with the tokens they have. We do not use pause mode `abort`, which polls until nothing runs.
- Changing the weight label aborts all requests unless told otherwise. Tokens still in transit through the server get
  the new label too, so we change it only after the pause has lasted a moment.
- Tokens and logprobs are read from `output_token_logprobs`, never from `output_ids`: the last chunk of a request that
  was aborted in a queue has only its newest id there.
- A chunk has all tokens so far, only the new ones, or both in a row if chunks were merged in transit, depending on a
  server flag, the release and timing. `completion_tokens` always counts from the beginning, so it determines how many
  entries at the end of the list are new.
- A token gets the oldest version that it can have. The label on a chunk is the one in force when the chunk was sent,
  but its tokens may have been sampled earlier: one step is always in flight. So the tokens of a chunk get the label of
  the previous chunk; the first chunk's tokens get the version in force when the request was sent.
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

from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import (
    QUERY_S,
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

GENERATE = "/generate"
ABORT = "/abort_request"
CONTINUE = "/continue_generation"
FLUSH = "/flush_cache"
LABEL = "/update_weight_version"
PAUSE = "/pause_generation"

_SEED_MASK = 2**31 - 1  # the range that its sampling kernels accept
_ABORT_S = 5.0
_TRANSIT_S = 0.05  # upper bound from sampling a token to sending it; a swap usually takes longer
_FIRST_REQUEST_S = 120.0  # a first request may compile kernels
_MIN_DIFFERENCE = 1e-3
_UNRESOLVED = "auto"  # the server does not report the resolved value


@dataclass
class _HttpRequest:
    """A running HTTP request. `ended`: why we stop reading it."""

    rid: str
    ended: Literal["aborted", "interrupted"] | None = None


class SglangServer(Server):
    """Client of one SGLang server."""

    def __init__(self, http: HttpClient, **settings: Any) -> None:
        super().__init__(http, **settings)
        self._version: Version | None = None  # current label
        self._retracted = 0
        self._paused_at = 0.0  # when it was paused
        self._active: dict[str, _HttpRequest] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    async def facts(self) -> ServerFacts:
        return await read_facts(self.http)

    async def stream(self, request: ServerRequest) -> AsyncGenerator[Piece, None]:
        """Sample tokens. With an adapter there are no spans, since the label refers to the base model."""
        reader = ChunkReader(f"{self.url}{GENERATE}", None if request.adapter else self._version, self._version_of)
        sent = self._active[request.id] = _HttpRequest(uuid.uuid4().hex)
        ended = False
        try:
            body = request_body(request, sent.rid, seeded=self._seeded)
            async with aclosing(self.http.events(GENERATE, body)) as payloads:
                async for payload in payloads:
                    piece = reader.parse_chunk(payload)
                    ended = piece.stop is not None
                    if sent.ended is not None and piece.stop in (None, "aborted"):
                        piece = replace(piece, stop=sent.ended)
                    if piece.stop is not None:
                        yield replace(piece, spans=reader.all_spans())
                        return
                    yield piece
            raise ServerFaulty(f"{self.url}{GENERATE}: a stream ended without a finish reason")
        finally:
            del self._active[request.id]
            if not ended:
                self._abort_later(sent.rid)

    async def abort(self, request_ids: list[str]) -> bool:
        await self._cut([sent for name in request_ids if (sent := self._active.get(name))], "aborted")
        return True

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
            await self._control(PAUSE, {"mode": "retract"})
            await self._cut([sent for sent in self._active.values() if sent.ended is None], "interrupted")
            await self._flush()
        await self._control(CONTINUE, {})

    async def paused(self) -> bool | None:
        """Always None: not reported. Raises `ServerFailed` if the server does not answer. `facts` resumes the
        server."""
        await read_label(self.http)
        return None

    async def label(self, version: Version) -> None:
        await asyncio.sleep(max(0.0, self._paused_at + _TRANSIT_S - time.monotonic()))
        await self._control(LABEL, {"new_version": self.label_of(version), "abort_all_requests": False})
        self._version = version

    async def close(self) -> None:
        await asyncio.gather(*self._aborting)
        await super().close()

    async def _flush(self) -> None:
        """Flush the cache. Salts contain the version, so entries of old weights only waste memory, and a refusal
        because other requests are queued is harmless."""
        with suppress(ServerRefused):
            await self.http.text(FLUSH, deadline_s=self._control_s)

    async def _cut(self, requests: list[_HttpRequest], why: Literal["aborted", "interrupted"]) -> None:
        for sent in requests:
            sent.ended = why
        await asyncio.gather(
            *(self.http.post(ABORT, {"rid": sent.rid}, deadline_s=QUERY_S, repeatable=True) for sent in requests)
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


LogprobEntry = tuple[float | None, int, str | None]
"""One token: (logprob, id, text)."""


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _FinishReason | None = None
    weight_version: str | None = None
    output_token_logprobs: list[LogprobEntry] = []


class _StreamError(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Chunk(msgspec.Struct):
    meta_info: _Meta | None = None
    error: _StreamError | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


class ChunkReader:
    """Parses the stream of one request. `sent`: the version when the request was sent; None if unknown, and then there
    are no spans."""

    def __init__(self, where: str, sent: Version | None, version_of: VersionOf) -> None:
        self.spans: list[VersionSpan] = []
        self._where = where
        self._version = sent
        self._version_of = version_of
        self._count = 0

    def parse_chunk(self, payload: bytes) -> Piece:
        meta = self._meta(payload)
        entries = self._new_entries(meta)
        logprobs = check_logprobs(self._where, (logprob for logprob, _, _ in entries))
        stop = None if meta.finish_reason is None else self._stop(meta.finish_reason)
        self._record_span(len(entries), meta.weight_version)
        return Piece([token for _, token, _ in entries], logprobs, stop)

    def all_spans(self) -> list[VersionSpan] | None:
        """The spans of the whole request; None if the version of a token is unknown."""
        return None if self._version is None else self.spans

    def _meta(self, payload: bytes) -> _Meta:
        chunk = decode_chunk(self._where, _DECODER, payload)
        if chunk.error is not None:
            raise stream_error(self._where, chunk.error.message, chunk.error.code)
        if chunk.meta_info is None:
            raise ServerFaulty(f"{self._where}: a chunk has no meta_info: {one_line(payload[:200])}")
        return chunk.meta_info

    def _new_entries(self, meta: _Meta) -> list[LogprobEntry]:
        """The new entries: the last ones of a list that may start at any position."""
        entries, new = meta.output_token_logprobs, meta.completion_tokens - self._count
        if new < 0:
            raise ServerFaulty(
                f"{self._where}: after {plural(self._count, 'token')} the server reports only {meta.completion_tokens}"
            )
        if len(entries) < new:
            raise ServerFaulty(f"{self._where}: {plural(new, 'token')} came with {len(entries)} logprobs")
        return entries[len(entries) - new :]

    def _stop(self, ending: _FinishReason) -> StopReason:
        match ending.type:
            case "stop":
                return "stop"
            case "length":
                return "length"
            case "abort" if ending.status_code is None:
                return "aborted"
            case "abort":
                raise stream_error(self._where, ending.message, ending.status_code)
        raise ServerFaulty(f"{self._where}: a request ended with finish reason {one_line(ending.type)!r}")

    def _record_span(self, count: int, label: str | None) -> None:
        start, self._count = self._count, self._count + count
        if self._version is None:
            return
        if count:
            if self.spans and self.spans[-1][0] == self._version:
                start = self.spans.pop()[1]
            self.spans.append((self._version, start, self._count))
        if label is not None:
            self._version = self._version_of_label(label)

    def _version_of_label(self, label: str) -> Version:
        """The version of a label. A foreign label on a server that had ours means that its weights were replaced."""
        version = self._version_of(label)
        if version is None:
            raise ServerFaulty(
                f"{self._where}: the weight label {one_line(label)!r} is not of this run; the server was restarted, or"
                " another run updates it"
            )
        return version


def request_body(request: ServerRequest, rid: str, *, seeded: bool) -> dict[str, Any]:
    """Request body for a stream of tokens and logprobs. `rid` is the request id on the server."""
    return {
        "rid": rid,
        "input_ids": request.token_ids.tolist(),
        "sampling_params": _sampling(request.sampling, seeded),
        "return_logprob": True,
        "logprob_start_len": -1,  # no prompt logprobs
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "stream": True,
        "extra_key": request.salt,
        **({"lora_path": request.adapter} if request.adapter else {}),
    }


def _sampling(sampling: Sampling, seeded: bool) -> dict[str, Any]:
    """Sampling parameters. `ignore_eos` would also disable our stop ids, so it is set only if there are none."""
    return sampling_parameters(sampling) | {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": 0,
        "top_k": sampling.top_k or -1,
        "ignore_eos": not sampling.stop_ids,
        "no_stop_trim": True,
        **({"sampling_seed": sampling.seed & _SEED_MASK} if seeded else {}),
    }


async def read_facts(http: HttpClient) -> ServerFacts:
    """Query the server's info, and resume the server. `details` has the model name or path (`root`), the maximum number
    of concurrent sequences (`slots`) and `max_lora_rank`."""
    reply, models = await _settings(http), await read_models(http)
    controls = await _controls(http)
    dtype = reply.get("dtype")
    return ServerFacts(
        kind="sglang",
        version=str(reply["version"]),
        model=str(models[0].get("id")),
        context=models[0].get("max_model_len") or reply.get("context_length"),
        dtype=None if dtype in (None, _UNRESOLVED) else str(dtype),
        logprobs=await _logprobs_mode(http),
        controls=controls,
        adapters=bool(reply.get("enable_lora")),
        details={
            "root": reply["model_path"],  # not from /model_info: that is the directory of the last update
            "slots": reply.get("max_running_requests"),
            "max_lora_rank": reply.get("max_lora_rank"),
        },
    )


async def read_loads(http: HttpClient) -> list[dict[str, Any]]:
    """The load of each data-parallel rank."""
    reply = await http.get("/v1/loads", deadline_s=QUERY_S, query={"include": "core,queues"})
    loads = reply.get("loads") if isinstance(reply, dict) else None
    if not isinstance(loads, list) or not all(
        isinstance(load, dict) and isinstance(load.get("num_running_reqs"), int) for load in loads
    ):
        raise ServerFaulty(f"{http.url}/v1/loads: no num_running_reqs in the response")
    return loads


async def read_label(http: HttpClient) -> str | None:
    """The label of the server's weights."""
    reply = await http.get("/model_info", deadline_s=QUERY_S)
    return str(reply["weight_version"]) if isinstance(reply, dict) and "weight_version" in reply else None


def pressure_of(loads: list[dict[str, Any]], retracted_before: int) -> Pressure:
    """The load over all ranks: the sum of requests, the maximum of KV cache usage. SGLang calls preempted requests
    retracted and reports only those since its last log line, hence `retracted_before`, the sum so far."""
    retracted = sum(int((load.get("queues") or {}).get("retracted", 0)) for load in loads)
    return Pressure(
        running=sum(int(load["num_running_reqs"]) for load in loads),
        waiting=sum(int(load.get("num_waiting_reqs", 0)) for load in loads),
        cache_used=max((float(load.get("token_usage", 0.0)) for load in loads), default=0.0),
        preemptions=retracted_before + retracted,
    )


async def _settings(http: HttpClient) -> dict[str, Any]:
    reply = await http.get("/server_info", deadline_s=QUERY_S)
    if not isinstance(reply, dict) or "version" not in reply or "model_path" not in reply:
        raise ServerFaulty(f"{http.url}/server_info: no version and model in the response; is this an SGLang server?")
    return reply


async def _controls(http: HttpClient) -> bool:
    """Whether our key is valid for the control routes. Tested with resume: a server left paused by an earlier update
    would not answer the following queries, and does not report that it is paused."""
    try:
        await http.post(CONTINUE, {}, deadline_s=QUERY_S, repeatable=True)
    except ServerRefused:
        return False
    return True


async def _logprobs_mode(http: HttpClient) -> str | None:
    """`processed`: logprobs after temperature; `original`: before. It is set by SGLANG_RETURN_ORIGINAL_LOGPROB in the
    server's environment and not reported, so measure it: halving the temperature doubles the difference of two logprobs
    at one position, or leaves it unchanged. None: all tokens are equally likely."""
    at_one, at_half = await _logprob_range(http, 1.0), await _logprob_range(http, 0.5)
    if at_one < _MIN_DIFFERENCE:
        return None
    return "processed" if at_half > 1.5 * at_one else "original"


async def _logprob_range(http: HttpClient, temperature: float) -> float:
    """Logprob difference between the first and the last of the top 16 candidates for the first token."""
    body = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        "return_logprob": True,
        "top_logprobs_num": 16,
        "stream": False,
    }
    reply = await http.post(GENERATE, body, deadline_s=_FIRST_REQUEST_S, repeatable=True)
    try:
        values = [float(entry[0]) for entry in reply["meta_info"]["output_top_logprobs"][0]]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ServerFaulty(f"{http.url}{GENERATE}: no output_top_logprobs in the response") from error
    return max(values) - min(values)
