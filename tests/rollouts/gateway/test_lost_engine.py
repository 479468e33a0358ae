"""Losing an engine during a request affects neither the agent behind the gateway nor the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outpace.engines.fleet import EngineFleet
from outpace.errors import ComponentLost
from outpace.types import Ints

HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LOST = ComponentLost("engine-0", "closed its connection")

pytestmark = pytest.mark.timeout(120)


async def lost(*_: Any) -> Ints:
    raise LOST


async def test_a_stream_continues_with_the_answer_of_the_replacement_engine(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine(LOST, "hello<|end|>", by_hand=True)
    engine.stream_tokens = lost
    client = policy(EngineFleet({"engine-0": engine}))
    agent = agent_of(await gateway.open(client))
    stream = await agent.chat.completions.create(**HI, stream=True)
    await engine.write(1 << 30)
    parts = [part.choices[0].delta.content or "" async for part in stream]
    assert "".join(parts) == "hello"
    assert len(engine.prompts) == 2
    assert await gateway.close_session(client) is None


async def test_an_episode_that_ends_while_its_engine_is_lost_does_not_fail_the_run(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine("hello", by_hand=True)
    engine.abort = lost
    client = policy(EngineFleet({"engine-0": engine}))
    agent = agent_of(await gateway.open(client))
    request = asyncio.create_task(agent.chat.completions.create(**HI))
    await engine.started.wait()
    assert await gateway.close_session(client) is None
    await client.abandon()
    (answer,) = await asyncio.gather(request, return_exceptions=True)
    assert isinstance(answer, Exception)
