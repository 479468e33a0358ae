"""The journal of a task stream, and the scheduler and feed that use it."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driver_support import SETTINGS
from outpace.controller import events as ev
from outpace.controller.ledger import LedgerState
from outpace.controller.pacing import TaskDemand
from outpace.controller.recovery import SchedulerState
from outpace.controller.scheduler import Scheduler
from outpace.controller.task_feed import StreamRounds, TaskFeed
from outpace.errors import BadInput, ComponentFailed
from outpace.protocols import TaskStream
from outpace.run.plan import UserObjects, make_plan
from outpace.tasks.order import TaskOrder
from outpace.tasks.stream import ENDLESS, Round, StreamedTasks
from outpace.types import Task
from support import naming, resolved

STREAMED = replace(SETTINGS, tasks=ENDLESS, streamed=True, eval_enabled=False, steps=None)
ORDER = TaskOrder(ENDLESS, 0, shuffle=False)


def task(number: int) -> Task:
    return Task(f"t{number}", f"prompt\n{number}", {"answer": number})


class Counted:
    """A stream of `count` tasks that remembers which numbers were asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[int] = []

    def next_task(self, number: int, /) -> Task | None:
        self.asked.append(number)
        return task(number) if number < self.count else None


# ------------------------------------------------------------------------------------------------------------ journal


def test_threads_that_read_at_once_see_the_same_tasks(tmp_path: Path) -> None:
    writer = StreamedTasks(tmp_path / "tasks.jsonl")
    for number in range(200):
        writer.append(task(number))
    for _ in range(20):
        reader = StreamedTasks(tmp_path / "tasks.jsonl")
        with ThreadPoolExecutor(8) as threads:
            assert [*threads.map(reader.__getitem__, range(200))] == [task(number) for number in range(200)]


def test_journaled_tasks_are_read_by_index_also_by_a_reader_that_was_there_first(tmp_path: Path) -> None:
    writer, reader = (StreamedTasks(tmp_path / "tasks.jsonl") for _ in range(2))
    assert len(reader) == 0
    for number in range(3):
        writer.append(task(number))
    assert [reader[index] for index in (2, 0, 1)] == [task(2), task(0), task(1)]
    assert len(reader) == len(writer) == 3
    with pytest.raises(IndexError):
        reader[3]


def test_a_torn_last_line_is_removed_and_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    StreamedTasks(path).append(task(0))
    with path.open("ab") as file:
        file.write(b'{"id":"t1","pro')
    tasks = StreamedTasks(path)
    assert len(tasks) == 1
    tasks.append(task(1))
    assert [StreamedTasks(path)[index] for index in range(2)] == [task(0), task(1)]


def test_a_task_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    tasks = StreamedTasks(tmp_path / "tasks.jsonl")
    with pytest.raises(BadInput, match=naming("t0")):
        tasks.append(Task("t0", "prompt", {"image": object()}))
    assert len(tasks) == 0


def append_round(tasks: StreamedTasks, number: int, prompts: str, passes: int = 1, limit: int | None = None) -> None:
    header = Round(number, len(prompts), passes, limit, rng=f"after {number}")
    tasks.append_round(header, [Task(prompt, prompt) for prompt in prompts])


def test_the_visits_of_a_round_are_its_tasks_in_every_pass_up_to_the_limit(tmp_path: Path) -> None:
    writer, reader = (StreamedTasks(tmp_path / "tasks.jsonl") for _ in range(2))
    append_round(writer, 0, "ab", passes=2)
    assert len(reader) == 4
    append_round(writer, 1, "cde", passes=2, limit=5)
    append_round(writer, 2, "f")
    assert "".join(reader[visit].id for visit in range(10)) == "abab" + "cdecd" + "f"
    assert len(reader) == 10
    assert (reader.rounds, reader.rng) == (3, "after 2")
    assert [reader.round_of(visit) for visit in range(11)] == [0] * 4 + [1] * 5 + [2, 3]
    assert [reader.visits_before(number) for number in range(5)] == [0, 4, 9, 10, 10]
    with pytest.raises(IndexError):
        reader[10]


@pytest.mark.parametrize("lost", [1, 20, 60, 100])
def test_a_round_that_a_kill_left_incomplete_does_not_exist(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "tasks.jsonl"
    tasks = StreamedTasks(path)
    append_round(tasks, 0, "ab")
    complete = path.stat().st_size
    append_round(tasks, 1, "cde")
    os.truncate(path, max(complete, path.stat().st_size - lost))
    torn = StreamedTasks(path)
    assert (len(torn), torn.rounds) == (2, 1)
    append_round(torn, 1, "xy")
    assert "".join(StreamedTasks(path)[visit].id for visit in range(4)) == "abxy"


def test_tasks_of_a_stream_are_rounds_of_one_also_before_rounds_of_a_producer(tmp_path: Path) -> None:
    tasks = StreamedTasks(tmp_path / "tasks.jsonl")
    for number in range(3):
        tasks.append(task(number))
    assert tasks.rounds == 3
    append_round(tasks, 3, "ab", passes=2)
    tasks.append(task(4))
    found = StreamedTasks(tmp_path / "tasks.jsonl")
    assert len(found) == 8
    assert [found[visit].id for visit in range(8)] == ["t0", "t1", "t2", *"abab", "t4"]
    assert [found.round_of(visit) for visit in range(9)] == [0, 1, 2, 3, 3, 3, 3, 4, 5]
    assert [found.visits_before(number) for number in range(6)] == [0, 1, 2, 3, 7, 8]


# ---------------------------------------------------------------------------------------------------------- scheduler


def admitted(actions: list[ev.Action]) -> list[int]:
    return [action.task for action in actions if isinstance(action, ev.Admit)]


def test_only_tasks_that_have_arrived_are_admitted_in_their_order() -> None:
    scheduler = Scheduler(STREAMED, ORDER)
    assert admitted(scheduler.handle(ev.RunStarted({"e0": 0}))) == []
    assert admitted(scheduler.handle(ev.TasksAdded(2))) == [0, 1]
    assert admitted(scheduler.handle(ev.TasksAdded(3))) == [2]
    assert scheduler.demand.issued == 3
    assert "stream" in scheduler.waiting_reason()


def test_a_run_waits_for_the_stream_and_ends_with_it_on_a_short_batch() -> None:
    scheduler = Scheduler(STREAMED, ORDER)
    scheduler.handle(ev.RunStarted({"e0": 0}))
    scheduler.handle(ev.TasksAdded(3))
    waiting = [action for group in range(3) for action in scheduler.handle(ev.GroupClosed(group, "finished"))]
    assert [action.groups for action in waiting if isinstance(action, ev.TrainChunk)] == [(0, 1)]
    assert not scheduler.handle(ev.ChunkTrained(0)), "a batch is not closed early while tasks may arrive"
    (chunk,) = scheduler.handle(ev.TasksAdded(3, ended=True))
    assert isinstance(chunk, ev.TrainChunk)
    (close,) = scheduler.handle(ev.ChunkTrained(0))
    assert isinstance(close, ev.CloseBatch)
    assert close.groups == (0, 1, 2)


def test_a_resumed_run_issues_open_visits_first_and_then_the_tasks_that_were_journaled() -> None:
    ledger = LedgerState(cursor=3, running=[1])
    state = SchedulerState(ENDLESS, 0, False, version=0, next_group=3, ledger=ledger)
    scheduler = Scheduler(STREAMED, ORDER, state)
    assert admitted(scheduler.handle(ev.RunStarted({"e0": 0}))) == [1]
    assert admitted(scheduler.handle(ev.TasksAdded(5))) == [3, 4]


# --------------------------------------------------------------------------------------------------------------- feed


class FakeScheduler:
    issued = version = 0

    @property
    def demand(self) -> TaskDemand:
        return TaskDemand(self.issued, self.issued, starved=False, on_policy=True)


async def feed(stream: TaskStream, path: Path, scheduler: Any) -> list[ev.TasksAdded]:
    """Feed a scheduler that issues every task at once, to the end of the stream."""
    posted: list[ev.TasksAdded] = []

    def post(event: Any) -> None:
        assert len(StreamedTasks(path)) >= event.total, "a task is announced before it is on disk"
        posted.append(event)
        scheduler.issued = event.total

    await stream_feed(stream, path, scheduler, post).run()
    return posted


def stream_feed(stream: TaskStream, path: Path, scheduler: Any, post: Any) -> TaskFeed:
    tasks = StreamedTasks(path)
    return TaskFeed(StreamRounds(stream, tasks, groups_per_step=2), tasks, scheduler, post)


async def test_tasks_are_journaled_before_they_are_announced_and_asked_for_once(tmp_path: Path) -> None:
    path, first, second = tmp_path / "tasks.jsonl", Counted(2), Counted(4)
    assert await feed(first, path, FakeScheduler()) == [*map(ev.TasksAdded, range(3)), ev.TasksAdded(2, ended=True)]
    announced = await feed(second, path, FakeScheduler())
    assert announced == [*map(ev.TasksAdded, range(5)), ev.TasksAdded(4, ended=True)]
    assert (first.asked, second.asked) == ([0, 1, 2], [2, 3, 4])
    assert [StreamedTasks(path)[index] for index in range(4)] == [task(number) for number in range(4)]


async def test_the_feed_takes_no_more_than_one_batch_ahead(tmp_path: Path) -> None:
    stream, scheduler, announced = Counted(100), FakeScheduler(), asyncio.Queue[Any]()
    fed = stream_feed(stream, tmp_path / "tasks.jsonl", scheduler, announced.put_nowait)
    running = asyncio.create_task(fed.run())
    while (await announced.get()).total < 2:
        pass
    scheduler.issued = 1
    fed.wake()
    assert (await announced.get()).total == 3
    assert stream.asked == [0, 1, 2]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class Waiting:
    """A stream of one task, which it gives when it may."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.called, self.may_answer = threading.Event(), threading.Event()

    def next_task(self, number: int, /) -> Task | None:
        self.asked.append(number)
        self.called.set()
        self.may_answer.wait(60)
        return task(number) if number == 0 else None


async def test_a_task_that_a_run_did_not_wait_for_is_given_to_the_next_run(tmp_path: Path) -> None:
    stream, path = Waiting(), tmp_path / "tasks.jsonl"
    first = asyncio.create_task(feed(stream, path, FakeScheduler()))
    await asyncio.to_thread(stream.called.wait)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    stream.may_answer.set()
    assert await feed(stream, path, FakeScheduler()) == [*map(ev.TasksAdded, range(2)), ev.TasksAdded(1, ended=True)]
    assert stream.asked == [0, 1]
    assert StreamedTasks(path)[0] == task(0)


class Invalid:
    """A stream whose second task cannot be used."""

    def __init__(self, second: Any) -> None:
        self.second = second

    def next_task(self, number: int, /) -> Task | None:
        return task(0) if number == 0 else self.second


@pytest.mark.parametrize("second", [Task("t1", "prompt", {"image": object()}), "text"])
async def test_an_invalid_task_ends_the_run_and_keeps_the_tasks_before_it(tmp_path: Path, second: Any) -> None:
    stream, path = Invalid(second), tmp_path / "tasks.jsonl"
    with pytest.raises(ComponentFailed):
        await feed(stream, path, FakeScheduler())
    assert StreamedTasks(path)[0] == task(0)
    stream.second = None  # mended; the next run asks for the task again
    announced = await feed(stream, path, FakeScheduler())
    assert announced == [ev.TasksAdded(0), ev.TasksAdded(1), ev.TasksAdded(1, ended=True)]


class Failing:
    def next_task(self, number: int, /) -> Task | None:
        raise ConnectionError("the queue is down")


def test_a_dataset_with_a_length_is_not_mistaken_for_a_stream() -> None:
    datasets = pytest.importorskip("datasets")
    assert not isinstance(datasets.Dataset.from_list([{"prompt": "a"}]), TaskStream)


async def test_an_error_of_the_stream_names_the_task_and_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ComponentFailed, match=naming("0", "the queue is down")):
        await feed(Failing(), tmp_path / "tasks.jsonl", FakeScheduler())


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("run.deterministic", {"run.deterministic": True}),
        ("run.epochs", {"run.epochs": 2}),
        ("tasks.limit", {"tasks.limit": 5}),
        ("difficulty.easy_above", {"difficulty.easy_above": 0.9}),
    ],
)
def test_settings_that_need_all_tasks_in_advance_are_rejected(key: str, settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=rf"^{key}: "):
        make_plan(resolved({"rewards.functions": ["number"], **settings}), UserObjects(tasks=Counted(1)))
