"""After a rush of episodes nothing of them is left: no task, no descriptor, no thread, no object."""

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

from outpace.bench.archive import GROUP, Archive, Load, Script
from outpace.bench.episodes import make_worker, play, settings_of
from outpace.bench.modelled import ModelledEngine, Pace
from outpace.rollouts.environments.instance import Instance
from outpace.rollouts.environments.stage import _OpenStage
from outpace.rollouts.policy.client import PolicyClient
from outpace.rollouts.policy.conversations import Conversations
from outpace.rollouts.policy.requests import Requests
from outpace.rollouts.policy.transcript import Turn
from outpace.rollouts.tools.toolbox import Toolbox
from outpace.rollouts.worker import RolloutWorker
from outpace.runtime import threads
from outpace.runtime.threads import steady_executor, warm_up
from outpace.types import Generation, GroupReport

OF_EPISODES = (PolicyClient, Conversations, Requests, Toolbox, Turn, Instance, Archive, _OpenStage, RolloutWorker)
FAST = Load(episodes=96, turns=3, tool_ms=1, pace=Pace(first_token_s=0.002, tokens_per_s=1e5))
HANGING = Load(episodes=32, turns=3, tool_ms=600_000, pace=FAST.pace)


class Announcing(ModelledEngine):
    """Says when it has answered the first request of every episode."""

    def __init__(self, load: Load) -> None:
        super().__init__(Script(load, "starter"), load.pace)
        self._episodes = load.groups * GROUP
        self.all_answered = asyncio.Event()

    async def generate(self, *request: Any) -> Generation:
        generation = await super().generate(*request)
        if self.requests == self._episodes:
            self.all_answered.set()
        return generation


def of_episodes() -> list[Any]:
    gc.collect()
    # By type: isinstance would ask proxies of other packages for their class, and some of them complain.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), OF_EPISODES)]


@dataclass(frozen=True)
class Baseline:
    """What the process holds once everything that is made once has been made; other tests may have kept something."""

    threads: int
    descriptors: int
    objects: list[Any]

    def assert_nothing_more(self) -> None:
        known = {id(thing) for thing in self.objects}
        assert [type(thing).__name__ for thing in of_episodes() if id(thing) not in known] == []
        assert threads_come_down_to(self.threads)
        assert psutil.Process().num_fds() <= self.descriptors


def threads_come_down_to(count: int) -> bool:
    """A thread that has done its last call needs a moment to end."""
    until = time.monotonic() + 20
    while threading.active_count() > count and time.monotonic() < until:
        time.sleep(0.01)
    return threading.active_count() <= count


async def rush(load: Load, folder: Path) -> list[GroupReport]:
    asyncio.get_running_loop().set_default_executor(steady_executor())
    worker = await make_worker(settings_of(load), folder, ModelledEngine(Script(load, "starter"), load.pace))
    try:
        return await play(worker, range(load.groups))
    finally:
        await worker.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def interrupted(load: Load, folder: Path) -> None:
    """All episodes are inside a tool call that does not end, when the worker is closed."""
    asyncio.get_running_loop().set_default_executor(steady_executor())
    engine = Announcing(load)
    worker = await make_worker(settings_of(load), folder, engine)
    playing = asyncio.ensure_future(play(worker, range(load.groups)))
    await engine.all_answered.wait()
    await worker.close()
    reports = await playing
    assert {report.cancelled for report in reports} == {True}
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
def baseline(tmp_path: Path) -> Baseline:
    asyncio.run(rush(Load(GROUP, 2, tool_ms=1, pace=FAST.pace), tmp_path / "warm"))
    warm_up(threads.MOST_IDLE)
    kept = of_episodes()
    return Baseline(threading.active_count(), psutil.Process().num_fds(), kept)


def test_a_rush_of_episodes_leaves_nothing_behind(tmp_path: Path, baseline: Baseline) -> None:
    reports = asyncio.run(rush(FAST, tmp_path))
    assert {(report.outcome, report.episodes) for report in reports} == {("finished", GROUP)}
    assert {report.metrics["turns"] for report in reports} == {3.0}
    baseline.assert_nothing_more()


def test_nor_do_episodes_that_are_given_up_inside_a_tool(tmp_path: Path, baseline: Baseline) -> None:
    asyncio.run(interrupted(HANGING, tmp_path))
    baseline.assert_nothing_more()
