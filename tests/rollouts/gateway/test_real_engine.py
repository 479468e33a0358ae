"""End to end: the official client, the gateway, the policy client, the embedded engine, and changing weights."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.engines.embedded.engine import EmbeddedEngine
from outpace.models.loading import load_model
from outpace.protocols import Engine
from outpace.runtime.rpc import Channel, close_proxy, proxy, serve_calls
from outpace.weights.shared_memory import SnapshotWriter

REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "3 4 5 -> 12"}]}


@pytest.fixture
async def real_engine(tokenizer: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine("starter", tokenizer=tokenizer, slots=8, threads=1)
    yield engine
    await engine.close()


@pytest.fixture
async def remote_engine(real_engine: EmbeddedEngine) -> AsyncIterator[Engine]:
    """The same engine behind a socket, as a worker reaches it."""
    ours, theirs = socket.socketpair()
    near = Channel(*await asyncio.open_connection(sock=ours))
    far = Channel(*await asyncio.open_connection(sock=theirs))
    serving = asyncio.create_task(serve_calls(real_engine, Engine, far))
    remote = proxy(Engine, near, "engine-0")
    yield remote
    close_proxy(remote)
    await serving
    far.close()


async def test_streamed_pieces_add_up_to_the_answer(
    gateway: Any, policy: Any, remote_engine: Engine, agent_of: Any
) -> None:
    client = policy(remote_engine, temperature=1.0, max_tokens=40)
    agent = agent_of(await gateway.open(client))

    async def stream_once() -> tuple[str, str, int]:
        stream = await agent.chat.completions.create(**REQUEST, stream=True)
        chunks = [chunk async for chunk in stream]
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
        return chunks[0].id, "".join(texts), sum(bool(text) for text in texts)

    answers = await asyncio.gather(*(stream_once() for _ in range(12)))
    written = {turn.request_id: turn.generation.tokens.tolist() for turn in client._sampler.transcript.turns}
    assert {request: text for request, text, _ in answers} == {
        request: client.chat_format.parse(tokens, ()).content for request, tokens in written.items()
    }
    assert max(pieces for _, _, pieces in answers) > 1


async def test_requests_continue_while_weights_change(
    gateway: Any, policy: Any, real_engine: EmbeddedEngine, agent_of: Any, tmp_path: Path
) -> None:
    model = load_model("starter")
    writer = SnapshotWriter(tmp_path, "test")
    clients = [policy(real_engine, episode=index, temperature=1.0, max_tokens=90) for index in range(8)]
    agents = [agent_of(await gateway.open(client)) for client in clients]

    async def talk(agent: Any, stream: bool) -> None:
        for _ in range(6):
            answer = await agent.chat.completions.create(**REQUEST, stream=stream)
            assert [chunk async for chunk in answer] if stream else answer.choices

    talks = asyncio.gather(*(talk(agent, index % 2 == 0) for index, agent in enumerate(agents)))
    version = 0
    while not talks.done() and version < 40:
        version += 1
        await real_engine.load(writer.publish(version, dict(model.named_parameters()), leased=()), pinned=False)
    await talks
    seen = np.concatenate([kept.versions[kept.mask] for client in clients for kept in client.trajectories()])
    assert len(set(seen.tolist())) > 1
    assert [len(client.requests) for client in clients] == [6] * 8


async def test_an_agent_that_disconnects_frees_its_slot_in_the_real_engine(
    gateway: Any, policy: Any, real_engine: EmbeddedEngine, remote_engine: Engine, agent_of: Any
) -> None:
    aborted = asyncio.Event()
    abort = real_engine.abort

    async def abort_and_signal(request_ids: list[str]) -> None:
        await abort(request_ids)
        aborted.set()

    real_engine.abort = abort_and_signal  # type: ignore[method-assign]
    steps = threading.Semaphore(4)
    advance = real_engine._main.advance
    real_engine._main.advance = lambda: [*(steps.acquire() and ()), *advance()]  # type: ignore[method-assign]
    client = policy(remote_engine, temperature=1.0)
    client.chat_format.stop_ids = ()  # generation runs until the context is full
    agent = agent_of(await gateway.open(client))
    stream = await agent.chat.completions.create(**REQUEST, stream=True)
    while not (await anext(stream)).choices[0].delta.content:
        pass
    await stream.close()
    await aborted.wait()
    steps.release(1000)
    await gateway.close_session(client)
    stats = await remote_engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.tokens == client.abandoned > 0
    assert not client.trajectories()
