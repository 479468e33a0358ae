"""The built-in inference engine: an asyncio interface over one compute thread.

    event loop                                     compute thread
    generate, abort, load, … ── inbox ──▶  until closed: run the inbox; one decode step of each batch with work
    futures resolve          ◀── outbox ─  (at most one wake-up of the event loop per turn)

The compute thread sleeps on a condition variable while no batch has work; a request, a load or `close` wakes it. The
event loop never blocks on it and only awaits futures. An exception on the compute thread fails every pending request
and every later call, and resolves `broken`: a failed engine reports the error, it does not hang.

Streaming: `stream_tokens` queues a `StreamRequest`, which is answered after the turn that produced new tokens. Nothing
is computed or sent for requests without a reader.

Invariants
- Only the compute thread touches decode batches and decoders, so every weight swap happens at a token boundary.
  Reading, verifying and laying out a snapshot happen before the swap, on a helper thread.
- Only the event loop touches `_pending_requests`, `_calls` and `_stream_futures`. Set `_loop` before adding to them:
  the compute thread needs it to report a failure.
- A request id may be reused while the result of its first submission is still pending, for example after a lost
  connection. Each submission therefore has its own key, and an id means its newest pending submission.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outpace.engines.continuation import Decode
from outpace.engines.embedded.decode_batch import FinishedRequest, GenerationRequest, KvPolicy
from outpace.engines.embedded.decoder import DecoderWeights
from outpace.engines.embedded.load_decoder import DecoderPath, build_decoder, tune_threads
from outpace.engines.embedded.weight_sets import STALE, WeightSets
from outpace.errors import ComponentFailed, OutpaceError, RequestFailed
from outpace.hardware.cores import CoreSharing
from outpace.models.loading import load_model, load_tokenizer, set_up_device
from outpace.monitoring.efficiency import Stopwatch
from outpace.runtime import diagnostics
from outpace.types import EngineStats, Generation, Ints, LoadReport, Manifest, Sampling, Version
from outpace.weights.shared_memory import read_snapshot


class PendingRequests:
    """Futures of the pending requests. Event loop only.

    The compute thread identifies a submission by its key, callers by a request id, which may be reused.
    """

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._keys: dict[str, str] = {}  # request id -> key of its newest submission
        self._answers: dict[str, asyncio.Future[Generation]] = {}  # by key

    def __len__(self) -> int:
        return len(self._answers)

    def reject_duplicate(self, request_id: str) -> None:
        if request_id in self._keys:
            raise RequestFailed(f"request {request_id} is already in flight")

    def new_key(self, request_id: str) -> str:
        return f"{request_id} #{next(self._serial)}"

    async def answer(self, request_id: str, key: str) -> Generation:
        """Wait for the result of the submission with this key."""
        self._keys[request_id] = key
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._answers[key] = future
        try:
            return await future
        finally:
            del self._keys[request_id], self._answers[key]

    def keys_of(self, request_ids: Iterable[str]) -> set[str]:
        """Return the keys of those requests that are still pending."""
        return {self._keys[request_id] for request_id in request_ids if request_id in self._keys}

    def deliver(self, finished: Iterable[FinishedRequest]) -> None:
        for done in finished:
            future = self._answers.get(done.id)
            if future is None or future.done():
                continue  # the caller is gone
            if isinstance(done.result, Generation):
                future.set_result(done.result)
            else:
                future.set_exception(done.result)

    def fail(self, error: OutpaceError) -> None:
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)


@dataclass(frozen=True, eq=False)
class StreamRequest:
    """A reader waits for the tokens of a request beyond the first `after`."""

    request_id: str
    after: int
    answer: asyncio.Future[Ints]


StreamedTokens = tuple[StreamRequest, Ints]


class StreamRequests:
    """Stream requests that wait for new tokens. Compute thread only.

    Their futures belong to the event loop; this class only reads whether they are done.
    """

    def __init__(self) -> None:
        self._waiting: list[StreamRequest] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, stream_request: StreamRequest) -> None:
        self._waiting.append(stream_request)

    def pop_ready(self, active_requests: Mapping[str, GenerationRequest]) -> list[StreamedTokens]:
        """Remove and return the stream requests that can be answered now.

        A request that is not active gets no tokens."""
        found: list[StreamedTokens] = []
        remaining: list[StreamRequest] = []
        for waiting in self._waiting:
            request = active_requests.get(waiting.request_id)
            if request is None:
                found.append((waiting, np.zeros(0, dtype=np.int32)))
            elif len(request.tokens) > waiting.after:
                found.append((waiting, np.array(request.tokens[waiting.after :], dtype=np.int32)))
            elif not waiting.answer.done():
                remaining.append(waiting)
        self._waiting = remaining
        return found


T = TypeVar("T")


class EmbeddedEngine:
    """`outpace.protocols.Engine` in this process. Starts at version 0 with the model's own weights, or `stale`."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        slots: int = 64,
        context: int | None = None,
        kv: KvPolicy = "keep",
        dtype: str = "float32",
        device: str = "auto",
        deterministic: bool = False,
        path: DecoderPath = "auto",
        threads: int | None = None,
        sharing: CoreSharing | None = None,
        trust_remote_code: bool = False,
        stale: bool = False,
        pinned_slots: int | None = None,
    ) -> None:
        """Load the model and start the compute thread.

        model: a value of `model.path`, or a loaded model, whose weights are copied.
        threads: the maximum; a small model decodes with fewer. With `sharing`, the number follows the load.
        stale: the model's own weights are no longer the policy's; serve nothing before the first load.
        pinned_slots: slots of a pinned weight set, where it needs fewer than `slots`.
        """
        if isinstance(model, str):
            tokenizer = tokenizer or load_tokenizer(model, trust_remote_code=trust_remote_code)
            model = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        set_up_device(model.device)
        decoder = build_decoder(model, slots, context, deterministic=deterministic, path=path)
        decode = None if tokenizer is None else _text_decoder(tokenizer)
        self._weight_sets = WeightSets(decoder, STALE if stale else 0, kv, decode, pinned_slots)
        self._main = self._weight_sets.main
        self._threads = threads or torch.get_num_threads()
        self._sharing = sharing
        self._on_cpu = model.device.type == "cpu"
        counted = self._threads if self._on_cpu else None
        self._work, self._eval_work = Stopwatch(counted), Stopwatch(counted)

        self._pending_requests = PendingRequests()
        self._calls: set[Future[Any]] = set()
        self._stream_futures: set[asyncio.Future[Ints]] = set()
        self._failure_future: asyncio.Future[ComponentFailed] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._load_lock = asyncio.Lock()

        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._stream_requests = StreamRequests()
        self._closing = False
        self._turns = 0
        self._failure: ComponentFailed | None = None
        self._thread = threading.Thread(target=self._compute, name="outpace-engine", daemon=True)
        diagnostics.crash_point("engine.built")
        self._thread.start()

    # ---------------------------------------------------------------------------------------------------- event loop

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        self._loop = asyncio.get_running_loop()
        self._pending_requests.reject_duplicate(request_id)
        key = self._pending_requests.new_key(request_id)
        self._post(lambda: self._weight_sets.submit(key, token_ids, sampling, min_version, pinned))
        try:
            return await self._pending_requests.answer(request_id, key)
        except asyncio.CancelledError:
            if self._failure is None and not self._closing:
                self._post(lambda: self._weight_sets.abort({key}))
            raise

    async def abort(self, request_ids: list[str]) -> None:
        keys = self._pending_requests.keys_of(request_ids)
        self._post(lambda: self._weight_sets.abort(keys))

    async def stream_tokens(self, request_id: str, after: int) -> Ints:
        self._raise_if_unusable()
        keys = self._pending_requests.keys_of([request_id])
        if not keys:
            return np.zeros(0, dtype=np.int32)
        self._loop = asyncio.get_running_loop()
        stream_request = StreamRequest(keys.pop(), after, self._loop.create_future())
        self._post(lambda: self._stream_requests.add(stream_request))
        self._stream_futures.add(stream_request.answer)
        try:
            return await stream_request.answer
        finally:
            self._stream_futures.discard(stream_request.answer)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        async with self._load_lock:
            started = time.perf_counter()
            self._reject_older(manifest, pinned)
            prepared = await asyncio.to_thread(self._prepare, manifest)
            pause_s = await self._on_compute(lambda: self._swap(prepared, manifest, pinned))
            return LoadReport(
                version=manifest.version,
                pause_s=pause_s,
                seconds=time.perf_counter() - started,
                bytes=manifest.nbytes,
            )

    async def release_pinned(self) -> None:
        await self._on_compute(self._weight_sets.drop_pinned)

    async def stats(self) -> EngineStats:
        """Return the counters without stopping the compute thread; they may be one step apart."""
        self._raise_if_unusable()
        batches = self._weight_sets.all
        return EngineStats(
            version=self._main.version,
            running=sum(batch.running for batch in batches),
            waiting=sum(batch.waiting for batch in batches),
            tokens=self._main.tokens,
            prefill_tokens=self._main.prefill_tokens,
            steps=self._main.steps,
            busy_s=self._work.busy_s,
            core_s=self._work.core_s,
            eval_busy_s=self._eval_work.busy_s,
            slots=self._main.decoder.slots,
            threads=self._threads if self._sharing is None else self._sharing.threads,
            turns=self._turns,
        )

    async def broken(self) -> ComponentFailed:
        """Wait until the compute thread has failed and return the error."""
        with self._condition:
            if self._failure is not None:
                return self._failure
            self._loop = asyncio.get_running_loop()
            self._failure_future = self._loop.create_future()
        return await self._failure_future

    async def close(self) -> None:
        """Fail pending requests and end the compute thread."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)
        self._fail_pending(RequestFailed("the engine is closed"))

    def _reject_older(self, manifest: Manifest, pinned: bool) -> None:
        self._raise_if_unusable()
        if not pinned and manifest.version < self._main.version:
            raise OutpaceError(
                f"cannot load version {manifest.version}: the engine already serves version {self._main.version}"
            )

    def _prepare(self, manifest: Manifest) -> DecoderWeights:
        with torch.no_grad():
            prepared = self._main.decoder.prepare(read_snapshot(manifest))
        diagnostics.crash_point("engine.load_read")
        return prepared

    def _raise_if_unusable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise RequestFailed("the engine is closed")

    def _post(self, command: Callable[[], None]) -> None:
        with self._condition:
            self._raise_if_unusable()
            self._inbox.append(command)
            self._condition.notify()

    async def _on_compute(self, action: Callable[[], T]) -> T:
        """Run `action` on the compute thread between two turns, unless the caller is cancelled before that."""
        self._loop = asyncio.get_running_loop()
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(action())

        self._post(run)
        self._calls.add(future)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    def _deliver(self, finished: list[FinishedRequest], streamed: list[StreamedTokens]) -> None:
        for stream_request, tokens in streamed:
            if not stream_request.answer.done():
                stream_request.answer.set_result(tokens)
        self._pending_requests.deliver(finished)

    def _fail_pending(self, error: OutpaceError) -> None:
        self._pending_requests.fail(error)
        for future in self._stream_futures:
            if not future.done():
                future.set_exception(error)
        for call in self._calls:
            if not call.done():
                call.set_exception(error)

    def _report_failure(self, failure: ComponentFailed) -> None:
        if self._failure_future is not None and not self._failure_future.done():
            self._failure_future.set_result(failure)
        self._fail_pending(failure)

    # ------------------------------------------------------------------------------------------------ compute thread

    def _compute(self) -> None:
        try:
            if self._sharing is None:
                if self._on_cpu:
                    self._threads = tune_threads(self._main.decoder, self._threads)
                torch.set_num_threads(self._threads)  # torch's thread count belongs to the thread that sets it
            while self._take_turn():
                pass
        except BaseException as error:  # thread boundary: every failure must reach the callers
            self._fail(error)

    def _take_turn(self) -> bool:
        with self._condition:
            while not (self._inbox or self._closing or self._weight_sets.has_work):
                if self._sharing is not None:
                    self._sharing.idle()
                self._condition.wait()
            if self._closing:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command()
        with self._sharing_cores(self._sharing) if self._sharing and self._weight_sets.has_work else nullcontext():
            for batch in self._weight_sets.all:
                if batch.has_work:
                    with self._work.running() if batch is self._main else self._eval_work.running():
                        self._weight_sets.finished += batch.advance()
                    diagnostics.crash_point("engine.turn")
        self._turns += 1
        self._flush()
        return True

    def _sharing_cores(self, sharing: CoreSharing) -> AbstractContextManager[None]:
        if sharing.most is None and self._main.running == 0:  # measuring clears the decoder
            sharing.measure_most(lambda: tune_threads(self._main.decoder, self._threads))
        return sharing.comparing(max(1, sum(batch.running for batch in self._weight_sets.all)))

    def _flush(self) -> None:
        streamed = self._stream_requests.pop_ready(self._weight_sets.active_requests()) if self._stream_requests else []
        if (self._weight_sets.finished or streamed) and self._loop is not None:
            finished, self._weight_sets.finished = self._weight_sets.finished, []
            self._wake(lambda: self._deliver(finished, streamed))

    def _wake(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _fail(self, error: BaseException) -> None:
        failure = ComponentFailed(
            "engine", f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        )
        with self._condition:
            self._failure = failure
            self._inbox.clear()
        self._wake(lambda: self._report_failure(failure))

    def _swap(self, prepared: DecoderWeights, manifest: Manifest, pinned: bool) -> float:
        started = time.perf_counter()
        swap = self._weight_sets.swap_pinned if pinned else self._weight_sets.swap_main
        swap(prepared, manifest.version)
        return time.perf_counter() - started


def _text_decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    def decode(tokens: Sequence[int]) -> str:
        text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode
