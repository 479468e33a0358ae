"""User callbacks.

Callbacks run sequentially, in event order, on a dedicated thread with its own event loop: they may block or await
without delaying the run. With a `blocking` callback the run waits: it trains a batch only after the callbacks of the
previous step, evaluation and checkpoint have returned, and admits groups only after `on_policy_updated` has.

An exception in a callback ends the run. It is passed to `on_failure` immediately and raised by `check` and `close` as
ComponentFailed with the callback's traceback; no further callback is called. With `errors="report"` the exception is
logged and the run continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from outpace.errors import ComponentFailed
from outpace.monitoring import metric_table
from outpace.monitoring.metric_table import MetricLog, collecting
from outpace.monitoring.summary import Summary
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
    "on_evaluation_start",
    "on_evaluation",
    "on_checkpoint",
]

MAX_BEHIND = 100_000
"""Maximum number of queued events. The run fails beyond it, since the queue would grow without bound."""

Request = Literal["stop", "save", "evaluate"]

POLL_S = 0.02
"""Interval at which a wait for callbacks checks whether their thread is alive."""
NOTICE_S = 30.0
"""Wait at the end of a run after which a warning is logged."""


class Callback:
    """Base class for callbacks. Override any `on_` method, as a plain function or a coroutine."""

    blocking = False
    """Whether the run waits for this callback before it trains the next batch. Requests by `stop`, `save` and
    `evaluate` then take effect right after the step that the callback has seen, not a step or two later."""

    _request: Callable[[Request], object] | None = None
    _metric_log: MetricLog | None = None

    def stop(self) -> None:
        """End the run after the current step and save a checkpoint; `train()` returns the summary."""
        self._send("stop")

    def save(self) -> None:
        """Save a checkpoint after the current step. In a deterministic run: after the next step from which a resume is
        exact."""
        self._send("save")

    def evaluate(self) -> None:
        """Evaluate the policy after the current step. Does nothing in a run without held-out tasks, or if the run stops
        after this step."""
        self._send("evaluate")

    def _send(self, request: Request) -> None:
        if self._request is not None:
            self._request(request)

    def log_metric(self, name: str, value: float, weight: float = 1.0) -> None:
        """Report a metric value, for the record of the next step. May be called on any thread."""
        if self._metric_log is not None:
            self._metric_log.log_metric(name, value, weight)
        else:  # a producer's copy, in the producer's process
            metric_table.log_metric(name, value, weight)

    def on_run_start(self, info: Mapping[str, Any]) -> Any:
        """All components are up. `info` has at least `dir`, `steps`, `version` and `config`."""

    def on_run_end(self, summary: Summary) -> Any: ...

    def on_epoch_start(self, epoch: int) -> Any: ...

    def on_epoch_end(self, epoch: int) -> Any:
        """Every task of the epoch was trained on, filtered, failed, dropped or skipped."""

    def on_rollout_start(self, order: GroupOrder) -> Any: ...

    def on_rollout_end(self, report: GroupReport) -> Any: ...

    def on_batch_start(self, version: Version) -> Any:
        """Training on the first chunk of a batch starts, from weights of `version`."""

    def on_batch_end(self, metrics: Mapping[str, float]) -> Any:
        """A step is done. `metrics` is its record in metrics.jsonl."""

    def on_policy_updated(self, version: Version) -> Any:
        """Every serving engine has loaded `version` or a newer one. Skipped versions are not reported."""

    def on_evaluation_start(self, version: Version) -> Any: ...

    def on_evaluation(self, version: Version, metrics: Mapping[str, float]) -> Any:
        """An evaluation is done. `metrics` is its record in evals.jsonl."""

    def on_checkpoint(self, step: int, path: Path) -> Any:
        """The checkpoint of `step` is complete in the directory `path`."""


class DataProducerCallback(Callback):
    """A data producer that also inherits from this class is registered as a callback."""

    def __getstate__(self) -> dict[str, Any]:
        """Drop the attributes of the run in this process: the producer's process gets a copy."""
        return {name: value for name, value in vars(self).items() if name not in ("_request", "_metric_log")}

    def on_rollout_end(self, *args: Any, **kwargs: Any) -> Any:
        """The hook of the producer. The event of this name is not sent to a producer."""


def _overrides(callback: Callback, event: Event) -> bool:
    if event == "on_rollout_end" and isinstance(callback, DataProducerCallback):
        return False
    return getattr(getattr(callback, event), "__func__", None) is not getattr(Callback, event)


class CallbackRunner:
    """Runs callbacks on a dedicated thread. Without callbacks no thread is started and `post` does nothing."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        on_failure: Callable[[ComponentFailed], object] | None = None,
        on_request: Callable[[Request], object] | None = None,
        errors: Literal["raise", "report"] = "raise",
    ) -> None:
        """`on_failure` is called on the callback thread. `on_request` is called by `Callback.stop()`, `save()` and
        `evaluate()`, on any thread."""
        self._callbacks = list(callbacks)
        self._handlers: dict[Event, list[Callback]] = {
            event: [callback for callback in callbacks if _overrides(callback, event)] for event in get_args(Event)
        }
        self.log = MetricLog()
        for callback in self._callbacks:
            callback._request = on_request
            callback._metric_log = self.log
        self._on_failure = on_failure
        self._errors = errors
        self._reported: Counter[str] = Counter()
        self._failure: ComponentFailed | None = None
        self._behind = 0
        self._lock = threading.Lock()
        self._current = ""
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._queue: asyncio.Queue[tuple[Event, tuple[Any, ...]] | Callable[[], object] | None]
        self._thread: threading.Thread | None = None
        if self._callbacks:
            # Daemon thread: user code that never returns must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="outpace-callbacks", daemon=True)
            self._thread.start()
            self._ready.wait()

    def post(self, event: Event, *args: Any) -> None:
        """Queue a call of the method `event` of every callback that overrides it. Never blocks."""
        if not self._handlers[event] or self._thread is None or self._failure is not None:
            return
        if not self._thread.is_alive():
            return
        with self._lock:
            self._behind += 1
            behind = self._behind
        if behind > MAX_BEHIND:
            self._fail(ComponentFailed("callback", f"{self._current} is {behind} events behind the run"))
            return
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (event, args))

    @property
    def blocking(self) -> bool:
        """Whether the run waits for callbacks."""
        return any(callback.blocking for callback in self._callbacks)

    async def handled(self) -> None:
        """If there is a blocking callback, wait until all events posted so far are handled, or a callback has
        failed."""
        thread = self._thread
        if thread is None or not self.blocking or self._failure is not None or not thread.is_alive():
            return
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def report_done() -> None:
            with contextlib.suppress(RuntimeError):  # the run has ended without waiting longer
                loop.call_soon_threadsafe(done.set)

        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, report_done)
        except RuntimeError:  # the loop has just closed: a callback has failed, and `on_failure` ends the run
            return
        while not done.is_set() and self._failure is None and thread.is_alive():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), POLL_S)
        await asyncio.sleep(0)  # run what the callbacks requested: it was scheduled on this loop earlier

    def check(self) -> None:
        """Raise if a callback has failed."""
        if self._failure is not None:
            raise self._failure

    async def close(self, timeout_s: float = 30.0) -> None:
        """Wait until all posted events are handled. Raise if a callback failed or exceeds `timeout_s`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            if thread.is_alive():
                self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
            await self._wait_for_thread(thread, timeout_s)
            for name, count in self._reported.items():
                if count > 1:
                    logger.error("callback %s raised %d exceptions in total", name, count)
        for callback in self._callbacks:
            callback._request = callback._metric_log = None
        self.check()

    async def _wait_for_thread(self, thread: threading.Thread, timeout_s: float) -> None:
        """Wait by polling: joining in a helper thread could not be cancelled when the run is interrupted."""
        waited_s = 0.0
        while thread.is_alive() and waited_s < timeout_s:
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
            if waited_s - POLL_S < NOTICE_S <= waited_s:
                logger.warning("the run has ended, still waiting for callback %s", self._current)
        if thread.is_alive():
            late = f"{self._current} was still running {timeout_s:g} s after the run ended"
            if self._errors == "report":
                logger.error("callback %s", late)
            else:
                self._fail(ComponentFailed("callback", late))

    # ------------------------------------------------------------------------------------------ callback thread

    def _run(self) -> None:
        with collecting(self.log):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue()
        self._ready.set()
        while self._failure is None and (item := await self._queue.get()) is not None:
            if callable(item):
                item()
                continue
            await self._call(*item)
            with self._lock:
                self._behind -= 1

    async def _call(self, event: Event, args: tuple[Any, ...]) -> None:
        for callback in self._handlers[event]:
            self._current = f"{type(callback).__name__}.{event}"
            try:
                result = getattr(callback, event)(*args)
                if inspect.isawaitable(result):
                    await result
            except BaseException as error:  # user code: sys.exit in a callback is a failure too
                text = "".join(traceback.format_exception(error))
                if self._errors == "report":
                    self._report(text)
                    continue
                self._fail(ComponentFailed(f"callback {self._current}", f"{type(error).__name__}: {error}", text))
                return

    def _report(self, text: str) -> None:
        """Log the first traceback of each method and count the rest."""
        self._reported[self._current] += 1
        if self._reported[self._current] == 1:
            logger.error("callback %s raised an exception, the run continues:\n%s", self._current, text.rstrip())

    def _fail(self, failure: ComponentFailed) -> None:
        if self._failure is None:
            self._failure = failure
            if self._on_failure is not None:
                self._on_failure(failure)
