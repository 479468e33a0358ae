"""When rounds of a producer are asked for, and in which order their tasks are visited."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_support import SETTINGS
from outpace.config.producer import ProducerConfig
from outpace.controller import events as ev
from outpace.controller.failure_budget import UserCodeFailed
from outpace.controller.scheduler import Scheduler
from outpace.controller.task_feed import FeedState, ProducerRounds, TaskFeed, wants_round
from outpace.errors import BadInput, ComponentFailed
from outpace.tasks.order import TaskOrder
from outpace.tasks.stream import ENDLESS, Round, StreamedTasks
from outpace.types import Task
from support import examples, naming

# -------------------------------------------------------------------------------------------------------------- rule

STARVED = FeedState(next_round=3, trained_round=3, unissued=0, starved=True, on_policy=True)
BUSY = replace(STARVED, trained_round=2, unissued=1, starved=False)


@pytest.mark.parametrize(
    ("state", "settings", "wanted"),
    [
        (STARVED, {}, True),
        (replace(STARVED, on_policy=False), {}, False),
        (BUSY, {}, False),
        (BUSY, {"async_prefetch": True}, True),
        (replace(BUSY, on_policy=False), {"async_prefetch": True}, True),
        (replace(BUSY, trained_round=1), {"async_prefetch": True}, False),
        (replace(BUSY, trained_round=1), {"async_prefetch": True, "prefetch_depth": 2}, True),
        (replace(STARVED, trained_round=1), {"async_prefetch": True}, True),
        (BUSY, {"async_prefetch": True, "sync_warmup_rollouts": 3}, True),
        (BUSY, {"async_prefetch": True, "sync_warmup_rollouts": 4}, False),
        (STARVED, {"async_prefetch": True, "sync_warmup_rollouts": 4}, True),
        (replace(STARVED, needed=False), {}, False),
        (replace(BUSY, needed=False), {"async_prefetch": True}, False),
    ],
)
def test_a_round_is_asked_for_when_the_settings_say(state: FeedState, settings: dict[str, Any], wanted: bool) -> None:
    assert wants_round(state, ProducerConfig(**settings)) is wanted


# -------------------------------------------------------------------------------------------------------- a whole run


class InThisThread(ThreadPoolExecutor):
    """Runs `asyncio.to_thread` at once, so that a test knows when everything has been done."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args, **kwargs))
        return future


@dataclass
class VirtualRun:
    """A scheduler and a feed over components that take virtual time. A step trains two groups."""

    path: Path
    settings: ProducerConfig
    produce_s: float  # a group and a step take one second each
    max_lag: int = 1
    prompts: int = 2
    asked: list[int] = field(default_factory=list)  # learner's version when each round was asked for
    ahead: list[int] = field(default_factory=list)  # rounds between each one and the one trained then
    on_policy: list[bool] = field(default_factory=list)
    admitted: list[tuple[str, int]] = field(default_factory=list)  # task and minimum version, in order of admission
    finish: str = ""

    async def run(self) -> None:
        asyncio.get_running_loop().set_default_executor(InThisThread())
        self.now, self.numbers, self.events = 0.0, count(), list[tuple[float, int, Any]]()
        self.tasks = StreamedTasks(self.path)
        scheduler_settings = replace(
            SETTINGS, tasks=ENDLESS, streamed=True, eval_enabled=False, steps=None, groups_per_step=2, chunk_groups=2,
            max_lag=self.max_lag,
        )  # fmt: skip
        self.scheduler = Scheduler(scheduler_settings, TaskOrder(ENDLESS, 0, shuffle=False))
        read = StreamedTasks(self.path)  # the controller reads what the producer's process writes
        rounds = ProducerRounds(self.settings, read, self.produce)
        feed = TaskFeed(rounds, read, self.scheduler, lambda event: self.after(0, event))
        feeding = asyncio.create_task(feed.run())
        self.after(0, ev.RunStarted({"e0": 0}))
        while not self.finish:
            self.now, _, event = heapq.heappop(self.events)
            if isinstance(event, asyncio.Event):
                event.set()
            else:
                for action in self.scheduler.handle(event):
                    self.carry_out(action)
            feed.wake()
            for _ in range(20):
                await asyncio.sleep(0)
        await feeding

    def after(self, seconds: float, event: Any) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), event))

    def carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Admit():
                self.admitted.append((self.tasks[action.task].id, action.min_version))
                self.after(1, ev.GroupClosed(action.group, "finished", oldest=action.min_version))
            case ev.TrainChunk():
                self.after(0.5, ev.ChunkTrained(action.version))
            case ev.CloseBatch():
                self.after(0.5, ev.BatchTrained(action.version + 1))
            case ev.Publish():
                self.after(0.1, ev.Published(action.version))
            case ev.LoadWeights():
                self.after(0.1, ev.EngineLoaded(action.engine, action.version))
            case ev.Finish():
                self.finish = action.reason

    async def produce(self, number: int, step: int) -> None:
        demand = self.scheduler.demand
        self.asked.append(step)
        self.ahead.append(number - self.tasks.round_of(demand.oldest_open))
        self.on_policy.append(demand.on_policy and demand.starved)
        done = asyncio.Event()
        self.after(self.produce_s, done)
        await done.wait()
        tasks = [Task(f"{number}.{index}", "?") for index in range(self.prompts)]
        self.tasks.append_round(Round(number, len(tasks), self.settings.mini_epochs, step=step), tasks)


FAST, SLOW = 0.01, 30.0
"""Seconds per round. Training takes a few seconds per round."""


@pytest.mark.parametrize(
    ("produce_s", "settings", "asked_at"),
    [
        # A round has 2 prompts and 2 passes: 4 visits, 2 steps. Two rounds of warm-up.
        (FAST, {"prefetch_depth": 1}, [0, 2, 2, 4, 6, 8]),  # one round ahead: asked for as the one before it begins
        (FAST, {"prefetch_depth": 4}, [0, 2, 2, 2, 2, 2]),  # four ahead: all while round 1 is trained
        (SLOW, {"prefetch_depth": 1}, [0, 2, 2, 4, 6, 8]),  # each takes longer than a round of training
        (SLOW, {"prefetch_depth": 4}, [0, 2, 2, 4, 6, 8]),  # one at a time, so none is ahead
        (FAST, {"prefetch_depth": 4, "max_rollouts": 8}, [0, 2, 2, 2, 2, 2, 4, 6]),
        (FAST, {"async_prefetch": False, "sync_warmup_rollouts": 0}, [0, 2, 4, 6, 8, 10]),
        (SLOW, {"async_prefetch": False, "sync_warmup_rollouts": 0}, [0, 2, 4, 6, 8, 10]),
    ],
)
async def test_versions_and_passes_come_in_the_order_that_the_settings_say(
    tmp_path: Path, produce_s: float, settings: dict[str, Any], asked_at: list[int]
) -> None:
    defaults = {"mini_epochs": 2, "async_prefetch": True, "sync_warmup_rollouts": 2, "max_rollouts": 6}
    producer = ProducerConfig(**(defaults | settings))
    run = VirtualRun(tmp_path / "tasks.jsonl", producer, produce_s)
    await run.run()
    assert run.finish == "done"
    assert run.asked == asked_at
    assert run.scheduler.version == 2 * len(asked_at)
    assert [task for task, _ in run.admitted] == [
        f"{number}.{index}" for number in range(len(asked_at)) for _ in range(2) for index in range(2)
    ], "all tasks of a round once, then all again"
    synchronous = producer.sync_warmup_rollouts if producer.async_prefetch else len(asked_at)
    assert all(run.on_policy[:synchronous])
    assert run.ahead[:synchronous] == [0] * synchronous
    assert max(run.ahead[synchronous:], default=0) <= producer.prefetch_depth
    firsts = [version for task, version in run.admitted[: 4 * synchronous : 4]]
    assert firsts == asked_at[:synchronous], "a synchronous round is sampled by the version that it was asked for with"


@examples(20)
@given(
    prompts=st.integers(1, 5),
    passes=st.integers(1, 3),
    depth=st.integers(1, 4),
    warmup=st.integers(0, 3),
    background=st.booleans(),
    max_lag=st.integers(0, 2),
    produce_s=st.sampled_from([FAST, 2.0, SLOW]),
)
async def test_every_visit_of_every_round_is_admitted_once_for_any_settings(
    tmp_path_factory: pytest.TempPathFactory, prompts: int, passes: int, depth: int, warmup: int, background: bool,
    max_lag: int, produce_s: float,
) -> None:  # fmt: skip
    settings = ProducerConfig(
        mini_epochs=passes, max_rollouts=4, async_prefetch=background, prefetch_depth=depth, sync_warmup_rollouts=warmup
    )
    path = tmp_path_factory.mktemp("feed") / "tasks.jsonl"
    run = VirtualRun(path, settings, produce_s, max_lag, prompts)
    await run.run()
    assert [task for task, _ in run.admitted] == [
        f"{number}.{index}" for number in range(4) for _ in range(passes) for index in range(prompts)
    ]
    assert run.scheduler.counts["trained"] == 4 * passes * prompts


# ------------------------------------------------------------------------------------------------------------ failures


class Idle:
    version = 3

    def __init__(self) -> None:
        self.demand = Scheduler(SETTINGS, TaskOrder(10, 0, shuffle=True)).demand


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no more questions"), ["round 0", "ValueError", "no more questions"]),
        (
            ComponentFailed("producer", "ValueError: no more questions", "its traceback"),
            ["round 0", "no more questions"],
        ),
        (BadInput("tasks.producer: round 0 row 2 has no prompt"), ["tasks.producer", "row 2"]),
    ],
)
async def test_a_producer_that_fails_ends_the_run_with_its_round_and_reason(
    tmp_path: Path, error: Exception, words: list[str]
) -> None:
    async def produce(number: int, step: int) -> None:
        raise error

    tasks = StreamedTasks(tmp_path / "tasks.jsonl")
    rounds = ProducerRounds(ProducerConfig(async_prefetch=True), tasks, produce)
    with pytest.raises(UserCodeFailed, match=naming(*words)):
        await TaskFeed(rounds, tasks, Idle(), lambda _: None).run()  # type: ignore[arg-type]


async def test_the_feed_says_which_round_it_waits_for(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def produce(number: int, step: int) -> None:
        asked.set()
        await asyncio.Event().wait()

    tasks = StreamedTasks(tmp_path / "tasks.jsonl")
    tasks.append_round(Round(0, 1), [Task("t", "?")])
    rounds = ProducerRounds(ProducerConfig(async_prefetch=True), tasks, produce)
    feed = TaskFeed(rounds, tasks, Idle(), lambda _: None)  # type: ignore[arg-type]
    assert feed.waiting_reason == ""
    running = asyncio.create_task(feed.run())
    await asked.wait()
    assert "round 1" in feed.waiting_reason
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
