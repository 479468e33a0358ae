"""Every implementation of `outpace.protocols.Engine`, set up alike for the conformance suite.

Each function is a context manager that yields an engine with version 1 loaded. With `pins`, version 1 is pinned too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from engines.server.fake_server import FakeServer
from engines.server.fake_transport import FakeTransport
from engines.server.sglang_protocol import EOS, Sglang
from engines_support import CONTEXT, build, engine_of
from outpace.engines.embedded.engine import EmbeddedEngine
from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import STALE, Server, Transport
from outpace.engines.server.server_engine import ServerEngine
from outpace.engines.server.sglang import SglangServer
from outpace.engines.server.state import ServerEngineSettings
from outpace.engines.server.transports import AdapterTransport, FilesTransport, sglang_reload
from outpace.engines.server.vllm import VllmServer
from outpace.models.loading import load_model
from outpace.types import Ints, LoraAdapter, Manifest
from outpace.weights.shared_memory import SnapshotWriter
from servers_support import RunningVllm

LOADED = 1
"""The version that every engine starts with."""

SGLANG_VOCABULARY = 8


@dataclass
class Subject:
    """An engine, how to publish weights for it, and a prompt. `long` tokens take it long enough to interfere."""

    engine: EmbeddedEngine | ServerEngine
    publish: Callable[[int], Manifest]
    prompt: Ints
    context: int

    @property
    def long(self) -> int:
        return self.context - len(self.prompt)


def server_engine(server: Server, transport: Transport, slots: int = 8, **settings: Any) -> ServerEngine:
    chosen = {"version": STALE, "control_s": 10.0, "probe_s": 600.0, "slots": slots, **settings}
    return ServerEngine(server, transport, ServerEngineSettings("engine-0", "run", **chosen))


@asynccontextmanager
async def embedded(directory: Path, pins: bool = False, slots: int = 8) -> AsyncIterator[Subject]:
    writer = SnapshotWriter(directory, "run")

    def publish(version: int) -> Manifest:
        return writer.publish(version, dict(build("llama", seed=version).named_parameters()), leased=())

    async with engine_of(build("llama"), slots=slots) as engine:
        subject = Subject(engine, publish, np.arange(1, 6, dtype=np.int32), CONTEXT)
        await engine.load(publish(LOADED), pinned=False)
        if pins:
            await engine.load(publish(LOADED), pinned=True)
        yield subject


@asynccontextmanager
async def vllm_protocol(directory: Path, pins: bool = False, slots: int = 8) -> AsyncIterator[Subject]:
    async with FakeServer(delay_s=0.005).serving() as fake:
        server = VllmServer(HttpClient(fake.url, retries=0), control_s=10, incarnation="run")
        engine = server_engine(server, FakeTransport(needs_pause=not pins), slots, context=64, pins=pins)
        prompt = np.arange(4, dtype=np.int32)
        async with _started(engine, lambda version: Manifest("run", version, "", []), prompt, 64, pins) as subject:
            yield subject


@asynccontextmanager
async def sglang_protocol(
    directory: Path, pins: bool = False, slots: int = 8, **settings: Any
) -> AsyncIterator[Subject]:
    fake = Sglang(sglang_model(directory))
    await fake.start()
    http = HttpClient(fake.url, retries=0)
    publisher = SglangPublisher(directory)
    publish: Callable[[int], Manifest] = publisher.adapter if pins else publisher.model
    transport = sglang_transport(http, directory / "files", adapters=pins)
    engine = server_engine(SglangServer(http, control_s=10), transport, slots, context=64, pins=pins, **settings)
    try:
        async with _started(engine, publish, np.array([1, 3], dtype=np.int32), fake.context, pins) as subject:
            yield subject
    finally:
        await fake.stop()


def sglang_transport(http: HttpClient, directory: Path, *, adapters: bool) -> Transport:
    if adapters:
        return AdapterTransport(http, 10, directory, routes="")
    return FilesTransport(http, 10, directory, reload_call=sglang_reload)


@asynccontextmanager
async def real_vllm(directory: Path, running: RunningVllm, slots: int = 8) -> AsyncIterator[Subject]:
    server = VllmServer(HttpClient(running.url, retries=0), control_s=60, incarnation="run")
    transport = FilesTransport(server.http, 60, directory / "weights")
    engine = server_engine(server, transport, slots, context=256, control_s=60.0)
    writer = SnapshotWriter(directory, "run")

    def publish(version: int) -> Manifest:
        torch.manual_seed(version)
        weights = load_model("starter").state_dict()
        step = 0.0 if version == LOADED else 0.2
        return writer.publish(version, {k: v + step * torch.randn_like(v) for k, v in weights.items()}, leased=())

    prompt = np.frombuffer(b"What is 3 + 4?", dtype=np.uint8).astype(np.int32)
    async with _started(engine, publish, prompt, 256, pins=False) as subject:
        yield subject


@asynccontextmanager
async def _started(
    engine: ServerEngine, publish: Callable[[int], Manifest], prompt: Ints, context: int, pins: bool
) -> AsyncIterator[Subject]:
    await engine.start()
    try:
        await engine.load(publish(LOADED), pinned=False)
        if pins:
            await engine.load(publish(LOADED), pinned=True)
        yield Subject(engine, publish, prompt, context)
    finally:
        await engine.close()


def sglang_table(version: int) -> torch.Tensor:
    """Logits of the fake SGLang server: one row per preceding token. It never samples the end of a sequence."""
    logits = torch.randn(SGLANG_VOCABULARY, SGLANG_VOCABULARY, generator=torch.Generator().manual_seed(version))
    logits[:, EOS] = -60.0
    return logits


def sglang_model(directory: Path) -> Path:
    """Write the initial model of a fake SGLang server: version 0."""
    folder = directory / "model"
    folder.mkdir(exist_ok=True)
    save_file({"logits": sglang_table(0)}, folder / "model.safetensors")
    return folder


class SglangPublisher:
    """Publishes tables of logits, or adapters, the way the learner publishes weights."""

    def __init__(self, directory: Path) -> None:
        self._tables = SnapshotWriter(_made(directory / "tables"), "run")
        self._adapters = SnapshotWriter(_made(directory / "adapters"), "run")

    def model(self, version: int) -> Manifest:
        return self._tables.publish(version, {"logits": sglang_table(version)}, [])

    def adapter(self, version: int, lift: float = 0.0) -> Manifest:
        """Publish an adapter that favors high token ids."""
        names = ("base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight")
        plain = self._adapters.publish(version, {names[0]: torch.full((1, 1), lift), names[1]: torch.zeros(1, 1)}, [])
        return msgspec.structs.replace(plain, adapter=LoraAdapter(rank=1, alpha=2.0, targets=["q_proj"]))


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
