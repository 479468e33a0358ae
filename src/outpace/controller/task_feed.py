"""Task feed: takes rounds of tasks from a stream or a data producer as the run needs them.

    scheduler needs a round ─┬─▶ TaskStream.next_task, on a thread ─┬─▶ journal ─▶ TasksAdded ─▶ scheduler
                             └─▶ Producer.produce, a component ─────┘

A round is announced only when its source's `wants` returns True, even if an earlier start of the run journaled it. So
what a resumed run admits, and when, does not depend on how far the earlier start got.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from outpace.config.producer import ProducerConfig
from outpace.controller.engine_registry import PostEvent
from outpace.controller.events import TasksAdded
from outpace.controller.failure_budget import UserCodeFailed
from outpace.controller.scheduler import Scheduler
from outpace.errors import BadInput, ComponentFailed, with_article
from outpace.protocols import TaskStream
from outpace.tasks.stream import StreamedTasks
from outpace.types import Task, Version


@dataclass(frozen=True)
class FeedState:
    """The state that decides whether to ask for the next round."""

    next_round: int
    trained_round: int  # the oldest round with a visit that is not finalized
    unissued: int  # visits received but not issued yet
    starved: bool  # nothing runs, and nothing can be trained without the next round
    on_policy: bool  # every engine serves the newest version
    needed: bool = True  # the remaining steps need more visits than there are


def wants_round(state: FeedState, settings: ProducerConfig) -> bool:
    """Return whether to ask a producer for the next round now. Pure.

    A synchronous round waits until the earlier rounds are trained, except for tasks too few to fill a batch, and the
    engines serve the result. A background round starts when it is at most `prefetch_depth` rounds ahead of the one
    being trained, or earlier if the rounds so far have too few tasks for a batch."""
    if not state.needed:
        return False
    if not settings.in_background(state.next_round):
        return state.starved and state.on_policy
    return state.next_round <= state.trained_round + settings.prefetch_depth or state.starved


class RoundSource(Protocol):
    """A source of rounds of tasks."""

    name: str

    def wants(self, state: FeedState) -> bool:
        """Return whether the next round is needed now."""
        ...

    async def next_round(self, number: int, step: Version) -> bool:
        """Journal round `number`, unless it is already journaled; return whether there is such a round."""
        ...


class TaskFeed:
    """Announces rounds to the scheduler. Call `wake` after every event that the scheduler has handled."""

    def __init__(self, source: RoundSource, tasks: StreamedTasks, scheduler: Scheduler, post: PostEvent) -> None:
        self._source = source
        self._tasks = tasks
        self._scheduler = scheduler
        self._post = post
        self._progress = asyncio.Event()
        self._asked: int | None = None

    def wake(self) -> None:
        self._progress.set()

    @property
    def waiting_reason(self) -> str:
        """What the feed waits for; empty if it waits for the run."""
        return "" if self._asked is None else f"the {self._source.name} has not given round {self._asked}"

    async def run(self) -> None:
        """Feed the scheduler until there are no more rounds."""
        await asyncio.to_thread(len, self._tasks)  # reads what an earlier start journaled
        last = self._scheduler.demand.issued - 1  # the rounds up to this visit were announced before
        number = self._tasks.round_of(last) + 1 if last >= 0 else 0
        while True:
            given = self._tasks.visits_before(number)
            self._post(TasksAdded(given))
            while not self._source.wants(self._state(number, given)):
                self._progress.clear()
                await self._progress.wait()
            if not await self._next_round(number):
                self._post(TasksAdded(given, ended=True))
                return
            number += 1

    def _state(self, number: int, given: int) -> FeedState:
        demand = self._scheduler.demand
        unissued = given - demand.issued
        return FeedState(
            next_round=number,
            trained_round=self._tasks.round_of(demand.oldest_open),
            unissued=unissued,
            starved=unissued <= 0 and demand.starved,
            on_policy=demand.on_policy,
            needed=demand.needed,
        )

    async def _next_round(self, number: int) -> bool:
        self._asked = number
        try:
            return await self._source.next_round(number, self._scheduler.version)
        except asyncio.CancelledError:
            raise  # the run ends
        except BaseException as error:  # of user code
            raise _failure(self._source.name, number, error) from error
        finally:
            self._asked = None


def _failure(source: str, number: int, error: BaseException) -> UserCodeFailed:
    """Return the error that ends the run, with the traceback of user code."""
    if isinstance(error, BadInput):
        return UserCodeFailed(*_setting_and_problem(source, str(error)))
    if isinstance(error, ComponentFailed):
        message, trace = error.message, error.remote_traceback
    else:
        message, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    return UserCodeFailed(source, f"round {number}: {message}", trace)


def _setting_and_problem(source: str, line: str) -> tuple[str, str]:
    """Split a line that may start with its setting."""
    setting, colon, problem = line.partition(": ")
    return (setting, problem) if colon and " " not in setting else (source, line)


class ProducerRounds:
    """Rounds of the component `producer`, which journals them."""

    name = "producer"

    def __init__(
        self,
        settings: ProducerConfig,
        tasks: StreamedTasks,
        produce: Callable[[int, Version], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._produce = produce

    def wants(self, state: FeedState) -> bool:
        return self._is_last(state.next_round) or wants_round(state, self._settings)

    async def next_round(self, number: int, step: Version) -> bool:
        if self._is_last(number):
            return False
        if number >= self._tasks.rounds:
            await self._produce(number, step)
            await asyncio.to_thread(len, self._tasks)  # reads the round
        return True

    def _is_last(self, number: int) -> bool:
        return self._settings.max_rollouts is not None and number >= self._settings.max_rollouts


_calls: dict[int, tuple[TaskStream, int, Future[Task | None]]] = {}
"""Calls whose task is not journaled yet, by the stream's id. If a run ends while its call blocks, the next run of this
process takes over the call instead of asking for the same task again."""


class StreamRounds:
    """Rounds of a stream, called on a thread of this process: each task is a round. Stays one batch ahead."""

    name = "task stream"

    def __init__(self, stream: TaskStream, tasks: StreamedTasks, groups_per_step: int) -> None:
        self._stream = stream
        self._tasks = tasks
        self._ahead = groups_per_step

    def wants(self, state: FeedState) -> bool:
        return state.unissued < self._ahead

    async def next_round(self, number: int, step: Version) -> bool:
        if number < self._tasks.rounds:
            return True
        try:
            task = await asyncio.wrap_future(_call(self._stream, number))  # may block indefinitely
        except asyncio.CancelledError:
            raise  # the run ends
        except BaseException:
            _calls.pop(id(self._stream), None)
            raise
        await asyncio.to_thread(self._journal, task)
        return task is not None

    def _journal(self, task: Task | None) -> None:
        """Journal a task and forget its call. A cancelled run does both or neither. If the task cannot be written, for
        example to a full disk, the call is kept; if the task is invalid, the call is forgotten."""
        try:
            if not isinstance(task, Task | None):
                raise BadInput(f"the stream returned {with_article(type(task).__name__)}; return a Task or None")
            if task is not None:
                self._tasks.append(task)
        except BadInput:
            _calls.pop(id(self._stream), None)
            raise
        _calls.pop(id(self._stream), None)


def _call(stream: TaskStream, number: int) -> Future[Task | None]:
    """Ask the stream for a task on a thread, unless an earlier run of this process still waits for the same one."""
    pending = _calls.get(id(stream))
    if pending is not None and pending[1] == number:
        return pending[2]
    future: Future[Task | None] = Future()
    future.set_running_or_notify_cancel()  # a run that ends cannot cancel it

    def ask() -> None:
        try:
            future.set_result(stream.next_task(number))
        except Exception as error:  # thread boundary: raised by the feed
            future.set_exception(RuntimeError("StopIteration") if isinstance(error, StopIteration) else error)
        except BaseException as error:  # thread boundary: an exit in the stream must not end the event loop
            future.set_exception(RuntimeError(type(error).__name__))

    _calls[id(stream)] = stream, number, future
    threading.Thread(target=ask, name="task-stream", daemon=True).start()
    return future
