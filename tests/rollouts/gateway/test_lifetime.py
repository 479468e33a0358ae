"""Requests end when the agent disconnects, the episode ends or the gateway closes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from outpace.rollouts.gateway.server import Gateway
from outpace.types import Endpoint

HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def send(endpoint: Endpoint, **changes: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a raw socket."""
    where = urlsplit(endpoint.base_url)
    body = json.dumps({**HI, **changes}).encode()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = [
        f"POST {where.path}/chat/completions HTTP/1.1",
        f"Host: {where.netloc}",
        f"Authorization: Bearer {endpoint.api_key}",
        f"Content-Length: {len(body)}",
    ]
    writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    return reader, writer


async def test_an_agent_that_disconnects_while_waiting_aborts_its_request(
    gateway: Any, policy: Any, typing_engine: Any
) -> None:
    engine = typing_engine("hello", by_hand=True)
    client = policy(engine)
    _, writer = await send(await gateway.open(client))
    await engine.started.wait()
    await engine.write(2)
    writer.close()
    await engine.stopped.wait()
    assert engine.aborted == ["7.0.0"]
    assert await gateway.close_session(client) is None
    assert client.abandoned == 2  # every token is accounted for


async def test_an_agent_that_disconnects_in_mid_stream_aborts_its_request(
    gateway: Any, policy: Any, typing_engine: Any
) -> None:
    engine = typing_engine("hello you", by_hand=True)
    client = policy(engine)
    reader, writer = await send(await gateway.open(client), stream=True)
    await engine.started.wait()
    await engine.write(5)
    while b"hello" not in await reader.readline():
        pass
    writer.close()
    await engine.stopped.wait()
    assert engine.aborted == ["7.0.0"]
    await gateway.close_session(client)
    assert client.abandoned == 5
    assert not client.trajectories()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_an_episode_ends_its_requests(
    stream: bool, gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine("hello", by_hand=True)
    client, other = policy(engine), policy(engine, episode=1)
    agent, other_agent = agent_of(await gateway.open(client)), agent_of(await gateway.open(other))

    async def chat(sender: AsyncOpenAI) -> Any:
        answer = await sender.chat.completions.create(**HI, stream=stream)
        return [chunk async for chunk in answer] if stream else answer

    ended, unaffected = asyncio.create_task(chat(agent)), asyncio.create_task(chat(other_agent))
    while len(engine.prompts) < 2:  # noqa: ASYNC110 - two requests, one event
        await asyncio.sleep(0.001)
    await gateway.close_session(client)
    with pytest.raises(openai.APIError) as raised:
        await ended
    assert raised.value.code == "episode_ended"
    assert engine.aborted == ["7.0.0"]
    with pytest.raises(openai.NotFoundError):
        await agent.models.list()
    await engine.write(99)
    assert await unaffected


async def test_a_request_that_arrives_as_its_episode_ends_is_not_started(
    gateway: Any, policy: Any, typing_engine: Any
) -> None:
    client = policy(typing_engine("hello"))
    endpoint = await gateway.open(client)
    where = urlsplit(endpoint.base_url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"POST {where.path}/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\nx-api-key: {endpoint.api_key}\r\n"
    body = json.dumps(HI).encode()
    writer.write(f"{head}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode())
    assert b"100" in await reader.readline()  # accepted, waiting for the body
    await gateway.close_session(client)
    writer.write(body)
    await reader.readline()
    assert b"410" in await reader.readline()
    writer.close()
    assert client.requests == []


async def test_closing_the_gateway_ends_requests_in_flight(policy: Any, typing_engine: Any, agent_of: Any) -> None:
    gateway = Gateway("127.0.0.1", 0, "m")
    engine = typing_engine("hello", by_hand=True)
    agent = agent_of(await gateway.open(policy(engine)))
    request = asyncio.create_task(agent.chat.completions.create(**HI))
    await engine.started.wait()
    await gateway.close()
    with pytest.raises(openai.APIError):
        await request
    assert engine.aborted == ["7.0.0"]
    with pytest.raises(openai.APIConnectionError):
        await agent.models.list()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


async def test_hundreds_of_sessions_and_thousands_of_requests_leave_nothing_behind(
    policy: Any, typing_engine: Any
) -> None:
    engine = typing_engine("hello you<|end|>")
    gc.collect()
    tasks, open_files = asyncio.all_tasks(), descriptors()
    gateway = Gateway("127.0.0.1", 0, "m")

    async def episode(number: int) -> weakref.ref[Any]:
        client = policy(engine, episode=number)
        endpoint = await gateway.open(client)
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        for stream in (False, True) * 2:
            body = {**HI, "stream": stream}
            async with http.post(f"{endpoint.base_url}/chat/completions", json=body, headers=key) as response:
                assert b"hello" in await response.read()
        await gateway.close_session(client)
        return weakref.ref(client)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = await asyncio.gather(*map(episode, range(256)))
    assert len(gateway._sessions) == 0
    await gateway.close()
    while asyncio.all_tasks() - tasks:  # noqa: ASYNC110 - connections close in later iterations of the loop
        await asyncio.sleep(0.001)
    gc.collect()
    assert [client() for client in clients if client() is not None] == []
    assert descriptors() <= open_files
    assert len(engine.prompts) == 1024


async def test_a_closed_session_is_freed_while_the_gateway_keeps_running(
    gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    """A keep-alive connection must not keep the episode of its last request alive."""
    client = policy(typing_engine("hello"))
    endpoint = await gateway.open(client)
    key = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with http.post(f"{endpoint.base_url}/chat/completions", json=HI, headers=key) as response:
        assert response.status == 200
    await gateway.close_session(client)
    left = weakref.ref(client)
    del client
    gc.collect()
    assert left() is None
