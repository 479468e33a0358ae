"""User code that follows a run.

Callbacks run one after another, in the order of their events, on one thread of their own with an event loop of its
own: they may block or await without holding up the run.

An exception in one ends the run: it is kept, passed to `on_failure` at once, and raised by `check` and `close` as
PartFailed with the callback's own traceback; no callback is called after it. With `errors="report"` it is logged
instead, and the run goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from outpace.errors import PartFailed
from outpace.observe.summary import Summary
from outpace.types import GroupOrder, GroupReport, Version

logger = logging.getLogger(__name__)

Event = Literal[
    "on_run_start",
    "on_run_end",
    "on_epoch_start",
    "on_epoch_end",
    "on_rollout_start",
    "on_rollout_end",
    "on_batch_start",
    "on_batch_end",
    "on_policy_updated",
    "on_evaluation",
    "on_checkpoint",
]

MAX_BEHIND = 100_000
"""Callbacks that fall so many events behind will not catch up: the run ends rather than grow without bound."""

POLL_S = 0.02
NOTICE_S = 30.0
"""At the end of a run: how often its callbacks are asked whether they are done, and when a wait is logged."""


class Callback:
    """Override what you need; a method may be a plain function or a coroutine."""

    _request_stop: Callable[[], object] | None = None

    def stop(self) -> None:
        """End the run after the step under way, with a checkpoint: `train()` returns its summary."""
        if self._request_stop is not None:
            self._request_stop()

    def on_run_start(self, info: Mapping[str, Any]) -> Any:
        """The parts are up. `info` says at least `dir`, `steps`, `version` and `config`."""

    def on_run_end(self, summary: Summary) -> Any: ...

    def on_epoch_start(self, epoch: int) -> Any: ...

    def on_epoch_end(self, epoch: int) -> Any:
        """Every task of this epoch is accounted for."""

    def on_rollout_start(self, order: GroupOrder) -> Any: ...

    def on_rollout_end(self, report: GroupReport) -> Any: ...

    def on_batch_start(self, version: Version) -> Any:
        """The first chunk of the batch that is trained from `version`."""

    def on_batch_end(self, metrics: Mapping[str, float]) -> Any:
        """A step is done. `metrics` is its line of metrics.jsonl."""

    def on_policy_updated(self, version: Version) -> Any:
        """Every serving engine has `version` or a newer one. Versions that were skipped are not reported."""

    def on_evaluation(self, version: Version, metrics: Mapping[str, float]) -> Any:
        """`metrics` is the evaluation's line of evals.jsonl."""

    def on_checkpoint(self, step: int, path: Path) -> Any:
        """The checkpoint of `step` is complete, in the directory `path`."""


class CallbackRunner:
    """Owns the thread. Without callbacks there is none, and posting costs nothing."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        on_failure: Callable[[PartFailed], object] | None = None,
        on_stop: Callable[[], object] | None = None,
        errors: Literal["raise", "report"] = "raise",
    ) -> None:
        """`on_failure` and `on_stop` (a callback called `stop`) are called on the callbacks' thread."""
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            callback._request_stop = on_stop
        self._on_failure = on_failure
        self._errors = errors
        self._reported: Counter[str] = Counter()
        self._failure: PartFailed | None = None
        self._behind = 0
        self._lock = threading.Lock()
        self._current = ""
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._queue: asyncio.Queue[tuple[Event, tuple[Any, ...]] | None]
        self._thread: threading.Thread | None = None
        if self._callbacks:
            # A daemon: user code that never returns must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="outpace-callbacks", daemon=True)
            self._thread.start()
            self._ready.wait()

    def post(self, event: Event, *args: Any) -> None:
        """Call this method of every callback, soon. Never blocks."""
        if self._thread is None or self._failure is not None or not self._thread.is_alive():
            return
        with self._lock:
            self._behind += 1
            behind = self._behind
        if behind > MAX_BEHIND:
            self._fail(PartFailed("callback", f"{self._current} is {behind} events behind the run"))
            return
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (event, args))

    def check(self) -> None:
        """Raise what a callback raised."""
        if self._failure is not None:
            raise self._failure

    async def close(self, timeout_s: float = 30.0) -> None:
        """Wait until the callbacks have handled what was posted; raise if one failed or is not done in time."""
        thread, self._thread = self._thread, None
        if thread is not None:
            if thread.is_alive():
                self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
            await self._ended(thread, timeout_s)
            for name, count in self._reported.items():
                if count > 1:
                    logger.error("callback %s raised %d times in all", name, count)
        for callback in self._callbacks:
            callback._request_stop = None
        self.check()

    async def _ended(self, thread: threading.Thread, timeout_s: float) -> None:
        """Poll: a thread that waits for user code could not be left when the run is interrupted."""
        waited_s = 0.0
        while thread.is_alive() and waited_s < timeout_s:
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
            if waited_s - POLL_S < NOTICE_S <= waited_s:
                logger.warning("the run has ended; waiting for callback %s", self._current)
        if thread.is_alive():
            late = f"{self._current} was still running {timeout_s:g} s after the end of the run"
            if self._errors == "report":
                logger.error("callback %s", late)
            else:
                self._fail(PartFailed("callback", late))

    # ------------------------------------------------------------------------------------------ the callbacks' thread

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue()
        self._ready.set()
        while self._failure is None and (item := await self._queue.get()) is not None:
            await self._call(*item)
            with self._lock:
                self._behind -= 1

    async def _call(self, event: Event, args: tuple[Any, ...]) -> None:
        for callback in self._callbacks:
            self._current = f"{type(callback).__name__}.{event}"
            try:
                result = getattr(callback, event)(*args)
                if inspect.isawaitable(result):
                    await result
            except BaseException as error:  # the boundary to user code: sys.exit in a callback is a failure too
                text = "".join(traceback.format_exception(error))
                if self._errors == "report":
                    self._report(text)
                    continue
                self._fail(PartFailed(f"callback {self._current}", f"{type(error).__name__}: {error}", text))
                return

    def _report(self, text: str) -> None:
        """The first traceback of each method; further ones are counted."""
        self._reported[self._current] += 1
        if self._reported[self._current] == 1:
            logger.error("callback %s raised, and the run goes on:\n%s", self._current, text.rstrip())

    def _fail(self, failure: PartFailed) -> None:
        if self._failure is None:
            self._failure = failure
            if self._on_failure is not None:
                self._on_failure(failure)
