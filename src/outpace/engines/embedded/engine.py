"""The engine built into outpace: an asyncio face over one compute thread.

    event loop                                   compute thread
    generate, abort, load, … ── inbox ──▶  until closed: run the inbox; one turn of each lane with work
    futures settle           ◀── outbox ─  (at most one wake-up of the loop per turn)

The compute thread sleeps on the inbox's condition when no lane has work; a request, a load or `close` wakes it. The
loop never waits for it except by futures. An exception on the compute thread fails every pending request and every
later call: an engine that is broken says so (`broken`), it does not hang.

Invariants
- Lanes and decoders are touched by the compute thread alone, between two turns or inside one; so every weight swap
  is at a token boundary. Reading, verifying and laying out a snapshot happen before, on a helper thread.
- `_submissions`, `_calls` and `_peeking` are touched by the event loop alone. Whoever adds to them sets `_loop` first:
  without it the compute thread could not tell them of its end.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outpace import crash
from outpace.engines.embedded.build import DecoderPath, build_decoder
from outpace.engines.embedded.decoder import Prepared
from outpace.engines.embedded.lane import KvPolicy
from outpace.engines.embedded.lanes import STALE, Lanes
from outpace.engines.embedded.peeking import Peek, Peeks, Seen
from outpace.engines.embedded.request import Done
from outpace.engines.embedded.stopping import Decode
from outpace.engines.embedded.submissions import Submissions
from outpace.engines.embedded.tuning import fitting_threads
from outpace.errors import OutpaceError, PartFailed, RequestFailed
from outpace.models.device import set_up_device
from outpace.models.loading import load_model, load_tokenizer
from outpace.runtime.core_sharing import CoreSharing
from outpace.stopwatch import Stopwatch
from outpace.types import EngineStats, Generation, Ints, LoadReport, Manifest, Sampling, Version
from outpace.weights.store import read_snapshot

T = TypeVar("T")


class EmbeddedEngine:
    """`outpace.protocols.Engine` in this process. Starts at version 0 with the model's own weights, or stale."""

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
        """`model` is what `model.path` may be, or a loaded model, whose weights are copied. `threads` is a limit: a
        small model is stepped with fewer. With `sharing` the number follows the load. `stale`: the model's own weights
        are not the policy's any more, and nothing is served before the first load. `pinned_slots`: of a pinned weight
        set, where it needs fewer than `slots`."""
        if isinstance(model, str):
            tokenizer = tokenizer or load_tokenizer(model, trust_remote_code=trust_remote_code)
            model = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        set_up_device(model.device)
        decoder = build_decoder(model, slots, context, deterministic=deterministic, path=path)
        decode = None if tokenizer is None else _text_decoder(tokenizer)
        self._lanes = Lanes(decoder, STALE if stale else 0, kv, decode, pinned_slots)
        self._main = self._lanes.main
        self._threads = threads or torch.get_num_threads()
        self._sharing = sharing
        self._on_cpu = model.device.type == "cpu"
        counted = self._threads if self._on_cpu else None
        self._work, self._eval_work = Stopwatch(counted), Stopwatch(counted)

        self._submissions = Submissions()
        self._calls: set[Future[Any]] = set()
        self._peeking: set[asyncio.Future[Ints]] = set()
        self._breakdown: asyncio.Future[PartFailed] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._load_lock = asyncio.Lock()

        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._peeks = Peeks()
        self._closing = False
        self._turns = 0  # of the compute thread
        self._failure: PartFailed | None = None
        self._thread = threading.Thread(target=self._compute, name="outpace-engine", daemon=True)
        crash.reached("engine.built")
        self._thread.start()

    # ---------------------------------------------------------------------------------------- the event loop's side

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        self._loop = asyncio.get_running_loop()
        self._submissions.refuse_twice(request_id)
        key = self._submissions.new_key(request_id)
        self._post(lambda: self._lanes.submit(key, token_ids, sampling, min_version, pinned))
        try:
            return await self._submissions.answer(request_id, key)
        except asyncio.CancelledError:
            if self._failure is None and not self._closing:
                self._post(lambda: self._lanes.abort({key}))
            raise

    async def abort(self, request_ids: list[str]) -> None:
        wanted = self._submissions.keys_of(request_ids)
        self._post(lambda: self._lanes.abort(wanted))

    async def peek(self, request_id: str, after: int) -> Ints:
        self._raise_if_unusable()
        wanted = self._submissions.keys_of([request_id])
        if not wanted:
            return np.zeros(0, dtype=np.int32)
        self._loop = asyncio.get_running_loop()
        peek = Peek(wanted.pop(), after, self._loop.create_future())
        self._post(lambda: self._peeks.add(peek))
        self._peeking.add(peek.answer)
        try:
            return await peek.answer
        finally:
            self._peeking.discard(peek.answer)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        async with self._load_lock:
            started = time.perf_counter()
            self._refuse_older(manifest, pinned)
            prepared = await asyncio.to_thread(self._prepare, manifest)
            pause_s = await self._on_compute(lambda: self._swap(prepared, manifest, pinned))
            return LoadReport(
                version=manifest.version,
                pause_s=pause_s,
                seconds=time.perf_counter() - started,
                bytes=manifest.nbytes,
            )

    async def release_pinned(self) -> None:
        await self._on_compute(self._lanes.drop_pinned)

    async def stats(self) -> EngineStats:
        """Read without stopping the compute thread: counters may be one step apart."""
        self._raise_if_unusable()
        lanes = self._lanes.all
        return EngineStats(
            version=self._main.version,
            running=sum(lane.running for lane in lanes),
            waiting=sum(lane.waiting for lane in lanes),
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

    async def broken(self) -> PartFailed:
        """Waits until the compute thread has broken down; says why."""
        with self._condition:
            if self._failure is not None:
                return self._failure
            self._loop = asyncio.get_running_loop()
            self._breakdown = self._loop.create_future()
        return await self._breakdown

    async def close(self) -> None:
        """Fail what is pending and end the compute thread."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)
        self._fail_pending(RequestFailed("the engine was closed"))

    def _refuse_older(self, manifest: Manifest, pinned: bool) -> None:
        self._raise_if_unusable()
        if not pinned and manifest.version < self._main.version:
            raise OutpaceError(
                f"the engine is at version {self._main.version}: it does not go back to {manifest.version}"
            )

    def _prepare(self, manifest: Manifest) -> Prepared:
        with torch.no_grad():
            prepared = self._main.decoder.prepare(read_snapshot(manifest))
        crash.reached("engine.load_read")
        return prepared

    def _raise_if_unusable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise RequestFailed("the engine was closed")

    def _post(self, command: Callable[[], None]) -> None:
        with self._condition:
            self._raise_if_unusable()
            self._inbox.append(command)
            self._condition.notify()

    async def _on_compute(self, action: Callable[[], T]) -> T:
        """Run `action` on the compute thread between two turns, unless the caller has given up by then."""
        self._loop = asyncio.get_running_loop()
        future: Future[T] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(action())

        self._post(answer)
        self._calls.add(future)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    def _settle(self, finished: list[Done], seen: list[Seen]) -> None:
        for peek, tokens in seen:
            if not peek.answer.done():
                peek.answer.set_result(tokens)
        self._submissions.settle(finished)

    def _fail_pending(self, error: OutpaceError) -> None:
        self._submissions.fail(error)
        for look in self._peeking:
            if not look.done():
                look.set_exception(error)
        for call in self._calls:
            if not call.done():
                call.set_exception(error)

    def _tell_breakdown(self, failure: PartFailed) -> None:
        if self._breakdown is not None and not self._breakdown.done():
            self._breakdown.set_result(failure)
        self._fail_pending(failure)

    # -------------------------------------------------------------------------------------- the compute thread's side

    def _compute(self) -> None:
        try:
            if self._sharing is None:
                if self._on_cpu:
                    self._threads = fitting_threads(self._main.decoder, self._threads)
                torch.set_num_threads(self._threads)  # torch's thread count belongs to the thread that sets it
            while self._take_turn():
                pass
        except BaseException as error:  # the boundary of the thread: whatever it was, callers must hear of it
            self._break_down(error)

    def _take_turn(self) -> bool:
        with self._condition:
            while not (self._inbox or self._closing or self._lanes.has_work):
                if self._sharing is not None:
                    self._sharing.idle()
                self._condition.wait()
            if self._closing:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command()
        with self._sharing_cores(self._sharing) if self._sharing and self._lanes.has_work else nullcontext():
            for lane in self._lanes.all:
                if lane.has_work:
                    with self._work.running() if lane is self._main else self._eval_work.running():
                        self._lanes.ended += lane.advance()
                    crash.reached("engine.turn")
        self._turns += 1
        self._flush()
        return True

    def _sharing_cores(self, sharing: CoreSharing) -> AbstractContextManager[None]:
        if sharing.most is None and self._main.running == 0:  # measuring clears the decoder
            sharing.measure_most(lambda: fitting_threads(self._main.decoder, self._threads))
        return sharing.comparing(max(1, sum(lane.running for lane in self._lanes.all)))

    def _flush(self) -> None:
        seen = self._peeks.seen(self._lanes.under_way()) if self._peeks else []
        if (self._lanes.ended or seen) and self._loop is not None:
            finished, self._lanes.ended = self._lanes.ended, []
            self._wake(lambda: self._settle(finished, seen))

    def _wake(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _break_down(self, error: BaseException) -> None:
        failure = PartFailed("engine", f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
        with self._condition:
            self._failure = failure
            self._inbox.clear()
        self._wake(lambda: self._tell_breakdown(failure))

    def _swap(self, prepared: Prepared, manifest: Manifest, pinned: bool) -> float:
        started = time.perf_counter()
        swap = self._lanes.swap_pinned if pinned else self._lanes.swap_main
        swap(prepared, manifest.version)
        return time.perf_counter() - started


def _text_decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    def decode(tokens: Sequence[int]) -> str:
        text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode
