"""Several environments in one run: which there are, which a task wants, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.config import Config
from outpace.errors import BadInput
from outpace.rollouts.environments.session import (
    SINGLE_KIND,
    EnvironmentSessions,
    EnvironmentSource,
    UnknownEnvironmentKind,
    all_give_rewards,
    check_kinds,
    kind_of_task,
    resolve_kinds,
)
from outpace.types import Task
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


def origins(**given: Any) -> dict[str, EnvironmentSource]:
    return resolve_kinds(config(), given)


def test_environments_come_from_one_place() -> None:
    both = config(rollout={"environment": "a:B"}, environment={"kinds": {"maze": "a:B"}})
    assert resolve_kinds(config()) == {}
    assert resolve_kinds(config(), Maze) == {"": EnvironmentSource("environment", factory=Maze)}
    assert resolve_kinds(config(rollout={"environment": "a:B"})) == {
        "": EnvironmentSource("rollout.environment", "a:B")
    }
    assert resolve_kinds(config(environment={"kinds": {"m": "a:B"}})) == {
        "m": EnvironmentSource("environment.kinds.m", "a:B")
    }
    assert origins(maze=Maze, guess="a:B") == {
        "maze": EnvironmentSource("environment: maze", factory=Maze),
        "guess": EnvironmentSource("environment: guess", "a:B"),
    }
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*environment\.kinds"):
        resolve_kinds(both)
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*\benvironment\b(?!\.)"):
        resolve_kinds(config(rollout={"environment": "a:B"}), Maze)


def test_a_column_chooses_among_several_and_nobody_looks_at_it_with_one() -> None:
    several = origins(maze=Maze, guess=Guess)
    assert kind_of_task(Task("t", "p", {"environment": "guess"}), several, "environment") == "guess"
    assert kind_of_task(Task("t", "p", {"world": "maze"}), several, "world") == "maze"
    assert kind_of_task(Task("t", "p", {"environment": "anything"}), resolve_kinds(config(), Maze), "environment") == ""


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, ("column", "environment")),
        ({"environment": "maize"}, ("environment", "'maize'", "maze")),
        ({"environment": 3}, ("environment", "3", "maze, guess")),
        ({"environment": ""}, ("environment", "''", "maze, guess")),
        ({"environment": ["maze"]}, ("environment", "['maze']", "maze, guess")),
    ],
)
async def test_a_task_without_a_kind_is_named_at_the_start_and_in_the_run(
    columns: dict[str, Any], said: tuple[str, ...]
) -> None:
    task, several = Task("t7", "p", columns), origins(maze=Maze, guess=Guess)
    with pytest.raises(BadInput, match=naming("t7", *said)) as refused:
        check_kinds(several, "environment", task)
    assert str(refused.value).startswith("environment.column: ")
    with pytest.raises(UnknownEnvironmentKind, match=naming("t7", *said)):
        await EnvironmentSessions(several).open(task)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (NoReset, ("NoReset", "reset")),
        (Undocumented, ("Undocumented.step", "docstring")),
        (f"{FILE}:Guesing", ("Guesing", "Guessing")),
        ("no_such_module:Maze", ("no_such_module:Maze", "module")),
        (3, ("3", "class")),
    ],
)
def test_what_can_be_no_environment_is_refused_in_one_line(given: Any, said: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=naming(*said)) as caught:
        check_kinds(origins(maze=given), "environment")
    assert str(caught.value).startswith("environment: maze: ")
    assert "\n" not in str(caught.value)


def test_good_ones_pass_and_what_a_function_makes_is_believed() -> None:
    check_kinds(origins(maze=Maze, guess=Guess), "environment", Task("t", "p", {"environment": "maze", "size": 3}))
    check_kinds(resolve_kinds(config(), lambda: Maze()), "environment", Task("t", "p"))
    check_kinds({}, "environment", Task("t", "p"))


def test_all_kinds_must_judge_themselves_for_a_run_without_reward_functions() -> None:
    assert not all_give_rewards(origins(maze=Maze, guess=Guess))
    assert all_give_rewards(origins(guess=Guess))
    assert all_give_rewards(resolve_kinds(config(), lambda: Maze()))


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_every_episode_has_the_tools_and_the_state_of_its_own_kind(isolation: Any) -> None:
    stages = EnvironmentSessions(origins(maze=Maze, guess=Guess), isolation=isolation, spare=0)
    maze = await stages.open(Task("t1", "p", {"environment": "maze"}))
    guess = await stages.open(Task("t2", "p", {"environment": "guess"}))
    assert await maze.reset({"size": 3, "environment": "maze"}) == "a maze of 3"
    assert await guess.reset({"size": 3, "environment": "guess"}) == "guess"
    assert (await maze.call("step", {"direction": "up"}), await guess.call("step", {"number": 1})) == ("went up", 2)
    assert (await maze.reward(), await guess.reward()) == (None, 1.0)
    for stage in (maze, guess):
        await stage.close()
    await stages.close()


def test_columns_that_reset_must_have_are_those_of_the_tasks() -> None:
    class Picky:
        def reset(self, code: int, prompt: str, colour: str = "red", **columns: Any) -> None: ...

    origins = {SINGLE_KIND: EnvironmentSource("environment", factory=Picky)}
    check_kinds(origins, "environment", Task("t", "hi", {"code": 1}))
    with pytest.raises(BadInput, match=naming("environment: ", "reset", "code", "answer")):
        check_kinds(origins, "environment", Task("t", "hi", {"answer": 1}))
