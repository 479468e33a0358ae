"""Rewards of a single episode."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outpace
from outpace.errors import BadInput, RewardFailed
from outpace.rewards.grader_pool import GraderPool
from outpace.rewards.grading import GradedCompletion, grade
from outpace.rewards.registry import check_rewards, isolated_sources, resolve_rewards
from outpace.types import Episode, Task, Trajectory
from support import naming

TASK = Task("t", "Say it.", {"wanted": 2})


@outpace.evaluator
def sampled(task: Task, episode: Episode) -> float:
    """How many tokens were sampled, over what was wanted."""
    return float(sum(int(one.mask.sum()) for one in episode.trajectories)) / float(task.columns["wanted"])


@outpace.evaluator
async def patient(task: Task, episode: Episode) -> float | None:
    await asyncio.sleep(0)
    return None if episode.completion == "1" else 5.0


@outpace.evaluator
def picky(task: Task, episode: Episode) -> Any:
    if episode.completion == "1":
        raise ValueError("not this one")
    return 1.0


@outpace.evaluator
def unsure(task: Task, episode: Episode) -> float:
    return math.nan if episode.completion == "1" else 0.0


@outpace.evaluator
def leaves(task: Task, episode: Episode) -> float:
    if episode.completion == "1":
        os._exit(3)
    return 1.0


def count(completions: list[str]) -> list[float]:
    return [float(len(completions))] * len(completions)


def episodes(number: int = 3) -> list[Episode]:
    masks = [np.arange(4) < sample for sample in range(number)]
    arrays = [np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.float32)]
    made = [Trajectory(arrays[0], mask, arrays[1], arrays[0]) for mask in masks]
    return [Episode([one], completion=str(sample)) for sample, one in enumerate(made)]


@pytest.fixture(params=["process", "thread"])
async def where(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    pools: list[GraderPool] = []

    async def judge(*functions: Any) -> list[GradedCompletion]:
        named = resolve_rewards(functions)
        apart = isolated_sources(named, request.param)
        pools.append(GraderPool(apart))
        done, columns = episodes(), {"wanted": [2] * 3}
        texts = [episode.completion for episode in done]
        return await grade(named, None, ["Say it."] * 3, texts, columns, 30.0, pools[-1], (TASK, done))

    yield judge
    for pool in pools:
        await pool.close()


async def test_an_evaluator_sees_task_and_episode_wherever_it_runs(where: Any) -> None:
    assert [each.parts for each in await where(sampled)] == [{"sampled": 0.0}, {"sampled": 0.5}, {"sampled": 1.0}]


async def test_evaluators_stand_beside_functions_of_a_group(where: Any) -> None:
    graded = await where(sampled, patient, count)
    assert [each.total for each in graded] == [8.0, 3.5, 9.0]
    assert ["patient" in each.parts for each in graded] == [True, False, True]


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        (picky, ("picky", "ValueError", "sample 1", "not this one")),
        (unsure, ("unsure", "nan", "sample 1")),
    ],
)
async def test_a_failure_names_the_sample(where: Any, function: Any, keys: tuple[str, ...]) -> None:
    with pytest.raises(RewardFailed, match=naming(*keys)) as caught:
        await where(function)
    assert caught.value.function == keys[0]
    assert "\n" not in str(caught.value)


async def test_a_process_that_ends_costs_its_own_call() -> None:
    named = resolve_rewards([leaves])
    pool = GraderPool(isolated_sources(named), workers=1)
    done = episodes()
    with pytest.raises(RewardFailed, match=naming("process", "leaves", "code 3", "sample 1")):
        await grade(named, None, ["p"] * 3, ["c"] * 3, {}, 30.0, pool, (TASK, done))
    assert (await pool.call("leaves", outpace_wired(done[0]), 1, 30.0)) == [1.0]
    await pool.close()


def outpace_wired(episode: Episode) -> dict[str, list[Any]]:
    from outpace.rewards.functions import encode_evaluator_arguments

    return encode_evaluator_arguments(TASK, episode)


async def test_a_task_that_does_not_travel_says_what_to_change() -> None:
    named = resolve_rewards([sampled])
    pool = GraderPool(isolated_sources(named))
    task = Task("odd", "p", {"lock": object()})
    with pytest.raises(RewardFailed, match=naming("sampled", "rewards.isolation = thread", "task odd")):
        await grade(named, None, ["p"], ["c"], {}, 30.0, pool, (task, episodes(1)))
    await pool.close()


def test_it_may_be_named_and_needs_no_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import outpace\n@outpace.evaluator\ndef good(task, episode):\n    return 1.0\n")
    ((name, function),) = check_rewards(["mine.py:good"], None, [])
    assert name == "good"
    assert function(None, None) == 1.0


def test_a_function_of_another_shape_is_refused() -> None:
    with pytest.raises(BadInput, match=naming("@outpace.evaluator", "<lambda>", "task", "episode")):
        outpace.evaluator(lambda completions: [1.0])
