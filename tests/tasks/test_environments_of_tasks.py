"""A named task sets its default environment and reward functions."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.config.validation import TASK_ENVIRONMENTS, TASK_REWARDS
from outpace.runtime.references import load_function
from outpace.tasks.registry import open_tasks
from support import resolved

CALCULATOR = "outpace.tasks.generated:Calculator"


def environment_and_rewards(settings: dict[str, Any]) -> tuple[str | None, list[str]]:
    config = resolved(settings)
    return config.rollout.environment, config.rewards.functions


def test_a_task_sets_its_environment_and_reward_functions() -> None:
    assert environment_and_rewards({"tasks.name": "calculator"}) == (CALCULATOR, ["number"])
    assert environment_and_rewards({"tasks.name": "guess"}) == ("outpace.tasks.generated:Guess", [])
    assert environment_and_rewards({"tasks.name": "countdown"}) == (None, ["countdown"])


def test_a_configured_environment_or_rollout_replaces_those_of_the_task() -> None:
    assert environment_and_rewards({"tasks.name": "calculator", "rollout.environment": "m:Other"}) == ("m:Other", [])
    assert environment_and_rewards({"tasks.name": "guess", "rollout.function": "m:roll"}) == (None, [])


def test_a_configured_agent_keeps_the_reward_functions_of_the_task() -> None:
    assert environment_and_rewards({"tasks.name": "calculator", "rollout.agent": ["python", "agent.py"]}) == (
        None,
        ["number"],
    )


def test_configured_rewards_keep_the_environment_of_the_task() -> None:
    settings = {"tasks.name": "calculator", "rewards.functions": ["m:score"]}
    assert environment_and_rewards(settings) == (CALCULATOR, ["m:score"])


def test_resolving_a_resolved_config_gives_the_same_defaults() -> None:
    environment, functions = environment_and_rewards({"tasks.name": "calculator"})
    assert environment_and_rewards({"tasks.name": "calculator", "rollout.environment": environment}) == (
        environment,
        functions,
    )


@pytest.mark.parametrize("name", TASK_ENVIRONMENTS)
def test_every_task_environment_accepts_the_task_columns_and_has_a_reward(name: str) -> None:
    factory = load_function(TASK_ENVIRONMENTS[name], "rollout.environment")
    train, _ = open_tasks(resolved({"tasks.name": name}))
    factory().reset(**train[0].columns)
    assert TASK_REWARDS[name] or hasattr(factory, "get_reward")
