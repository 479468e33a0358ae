"""A run on a thread with an event loop of its own, and the ways to end it early.

    stop       checkpoint and end; `finished` gets the summary
    interrupt  the same for a signal or a cancelled task; `finished` gets `Interrupted`
    leave      end at once, without a checkpoint; `finished` gets KeyboardInterrupt

All three can be called from any thread, and from a signal handler.
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
from outpace.observe.runlog import RunLog
from outpace.observe.summary import Summary
from outpace.planning import already_done, nothing_left, with_checkpoint
from outpace.runtime.threads import steady_executor
from outpace.session import Plan, Session

Prepared = tuple[Plan, RunLog]
"""A checked plan, and the run directory that was claimed for it."""

SAME_SIGNAL_S = 0.3
"""A signal that arrives twice within this time counts once: a wrapper in the same process group may pass it on."""

WAKE_S = 0.5
"""How often a caller that waits for the end looks for signals."""


def claim(plan: Plan, resume: bool = False) -> Prepared:
    """Claim the plan's run directory; with `resume`, continue from its newest complete checkpoint."""
    return plan_in(plan.config, resume, lambda _: plan)


def plan_in(config: Config, resume: bool, make: Callable[[RunLog], Plan]) -> Prepared:
    """Claim the run directory of a config, and have `make` plan the run with it."""
    assert config.run.dir is not None, "the caller sets it"
    log = RunLog.claim(config.run.dir, overwrite=config.run.overwrite, resume=resume)
    try:
        plan = make(log)
        return (with_checkpoint(plan, log.dir) if resume else plan), log
    except BaseException:
        log.abandon()
        raise


def run_plan(plan: Plan, resume: bool = False) -> Summary:
    """Run a plan to its end. SIGINT or SIGTERM stops it with a checkpoint, a second one at once."""
    run = BackgroundRun(lambda: claim(plan, resume))
    run.prepare()
    return run.run()


class BackgroundRun:
    def __init__(self, prepare: Callable[[], Prepared]) -> None:
        self._prepare = prepare
        self._prepared: Prepared | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Session | None = None
        self._work: asyncio.Task[Summary] | None = None
        self._stops = self._interrupts = 0
        self._last_signal: tuple[int, float] | None = None
        self.finished: Future[Summary] = Future()
        self.summary: Summary | None = None
        """Set when the run has ended, in whatever way."""

    def prepare(self) -> None:
        """Plan the run and claim its directory on the calling thread. Otherwise `start` does so on the run's own."""
        self._prepared = self._prepare()

    def start(self) -> None:
        # A daemon thread: after `leave` the interpreter must not wait for it.
        threading.Thread(target=self._main, name="outpace-controller", daemon=True).start()

    def run(self) -> Summary:
        """Start, and wait for the end. Signals are caught if this is the main thread."""
        with signals_to(self.signalled):
            self.start()
            while not self.finished.done():  # in turns: a signal delivered to another thread does not end a long wait
                wait([self.finished], timeout=WAKE_S)
        return self.finished.result()

    async def run_async(self) -> Summary:
        """The same on a running event loop. If the task is cancelled, the run is stopped with a checkpoint before
        CancelledError is raised; a second cancellation ends it at once."""
        cancelled = 0
        with signals_to(self.signalled, keep_own=True):
            self.start()
            finished = asyncio.wrap_future(self.finished)
            while not finished.done():
                try:
                    # In turns: a signal handler that only schedules a callback, as a notebook's does, wakes no loop.
                    await asyncio.wait([finished], timeout=WAKE_S)
                except asyncio.CancelledError:
                    cancelled += 1
                    (self.interrupt if cancelled == 1 else self.leave)()
        error = finished.exception()
        if cancelled:
            raise asyncio.CancelledError from error
        return finished.result()

    def stop(self) -> None:
        self._stops += 1
        self._call(self._stop_session)

    def interrupt(self) -> None:
        self._interrupts += 1
        self._call(self._stop_session)

    def leave(self) -> None:
        self._interrupts = max(self._interrupts + 1, 2)
        if self._work is None:  # still preparing, which nothing can interrupt: its outcome is dropped
            self._finish(KeyboardInterrupt())
        else:
            self._call(self._work.cancel)

    def signalled(self, number: int) -> None:
        """First signal: checkpoint and end. Second: end at once."""
        last, self._last_signal = self._last_signal, (number, time.monotonic())
        if last is not None and last[0] == number and self._last_signal[1] - last[1] < SAME_SIGNAL_S:
            return
        (self.leave if self._interrupts else self.interrupt)()

    def _call(self, function: Callable[[], object]) -> None:
        """On the run's event loop; before there is one, `_session_main` looks at what was asked for."""
        if self._loop is not None and self._work is not None:
            with suppress(RuntimeError):  # the loop is closed: the run has just ended
                self._loop.call_soon_threadsafe(function)

    # ------------------------------------------------------------------------------------------------ the run's thread

    def _main(self) -> None:
        try:
            outcome: Summary | BaseException = self._execute(*(self._prepared or self._prepare()))
        except BaseException as error:  # the boundary between threads: raised again where `finished` is awaited
            outcome = error
        self._finish(outcome)

    def _finish(self, outcome: Summary | BaseException) -> None:
        with suppress(InvalidStateError):  # it was left, and its outcome is of no interest any more
            if isinstance(outcome, BaseException):
                self.finished.set_exception(outcome)
            else:
                self.summary = outcome  # first: `finished` wakes a thread that may read it
                self.finished.set_result(outcome)

    def _execute(self, plan: Plan, log: RunLog) -> Summary:
        try:
            if self.finished.done():
                raise Interrupted("stopped before anything was started")
            summary = _nothing_left(plan, log) or asyncio.run(self._session_main(plan, log))
        except BaseException as error:
            refused = isinstance(error, BadInput) or (isinstance(error, Interrupted) and not log.began)
            (log.abandon if refused else log.close)()  # otherwise the logs say what went wrong
            raise
        (log.close if log.began else log.abandon)()
        return summary

    async def _session_main(self, plan: Plan, log: RunLog) -> Summary:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(steady_executor())
        self._session = Session(plan, log)
        self._work = asyncio.ensure_future(self._session.run())
        if self._stops or self._interrupts:  # asked for before there was a session
            self._stop_session()
        try:
            return await self._work
        except asyncio.CancelledError:
            if self._interrupts < 2:
                raise
            raise KeyboardInterrupt from None
        finally:
            self.summary = self._session.summary

    def _stop_session(self) -> None:
        assert self._session is not None, "this runs on its loop"
        self._session.stop(interrupted=self._interrupts > 0)


def _nothing_left(plan: Plan, log: RunLog) -> Summary | None:
    """The summary of a run that is complete already."""
    done = already_done(plan, log.dir) if plan.resumes else None
    if done is not None:
        print(f"{log.dir}: {nothing_left(plan)}")
    return done


# ----------------------------------------------------------------------------------------------------------- signals

_receivers: list[Callable[[int], None]] = []
_replaced: dict[int, Any] = {}


@contextmanager
def signals_to(receive: Callable[[int], None], keep_own: bool = False) -> Iterator[None]:
    """Call `receive` with every SIGINT and SIGTERM. With `keep_own`, signals that the program handles itself stay with
    it. Several runs may be under way: each of them hears of a signal. Python handles signals on the main thread only;
    on any other this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _receivers:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if not keep_own or _is_default(handler):
                _replaced[number] = handler
                signal.signal(number, _deliver)
    _receivers.append(receive)
    try:
        yield
    finally:
        _receivers.remove(receive)
        if not _receivers:
            for replaced, handler in _replaced.items():
                signal.signal(replaced, handler)
            _replaced.clear()


def _deliver(number: int, frame: object) -> None:
    for receive in _receivers:
        receive(number)


def _is_default(handler: Any) -> bool:
    """What Python installs by itself, `asyncio.run` for its main task, or a notebook's kernel for a cell."""
    if isinstance(handler, functools.partial):
        handler = handler.func
    if getattr(handler, "__module__", "").startswith("ipykernel."):
        return True
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(
        getattr(handler, "__self__", None), asyncio.Runner
    )
