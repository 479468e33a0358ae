"""Task feed: takes tasks from a stream as the run needs them.

scheduler has issued nearly all ─▶ TaskStream.next_task, on a thread ─▶ journal ─▶ TasksAdded ─▶ scheduler
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from concurrent.futures import Future

from outpace.controller.engine_registry import PostEvent
from outpace.controller.events import TasksAdded
from outpace.controller.scheduler import Scheduler
from outpace.errors import BadInput, ComponentFailed, with_article
from outpace.protocols import TaskStream
from outpace.tasks.stream import StreamedTasks
from outpace.types import Task

_calls: dict[int, tuple[TaskStream, int, Future[Task | None]]] = {}
"""Calls whose task is not journaled yet, by the stream's id. A run that ends leaves its blocked call to the next run of
this process, which would otherwise ask for the same task a second time."""


class TaskFeed:
    """Keeps one batch of tasks ahead of the scheduler. Call `wake` after every event it has handled."""

    def __init__(self, stream: TaskStream, tasks: StreamedTasks, scheduler: Scheduler, post: PostEvent) -> None:
        self._stream = stream
        self._tasks = tasks
        self._scheduler = scheduler
        self._post = post
        self._progress = asyncio.Event()

    def wake(self) -> None:
        self._progress.set()

    async def run(self) -> None:
        """Feed the scheduler until the stream ends."""
        given = await asyncio.to_thread(self._tasks.repair)
        self._post(TasksAdded(given))
        while True:
            while given - self._scheduler.issued >= self._scheduler.settings.groups_per_step:
                self._progress.clear()
                await self._progress.wait()
            task = await self._take(given)
            if task is None:
                self._post(TasksAdded(given, ended=True))
                return
            given += 1
            self._post(TasksAdded(given))

    async def _take(self, number: int) -> Task | None:
        """Return task `number` after it was journaled."""
        try:
            task = await asyncio.wrap_future(_call(self._stream, number))  # may block for as long as it likes
        except asyncio.CancelledError:
            raise  # the run ends
        except BaseException as error:  # of user code
            _calls.pop(id(self._stream), None)
            trace = "".join(traceback.format_exception(error))
            raise ComponentFailed(
                "tasks", f"task {number} of the stream: {type(error).__name__}: {error}", trace
            ) from error
        await asyncio.to_thread(self._journal, task)
        return task

    def _journal(self, task: Task | None) -> None:
        """Journal a task and forget its call. One unit, which a cancelled run either completes or leaves undone. The
        call of a task that could not be written, such as to a full disk, is kept; that of an invalid task is not."""
        try:
            if not isinstance(task, Task | None):
                raise BadInput(f"the stream returned {with_article(type(task).__name__)}; return a Task or None")
            if task is not None:
                self._tasks.append(task)
        except BadInput as error:  # the run has begun, so its files stay
            _calls.pop(id(self._stream), None)
            raise ComponentFailed("tasks", str(error)) from error
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
        except BaseException as error:  # thread boundary: raised by the feed
            future.set_exception(error)

    _calls[id(stream)] = stream, number, future
    threading.Thread(target=ask, name="task-stream", daemon=True).start()
    return future
