"""Task feed: takes tasks from a stream as the run needs them.

scheduler has issued nearly all ─▶ TaskStream.next_task, on a thread ─▶ journal ─▶ TasksAdded ─▶ scheduler
"""

from __future__ import annotations

import asyncio
import traceback
from functools import partial

from outpace.controller.engine_registry import PostEvent
from outpace.controller.events import TasksAdded
from outpace.controller.scheduler import Scheduler
from outpace.errors import BadInput, ComponentFailed, with_article
from outpace.protocols import TaskStream
from outpace.runtime.async_tools import run_in_thread
from outpace.tasks.stream import StreamedTasks
from outpace.types import Task


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
        await asyncio.to_thread(self._tasks.repair)
        given = len(self._tasks)
        self._post(TasksAdded(given))
        while True:
            while given - self._scheduler.issued >= self._scheduler.settings.groups_per_step:
                self._progress.clear()
                await self._progress.wait()
            task = await self._take(given)
            if task is None:
                self._post(TasksAdded(given, ended=True))
                return
            await asyncio.to_thread(self._tasks.append, task)
            given += 1
            self._post(TasksAdded(given))

    async def _take(self, number: int) -> Task | None:
        task, error = await run_in_thread(partial(self._stream.next_task, number))  # may block for as long as it likes
        if error is not None:
            trace = "".join(traceback.format_exception(error))
            raise ComponentFailed("tasks", f"task {number} of the stream: {type(error).__name__}: {error}", trace)
        if not isinstance(task, Task | None):
            raise BadInput(f"tasks: the stream returned {with_article(type(task).__name__)}; return a Task or None")
        return task
