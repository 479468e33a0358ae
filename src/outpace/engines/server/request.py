"""RequestRunner: one attempt at a request, from `generate` to its output.

    wait for admission ─▶ send ─▶ stream pieces ─▶ complete: "stop", "length"
                                      ├─▶ aborted by the caller: "aborted"
                                      ├─▶ ended by the server for a weight update: "interrupted"
                                      └─▶ failed: "lost"

Invariants
- A request is sent at most once. After an interruption or a failure, the fleet requests the rest.
- Received tokens are returned, however the request ends. Only tokens of a server that turns out to have foreign weights
  are discarded.
- Cancelling `generate` closes the stream, which ends the request on the server.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from outpace.engines.generation import tokens_to_sample
from outpace.engines.server.admission import EarlyStop
from outpace.engines.server.protocol import ServerRequest
from outpace.engines.server.state import ActiveRequest, ServerState
from outpace.errors import (
    RequestFailed,
    ServerFailed,
    ServerFaulty,
    ServerRefused,
    ServerSilent,
    one_line,
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
        state = self._state
        limit = tokens_to_sample(token_ids, sampling, state.settings.context)
        sampling = msgspec.structs.replace(sampling, max_tokens=limit)
        with state.active_requests.open(request_id, ActiveRequest(request_id, self._spans)) as request:
            ending = await self._admitted(
                request, lambda: state.accepts_requests and state.loaded_versions.admits(min_version, pinned)
            )
            return request.generation(ending or await self._run(request, token_ids, sampling, pinned))

    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests by id, so that their last tokens still arrive. Close the streams that have no token yet, and
        those that the server does not end in time or cannot end."""
        ended = self._state.active_requests.of(request_ids)
        for request in ended:
            request.aborted = True
        self._state.admission.end("aborted", {request.id for request in ended})
        await self._abort_on_server([request for request in ended if request.tokens])
        for request in ended:
            request.stop_reading("aborted")

    async def _abort_on_server(self, requests: list[ActiveRequest]) -> None:
        try:
            async with asyncio.timeout(_ABORT_S):
                if requests and await self._state.server.abort([r.sent.id for r in requests if r.sent is not None]):
                    await asyncio.gather(*(request.closed.wait() for request in requests))
        except (ServerFailed, TimeoutError) as error:
            log.info("closing the streams of aborted requests: %s", one_line(error) or "no reply in time")

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

    async def _run(
        self, request: ActiveRequest, token_ids: Ints, sampling: Sampling, pinned: Version | None
    ) -> StopReason:
        """Run an admitted request to its end, then release its slot and weight version."""
        state = self._state
        stop: StopReason | None = None
        busy = state.busy if pinned is None else state.eval_busy
        version = state.loaded_versions.take(pinned)
        busy.enter()
        try:
            stop = await self._stream(request, self._server_request(request, token_ids, sampling, version), version)
            if pinned is None:
                state.counters.tokens += len(request.tokens)
                state.counters.prefill_tokens += len(token_ids)
            return stop
        finally:
            busy.leave()
            state.loaded_versions.give_back(version)
            if stop == "interrupted":
                state.admission.leave_interrupted(request.id)
            else:
                state.admission.leave()

    async def _stream(self, request: ActiveRequest, sent: ServerRequest, version: Version) -> StopReason:
        reader = asyncio.create_task(self._read_pieces(request, sent))
        request.send(sent, version, reader)
        try:
            failure = await self._until_read(request, reader)
        finally:
            request.closed.set()
        if failure is not None:
            self._record_failure(request, failure)
        if request.has_foreign_versions(self._state.loaded_versions.newest):
            self._state.reject_foreign_weights(_FOREIGN)
        if failure is None and request.stop in ("stop", "length"):
            self._state.health.request_passed()
            return request.stop
        if request.aborted:
            return "aborted"
        if failure is None and request.stop == "interrupted":
            return "interrupted"
        self._state.counters.retries += 1
        return "lost"  # also if the server aborted it by itself

    def _record_failure(self, request: ActiveRequest, failure: ServerFailed) -> None:
        """Record the failure. Raise `RequestFailed` if the server rejects the request; but if it does not know the
        adapter, its weights are foreign."""
        assert request.sent is not None
        if isinstance(failure, ServerRefused):
            if request.sent.adapter is None or failure.status != _UNKNOWN_MODEL:
                raise RequestFailed(f"the server rejected the request: {failure}") from failure
            self._state.reject_foreign_weights(_FOREIGN)
            return
        log.info("%s: request %s failed: %s", self._state.settings.name, request.id, failure)
        self._state.health.request_failed(one_line(failure))
        self._state.react()

    async def _until_read(self, request: ActiveRequest, reader: asyncio.Task[None]) -> ServerFailed | None:
        """Wait until the request ends. Returns the server's failure, if any."""
        idle_timer = asyncio.create_task(self._end_when_idle(request))
        try:
            await asyncio.wait({reader})
        finally:
            idle_timer.cancel()
            reader.cancel()
            await asyncio.wait({reader})  # the stream is closed once the task has ended
        if isinstance(request.end_reason, ServerFailed):
            return request.end_reason
        if reader.cancelled():
            return None
        failure = reader.exception()
        if failure is not None and not isinstance(failure, ServerFailed):
            raise failure
        return failure if request.stop is None else None

    async def _read_pieces(self, request: ActiveRequest, sent: ServerRequest) -> None:
        counters = self._state.counters
        async with aclosing(self._state.server.stream(sent)) as pieces:
            async for piece in pieces:
                request.take(piece)
                counters.pieces += 1
                counters.turns += 1
                if piece.stop is not None:
                    return
        raise ServerFaulty(f"{self._state.server.url}: a stream ended without a finish reason")

    async def _end_when_idle(self, request: ActiveRequest) -> None:
        """End the request after `idle_s` without a token. Pauses by our own weight updates do not count."""
        idle_s, loop = self._state.settings.idle_s, asyncio.get_running_loop()
        while True:
            left = idle_s if self._state.paused else request.last_token_at + idle_s - loop.time()
            if left <= 0:
                request.stop_reading(ServerSilent(f"{self._state.server.url}: no token for {idle_s:g} s"))
                return
            await asyncio.sleep(left)

    def _server_request(
        self, request: ActiveRequest, token_ids: Ints, sampling: Sampling, version: Version
    ) -> ServerRequest:
        return ServerRequest(
            id=f"{request.id}.{next(self._serial)}",
            token_ids=token_ids,
            sampling=sampling,
            salt=f"{self._state.settings.incarnation}.{version}",
            adapter=self._state.loaded_versions.adapter(version),
        )
