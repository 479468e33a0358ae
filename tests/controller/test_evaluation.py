from __future__ import annotations

import asyncio
import math

import pytest

from outpace.controller.evaluation import Evaluator, summarize
from outpace.errors import ComponentFailed
from outpace.types import GroupOrder, GroupReport


def graded(order: GroupOrder, reward: float = 1.0) -> GroupReport:
    return GroupReport(order.group, f"t{order.task}", "finished", rewards=[reward], episodes=1)


async def test_a_hundred_thousand_tasks_need_no_more_coroutines_than_max_running() -> None:
    most = 0
    taken: list[int] = []
    tasks_before = len(asyncio.all_tasks())

    async def run_group(order: GroupOrder) -> GroupReport:
        nonlocal most
        taken.append(order.task)
        if order.task % 1000 == 0:
            await asyncio.sleep(0)
            most = max(most, len(asyncio.all_tasks()) - tasks_before)
        return graded(order)

    evaluation = await Evaluator(100_000, max_running=8).run(3, run_group)
    assert sorted(taken) == list(range(100_000)), "each task once"
    assert most <= 8
    assert evaluation.count == 100_000


async def test_as_many_tasks_as_max_running_run_at_once() -> None:
    running = most = 0
    full = asyncio.Event()

    async def run_group(order: GroupOrder) -> GroupReport:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            full.set()
        await full.wait()
        running -= 1
        return graded(order)

    await Evaluator(20, max_running=4).run(0, run_group)
    assert most == 4


async def test_a_component_failure_ends_the_evaluation_and_leaves_nothing_running() -> None:
    tasks_before = asyncio.all_tasks()

    async def run_group(order: GroupOrder) -> GroupReport:
        if order.task == 2:
            raise ComponentFailed("worker-0", "died")
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ComponentFailed):
        await Evaluator(20, max_running=4).run(0, run_group)
    assert asyncio.all_tasks() == tasks_before


def test_the_mean_reward_comes_with_its_standard_error_and_whether_it_is_an_accuracy() -> None:
    reports = [GroupReport(n, "t", "finished", rewards=[float(n < 3)], episodes=1) for n in range(4)]
    evaluation = summarize(5, reports)
    assert (evaluation.reward, evaluation.count, evaluation.binary) == (0.75, 4, True)
    assert evaluation.stderr == pytest.approx(math.sqrt(0.75 * 0.25 * 4 / 3) / 2)
    assert evaluation.metrics()["eval/stderr"] == evaluation.stderr
    single = summarize(5, reports[:1])
    assert single.stderr is None
    assert "eval/stderr" not in single.metrics()
    assert not summarize(5, [GroupReport(0, "t", "finished", rewards=[0.5], episodes=1)]).binary
