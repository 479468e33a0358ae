"""A door before a real vLLM server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from outpace.engines.server.admission import ConcurrencyLimit
from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import STALE
from outpace.engines.server.server_engine import ServerEngine, ServerEngineSettings
from outpace.engines.server.state import HealthMachine
from outpace.engines.server.transports import FilesTransport
from outpace.engines.server.vllm import VllmServer
from outpace.engines.server.vllm_replies import COMPLETIONS, GENERATE
from outpace.errors import ContextFull, RequestFailed
from outpace.models.loading import load_model, load_tokenizer
from outpace.types import Generation, Manifest, Sampling
from outpace.weights.shared_memory import SnapshotWriter
from servers_support import RunningVllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

CONTEXT = 256
PROMPT = np.frombuffer(b"What is 3 + 4?", dtype=np.uint8).astype(np.int32)


@pytest.fixture(params=[GENERATE, COMPLETIONS])
async def door(request: pytest.FixtureRequest, vllm: RunningVllm, tmp_path: Path) -> AsyncIterator[ServerEngine]:
    """By either route. Where there is only the older one, nobody accounts for versions and aborts by name either."""
    server = await a_server(vllm, request.param)
    door = a_door(server, tmp_path)
    await door.start()
    await door.load(published(tmp_path, 1, 0.0), pinned=False)
    yield door
    await door.close()


async def a_server(vllm: RunningVllm, route: str) -> VllmServer:
    server = VllmServer(HttpClient(vllm.url, retries=0), control_s=60)
    facts = await server.facts()
    if route == COMPLETIONS:
        server._facts = replace(facts, details={**facts.details, "routes": [COMPLETIONS, "/pause"]})
    return server


def a_door(server: VllmServer, directory: Path, **given: Any) -> ServerEngine:
    transport = FilesTransport(server.http, 60, directory / "weights")
    chosen: dict[str, Any] = {"version": STALE, "context": CONTEXT, "slots": 16, "probe_s": 0.5, **given}
    return ServerEngine(
        server, transport, HealthMachine(), ConcurrencyLimit(16), ServerEngineSettings("engine-0", "run", **chosen)
    )


def published(directory: Path, version: int, change: float) -> Manifest:
    """The starter's weights, each moved by a random step of this size."""
    torch.manual_seed(version)
    tensors = {
        name: value + change * torch.randn_like(value) for name, value in load_model("starter").state_dict().items()
    }
    store = directory / f"store-{version}"
    store.mkdir()
    return SnapshotWriter(store, "run").publish(version, tensors, [])


async def ask(door: ServerEngine, name: str = "r", max_tokens: int = 40, **how: Any) -> Generation:
    return await door.generate(name, PROMPT, Sampling(max_tokens, seed=1, **how), 0, None)


def is_sound(answer: Generation) -> bool:
    return len(answer.tokens) == len(answer.logprobs) == len(answer.versions) and bool((answer.logprobs <= 0).all())


async def test_sampling_stops_where_the_embedded_engine_would(door: ServerEngine) -> None:
    answer = await ask(door)
    assert is_sound(answer)
    assert len(answer.tokens) == 40
    assert answer.stop == "length"
    third = int((await ask(door, temperature=0.0)).tokens[2])
    stopped = await ask(door, temperature=0.0, stop_ids=[third])
    assert stopped.stop == "stop"
    assert stopped.tokens[-1] == third
    text = load_tokenizer("starter").decode([third])
    by_text = await ask(door, temperature=0.0, stop_strings=[text])
    assert by_text.stop == "stop"
    assert by_text.tokens.tolist() == stopped.tokens.tolist()


async def test_nothing_outgrows_the_context(door: ServerEngine) -> None:
    assert len((await ask(door, max_tokens=9999)).tokens) == CONTEXT - len(PROMPT)
    with pytest.raises(ContextFull):
        await door.generate("long", np.ones(CONTEXT, dtype=np.int32), Sampling(1, 1), 0, None)
    with pytest.raises(RequestFailed, match="vocabulary"):
        await door.generate("odd", np.array([99999], dtype=np.int32), Sampling(1, 1), 0, None)


async def test_an_abort_answers_with_what_was_sampled(door: ServerEngine) -> None:
    for _ in range(10):  # on a busy machine the server may be done before the abort reaches it
        request = asyncio.create_task(ask(door, max_tokens=CONTEXT))
        await asyncio.sleep(0)
        seen = await door.stream_tokens("r", 3)
        await door.abort(["r"])
        answer = await request
        if answer.stop == "aborted":
            break
    assert answer.stop == "aborted"
    assert is_sound(answer)
    assert answer.tokens[3 : 3 + len(seen)].tolist() == seen.tolist()
    assert len(answer.tokens) < CONTEXT - len(PROMPT)


async def test_a_caller_that_goes_away_frees_the_server(door: ServerEngine, vllm: RunningVllm) -> None:
    request = asyncio.create_task(ask(door, max_tokens=CONTEXT))
    await asyncio.sleep(0)
    await door.stream_tokens("r", 3)
    request.cancel()
    watching = await a_server(vllm, GENERATE)
    async with asyncio.timeout(60):
        while (await watching.pressure()).running:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)
    await watching.close()


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_an_update_changes_the_weights_inside_a_sequence(vllm: RunningVllm, tmp_path: Path, kv: str) -> None:
    door = a_door(await a_server(vllm, GENERATE), tmp_path, kv=kv)
    await door.start()
    await door.load(published(tmp_path, 1, 0.0), pinned=False)
    before = await ask(door, "before", temperature=0.0)
    mixed = False
    for version in range(2, 8):  # a busy machine may see the tokens of a whole answer before the update
        changed = published(tmp_path, version, 0.2)
        requests = [asyncio.create_task(ask(door, f"r{number}", max_tokens=220)) for number in range(16)]
        await asyncio.sleep(0)
        await door.stream_tokens("r0", 0)
        report = await door.load(changed, pinned=False)
        answers = await asyncio.gather(*requests)
        assert all(is_sound(answer) and (np.diff(answer.versions) >= 0).all() for answer in answers)
        assert 0 < report.pause_s < report.seconds
        mixed |= {version - 1, version} in [set(answer.versions.tolist()) for answer in answers]
        if mixed:
            break
    assert mixed
    after = await ask(door, "after", temperature=0.0)
    assert not np.allclose(before.logprobs, after.logprobs, atol=1e-2)
    await door.load(published(tmp_path, 9, 0.0), pinned=False)
    again = await ask(door, "again", temperature=0.0)
    assert np.allclose(before.logprobs, again.logprobs, atol=1e-4)
    await door.close()


async def test_many_requests_at_once_are_all_answered(door: ServerEngine) -> None:
    answers = await asyncio.gather(*(ask(door, f"r{n}", max_tokens=20) for n in range(100)))
    assert all(is_sound(answer) and len(answer.tokens) == 20 for answer in answers)
    stats = await door.stats()
    assert stats.tokens == 2000
    assert stats.health == "healthy"


async def test_a_server_that_is_stopped_is_dead_though_its_port_accepts(vllm: RunningVllm, tmp_path: Path) -> None:
    door = a_door(await a_server(vllm, GENERATE), tmp_path, probe_deadline_s=0.5)
    await door.start()
    await door.load(published(tmp_path, 1, 0.0), pinned=False)
    request = asyncio.create_task(ask(door, max_tokens=CONTEXT))
    await asyncio.sleep(0)
    await door.stream_tokens("r", 3)
    leader = psutil.Process(vllm.pid)
    family = [leader, *leader.children(recursive=True)]
    try:
        for process in family:
            process.send_signal(signal.SIGSTOP)
        answer = await request
        assert "probes" in str(await door.broken())
    finally:
        for process in family:
            process.send_signal(signal.SIGCONT)
    assert answer.stop == "lost"
    assert is_sound(answer)
    assert len(answer.tokens) > 3
    await door.close()
