"""RequestRunner: runs one request from `generate` to its output.

    wait for admission ─▶ send ─▶ stream chunks ─▶ complete                  output
            ▲                          └─▶ server failure
            └── continue from the tokens so far ◀── retries left, healthy ─┴─▶ otherwise: stop reason "lost"

Invariants
- Received tokens are never discarded and never sampled twice. The one exception: tokens of a server that turns out to
  have foreign weights.
- Cancelling `generate` closes the stream, which ends the request on the server.
- A request that the server rejects (4xx) is never retried.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from outpace.engines.server.admission import EarlyStop
from outpace.engines.server.http import backoff_s
from outpace.engines.server.protocol import ServerRequest
from outpace.engines.server.state import ActiveRequest, RequestSegment, ServerState
from outpace.errors import (
    ContextFull,
    RequestFailed,
    ServerFailed,
    ServerFaulty,
    ServerRefused,
    ServerSilent,
    one_line,
    plural,
)
from outpace.types import Generation, Ints, Sampling, StopReason, Version

log = logging.getLogger(__name__)

_FOREIGN = "the server samples from weights this run did not load; was it restarted, or does another run use it?"
_UNKNOWN_MODEL = 404  # status for an unknown model or adapter
_ABORT_S = 5.0  # time for the server to end aborted requests


class RequestRunner:
    """Runs `generate` and `abort`. `spans`: the server reports the weight version of each token, under our labels."""

    def __init__(self, state: ServerState, spans: bool) -> None:
        self._state = state
        self._spans = spans
        self._serial = itertools.count(1)

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        sampling = self._clamped(token_ids, sampling)
        request = self._state.active_requests.begin(request_id, token_ids, sampling)
        try:
            return request.output.generation(await self._run_to_end(request, min_version, pinned))
        finally:
            self._state.active_requests.end(request)

    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests by id, so that their last tokens still arrive. Close the streams that have no token yet, and
        those that the server does not end in time or cannot end."""
        ended = self._state.active_requests.of(request_ids)
        for request in ended:
            request.aborted = True
        self._state.admission.end("aborted", {request.id for request in ended})
        segments = [request.segment for request in ended if request.segment is not None]
        await self._abort_on_server([segment for segment in segments if segment.tokens])
        for segment in segments:
            segment.end("aborted")

    async def _abort_on_server(self, segments: list[RequestSegment]) -> None:
        try:
            async with asyncio.timeout(_ABORT_S):
                if segments and await self._state.server.abort([segment.request.id for segment in segments]):
                    await asyncio.gather(*(segment.ended.wait() for segment in segments))
        except (ServerFailed, TimeoutError) as error:
            log.info("closing the streams of aborted requests: %s", one_line(error) or "no reply in time")

    async def _run_to_end(self, request: ActiveRequest, min_version: Version, pinned: Version | None) -> StopReason:
        """Run the request to its end and return the stop reason."""
        for failures in itertools.count():
            stop = await self._send_once(request, min_version, pinned)
            stop = request.output.ended if stop is None else stop
            if stop is not None:
                return stop
            if request.aborted:
                return "aborted"
            if failures >= self._state.settings.retries or not self._can_retry_here(request):
                return "lost"
            self._state.counters.retries += 1
            await asyncio.sleep(backoff_s(failures))
        raise AssertionError("unreachable")

    def _can_retry_here(self, request: ActiveRequest) -> bool:
        """Whether to retry on this server. Not with stop strings and partial output: a stop string may span two
        segments, which the server cannot detect. Only a caller with a tokenizer can."""
        return self._state.health.serves and not (request.stop_strings and len(request.output))

    async def _send_once(
        self, request: ActiveRequest, min_version: Version, pinned: Version | None
    ) -> StopReason | None:
        """Send the request, or the rest of it. Returns the stop reason; None if the server failed."""
        state = self._state
        ending = await self._admitted(
            request, lambda: state.accepts_requests and state.loaded_versions.admits(min_version, pinned)
        )
        if ending is not None:
            return ending
        busy = state.busy if pinned is None else state.eval_busy
        version = state.loaded_versions.take(pinned)
        busy.enter()
        try:
            return await self._stream_segment(request, version, pinned is None)
        finally:
            busy.leave()
            state.loaded_versions.give_back(version)
            state.admission.leave()

    async def _admitted(self, request: ActiveRequest, may_enter: Callable[[], bool]) -> EarlyStop | None:
        """Wait for admission. Returns None once admitted, else why the request ended. The state can change between
        admission and this task waking up, so it is checked again."""
        queue = self._state.admission
        while True:
            if request.aborted:
                return "aborted"
            if self._state.health.state in ("dead", "draining"):
                return "lost"
            entered = await queue.enter(request.id, may_enter)
            if entered != "admitted":
                return entered
            if not request.aborted and may_enter():
                return None
            queue.leave()

    async def _stream_segment(self, request: ActiveRequest, version: Version, training: bool) -> StopReason | None:
        segment = request.segment = RequestSegment(self._server_request(request, version), version, self._spans)
        try:
            failure = await self._read_stream(request, segment)
        finally:
            segment.ended.set()
        if segment.has_foreign_versions(self._state.loaded_versions.newest):
            request.segment = None
            self._state.reject_foreign_weights(_FOREIGN)
            return "lost"
        request.join(segment)
        self._count_tokens(segment, training)
        if failure is not None:
            return self._handle_failure(request, segment, failure)
        if segment.end_reason is None and segment.stop != "aborted":
            self._state.health.request_passed()
        return self._stop_reason(request, segment)

    def _handle_failure(
        self, request: ActiveRequest, segment: RequestSegment, failure: ServerFailed
    ) -> StopReason | None:
        if isinstance(failure, ServerRefused):
            if segment.request.adapter is not None and failure.status == _UNKNOWN_MODEL:
                self._state.reject_foreign_weights(_FOREIGN)
                return "lost"
            raise RequestFailed(f"the server rejected the request: {failure}") from failure
        log.info("%s: request %s failed: %s", self._state.settings.name, request.id, failure)
        self._state.health.request_failed(one_line(failure))
        self._state.react()
        return None

    def _stop_reason(self, request: ActiveRequest, segment: RequestSegment) -> StopReason | None:
        """The stop reason of a segment. An abort that we did not request counts as a server failure (None)."""
        if segment.stop is None:
            assert isinstance(segment.end_reason, str)
            return segment.end_reason
        return None if segment.stop == "aborted" and not request.aborted else segment.stop

    async def _read_stream(self, request: ActiveRequest, segment: RequestSegment) -> ServerFailed | None:
        """Read the stream until the segment ends. Returns the server's failure, if any."""
        reader = asyncio.create_task(self._read_pieces(request, segment))
        segment.set_reader(reader)
        idle_timer = asyncio.create_task(self._end_when_idle(segment))
        try:
            await asyncio.wait({reader})
        finally:
            idle_timer.cancel()
            reader.cancel()
            await asyncio.wait({reader})  # the stream is closed once the task has ended
        if isinstance(segment.end_reason, ServerFailed):
            return segment.end_reason
        if reader.cancelled():
            return None
        failure = reader.exception()
        if failure is not None and not isinstance(failure, ServerFailed):
            raise failure
        return failure if segment.stop is None else None

    async def _read_pieces(self, request: ActiveRequest, segment: RequestSegment) -> None:
        counters = self._state.counters
        async with aclosing(self._state.server.stream(segment.request)) as pieces:
            async for piece in pieces:
                segment.take(piece)
                counters.pieces += 1
                counters.turns += 1
                request.notify()
                if piece.stop is not None:
                    return
        raise ServerFaulty(f"{self._state.server.url}: a stream ended without a finish reason")

    async def _end_when_idle(self, segment: RequestSegment) -> None:
        """End the segment after `idle_s` without a token. Pauses by our own weight updates do not count."""
        idle_s, loop = self._state.settings.idle_s, asyncio.get_running_loop()
        while True:
            left = idle_s if self._state.paused else segment.last_token_at + idle_s - loop.time()
            if left <= 0:
                segment.end(ServerSilent(f"{self._state.server.url}: no token for {idle_s:g} s"))
                return
            await asyncio.sleep(left)

    def _server_request(self, request: ActiveRequest, version: Version) -> ServerRequest:
        return ServerRequest(
            id=f"{request.id}.{next(self._serial)}",
            token_ids=request.output.prompt,
            sampling=request.output.sampling,
            salt=f"{self._state.settings.incarnation}.{version}",
            adapter=self._state.loaded_versions.adapter(version),
        )

    def _count_tokens(self, segment: RequestSegment, training: bool) -> None:
        if training:
            self._state.counters.tokens += len(segment.tokens)
            self._state.counters.prefill_tokens += len(segment.request.token_ids)

    def _clamped(self, token_ids: Ints, sampling: Sampling) -> Sampling:
        """Reject requests that can never be served, and cap `max_tokens` to the context."""
        if len(token_ids) == 0:
            raise RequestFailed("the prompt is empty")
        if sampling.max_tokens < 1:
            raise RequestFailed(f"max_tokens is {sampling.max_tokens}; it must be at least 1")
        if "" in sampling.stop_strings:
            raise RequestFailed("a stop string is empty")
        context = self._state.settings.context
        if context is None:
            return sampling
        if len(token_ids) >= context:
            raise ContextFull(f"the prompt has {plural(len(token_ids), 'token')}; the context is {context}")
        return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, context - len(token_ids)))
