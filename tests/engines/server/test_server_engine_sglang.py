"""Server engines for SGLang, alone and as a fleet of two, with a fake SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engines.server.sglang_protocol import EOS, Sglang
from outpace.engines.fleet import EngineFleet
from outpace.engines.server.admission import ConcurrencyLimit
from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import Transport
from outpace.engines.server.server_engine import ServerEngine, ServerEngineSettings
from outpace.engines.server.sglang import SglangServer
from outpace.engines.server.state import HealthMachine
from outpace.engines.server.transports import SglangAdapters, SglangFiles
from outpace.errors import CorruptData, UpdateTorn
from outpace.types import Generation, LoraAdapter, Manifest, Sampling
from outpace.weights.shared_memory import SnapshotWriter

pytestmark = pytest.mark.timeout(120)

VOCABULARY = 8
LONG = 50
PROMPT = np.array([1, 3], dtype=np.int32)


def table(version: int) -> torch.Tensor:
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(version))
    logits[:, EOS] = -60.0
    return logits


def expected(version: int, tokens: list[int]) -> Any:
    """Return the logprobs of all tokens except the first."""
    rows = torch.log_softmax(table(version).double(), dim=-1)
    return rows[tokens[:-1], tokens[1:]].numpy()


class Learner:
    """Publishes tables of logits, or adapters, the way the learner publishes weights."""

    def __init__(self, directory: Path) -> None:
        self._tables = SnapshotWriter(directory, "run")
        self._adapters = SnapshotWriter(directory / "adapters", "run")

    def publish(self, version: int) -> Manifest:
        return self._tables.publish(version, {"logits": table(version)}, [])

    def publish_adapter(self, version: int, lift: float) -> Manifest:
        """Publish an adapter that favors high token ids."""
        names = ("base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight")
        plain = self._adapters.publish(version, {names[0]: torch.full((1, 1), lift), names[1]: torch.zeros(1, 1)}, [])
        return Manifest(**{**_fields(plain), "adapter": LoraAdapter(rank=1, alpha=2.0, targets=["q_proj"])})


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__struct_fields__}


def damage(manifest: Manifest) -> None:
    with Path(manifest.path).open("r+b") as file:
        file.seek(manifest.tensors[0].offset)
        file.write(b"\xff")


class Cluster:
    """Servers, their server engines, and a learner."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.learner = Learner(directory / "learner")
        self.servers: list[Sglang] = []
        self.engines: list[ServerEngine] = []

    async def start_engine(self, *, adapters: bool = False, **settings: Any) -> tuple[Sglang, ServerEngine]:
        number = len(self.engines)
        server = Sglang(self._model())
        await server.start()
        http = HttpClient(server.url, retries=0)
        make = SglangAdapters if adapters else SglangFiles
        transport: Transport = make(http, 10, self._directory / f"files-{number}")
        settings = {"retries": 0, "control_s": 10.0, "pins": adapters, "context": server.context, **settings}
        engine = ServerEngine(
            SglangServer(http, control_s=10), transport, HealthMachine(), ConcurrencyLimit(8),
            ServerEngineSettings(f"engine-{number}", "run", **settings),
        )  # fmt: skip
        self.servers.append(server)
        self.engines.append(engine)
        await engine.start()
        return server, engine

    def _model(self) -> Path:
        """Write the initial model of the servers: version 0."""
        folder = self._directory / "model"
        folder.mkdir(exist_ok=True)
        save_file({"logits": table(0)}, folder / "model.safetensors")
        return folder

    def left_files(self) -> list[Path]:
        return [path for path in self._directory.glob("files-*/**/*") if path.is_file()]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    (tmp_path / "learner" / "adapters").mkdir(parents=True)
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
    answering = submit(engine)
    await until(streams(server))
    report = await engine.load(cluster.learner.publish(1), pinned=False)
    answer = await answering
    assert answer.stop == "length"
    assert len(answer.tokens) == LONG
    assert set(answer.versions.tolist()) == {0, 1}
    assert (np.diff(answer.versions) >= 0).all()
    fresh = np.flatnonzero(answer.versions)  # strict: weights may be newer than the recorded version, never older
    assert np.allclose(answer.logprobs[fresh], expected(1, sequence(answer))[fresh], atol=1e-5)
    assert report.bytes == VOCABULARY * VOCABULARY * 4
    assert 0 < report.pause_s <= report.seconds


async def test_requests_after_an_update_use_only_the_new_weights_and_no_files_are_left(cluster: Cluster) -> None:
    _, engine = await cluster.start_engine()
    await engine.load(cluster.learner.publish(1), pinned=False)
    answer = await submit(engine)
    assert set(answer.versions.tolist()) == {1}
    assert np.allclose(answer.logprobs, expected(1, sequence(answer)), atol=1e-5)
    assert not np.allclose(answer.logprobs, expected(0, sequence(answer)), atol=1e-2)
    assert cluster.left_files() == []


async def test_a_damaged_snapshot_is_refused_and_leaves_the_weights_unchanged(cluster: Cluster) -> None:
    _, engine = await cluster.start_engine()
    manifest = cluster.learner.publish(1)
    damage(manifest)
    with pytest.raises(CorruptData):
        await engine.load(manifest, pinned=False)
    answer = await submit(engine)
    assert set(answer.versions.tolist()) == {0}
    assert cluster.left_files() == []


async def test_after_an_update_that_fails_in_the_server_it_serves_nothing_until_the_next_load(cluster: Cluster) -> None:
    _, engine = await cluster.start_engine()
    manifest = cluster.learner.publish(1)
    nameless = [type(spec)(**{**_fields(spec), "name": "else"}) for spec in manifest.tensors]  # type: ignore[arg-type]
    with pytest.raises(UpdateTorn, match="version 1"):
        await engine.load(Manifest(**{**_fields(manifest), "tensors": nameless}), pinned=False)
    assert (await engine.stats()).health == "stale"
    answering = submit(engine)
    await engine.load(cluster.learner.publish(2), pinned=False)
    assert set((await answering).versions.tolist()) == {2}


async def test_adapters_coexist_and_are_removed_when_no_request_uses_them(cluster: Cluster) -> None:
    server, engine = await cluster.start_engine(adapters=True)
    await engine.load(cluster.learner.publish_adapter(1, 0.0), pinned=False)
    first = submit(engine)
    await until(streams(server))
    await engine.load(cluster.learner.publish_adapter(2, 9.0), pinned=False)
    second = await submit(engine, "2.0.0")
    assert set(second.versions.tolist()) == {2}
    assert set(second.tokens.tolist()) == {VOCABULARY - 1}
    assert set((await first).versions.tolist()) == {1}
    await until(lambda: server.adapters == ["outpace-run-2"])


async def test_an_abort_returns_the_partial_output(cluster: Cluster) -> None:
    server, engine = await cluster.start_engine()
    answering = submit(engine)
    await until(streams(server))
    await engine.abort(["1.0.0"])
    answer = await answering
    assert answer.stop == "aborted"
    assert 3 <= len(answer.tokens) < LONG
    assert np.allclose(answer.logprobs, expected(0, sequence(answer)), atol=1e-5)


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
    assert fleet.moves > 0
    assert "127.0.0.1" in str(await cluster.engines[0].broken())
