"""Server engines for SGLang, alone and as a fleet of two, with a fake SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engines.implementations import (
    SGLANG_VOCABULARY,
    SglangPublisher,
    server_engine,
    sglang_model,
    sglang_table,
    sglang_transport,
)
from engines.server.sglang_protocol import Sglang
from outpace.engines.fleet import EngineFleet
from outpace.engines.server.http import HttpClient
from outpace.engines.server.server_engine import ServerEngine
from outpace.engines.server.sglang import SglangServer
from outpace.errors import CorruptData, UpdateTorn
from outpace.types import Generation, Manifest, Sampling

pytestmark = pytest.mark.timeout(120)

LONG = 50
PROMPT = np.array([1, 3], dtype=np.int32)


def expected(version: int, tokens: list[int]) -> Any:
    """Return the logprobs of all tokens except the first."""
    rows = torch.log_softmax(sglang_table(version).double(), dim=-1)
    return rows[tokens[:-1], tokens[1:]].numpy()


def damage(manifest: Manifest) -> None:
    with Path(manifest.path).open("r+b") as file:
        file.seek(manifest.tensors[0].offset)
        file.write(b"\xff")


class Cluster:
    """Servers, their server engines, and a learner."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.learner = SglangPublisher(directory)
        self.servers: list[Sglang] = []
        self.engines: list[ServerEngine] = []

    async def start_engine(
        self, *, adapters: bool = False, slots: int = 8, **settings: Any
    ) -> tuple[Sglang, ServerEngine]:
        number = len(self.engines)
        server = Sglang(sglang_model(self._directory))
        await server.start()
        http = HttpClient(server.url, retries=0)
        transport = sglang_transport(http, self._directory / f"files-{number}", adapters=adapters)
        settings = {"version": 0, "pins": adapters, "context": server.context, **settings}
        engine = server_engine(SglangServer(http, control_s=10), transport, slots, **settings)
        self.servers.append(server)
        self.engines.append(engine)
        await engine.start()
        return server, engine

    def left_files(self) -> list[Path]:
        return [path for path in self._directory.glob("files-*/**/*") if path.is_file()]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    for engine in cluster.engines:
        await engine.close()
    for server in cluster.servers:
        await server.stop()


def submit(engine: ServerEngine | EngineFleet, name: str = "1.0.0", tokens: int = LONG) -> Awaitable[Generation]:
    return asyncio.ensure_future(engine.generate(name, PROMPT, Sampling(max_tokens=tokens, seed=0), 0, None))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  # the server has no event to wait for
            await asyncio.sleep(0.002)


def streams(server: Sglang) -> Callable[[], bool]:
    return lambda: any(request.streamed >= 3 and request.finish is None for request in server.seen)


def sequence(answer: Generation) -> list[int]:
    return [int(PROMPT[-1]), *answer.tokens.tolist()]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_weights_change_during_an_answer_and_every_token_records_its_version(cluster: Cluster, kv: str) -> None:
    server, engine = await cluster.start_engine(kv=kv)
    answering = submit(EngineFleet({"engine-0": engine}))
    await until(streams(server))
    report = await engine.load(cluster.learner.model(1), pinned=False)
    answer = await answering
    assert answer.stop == "length"
    assert len(answer.tokens) == LONG
    assert set(answer.versions.tolist()) == {0, 1}
    assert (np.diff(answer.versions) >= 0).all()
    fresh = np.flatnonzero(answer.versions)  # strict: weights may be newer than the recorded version, never older
    assert np.allclose(answer.logprobs[fresh], expected(1, sequence(answer))[fresh], atol=1e-5)
    assert report.bytes == SGLANG_VOCABULARY * SGLANG_VOCABULARY * 4
    assert len(server.seen) == (1 if kv == "keep" else 2)


async def test_to_recompute_a_request_ends_as_interrupted_with_the_tokens_so_far(cluster: Cluster) -> None:
    server, engine = await cluster.start_engine(kv="recompute")
    answering = submit(engine)
    await until(streams(server))
    await engine.load(cluster.learner.model(1), pinned=False)
    answer = await answering
    assert answer.stop == "interrupted"
    assert 3 <= len(answer.tokens) < LONG
    assert answer.versions.tolist() == [0] * len(answer.tokens)
    stats = await engine.stats()
    assert (stats.health, stats.retries) == ("healthy", 0)


async def test_an_interrupted_request_continues_before_requests_that_were_waiting(cluster: Cluster) -> None:
    server, engine = await cluster.start_engine(kv="recompute", slots=1)
    fleet = EngineFleet({"engine-0": engine})
    answering = submit(fleet, "1.0.0")
    await until(streams(server))
    waiting = submit(fleet, "2.0.0", tokens=4)
    await engine.load(cluster.learner.model(1), pinned=False)
    assert len((await answering).tokens) == LONG
    assert len((await waiting).tokens) == 4
    lengths = [len(request.body["input_ids"]) for request in server.seen]
    assert lengths[0] == lengths[2] == len(PROMPT) < lengths[1]


async def test_after_a_recompute_the_cache_contains_nothing_of_the_older_weights(cluster: Cluster) -> None:
    server, engine = await cluster.start_engine(kv="recompute")
    fleet = EngineFleet({"engine-0": engine})
    answering = [submit(fleet, f"{group}.0.0") for group in range(2)]
    await until(streams(server))
    await engine.load(cluster.learner.model(1), pinned=False)
    await asyncio.gather(*answering)
    assert len({weights for _, weights in server.caches}) == 1
    assert len({salt for salt, _ in server.caches}) == 1


async def test_requests_after_an_update_use_only_the_new_weights_and_no_files_are_left(cluster: Cluster) -> None:
    _, engine = await cluster.start_engine()
    await engine.load(cluster.learner.model(1), pinned=False)
    answer = await submit(engine)
    assert set(answer.versions.tolist()) == {1}
    assert np.allclose(answer.logprobs, expected(1, sequence(answer)), atol=1e-5)
    assert not np.allclose(answer.logprobs, expected(0, sequence(answer)), atol=1e-2)
    assert cluster.left_files() == []


async def test_a_damaged_snapshot_is_refused_and_leaves_the_weights_unchanged(cluster: Cluster) -> None:
    _, engine = await cluster.start_engine()
    manifest = cluster.learner.model(1)
    damage(manifest)
    with pytest.raises(CorruptData):
        await engine.load(manifest, pinned=False)
    answer = await submit(engine)
    assert set(answer.versions.tolist()) == {0}
    assert cluster.left_files() == []


async def test_after_an_update_that_fails_in_the_server_it_serves_nothing_until_the_next_load(cluster: Cluster) -> None:
    _, engine = await cluster.start_engine()
    manifest = cluster.learner.model(1)
    nameless = [msgspec.structs.replace(spec, name="else") for spec in manifest.tensors]
    with pytest.raises(UpdateTorn, match="version 1"):
        await engine.load(msgspec.structs.replace(manifest, tensors=nameless), pinned=False)
    assert (await engine.stats()).health == "stale"
    answering = submit(engine)
    await engine.load(cluster.learner.model(2), pinned=False)
    assert set((await answering).versions.tolist()) == {2}


async def test_adapters_coexist_and_are_removed_when_no_request_uses_them(cluster: Cluster) -> None:
    server, engine = await cluster.start_engine(adapters=True)
    await engine.load(cluster.learner.adapter(1, 0.0), pinned=False)
    first = submit(engine)
    await until(streams(server))
    await engine.load(cluster.learner.adapter(2, 9.0), pinned=False)
    second = await submit(engine, "2.0.0")
    assert set(second.versions.tolist()) == {2}
    assert set(second.tokens.tolist()) == {SGLANG_VOCABULARY - 1}
    assert set((await first).versions.tolist()) == {1}
    await until(lambda: server.adapters == ["outpace-run-2"])


async def test_when_one_of_two_servers_dies_its_requests_continue_on_the_other(cluster: Cluster) -> None:
    servers = [(await cluster.start_engine(probe_s=0.05, probe_deadline_s=1.0))[0] for _ in range(2)]
    fleet = EngineFleet({f"engine-{number}": engine for number, engine in enumerate(cluster.engines)})
    answering = [submit(fleet, f"{group}.0.0") for group in range(4)]
    await until(lambda: all(streams(server)() for server in servers))
    await servers[0].stop()
    for answer in await asyncio.gather(*answering):
        assert answer.stop == "length"
        assert len(answer.tokens) == LONG
        assert np.allclose(answer.logprobs, expected(0, sequence(answer)), atol=1e-5)
    assert "127.0.0.1" in str(await cluster.engines[0].broken())
