"""The built-in inference engine: an asyncio interface over one compute thread.

    event loop                                     compute thread
    generate, abort, load, … ── inbox ──▶  until closed: run the inbox; one decode step of each batch with work
    futures resolve          ◀── outbox ─  (at most one wake-up of the event loop per turn)

The compute thread sleeps on a condition variable while no batch has work; a request, a load or `close` wakes it. The
event loop never blocks on it and only awaits futures. An exception on the compute thread fails every pending request
and every later call, and resolves `broken`: a failed engine reports the error, it does not hang.

Streaming: the first `stream_tokens` of a request makes the compute thread send its new tokens after every turn. Nothing
is sent for requests without a reader.

Invariants
- Only the compute thread touches decode batches and decoders, so every weight swap happens at a token boundary.
  Reading, verifying and laying out a snapshot happen before the swap, on a helper thread.
- Only the event loop touches `_in_flight`, `_pending` and `_calls`. Set `_loop` before adding to them: the compute
  thread needs it to report a failure.
- A request id may be reused while the result of its first submission is still pending, for example after a lost
  connection. Each submission therefore has its own key, and an id refers to its newest pending submission.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outpace.engines.embedded.decode_batch import KvPolicy
from outpace.engines.embedded.decoder import DecoderWeights
from outpace.engines.embedded.load_decoder import DecoderPath, build_decoder, tune_threads
from outpace.engines.embedded.requests import FinishedRequest
from outpace.engines.embedded.weight_sets import STALE, WeightSets
from outpace.engines.generation import OpenStreams, TokenStream
from outpace.errors import ComponentFailed, EngineClosed, OutpaceError, RequestFailed
from outpace.hardware.cores import CoreSharing
from outpace.models.chat import text_decoder
from outpace.models.loading import load_model, load_tokenizer, set_up_device
from outpace.monitoring.efficiency import Stopwatch
from outpace.runtime import diagnostics
from outpace.types import EngineStats, Generation, Ints, LoadReport, Manifest, Sampling, Version
from outpace.weights.shared_memory import read_snapshot


class PendingRequest(TokenStream):
    """A submitted request. `key` identifies the submission on the compute thread, where its id may occur twice."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key
        self.streams = False  # whether the compute thread sends its tokens
        self.answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    def deliver(self, result: Generation | RequestFailed) -> None:
        if isinstance(result, Generation):
            if self.streams:
                self.add(result.tokens[len(self.tokens) :].tolist())
            self.answer.set_result(result)
        else:
            self.answer.set_exception(result)


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
        pinned_slots: slots of a pinned weight set, if fewer than `slots`.
        """
        if isinstance(model, str):
            tokenizer = tokenizer or load_tokenizer(model, trust_remote_code=trust_remote_code)
            model = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        set_up_device(model.device)
        decoder = build_decoder(model, slots, context, deterministic=deterministic, path=path)
        decode = None if tokenizer is None else text_decoder(tokenizer, special_tokens=True)
        self._weight_sets = WeightSets(decoder, STALE if stale else 0, kv, decode, pinned_slots)
        self._main = self._weight_sets.main
        self._threads = threads or torch.get_num_threads()
        self._sharing = sharing
        self._on_cpu = model.device.type == "cpu"
        counted = self._threads if self._on_cpu else None
        self._work, self._eval_work = Stopwatch(counted), Stopwatch(counted)

        self._in_flight: OpenStreams[PendingRequest] = OpenStreams()
        self._pending: dict[str, PendingRequest] = {}  # by key
        self._serial = itertools.count()
        self._calls: set[Future[Any]] = set()
        self._failure_future: asyncio.Future[ComponentFailed] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._load_lock = asyncio.Lock()

        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], object]] = deque()
        self._streamed: dict[str, int] = {}  # key -> number of tokens sent to the event loop
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
        key = f"{request_id} #{next(self._serial)}"
        with self._in_flight.open(request_id, PendingRequest(key)) as pending:
            self._post(lambda: self._weight_sets.submit(key, token_ids, sampling, min_version, pinned))
            self._pending[key] = pending
            try:
                return await pending.answer
            except asyncio.CancelledError:
                if self._failure is None and not self._closing:
                    self._post(lambda: self._weight_sets.abort({key}))
                raise
            finally:
                del self._pending[key]

    async def abort(self, request_ids: list[str]) -> None:
        keys = {pending.key for pending in self._in_flight.of(request_ids)}
        self._post(lambda: self._weight_sets.abort(keys))

    async def stream_tokens(self, request_id: str, after: int) -> Ints:
        self._raise_if_unusable()
        for pending in self._in_flight.of([request_id]):
            if not pending.streams:
                pending.streams = True
                self._post(partial(self._streamed.setdefault, pending.key, 0))
        return await self._in_flight.read(request_id, after)

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
            shared_tokens=self._main.shared_tokens,
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
        self._fail_pending(EngineClosed("the engine is closed"))

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
            raise EngineClosed("the engine is closed")

    def _post(self, command: Callable[[], object]) -> None:
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

    def _deliver(self, finished: list[FinishedRequest], streamed: dict[str, list[int]]) -> None:
        for key, tokens in streamed.items():
            if key in self._pending:
                self._pending[key].add(tokens)
        for done in finished:
            pending = self._pending.get(done.id)
            if pending is not None and not pending.answer.done():  # else the caller is gone
                pending.deliver(done.result)

    def _fail_pending(self, error: OutpaceError) -> None:
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)
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
        if sharing.most is None and self._main.running == 0:  # measuring overwrites slots
            sharing.measure_most(lambda: tune_threads(self._main.decoder, self._threads))
        return sharing.comparing(max(1, sum(batch.running for batch in self._weight_sets.all)))

    def _flush(self) -> None:
        streamed = self._take_streamed() if self._streamed else {}
        if (self._weight_sets.finished or streamed) and self._loop is not None:
            finished, self._weight_sets.finished = self._weight_sets.finished, []
            self._wake(lambda: self._deliver(finished, streamed))

    def _take_streamed(self) -> dict[str, list[int]]:
        """Return the new tokens of every request with a reader, by key."""
        active, found = self._weight_sets.active_requests(), {}
        for key, sent in list(self._streamed.items()):
            if key not in active:
                del self._streamed[key]
            elif new := active[key].tokens[sent:]:
                found[key] = new
                self._streamed[key] += len(new)
        return found

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
