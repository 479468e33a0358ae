"""Gymnasium environments as environments with one tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outpace.config.sections import RolloutConfig
from outpace.errors import BadInput
from outpace.rollouts.adapters.gymnasium import EPISODE_OVER, text_environment, without_escapes
from outpace.rollouts.environments.session import EnvironmentSource
from outpace.rollouts.episode import run_episode
from outpace.rollouts.tool_loop import ToolLoop
from outpace.rollouts.tools.functions import tools_of
from outpace.runtime import by_value
from outpace.types import Task
from rollouts_support import environment_sessions
from support import naming

gymnasium = pytest.importorskip("gymnasium")

DIRECTIONS = ("left", "down", "right", "up")
WAY_TO_THE_GOAL = ("down", "down", "right", "right", "down", "right")


def frozen_lake(**options: Any) -> type[Any]:
    return text_environment("FrozenLake-v1", actions=DIRECTIONS, is_slippery=False, **options)


def test_reaching_the_goal_gives_one_point_and_ends_the_episode() -> None:
    lake = frozen_lake()()
    assert lake.reset(seed=0) == "[S]FFF\nFHFH\nFFFH\nHFFG"
    seen = [lake.act(direction) for direction in WAY_TO_THE_GOAL]
    assert seen[0].splitlines()[-4:] == ["SFFF", "[F]HFH", "FFFH", "HFFG"]
    assert seen[-1].endswith(f"HFF[G]\n{EPISODE_OVER}")
    assert lake.get_reward() == 1.0


def test_actions_after_the_end_have_no_effect_until_reset() -> None:
    lake = frozen_lake()()
    assert lake.act("left") == EPISODE_OVER, "before the first reset"
    lake.reset(seed=0)
    for direction in WAY_TO_THE_GOAL:
        lake.act(direction)
    assert lake.act("left") == EPISODE_OVER
    assert lake.get_reward() == 1.0
    lake.reset(seed=0)
    assert lake.get_reward() == 0.0
    assert lake.act("down") != EPISODE_OVER


@pytest.mark.parametrize(("reuse", "left_open"), [(False, 0), (True, 1)])
async def test_the_gymnasium_environment_is_closed_with_its_instance(reuse: bool, left_open: int) -> None:
    opened: set[int] = set()

    class Counted(gymnasium.Env[str, str]):
        observation_space = action_space = gymnasium.spaces.Text(8)

        def __init__(self) -> None:
            opened.add(id(self))

        def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
            return "begin", {}

        def close(self) -> None:
            opened.remove(id(self))

    sessions = environment_sessions(
        {"": EnvironmentSource("environment", factory=text_environment(Counted))}, reuse=reuse
    )
    assert not opened, "the instance created to read the spaces is closed"
    for _ in range(3):
        session = await sessions.open(Task("t", "p"))
        await session.reset({})
        assert len(opened) == 1
        await session.close()
        del session
        await wait_for_size(opened, left_open)
    await sessions.close()
    await wait_for_size(opened, 0)


async def wait_for_size(opened: set[int], size: int) -> None:
    """The thread of the last call may release the instance a moment after the episode."""
    for _ in range(5000):
        if len(opened) == size:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{len(opened)} games are open, not {size}")


def test_a_truncated_episode_is_over_too() -> None:
    lake = frozen_lake(max_episode_steps=2)()
    lake.reset(seed=0)
    assert EPISODE_OVER not in lake.act("left")
    assert lake.act("left").endswith(EPISODE_OVER)


def test_an_action_can_be_a_name_or_a_number() -> None:
    byname, bynumber = frozen_lake()(), frozen_lake()()
    byname.reset(seed=0)
    bynumber.reset(seed=0)
    assert byname.act(" Down ") == bynumber.act("1")


@pytest.mark.parametrize("action", ["jump", "4", "-1", "", "1.0"])
def test_an_invalid_action_is_named_in_the_error_and_changes_nothing(action: str) -> None:
    lake = frozen_lake()()
    lake.reset(seed=0)
    with pytest.raises(ValueError, match=naming(repr(action), "left, down, right, up")):
        lake.act(action)
    assert lake.act("down").splitlines()[-3] == "[F]HFH"


def test_the_only_tool_lists_the_names_of_the_actions() -> None:
    [tool] = tools_of(frozen_lake()).values()
    assert tool.name == "act"
    parameters = tool.schema["function"]["parameters"]
    assert parameters["required"] == ["action"]
    assert "left, down, right, up" in parameters["properties"]["action"]["description"]


def test_the_seed_decides_where_an_episode_starts() -> None:
    taxi = text_environment("Taxi-v4")
    starts = [taxi().reset(seed=seed, unused="column") for seed in (1, 1, 2)]
    assert starts[0] == starts[1] != starts[2]
    assert "\x1b" not in starts[0]


def test_describe_replaces_the_rendered_observation() -> None:
    blackjack = text_environment("Blackjack-v1", actions=("stick", "hit"), describe=lambda seen: f"You have {seen[0]}.")
    game = blackjack()
    assert game.reset(seed=0).startswith("You have ")
    assert game.act("stick").endswith(EPISODE_OVER)


class Echo(gymnasium.Env):  # type: ignore[misc, name-defined]
    """Text in, text out."""

    observation_space = action_space = gymnasium.spaces.Text(max_length=20)

    def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        return "Say something.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"you said {action}", 0.5, False, action == "bye", {}


def test_text_actions_and_observations_pass_unchanged_and_rewards_add_up() -> None:
    game = text_environment(Echo)()
    assert game.reset() == "Say something."
    assert [game.act("hello"), game.act("bye")] == ["you said hello", f"you said bye\n{EPISODE_OVER}"]
    assert game.get_reward() == 1.0
    game.reset()
    with pytest.raises(ValueError, match="far too long for the space of these actions"):
        game.act("far too long for the space of these actions")


class Pushing(Echo):
    action_space = gymnasium.spaces.Box(0, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: text_environment(Pushing), ("Box(", "Discrete", "Text")),
        (lambda: text_environment("FrozenLake-v1", actions=("left", "right")), ("2", "Discrete(4)")),
        (lambda: text_environment(Echo, actions=("say",)), ("1", "Text(")),
    ],
)
def test_unsupported_action_spaces_and_action_names_are_refused(
    make: Callable[[], Any], message: tuple[str, ...]
) -> None:
    with pytest.raises(BadInput, match=naming("rollout.environment: ", *message)):
        make()


def test_the_class_can_be_sent_to_another_process_by_value() -> None:
    lake = by_value.unpickle_objects(by_value.pickle_objects({"environment": frozen_lake()}))["environment"]()
    assert lake.reset(seed=0).startswith("[S]FFF")


def test_only_highlighted_text_is_put_in_brackets() -> None:
    assert without_escapes("\n\x1b[41mS\x1b[0mF\n\x1b[0mG\x1b[2K\n") == "[S]F\nG"


FILE = """
from outpace.rollouts.adapters.gymnasium import text_environment

FrozenLake = text_environment("FrozenLake-v1", actions=("left", "down", "right", "up"), is_slippery=False)
"""


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_an_environment_named_in_a_file_runs_a_whole_episode(
    isolation: Any, tmp_path: Path, make_engine: Callable[..., Any], make_client: Callable[..., Any]
) -> None:
    (tmp_path / "my_lake.py").write_text(FILE)
    calls = [json.dumps({"name": "act", "arguments": {"action": direction}}) for direction in WAY_TO_THE_GOAL]
    engine = make_engine([*(f"<tool_call>{call}</tool_call>" for call in calls), "There."])
    sessions = environment_sessions(
        {"": EnvironmentSource("rollout.environment", f"{tmp_path}/my_lake.py:FrozenLake")}, isolation=isolation
    )
    try:
        rollout = ToolLoop(environments=sessions, limits=RolloutConfig(max_turns=10))
        client = make_client(engine, max_tokens=200, stop_strings=())
        episode = await run_episode(rollout, Task("lake", "Walk to G.\n", {"seed": 0}), client, 60)
    finally:
        await sessions.close()
    assert episode.error is None
    assert episode.rewards == {"environment": 1.0}
    assert [message["role"] for message in episode.completion][:2] == ["assistant", "tool"]
    assert "[G]" in episode.completion[-2]["content"]
