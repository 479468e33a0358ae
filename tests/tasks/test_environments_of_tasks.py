"""Naming a task is enough: the environment it is played in, and who judges, come with it."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.config.validation import TASK_ENVIRONMENTS, TASK_REWARDS
from outpace.runtime.references import load_function
from outpace.tasks.registry import open_tasks
from support import resolved

CALCULATOR = "outpace.tasks.generated:Calculator"


def ways(settings: dict[str, Any]) -> tuple[str | None, list[str]]:
    config = resolved(settings)
    return config.rollout.environment, config.rewards.functions


def test_a_task_brings_its_environment_and_its_judge() -> None:
    assert ways({"tasks.name": "calculator"}) == (CALCULATOR, ["number"])
    assert ways({"tasks.name": "guess"}) == ("outpace.tasks.generated:Guess", [])
    assert ways({"tasks.name": "countdown"}) == (None, ["countdown"])


def test_another_environment_or_rollout_takes_its_place() -> None:
    assert ways({"tasks.name": "calculator", "rollout.environment": "m:Other"}) == ("m:Other", [])
    assert ways({"tasks.name": "guess", "rollout.function": "m:roll"}) == (None, [])


def test_an_agent_of_its_own_is_judged_as_the_task_is() -> None:
    assert ways({"tasks.name": "calculator", "rollout.agent": ["python", "agent.py"]}) == (None, ["number"])


def test_other_rewards_keep_the_environment() -> None:
    settings = {"tasks.name": "calculator", "rewards.functions": ["m:score"]}
    assert ways(settings) == (CALCULATOR, ["m:score"])


def test_what_was_filled_in_is_filled_in_the_same_way_again() -> None:
    environment, functions = ways({"tasks.name": "calculator"})
    assert ways({"tasks.name": "calculator", "rollout.environment": environment}) == (environment, functions)


@pytest.mark.parametrize("name", TASK_ENVIRONMENTS)
def test_every_environment_of_a_task_takes_its_columns_and_someone_judges(name: str) -> None:
    factory = load_function(TASK_ENVIRONMENTS[name], "rollout.environment")
    train, _ = open_tasks(resolved({"tasks.name": name}))
    factory().reset(**train[0].columns)
    assert TASK_REWARDS[name] or hasattr(factory, "get_reward")
