"""After many episodes nothing is left over: no task, descriptor, thread or object."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.episodes import (
    GROUP,
    Archive,
    EpisodeLoad,
    Pace,
    Script,
    ScriptedEngine,
    bench_config,
    make_worker,
    run_groups,
)

from outpace.monitoring.metrics import result
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.conversation import ConversationIndex
from outpace.rollouts.environments.child import EnvironmentInstance
from outpace.rollouts.environments.session import EnvironmentSession
from outpace.rollouts.requests import EpisodeRequests
from outpace.rollouts.tools.toolbox import Toolbox
from outpace.rollouts.transcript import Turn
from outpace.rollouts.worker import RolloutWorker
from outpace.runtime import async_tools
from outpace.runtime.async_tools import start_idle_threads, steady_executor
from outpace.types import Generation, GroupReport

EPISODE_TYPES = (
    PolicyClient,
    ConversationIndex,
    EpisodeRequests,
    Toolbox,
    Turn,
    EnvironmentInstance,
    Archive,
    EnvironmentSession,
    RolloutWorker,
)
FAST = EpisodeLoad(episodes=96, turns=3, tool_ms=1, pace=Pace(first_token_s=0.002, tokens_per_s=1e5))
HANGING = EpisodeLoad(episodes=32, turns=3, tool_ms=600_000, pace=FAST.pace)


class SignalingEngine(ScriptedEngine):
    """Sets `all_answered` once the first request of every episode is answered."""

    def __init__(self, load: EpisodeLoad) -> None:
        super().__init__(Script(load, "starter"), load.pace)
        self._episodes = load.groups * GROUP
        self.all_answered = asyncio.Event()

    async def generate(self, *request: Any) -> Generation:
        generation = await super().generate(*request)
        if self.requests == self._episodes:
            self.all_answered.set()
        return generation


def episode_objects() -> list[Any]:
    gc.collect()
    # By type: isinstance reads `__class__` of proxies of other packages, and some of them warn.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), EPISODE_TYPES)]


@dataclass(frozen=True)
class Baseline:
    """Resources of the process after one-time setup; other tests may have left some behind."""

    threads: int
    descriptors: int
    objects: list[Any]

    def assert_nothing_left(self) -> None:
        baseline_ids = {id(thing) for thing in self.objects}
        assert [type(thing).__name__ for thing in episode_objects() if id(thing) not in baseline_ids] == []
        assert threads_drop_to(self.threads)
        assert psutil.Process().num_fds() <= self.descriptors


def threads_drop_to(count: int) -> bool:
    """Wait for the thread count to drop: a thread takes a moment to end after its last call."""
    until = time.monotonic() + 20
    while threading.active_count() > count and time.monotonic() < until:
        time.sleep(0.01)
    return threading.active_count() <= count


async def run_all(load: EpisodeLoad, folder: Path) -> list[GroupReport]:
    asyncio.get_running_loop().set_default_executor(steady_executor())
    worker = await make_worker(bench_config(load), folder, ScriptedEngine(Script(load, "starter"), load.pace))
    try:
        return await run_groups(worker, range(load.groups))
    finally:
        await worker.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def run_interrupted(load: EpisodeLoad, folder: Path) -> None:
    """Close the worker while every episode is inside a tool call that never returns."""
    asyncio.get_running_loop().set_default_executor(steady_executor())
    engine = SignalingEngine(load)
    worker = await make_worker(bench_config(load), folder, engine)
    running = asyncio.ensure_future(run_groups(worker, range(load.groups)))
    await engine.all_answered.wait()
    await worker.close()
    reports = await running
    assert {report.cancelled for report in reports} == {True}
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
def baseline(tmp_path: Path) -> Baseline:
    asyncio.run(run_all(EpisodeLoad(GROUP, 2, tool_ms=1, pace=FAST.pace), tmp_path / "warm"))
    start_idle_threads(async_tools.MAX_IDLE_THREADS)
    kept = episode_objects()
    return Baseline(threading.active_count(), psutil.Process().num_fds(), kept)


def test_many_concurrent_episodes_leave_nothing_behind(tmp_path: Path, baseline: Baseline) -> None:
    reports = asyncio.run(run_all(FAST, tmp_path))
    assert {(report.outcome, report.episodes) for report in reports} == {("finished", GROUP)}
    assert {result(report.measured["episode/turns"]) for report in reports} == {3.0}
    baseline.assert_nothing_left()


def test_episodes_abandoned_inside_a_tool_call_leave_nothing_behind(tmp_path: Path, baseline: Baseline) -> None:
    asyncio.run(run_interrupted(HANGING, tmp_path))
    baseline.assert_nothing_left()
