"""Background run: a run in its own thread with its own event loop, and three ways to end it early.

    stop       checkpoint and end; `finished` gets the summary
    interrupt  the same for a signal or a cancelled task; `finished` gets `Interrupted`
    abort      end immediately, without a checkpoint; `finished` gets KeyboardInterrupt

All three can be called from any thread and from a signal handler.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from typing import Any

from outpace.config import Config
from outpace.errors import BadInput, Interrupted
from outpace.monitoring.run_directory import RunLog
from outpace.monitoring.summary import Summary
from outpace.run.plan import RunPlan, completed_message, completed_summary, with_newest_checkpoint
from outpace.run.session import RunSession
from outpace.runtime.async_tools import steady_executor

PreparedRun = tuple[RunPlan, RunLog]
"""A validated plan and the run directory claimed for it."""

DUPLICATE_SIGNAL_S = 0.3
"""The same signal twice within this time counts once: a wrapper in the same process group may forward it."""

POLL_S = 0.5
"""How often a waiting caller wakes up to handle signals."""


def claim_run_directory(plan: RunPlan, resume: bool = False) -> PreparedRun:
    """Claim the plan's run directory; with `resume`, continue from its newest complete checkpoint."""
    return claim_and_plan(plan.config, resume, lambda _: plan)


def claim_and_plan(config: Config, resume: bool, make: Callable[[RunLog], RunPlan]) -> PreparedRun:
    """Claim the config's run directory, then call `make` to plan the run. Releases the directory if that fails."""
    assert config.run.dir is not None, "the caller must set run.dir"
    log = RunLog.claim(config.run.dir, overwrite=config.run.overwrite, resume=resume)
    try:
        plan = make(log)
        return (with_newest_checkpoint(plan, log.dir) if resume else plan), log
    except BaseException:
        log.abandon()
        raise


def run_plan(plan: RunPlan, resume: bool = False) -> Summary:
    """Run a plan to its end. SIGINT or SIGTERM stops it with a checkpoint; a second signal aborts it."""
    run = BackgroundRun(lambda: claim_run_directory(plan, resume))
    run.prepare()
    return run.run()


class BackgroundRun:
    """One run in a background thread. `prepare` returns its plan and claimed run directory."""

    def __init__(self, prepare: Callable[[], PreparedRun]) -> None:
        self._prepare = prepare
        self._prepared: PreparedRun | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: RunSession | None = None
        self._work: asyncio.Task[Summary] | None = None
        self._stop_count = self._interrupt_count = 0
        self._last_signal: tuple[int, float] | None = None
        self.finished: Future[Summary] = Future()
        self.summary: Summary | None = None
        """Set when the run has ended, however it ended."""

    def prepare(self) -> None:
        """Plan the run and claim its directory in the calling thread. Without this call, the run's thread does it."""
        self._prepared = self._prepare()

    def start(self) -> None:
        # A daemon thread: after `abort` the interpreter must not wait for it.
        threading.Thread(target=self._main, name="outpace-controller", daemon=True).start()

    def run(self) -> Summary:
        """Start and wait for the end. Handles signals if called in the main thread."""
        with forward_signals(self.on_signal):
            self.start()
            while not self.finished.done():  # poll: a signal delivered to another thread does not interrupt a wait
                wait([self.finished], timeout=POLL_S)
        return self.finished.result()

    async def run_async(self) -> Summary:
        """Like `run`, on a running event loop. If the task is cancelled, the run writes a checkpoint before
        CancelledError is raised; a second cancellation aborts the run."""
        cancelled = 0
        with forward_signals(self.on_signal, keep_own=True):
            self.start()
            finished = asyncio.wrap_future(self.finished)
            while not finished.done():
                try:
                    # Poll: a signal handler that only schedules a callback, as in a notebook, does not wake the loop.
                    await asyncio.wait([finished], timeout=POLL_S)
                except asyncio.CancelledError:
                    cancelled += 1
                    (self.interrupt if cancelled == 1 else self.abort)()
        error = finished.exception()
        if cancelled:
            raise asyncio.CancelledError from error
        return finished.result()

    def stop(self) -> None:
        self._stop_count += 1
        self._call(self._stop_session)

    def interrupt(self) -> None:
        self._interrupt_count += 1
        self._call(self._stop_session)

    def abort(self) -> None:
        self._interrupt_count = max(self._interrupt_count + 1, 2)
        if self._work is None:  # still preparing, which cannot be interrupted: drop its outcome
            self._finish(KeyboardInterrupt())
        else:
            self._call(self._work.cancel)

    def on_signal(self, number: int) -> None:
        """Handle a signal: the first one interrupts the run with a checkpoint, the second one aborts it."""
        last, self._last_signal = self._last_signal, (number, time.monotonic())
        if last is not None and last[0] == number and self._last_signal[1] - last[1] < DUPLICATE_SIGNAL_S:
            return
        (self.abort if self._interrupt_count else self.interrupt)()

    def _call(self, function: Callable[[], object]) -> None:
        """Schedule `function` on the run's event loop. Before the loop exists, `_session_main` checks the counters."""
        if self._loop is not None and self._work is not None:
            with suppress(RuntimeError):  # loop closed: the run has just ended
                self._loop.call_soon_threadsafe(function)

    # ---------------------------------------------------------------------------------------------------- run thread

    def _main(self) -> None:
        try:
            outcome: Summary | BaseException = self._execute(*(self._prepared or self._prepare()))
        except BaseException as error:  # thread boundary: raised again where `finished` is awaited
            outcome = error
        self._finish(outcome)

    def _finish(self, outcome: Summary | BaseException) -> None:
        with suppress(InvalidStateError):  # aborted earlier: drop this outcome
            if isinstance(outcome, BaseException):
                self.finished.set_exception(outcome)
            else:
                self.summary = outcome  # before `finished`, which wakes a thread that may read it
                self.finished.set_result(outcome)

    def _execute(self, plan: RunPlan, log: RunLog) -> Summary:
        try:
            if self.finished.done():
                raise Interrupted("stopped before any component was started")
            summary = _report_completed(plan, log) or asyncio.run(self._session_main(plan, log))
        except BaseException as error:
            discard = isinstance(error, BadInput) or (isinstance(error, Interrupted) and not log.began)
            (log.abandon if discard else log.close)()  # keep the logs of other failures
            raise
        (log.close if log.began else log.abandon)()
        return summary

    async def _session_main(self, plan: RunPlan, log: RunLog) -> Summary:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(steady_executor())
        self._session = RunSession(plan, log)
        self._work = asyncio.ensure_future(self._session.run())
        if self._stop_count or self._interrupt_count:  # requested before the session existed
            self._stop_session()
        try:
            return await self._work
        except asyncio.CancelledError:
            if self._interrupt_count < 2:
                raise
            raise KeyboardInterrupt from None
        finally:
            self.summary = self._session.summary

    def _stop_session(self) -> None:
        assert self._session is not None, "runs on the session's loop"
        self._session.stop(interrupted=self._interrupt_count > 0)


def _report_completed(plan: RunPlan, log: RunLog) -> Summary | None:
    """Return the summary of a resumed run that is already complete, and print how to extend it."""
    summary = completed_summary(plan, log.dir) if plan.resumes else None
    if summary is not None:
        print(f"{log.dir}: {completed_message(plan)}")
    return summary


# ----------------------------------------------------------------------------------------------------------- signals

_signal_receivers: list[Callable[[int], None]] = []
_replaced_handlers: dict[int, Any] = {}


@contextmanager
def forward_signals(receive: Callable[[int], None], keep_own: bool = False) -> Iterator[None]:
    """Call `receive` on every SIGINT and SIGTERM. If several runs are active, each of them receives the signal.

    `keep_own`: do not replace handlers that the program installed itself. Python handles signals only in the main
    thread; in any other thread this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _signal_receivers:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if not keep_own or _is_default(handler):
                _replaced_handlers[number] = handler
                signal.signal(number, _dispatch_signal)
    _signal_receivers.append(receive)
    try:
        yield
    finally:
        _signal_receivers.remove(receive)
        if not _signal_receivers:
            for replaced, handler in _replaced_handlers.items():
                signal.signal(replaced, handler)
            _replaced_handlers.clear()


def _dispatch_signal(number: int, frame: object) -> None:
    for receive in _signal_receivers:
        receive(number)


def _is_default(handler: Any) -> bool:
    """Return whether Python, `asyncio.run` or a notebook kernel installed the handler, rather than the program."""
    if isinstance(handler, functools.partial):
        handler = handler.func
    if getattr(handler, "__module__", "").startswith("ipykernel."):
        return True
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(
        getattr(handler, "__self__", None), asyncio.Runner
    )
