"""A verifiers environment as tasks and a rollout. Needs the package, so these tests run in a separate Python."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.config.load import make_config
from outpace.errors import BadInput
from outpace.rollouts.adapters.verifiers import TASK_INDEX, VerifiersEnvironment
from outpace.rollouts.episode import run_episode
from outpace.rollouts.gateway.server import Gateway
from outpace.types import Endpoint, Task

pytest.importorskip("verifiers.v1")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the package's own

TINY: dict[str, Any] = {"taskset": {"id": "tiny_sums"}, "agent": {"runtime": {"type": "subprocess"}}}
UNGRADED = 12  # its reward function raises


@pytest.fixture(autouse=True)
def _tiny_sums_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway("127.0.0.1", 0, "policy")
    yield made
    await made.close()


@pytest.fixture
def make_episode(
    make_engine: Callable[..., Any], make_client: Callable[..., Any], gateway: Gateway
) -> Callable[[str | Exception], Any]:
    """Makes the client of an episode whose policy always gives the same answer."""

    def made(answer: str | Exception) -> Any:
        return make_client(make_engine(lambda episode, turn: answer), gateway=gateway)

    return made


def sum_task(number: int) -> Task:
    return Task(f"tiny_sums/{number}", "", {TASK_INDEX: number})


def test_the_taskset_becomes_training_and_held_out_tasks() -> None:
    train, heldout = VerifiersEnvironment(TINY).tasks(make_config({"eval.holdout": 0.25}))
    assert heldout is not None
    assert len(train) + len(heldout) == 40
    found = [source[index] for source in (train, heldout) for index in range(len(source))]
    assert {task.columns[TASK_INDEX] for task in found} == set(range(40))
    for task in found:
        assert task.prompt == f"What is {task.columns[TASK_INDEX]} + 1?"


def test_a_limit_takes_the_first_tasks() -> None:
    train, heldout = VerifiersEnvironment(TINY, limit=3).tasks(make_config({"eval.holdout": 0.0}))
    assert (len(train), heldout) == (3, None)


def test_a_taskset_that_cannot_be_loaded_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match="no_such_taskset") as caught:
        VerifiersEnvironment("no_such_taskset").tasks(make_config({}))
    assert str(caught.value).startswith("tasks.name: ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("answer", "reward"), [("8", 1.5), ("9", 0.5)])
async def test_the_agent_of_the_environment_runs_on_the_policy_and_its_rewards_are_summed(
    answer: str, reward: float, make_episode: Callable[..., Any], tokenizer: Any
) -> None:
    episode = await run_episode(VerifiersEnvironment(TINY).rollout, sum_task(7), make_episode(answer), 60)
    assert (episode.error, episode.rewards, episode.completion) == (None, {"rollout": reward}, answer)
    [trajectory] = episode.trajectories
    np.testing.assert_array_equal(
        trajectory.tokens[trajectory.mask], tokenizer.encode(answer, add_special_tokens=False)
    )
    assert "What is 7 + 1?" in tokenizer.decode(trajectory.tokens[~trajectory.mask])


async def test_concurrent_episodes_each_use_their_own_key(make_episode: Callable[..., Any]) -> None:
    environment = VerifiersEnvironment(TINY)
    episodes = await asyncio.gather(
        *(run_episode(environment.rollout, sum_task(number), make_episode(str(number)), 60) for number in range(1, 5)),
        run_episode(environment.rollout, sum_task(0), make_episode("1"), 60),
    )
    assert [episode.rewards["rollout"] for episode in episodes] == [0.5] * 4 + [1.5]
    assert not [name for name in os.environ if name.startswith("OUTPACE_EPISODE_")]


async def test_an_episode_whose_reward_function_raises_fails(make_episode: Callable[..., Any]) -> None:
    episode = await run_episode(VerifiersEnvironment(TINY).rollout, sum_task(UNGRADED), make_episode("13"), 60)
    assert episode.error is not None
    assert "this one cannot be judged" in episode.error


async def test_an_unreachable_policy_raises_and_leaves_no_environment_variables() -> None:
    class Nowhere:
        async def endpoint(self, role: str = "policy") -> Endpoint:
            return Endpoint("http://127.0.0.1:9/v1", "key", "policy")

    with pytest.raises(RuntimeError):
        await VerifiersEnvironment(TINY).rollout(sum_task(1), Nowhere())  # type: ignore[arg-type]
    assert not [name for name in os.environ if name.startswith("OUTPACE_EPISODE_")]
