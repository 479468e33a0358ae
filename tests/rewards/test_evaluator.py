"""Evaluators: reward functions of a single episode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outpace
from outpace.errors import BadInput, RewardFailed
from outpace.rewards.grading import GradedCompletion, GraderPool, grade
from outpace.rewards.registry import check_rewards, isolated_sources, resolve_rewards
from outpace.types import Episode, Task, Trajectory
from rewards.evaluators import count, leaves, patient, picky, sampled, unsure
from support import naming

TASK = Task("t", "Say it.", {"wanted": 2})


def episodes(number: int = 3) -> list[Episode]:
    masks = [np.arange(4) < sample for sample in range(number)]
    arrays = [np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.float32)]
    made = [Trajectory(arrays[0], mask, arrays[1], arrays[0]) for mask in masks]
    return [Episode([one], completion=str(sample)) for sample, one in enumerate(made)]


@pytest.fixture(params=["process", "thread"])
async def grade_episodes(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    pools: list[GraderPool] = []

    async def run_grading(*functions: Any) -> list[GradedCompletion]:
        named = resolve_rewards(functions)
        apart = isolated_sources(named, request.param)
        pools.append(GraderPool(apart))
        done, columns = episodes(), {"wanted": [2] * 3}
        texts = [episode.completion for episode in done]
        return await grade(named, None, ["Say it."] * 3, texts, columns, 30.0, pools[-1], (TASK, done))

    yield run_grading
    for pool in pools:
        await pool.close()


async def test_an_evaluator_receives_task_and_episode_in_a_process_and_in_a_thread(grade_episodes: Any) -> None:
    assert [each.parts for each in await grade_episodes(sampled)] == [
        {"sampled": 0.0},
        {"sampled": 0.5},
        {"sampled": 1.0},
    ]


async def test_evaluators_combine_with_group_reward_functions(grade_episodes: Any) -> None:
    graded = await grade_episodes(sampled, patient, count)
    assert [each.total for each in graded] == [8.0, 3.5, 9.0]
    assert ["patient" in each.parts for each in graded] == [True, False, True]


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        (picky, ("picky", "ValueError", "sample 1", "not this one")),
        (unsure, ("unsure", "nan", "sample 1")),
    ],
)
async def test_an_evaluator_failure_names_the_sample(grade_episodes: Any, function: Any, keys: tuple[str, ...]) -> None:
    with pytest.raises(RewardFailed, match=naming(*keys)) as caught:
        await grade_episodes(function)
    assert caught.value.function == keys[0]
    assert "\n" not in str(caught.value)


async def test_a_process_that_exits_fails_only_its_own_call() -> None:
    named = resolve_rewards([leaves])
    pool = GraderPool(isolated_sources(named), workers=1)
    done = episodes()
    with pytest.raises(RewardFailed, match=naming("process", "leaves", "code 3", "sample 1")):
        await grade(named, None, ["p"] * 3, ["c"] * 3, {}, 30.0, pool, (TASK, done))
    assert (await pool.call("leaves", evaluator_arguments(done[0]), 1, 30.0)) == [1.0]
    await pool.close()


def evaluator_arguments(episode: Episode) -> dict[str, list[Any]]:
    from outpace.rewards.functions import encode_evaluator_arguments

    return encode_evaluator_arguments(TASK, episode)


async def test_a_task_that_cannot_be_serialized_fails_with_the_setting_to_change() -> None:
    named = resolve_rewards([sampled])
    pool = GraderPool(isolated_sources(named))
    task = Task("odd", "p", {"lock": object()})
    with pytest.raises(RewardFailed, match=naming("sampled", "rewards.isolation = thread", "task odd")):
        await grade(named, None, ["p"], ["c"], {}, 30.0, pool, (task, episodes(1)))
    await pool.close()


def test_an_evaluator_may_be_named_by_reference_and_needs_no_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import outpace\n@outpace.evaluator\ndef good(task, episode):\n    return 1.0\n")
    ((name, function),) = check_rewards(["mine.py:good"], None, [])
    assert name == "good"
    assert function(None, None) == 1.0


def test_a_function_with_another_signature_is_rejected_as_evaluator() -> None:
    with pytest.raises(BadInput, match=naming("@outpace.evaluator", "<lambda>", "task", "episode")):
        outpace.evaluator(lambda completions: [1.0])
