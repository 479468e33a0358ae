"""The server engine with a real vLLM server: what the conformance suite does not cover, and the older route."""

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

from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import STALE, Transport
from outpace.engines.server.server_engine import ServerEngine
from outpace.engines.server.state import ServerEngineSettings
from outpace.engines.server.transports import FilesTransport, MemoryTransport
from outpace.engines.server.vllm import COMPLETIONS, GENERATE, VllmServer
from outpace.errors import ContextFull, RequestFailed
from outpace.models.loading import load_model, load_tokenizer
from outpace.types import Generation, Manifest, Sampling
from outpace.weights.shared_memory import SnapshotWriter
from servers_support import RunningVllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

CONTEXT = 256
PROMPT = np.frombuffer(b"What is 3 + 4?", dtype=np.uint8).astype(np.int32)


@pytest.fixture(params=[GENERATE, COMPLETIONS])
async def engine(request: pytest.FixtureRequest, vllm: RunningVllm, tmp_path: Path) -> AsyncIterator[ServerEngine]:
    """An engine for each route. The older route has neither version spans nor aborts by request id."""
    server = await make_server(vllm, request.param)
    engine = make_engine(server, tmp_path)
    await engine.start()
    await engine.load(published(tmp_path, 1, 0.0), pinned=False)
    yield engine
    await engine.close()


async def make_server(vllm: RunningVllm, route: str) -> VllmServer:
    server = VllmServer(HttpClient(vllm.url, retries=0), control_s=60)
    facts = await server.facts()
    if route == COMPLETIONS:
        server._facts = replace(facts, details={**facts.details, "routes": [COMPLETIONS, "/pause"]})
    return server


def make_engine(server: VllmServer, directory: Path, transport: Transport | None = None, **given: Any) -> ServerEngine:
    transport = transport or FilesTransport(server.http, 60, directory / "weights")
    chosen: dict[str, Any] = {"version": STALE, "context": CONTEXT, "slots": 16, "probe_s": 0.5, **given}
    return ServerEngine(server, transport, ServerEngineSettings("engine-0", "run", **chosen))


def published(directory: Path, version: int, change: float) -> Manifest:
    """Publish the starter's weights, each changed by a random step of this size."""
    torch.manual_seed(version)
    tensors = {
        name: value + change * torch.randn_like(value) for name, value in load_model("starter").state_dict().items()
    }
    store = directory / f"store-{version}"
    store.mkdir()
    return SnapshotWriter(store, "run").publish(version, tensors, [])


async def generate(engine: ServerEngine, name: str = "r", max_tokens: int = 40, **how: Any) -> Generation:
    return await engine.generate(name, PROMPT, Sampling(max_tokens, seed=1, **how), 0, None)


def is_sound(answer: Generation) -> bool:
    return len(answer.tokens) == len(answer.logprobs) == len(answer.versions) and bool((answer.logprobs <= 0).all())


async def test_sampling_stops_where_the_embedded_engine_would(engine: ServerEngine) -> None:
    answer = await generate(engine)
    assert is_sound(answer)
    assert len(answer.tokens) == 40
    assert answer.stop == "length"
    third = int((await generate(engine, temperature=0.0)).tokens[2])
    stopped = await generate(engine, temperature=0.0, stop_ids=[third])
    assert stopped.stop == "stop"
    assert stopped.tokens[-1] == third
    text = load_tokenizer("starter").decode([third])
    by_text = await generate(engine, temperature=0.0, stop_strings=[text])
    assert by_text.stop == "stop"
    assert by_text.tokens.tolist() == stopped.tokens.tolist()


async def test_requests_are_limited_to_the_context(engine: ServerEngine) -> None:
    assert len((await generate(engine, max_tokens=9999)).tokens) == CONTEXT - len(PROMPT)
    with pytest.raises(ContextFull):
        await engine.generate("long", np.ones(CONTEXT, dtype=np.int32), Sampling(1, 1), 0, None)
    with pytest.raises(RequestFailed, match="vocabulary"):
        await engine.generate("odd", np.array([99999], dtype=np.int32), Sampling(1, 1), 0, None)


@pytest.mark.parametrize("engine", [COMPLETIONS], indirect=True)
async def test_an_abort_returns_the_partial_output(engine: ServerEngine) -> None:
    for _ in range(10):  # on a busy machine the server may finish before the abort arrives
        request = asyncio.create_task(generate(engine, max_tokens=CONTEXT))
        await asyncio.sleep(0)
        seen = await engine.stream_tokens("r", 3)
        await engine.abort(["r"])
        answer = await request
        if answer.stop == "aborted":
            break
    assert answer.stop == "aborted"
    assert is_sound(answer)
    assert answer.tokens[3 : 3 + len(seen)].tolist() == seen.tolist()
    assert len(answer.tokens) < CONTEXT - len(PROMPT)


async def test_cancelling_the_caller_ends_the_request_in_the_server(engine: ServerEngine, vllm: RunningVllm) -> None:
    request = asyncio.create_task(generate(engine, max_tokens=CONTEXT))
    await asyncio.sleep(0)
    await engine.stream_tokens("r", 3)
    request.cancel()
    observer = await make_server(vllm, GENERATE)
    async with asyncio.timeout(60):
        while (await observer.pressure()).running:  # noqa: ASYNC110 - state of another process
            await asyncio.sleep(0.05)
    await observer.close()


@pytest.mark.parametrize(("kv", "paused_by"), [("keep", "us"), ("keep", "itself"), ("recompute", "itself")])
async def test_an_update_changes_the_weights_during_a_sequence(
    vllm: RunningVllm, tmp_path: Path, kv: str, paused_by: str
) -> None:
    server = await make_server(vllm, GENERATE)
    memory = MemoryTransport(server.http, 60, label=server.label_of, recompute=kv == "recompute")
    engine = make_engine(server, tmp_path, memory if paused_by == "itself" else None, kv=kv)
    await engine.start()
    await engine.load(published(tmp_path, 1, 0.0), pinned=False)
    before = await generate(engine, "before", temperature=0.0)
    mixed = False
    for version in range(2, 8):  # on a busy machine an answer may be complete before the update
        changed = published(tmp_path, version, 0.2)
        requests = [asyncio.create_task(generate(engine, f"r{number}", max_tokens=220)) for number in range(16)]
        await asyncio.sleep(0)
        await engine.stream_tokens("r0", 0)
        report = await engine.load(changed, pinned=False)
        answers = await asyncio.gather(*requests)
        assert all(is_sound(answer) and (np.diff(answer.versions) >= 0).all() for answer in answers)
        phases = report.phases
        assert phases is not None
        assert report.pause_s == pytest.approx(phases.hold_s + phases.copy_s + phases.resume_s)
        assert min(phases.prepare_s, phases.hold_s, phases.copy_s, phases.resume_s) > 0
        assert phases.prepare_s + report.pause_s < report.seconds
        mixed |= {version - 1, version} in [set(answer.versions.tolist()) for answer in answers]
        if mixed:
            break
    assert mixed
    after = await generate(engine, "after", temperature=0.0)
    assert not np.allclose(before.logprobs, after.logprobs, atol=1e-2)
    await engine.load(published(tmp_path, 9, 0.0), pinned=False)
    again = await generate(engine, "again", temperature=0.0)
    assert np.allclose(before.logprobs, again.logprobs, atol=1e-4)
    await engine.close()


@pytest.mark.parametrize("engine", [COMPLETIONS], indirect=True)
async def test_many_concurrent_requests_all_complete(engine: ServerEngine) -> None:
    answers = await asyncio.gather(*(generate(engine, f"r{n}", max_tokens=20) for n in range(100)))
    assert all(is_sound(answer) and len(answer.tokens) == 20 for answer in answers)
    stats = await engine.stats()
    assert stats.tokens == 2000
    assert stats.health == "healthy"


async def test_a_suspended_server_is_detected_as_dead_although_its_port_accepts(
    vllm: RunningVllm, tmp_path: Path
) -> None:
    engine = make_engine(await make_server(vllm, GENERATE), tmp_path, probe_deadline_s=0.5)
    await engine.start()
    await engine.load(published(tmp_path, 1, 0.0), pinned=False)
    request = asyncio.create_task(generate(engine, max_tokens=CONTEXT))
    await asyncio.sleep(0)
    await engine.stream_tokens("r", 3)
    leader = psutil.Process(vllm.pid)
    processes = [leader, *leader.children(recursive=True)]
    try:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        answer = await request
        assert "probes" in str(await engine.broken())
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
    assert answer.stop == "lost"
    assert is_sound(answer)
    assert len(answer.tokens) > 3
    await engine.close()
