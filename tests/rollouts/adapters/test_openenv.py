"""Environments behind OpenEnv's own server, in a separate process with a separate Python."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outpace.errors import BadInput
from outpace.rollouts.adapters.gymnasium import EPISODE_OVER
from outpace.rollouts.adapters.openenv import OpenEnvError, observation_text, openenv_environment
from outpace.rollouts.environments.session import EnvironmentSource
from outpace.rollouts.tools.functions import ToolError, tools_of
from outpace.types import Task
from rollouts_support import environment_sessions

pytest.importorskip("aiohttp")

Server = Callable[[str], str]
SESSIONS = 3  # of the server


# ------------------------------------------------------------------------------------------------ without a server


def test_an_unreachable_server_is_a_one_line_error() -> None:
    with pytest.raises(BadInput) as caught:
        openenv_environment("http://127.0.0.1:9", timeout_s=5)
    message = str(caught.value)
    assert message.startswith("rollout.environment: ")
    assert "http://127.0.0.1:9" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "hello", "metadata": {"secret": 7}}, "hello"),
        ({"board": [1, 2], "turn": 3}, '{"board": [1, 2], "turn": 3}'),
        ({"result": {"content": [{"type": "text", "text": "3"}], "data": 3}, "error": None, "tool_name": "price"}, "3"),
        ({"result": {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "data": None}}, "a\nb"),
        ({"metadata": {"status": "open"}}, ""),
        (None, ""),
    ],
)
def test_observation_text_leaves_out_metadata(observation: Any, text: str) -> None:
    assert observation_text(observation) == text


@pytest.mark.parametrize(
    "observation",
    [
        {"result": None, "error": {"error_type": "execution_error", "message": "not for sale"}},
        {"result": {"content": [{"type": "text", "text": "not for sale"}], "is_error": True}},
    ],
)
def test_a_tool_error_in_an_observation_is_raised(observation: Any) -> None:
    with pytest.raises(OpenEnvError, match="not for sale"):
        observation_text(observation)


# ---------------------------------------------------------------------------------------------- with a real server


@pytest.mark.slow
async def test_an_action_becomes_a_tool_and_step_rewards_add_up(openenv_server: Server) -> None:
    made = openenv_environment(openenv_server("guess"))
    [tool] = tools_of(made).values()
    assert tool.schema["function"] == {
        "name": "step",
        "description": "Guess the number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    }
    game = made()
    assert await game.reset(secret=5, unused="column") == "Guess."
    assert await game.step(number=3) == "wrong"
    assert await game.step(number=5) == f"right\n{EPISODE_OVER}"
    assert await game.step(number=5) == EPISODE_OVER
    assert await game.get_reward() == 0.75


@pytest.mark.slow
async def test_mcp_tools_are_tools_with_their_own_schemas(openenv_server: Server) -> None:
    made = openenv_environment(openenv_server("shop"))
    tools = tools_of(made)
    assert sorted(tools) == ["price", "sell"]
    function = tools["sell"].schema["function"]
    assert function["description"] == "Sell some items."
    assert function["parameters"]["properties"] == {
        "item": {"type": "string"},
        "count": {"default": 1, "type": "integer"},
    }
    assert function["parameters"]["required"] == ["item"]
    shop = made()
    await shop.reset()
    assert await shop.price(item="abc") == "3"
    with pytest.raises(OpenEnvError, match="not for sale"):
        await shop.price(item="gold")
    assert await shop.sell(item="abc", count=2) == f"sold 2 abc\n{EPISODE_OVER}"
    assert await shop.get_reward() == 2.0


@pytest.mark.slow
async def test_a_refused_step_raises_and_the_episode_continues(openenv_server: Server) -> None:
    game = openenv_environment(openenv_server("guess"))()
    await game.reset()
    with pytest.raises(OpenEnvError, match="numbers are not negative"):
        await game.step(number=-1)
    with pytest.raises(OpenEnvError, match="number: Input should be a valid integer"):
        await game.step(number="seven")
    assert await game.step(number=7) == f"right\n{EPISODE_OVER}"
    assert await game.get_reward() == 1.0


@pytest.mark.slow
async def test_episodes_are_independent(openenv_server: Server) -> None:
    made = openenv_environment(openenv_server("guess"))
    games = [made() for _ in range(SESSIONS)]
    await asyncio.gather(*(game.reset(secret=number) for number, game in enumerate(games)))
    await asyncio.gather(*(game.step(number=number) for number, game in enumerate(games)))
    assert [await game.get_reward() for game in games] == [1.0] * SESSIONS


@pytest.mark.slow
async def test_sessions_of_abandoned_episodes_are_released(openenv_server: Server) -> None:
    made = openenv_environment(openenv_server("guess"))
    for _ in range(2 * SESSIONS):
        game = made()
        await game.reset()
        del game  # its reward is never read
        gc.collect()
        await asyncio.sleep(0.05)
    kept = [made() for _ in range(SESSIONS)]
    for game in kept:
        await _retry_until_free(game.reset)
    with pytest.raises(OpenEnvError, match=r"(?i)capacity"):
        await made().reset()
    for game in kept:
        await game.get_reward()


async def _retry_until_free(reset: Callable[[], Any]) -> None:
    """Retry: the server counts a session until it notices that the connection is closed."""
    async with asyncio.timeout(60):
        while True:
            try:
                await reset()
            except OpenEnvError:
                await asyncio.sleep(0.05)
            else:
                return


@pytest.mark.slow
async def test_a_late_reply_to_an_interrupted_step_is_not_taken_for_the_next_one(openenv_server: Server) -> None:
    game = openenv_environment(openenv_server("guess"))()
    await game.reset(secret=5)
    step = asyncio.create_task(game.step(number=2000))
    await asyncio.sleep(0.1)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    with pytest.raises(OpenEnvError, match="session"):
        await game.step(number=5)
    assert await game.get_reward() == 0.0


@pytest.mark.slow
async def test_an_environment_can_be_reset_again(openenv_server: Server) -> None:
    game = openenv_environment(openenv_server("guess"))()
    for secret in (3, 4):
        await _retry_until_free(lambda secret=secret: game.reset(secret=secret))
        await game.step(number=secret)
        assert await game.get_reward() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_an_environment_named_in_a_file_works_in_a_run(
    isolation: Any, openenv_server: Server, tmp_path: Path
) -> None:
    url = openenv_server("shop")
    (tmp_path / "my_shop.py").write_text(
        f"from outpace.rollouts.adapters.openenv import openenv_environment\nShop = openenv_environment({url!r})\n"
    )
    sessions = environment_sessions(
        {"": EnvironmentSource("rollout.environment", f"{tmp_path}/my_shop.py:Shop")}, isolation=isolation
    )
    try:
        session = await sessions.open(Task("shop", "Sell.", {}))
        await session.reset({})
        assert sorted(session.tools) == ["price", "sell"]
        assert await session.call("price", {"item": "abc"}) == "3"
        with pytest.raises(ToolError, match="not for sale"):
            await session.call("price", {"item": "gold"})
        await session.call("sell", {"item": "abc"})
        assert await session.reward() == 1.0
        await session.close()
    finally:
        await sessions.close()
