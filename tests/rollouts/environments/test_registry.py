"""The environment registry: which kinds exist, which one a task selects, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.config import Config
from outpace.errors import BadInput
from outpace.rollouts.environments.session import (
    SINGLE_KIND,
    EnvironmentSource,
    UnknownEnvironmentKind,
    all_give_rewards,
    check_kinds,
    kind_of_task,
    resolve_kinds,
)
from outpace.types import Task
from rollouts_support import environment_sessions
from support import naming

FILE = Path(__file__).parent / "unruly.py"


class Maze:
    def reset(self, size: int) -> str:
        return f"a maze of {size}"

    def step(self, direction: str) -> str:
        """Go one step."""
        return f"went {direction}"


class Guess:
    def reset(self, **columns: Any) -> str:
        return "guess"

    def step(self, number: int) -> int:
        """Guess: another method with the same name."""
        return number + 1

    def get_reward(self) -> float:
        return 1.0


class NoReset:
    def step(self) -> None:
        """Go."""


class Undocumented:
    def reset(self) -> None: ...

    def step(self) -> None: ...


def config(**settings: Any) -> Config:
    return Config.model_validate({"model": {"path": "starter"}, **settings})


def sources(**given: Any) -> dict[str, EnvironmentSource]:
    return resolve_kinds(config(), given)


def test_environments_can_be_configured_in_only_one_place() -> None:
    both = config(rollout={"environment": "a:B"}, environment={"kinds": {"maze": "a:B"}})
    assert resolve_kinds(config()) == {}
    assert resolve_kinds(config(), Maze) == {"": EnvironmentSource("environment", factory=Maze)}
    assert resolve_kinds(config(rollout={"environment": "a:B"})) == {
        "": EnvironmentSource("rollout.environment", "a:B")
    }
    assert resolve_kinds(config(environment={"kinds": {"m": "a:B"}})) == {
        "m": EnvironmentSource("environment.kinds.m", "a:B")
    }
    assert sources(maze=Maze, guess="a:B") == {
        "maze": EnvironmentSource("environment: maze", factory=Maze),
        "guess": EnvironmentSource("environment: guess", "a:B"),
    }
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*environment\.kinds"):
        resolve_kinds(both)
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*\benvironment\b(?!\.)"):
        resolve_kinds(config(rollout={"environment": "a:B"}), Maze)


def test_a_column_selects_among_several_environments_and_is_ignored_for_one() -> None:
    several = sources(maze=Maze, guess=Guess)
    assert kind_of_task(Task("t", "p", {"environment": "guess"}), several, "environment") == "guess"
    assert kind_of_task(Task("t", "p", {"world": "maze"}), several, "world") == "maze"
    assert kind_of_task(Task("t", "p", {"environment": "anything"}), resolve_kinds(config(), Maze), "environment") == ""


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, ("column", "environment")),
        ({"environment": "maize"}, ("environment", "'maize'", "maze")),
        ({"environment": 3}, ("environment", "3", "maze, guess")),
        ({"environment": ""}, ("environment", "''", "maze, guess")),
        ({"environment": ["maze"]}, ("environment", "['maze']", "maze, guess")),
    ],
)
async def test_a_task_without_a_known_kind_is_named_at_start_up_and_during_the_run(
    columns: dict[str, Any], words: tuple[str, ...]
) -> None:
    task, several = Task("t7", "p", columns), sources(maze=Maze, guess=Guess)
    with pytest.raises(BadInput, match=naming("t7", *words)) as refused:
        check_kinds(several, "environment", task)
    assert str(refused.value).startswith("environment.column: ")
    with pytest.raises(UnknownEnvironmentKind, match=naming("t7", *words)):
        await environment_sessions(several).open(task)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (NoReset, ("NoReset", "reset")),
        (Undocumented, ("Undocumented.step", "docstring")),
        (f"{FILE}:Guesing", ("Guesing", "Guessing")),
        ("no_such_module:Maze", ("no_such_module:Maze", "module")),
        (3, ("3", "class")),
    ],
)
def test_an_invalid_environment_is_refused_in_one_line(given: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=naming(*words)) as caught:
        check_kinds(sources(maze=given), "environment")
    assert str(caught.value).startswith("environment: maze: ")
    assert "\n" not in str(caught.value)


def test_valid_environments_pass_and_factory_functions_are_not_checked() -> None:
    check_kinds(sources(maze=Maze, guess=Guess), "environment", Task("t", "p", {"environment": "maze", "size": 3}))
    check_kinds(resolve_kinds(config(), lambda: Maze()), "environment", Task("t", "p"))
    check_kinds({}, "environment", Task("t", "p"))


def test_all_give_rewards_requires_get_reward_in_every_kind() -> None:
    assert not all_give_rewards(sources(maze=Maze, guess=Guess))
    assert all_give_rewards(sources(guess=Guess))
    assert all_give_rewards(resolve_kinds(config(), lambda: Maze()))


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_every_episode_has_the_tools_and_the_state_of_its_own_kind(isolation: Any) -> None:
    sessions = environment_sessions(sources(maze=Maze, guess=Guess), isolation=isolation, spare=0)
    maze = await sessions.open(Task("t1", "p", {"environment": "maze"}))
    guess = await sessions.open(Task("t2", "p", {"environment": "guess"}))
    assert await maze.reset({"size": 3, "environment": "maze"}) == "a maze of 3"
    assert await guess.reset({"size": 3, "environment": "guess"}) == "guess"
    assert (await maze.call("step", {"direction": "up"}), await guess.call("step", {"number": 1})) == ("went up", 2)
    assert (await maze.reward(), await guess.reward()) == (None, 1.0)
    for session in (maze, guess):
        await session.close()
    await sessions.close()


def test_required_arguments_of_reset_must_be_task_columns() -> None:
    class Picky:
        def reset(self, code: int, prompt: str, colour: str = "red", **columns: Any) -> None: ...

    sources = {SINGLE_KIND: EnvironmentSource("environment", factory=Picky)}
    check_kinds(sources, "environment", Task("t", "hi", {"code": 1}))
    with pytest.raises(BadInput, match=naming("environment: ", "reset", "code", "answer")):
        check_kinds(sources, "environment", Task("t", "hi", {"answer": 1}))
