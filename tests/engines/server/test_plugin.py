"""The vLLM plugin: reading snapshots, and which weights a real vLLM samples from after an update."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from torch import Tensor, nn

from outpace.config.load import make_config
from outpace.engines.server.checks import check_server
from outpace.engines.server.http import HttpClient
from outpace.engines.server.launch import LaunchPlan, launch_server
from outpace.engines.server.protocol import Transport
from outpace.engines.server.transports import (
    AdapterTransport,
    CollectiveTransport,
    FilesTransport,
    MemoryTransport,
    memory_update,
)
from outpace.errors import BadInput, CorruptData, ServerFaulty
from outpace.models.loading import load_model, resolve_model
from outpace.types import LoraAdapter, Manifest, Version
from outpace.weights.delta import LocalSnapshot
from outpace.weights.process_group import send_snapshot
from outpace.weights.shared_memory import SnapshotWriter
from outpace_vllm.sources import from_memory
from servers_support import SMALL, RunningVllm, vllm_python
from weights_support import flip

PROMPT = list(b"What is 3 + 4? Let me see.")
NOISE = 2e-3
"""Tolerance between the server's and the learner's float32 logprobs."""
CONTROL_S = 60.0


def test_the_plugin_reads_a_snapshot_in_place(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).bfloat16(), "b": torch.tensor(7), "c": torch.zeros(0, 2)}
    manifest = SnapshotWriter(tmp_path, "run").publish(5, tensors, [])
    with from_memory(**source(manifest)) as named:
        found = {name: tensor.clone() for name, tensor in named}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def source(manifest: Manifest) -> dict[str, Any]:
    return {key: value for key, value in memory_update(manifest).items() if key != "kind"}


def test_the_plugin_refuses_a_file_that_holds_another_snapshot_or_is_too_short(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "run")
    manifest = writer.publish(5, {"a": torch.zeros(8)}, [])
    other = msgspec.structs.replace(manifest, version=6)
    with pytest.raises(ValueError, match="version 6"), from_memory(**source(other)):
        pass
    spec = msgspec.structs.replace(manifest.tensors[0], shape=[999], nbytes=999 * 4)
    longer = msgspec.structs.replace(manifest, tensors=[spec])
    with pytest.raises(ValueError, match=f"{longer.path}.* tensor"), from_memory(**source(longer)):
        pass


def test_the_plugin_notices_a_snapshot_that_is_overwritten_while_it_loads(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "run")
    manifest = writer.publish(1, {"a": torch.zeros(8)}, [])
    writer.publish(2, {"a": torch.zeros(8)}, [])
    with pytest.raises(ValueError, match="version 1"), from_memory(**source(manifest)):
        writer.publish(3, {"a": torch.ones(8)}, [])


@dataclass
class Bench:
    """A real server, the learner's model, and the snapshot writer between them."""

    http: HttpClient
    name: str
    model: nn.Module
    directory: Path
    version: Version = 0

    def __post_init__(self) -> None:
        self.base = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.writer = SnapshotWriter(self.directory, "bench", torch.float32, deltas=self.directory)

    def moved(self, share: float = 1.0) -> dict[str, Tensor]:
        """Change this share of the learner's weights, as a training step would, and return them."""
        self.version += 1
        noise = torch.Generator().manual_seed(self.version)
        for tensor in self.model.state_dict().values():
            step = 0.1 * tensor.std() * torch.randn(tensor.shape, generator=noise)
            tensor += step * (torch.rand(tensor.shape, generator=noise) < share)
        return self.model.state_dict()

    def published(self, share: float = 1.0) -> Manifest:
        tensors = self.moved(share)
        return self.writer.publish(self.version, tensors, [])

    async def update(self, transport: Transport, manifest: Manifest) -> int:
        ready = await transport.prepare(manifest)
        if transport.needs_pause:
            await self.http.post("/pause", {}, deadline_s=CONTROL_S, query={"mode": "keep", "clear_cache": "true"})
        try:
            await transport.swap(ready)
        finally:
            await self.http.post("/resume", {}, deadline_s=CONTROL_S, repeatable=True)
        return ready.nbytes

    async def distance(self, name: str = "") -> float:
        """Return the largest difference between the server's and the learner's logprobs of the prompt."""
        found = await self.served(name)
        return float(np.abs(found - learners_logprobs(self.model)).max())

    async def served(self, name: str = "") -> np.ndarray[Any, Any]:
        body = {"model": name or self.name, "prompt": PROMPT, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self.http.post("/v1/completions", body, deadline_s=CONTROL_S)
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        return np.array([entry[str(token)]["logprob"] for entry, token in zip(entries, PROMPT[1:], strict=True)])


@torch.no_grad()
def learners_logprobs(model: nn.Module) -> np.ndarray[Any, Any]:
    tokens = torch.tensor([PROMPT])
    logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1)
    found: np.ndarray[Any, Any] = logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()
    return found


@pytest_asyncio.fixture
async def bench(vllm: RunningVllm, tmp_path: Path) -> AsyncIterator[Bench]:
    """The server is shared between tests: each one starts and ends with the weights that it was launched with."""
    http = HttpClient(vllm.url)
    path = str(resolve_model(vllm.config.model.path))
    name = (await http.get("/v1/models", deadline_s=CONTROL_S))["data"][0]["id"]
    bench = Bench(http, name, load_model(path, dtype="float32"), tmp_path)
    launched = SnapshotWriter(tmp_path, "launched", torch.float32).publish(0, bench.base, [])
    await bench.update(MemoryTransport(http, CONTROL_S), launched)
    yield bench
    await bench.update(MemoryTransport(http, CONTROL_S), launched)
    await http.close()


@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["files", "memory", "collective"])
async def test_a_server_samples_from_published_weights_after_the_update_and_not_before(bench: Bench, kind: str) -> None:
    memory = MemoryTransport(bench.http, CONTROL_S)
    transports: dict[str, Transport] = {
        "files": FilesTransport(bench.http, CONTROL_S, bench.directory / "folders"),
        "memory": memory,
        "collective": CollectiveTransport(memory, send_snapshot, "gloo", CONTROL_S),
    }
    assert await bench.distance() < NOISE
    for _ in range(2):
        manifest = bench.published()
        assert await bench.distance() > 10 * NOISE
        await bench.update(transports[kind], manifest)
        assert await bench.distance() < NOISE


@pytest.mark.vllm
@pytest.mark.timeout(400)
async def test_a_server_can_be_updated_by_deltas(bench: Bench) -> None:
    transport = MemoryTransport(bench.http, CONTROL_S, LocalSnapshot(bench.directory))
    await bench.update(transport, first := bench.published())
    for _ in range(2):
        manifest = bench.published(share=0.05)
        travelled = await bench.update(transport, manifest)
        assert manifest.delta is not None
        assert travelled == manifest.delta.nbytes < first.nbytes / 8
        assert await bench.distance() < NOISE


@pytest.mark.vllm
@pytest.mark.timeout(400)
async def test_a_flipped_bit_leaves_the_server_with_its_previous_weights(bench: Bench) -> None:
    """Fault 31."""
    transport = MemoryTransport(bench.http, CONTROL_S)
    await bench.update(transport, bench.published())
    before = await bench.served()
    damaged = bench.published()
    flip(Path(damaged.path), damaged.tensors[3].offset + 1)
    with pytest.raises(CorruptData):
        await bench.update(transport, damaged)
    assert np.array_equal(await bench.served(), before)
    await bench.update(transport, bench.published())
    assert await bench.distance() < NOISE


@pytest.mark.vllm
@pytest.mark.timeout(400)
async def test_an_update_that_fails_in_the_server_leaves_it_paused_and_the_next_update_succeeds(bench: Bench) -> None:
    transport = MemoryTransport(bench.http, CONTROL_S)
    tensors = bench.moved()
    shapeless = {**tensors, "model.layers.2.mlp.down_proj.weight": torch.zeros(3, 5)}
    partial = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    for number, (wrong, cause) in enumerate([(shapeless, "dimension"), (partial, r"layers\.1\.")]):
        manifest = SnapshotWriter(bench.directory, f"wrong-{number}", torch.float32).publish(1, wrong, [])
        ready = await transport.prepare(manifest)
        with pytest.raises(ServerFaulty, match=cause):
            await transport.swap(ready)
        assert (await bench.http.get("/is_paused", deadline_s=CONTROL_S))["is_paused"]
    await bench.update(transport, bench.published())
    assert await bench.distance() < NOISE


@pytest.mark.vllm
@pytest.mark.timeout(400)
async def test_adapters_of_several_versions_are_served_concurrently_and_a_higher_rank_is_refused(
    tmp_path: Path,
) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = make_config(SMALL | {"launch.python": vllm_python(), "lora.rank": 8})
    started = await launch_server(await LaunchPlan.of(config, tmp_path), 0, tmp_path / "server.log", print)
    http = HttpClient(started.server.url)
    try:
        path = str(resolve_model(config.model.path))
        name = (await http.get("/v1/models", deadline_s=CONTROL_S))["data"][0]["id"]
        bench = Bench(http, name, load_model(path, dtype="float32"), tmp_path)
        base = await bench.served()
        learner = get_peft_model(
            load_model(path, dtype="float32"), LoraConfig(r=8, lora_alpha=16, target_modules=targets)
        )
        transport = AdapterTransport(http, CONTROL_S, tmp_path / "adapters")
        expected: dict[str, np.ndarray[Any, Any]] = {}
        for version in (1, 2):
            torch.manual_seed(version)
            tensors = get_peft_model_state_dict(learner)
            for tensor in tensors.values():
                tensor.copy_(0.1 * torch.randn(tensor.shape))
            published = SnapshotWriter(tmp_path, f"lora{version}", torch.float32).publish(version, tensors, [])
            ready = await transport.prepare(msgspec.structs.replace(published, adapter=LoraAdapter(8, 16.0, targets)))
            await transport.swap(ready)
            expected[ready.adapter] = learners_logprobs(learner)
        for adapter, logprobs in expected.items():
            assert np.abs(await bench.served(adapter) - logprobs).max() < NOISE
            assert np.abs(base - logprobs).max() > 10 * NOISE
        assert np.array_equal(await bench.served(), base), "the model itself is as it was"
        too_high = make_config(SMALL | {"lora.rank": 20, "launch.python": vllm_python()})
        with pytest.raises(BadInput, match="--max-lora-rank 32"):
            await check_server(started.server, too_high, {})
    finally:
        await http.close()
        await started.stop()
