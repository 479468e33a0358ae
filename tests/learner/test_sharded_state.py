"""Checkpoints and snapshots of a sharded learner: written by all ranks, read with another number of them."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.ranks import run_ranks, stop_ranks
from learner.small import make_llama, make_records
from outpace.checkpoint.journal import JournalWriter, read_record
from outpace.errors import CorruptData
from outpace.learner.backend import LearnerSettings
from outpace.learner.learner import LearnerHost
from outpace.learner.ranks import Ranks, RankSettings
from outpace.learner.torch_backend import TorchBackend
from outpace.models.slices import local_part
from outpace.types import JournalLocation, Manifest
from outpace.weights.shared_memory import read_snapshot
from support import kept_of, resolved

pytestmark = pytest.mark.slow

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reference and critic": {"kl.coefficient": 0.1, "kl.sync_every": 1, "advantage.name": "gae"},
    "lora": {"lora.rank": 4, "lora.targets": ["q_proj", "o_proj"]},
}


@dataclass
class Scene:
    """A model on disk, journaled groups, and a checkpoint directory."""

    home: Path
    settings: dict[str, Any]
    places: list[JournalLocation]
    snapshots: Path | None = None

    def host(self, size: int, rank: int, seed: int = 0) -> LearnerHost[TorchBackend]:
        dotted = {"learner.lr": 1e-2, "model.path": str(self.home / f"model{seed}"), **self.settings}
        return LearnerHost(
            LearnerSettings(
                config=resolved(dotted | {"learner.devices": size}),
                read_group=partial(read_record, self.home / "journal"),
                snapshots=self.snapshots or self.home / "weights",
                incarnation="run",
                threads=1,
                ranks=Ranks(RankSettings(rank, size, "", 60.0), "cpu") if size > 1 else None,
            ),
            TorchBackend,
        )


@dataclass
class Seen:
    """The state of a learner, whole."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    counters: tuple[int, int, int]
    manifest: Manifest


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


async def see(host: LearnerHost[TorchBackend]) -> Seen:
    core = host.backend
    named = core.parameters | core.critic_parameters
    return Seen(
        {name: whole(parameter) for name, parameter in named.items()},
        {
            f"{kind}/{name}": whole(v)
            for name, p in named.items()
            for kind, v in core.optimizer.state.get(p, {}).items()
        },
        (core.version, core.tokens, core.bad_steps),
        await host.publish([]),
    )


async def step(host: LearnerHost[TorchBackend], scene: Scene) -> None:
    version = host.backend.version
    await host.chunk(version, scene.places[:2])
    await host.chunk(version, scene.places[2:])
    await host.step(version)


def train_and_save(scenes: list[Scene], size: int, target: str, rank: int) -> list[Seen]:
    async def work(scene: Scene) -> Seen:
        host = scene.host(size, rank)
        for _ in range(2):
            await step(host, scene)
        assert await host.save(str(scene.home / target), 2)
        return await see(host)

    return [asyncio.run(work(scene)) for scene in scenes]


def load_and_save(scenes: list[Scene], size: int, source: str, target: str, rank: int) -> list[tuple[Seen, Seen]]:
    """Return what was loaded, and the state after one more step."""

    async def work(scene: Scene) -> tuple[Seen, Seen]:
        host = scene.host(size, rank, seed=1)
        assert await host.load(str(scene.home / source)) == 2
        loaded = await see(host)
        assert await host.save(str(scene.home / target), 2)
        await step(host, scene)
        return loaded, await see(host)

    return [asyncio.run(work(scene)) for scene in scenes]


def run(function: Any, size: int) -> list[Any]:
    return run_ranks(function, size) if size > 1 else [function(0)]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.fixture
def make_scene(tmp_path: Path) -> Callable[[str], Scene]:
    def make(case: str) -> Scene:
        home = tmp_path / case
        for seed in range(2):
            # The base model of adapters must not change.
            make_llama(0 if case == "lora" else seed).save_pretrained(home / f"model{seed}")
        writer = JournalWriter(home / "journal", "worker")
        places = [writer.append(kept_of(record.group), record) for record in make_records()]
        writer.close()
        for name in ("four", "two", "one", "again"):
            (home / name).mkdir()
        return Scene(home, SETTINGS[case], places)

    return make


def test_a_state_saved_by_four_ranks_resumes_with_two_with_one_and_with_four_again(
    make_scene: Callable[[str], Scene],
) -> None:
    scenes = [make_scene(case) for case in SETTINGS]
    saved = run(partial(train_and_save, scenes, 4, "four"), 4)[0]
    after: list[list[Seen]] = [[] for _ in scenes]
    for source, size, target in [("four", 2, "two"), ("two", 1, "one"), ("one", 4, "again")]:
        for results in run(partial(load_and_save, scenes, size, source, target), size):
            for number, (loaded, stepped) in enumerate(results):
                assert loaded.counters == saved[number].counters
                assert_same(loaded.weights, saved[number].weights)
                assert_same(loaded.optimizer, saved[number].optimizer)
                after[number].append(stepped)
    for first, *others in after:
        for stepped in others:
            assert stepped.counters == first.counters
            assert_same(stepped.weights, first.weights, tolerance=1e-5)
    for scene in scenes:
        for file in (scene.home / "four").glob("*.safetensors"):
            for name in ("two", "one", "again"):
                assert_same(load_file(scene.home / name / file.name), load_file(file))


def test_ranks_publish_one_snapshot_of_the_whole_policy(make_scene: Callable[[str], Scene]) -> None:
    scenes = [make_scene(case) for case in ("plain", "lora")]
    first, *others = run(partial(publish_twice, scenes, 2), 2)
    for number in range(len(scenes)):
        assert [manifest.version for manifest in first[number]] == [0, 1]
        assert all(manifest.tensors for manifest in first[number])
        assert not any(manifest.tensors for other in others for manifest in other[number])


def publish_twice(scenes: list[Scene], size: int, rank: int) -> list[list[Manifest]]:
    """Return the manifests of two versions. Their snapshots are compared with the weights here."""

    async def work(scene: Scene) -> list[Manifest]:
        host, found = scene.host(size, rank), []
        for _ in range(2):
            expected = {name: whole(tensor) for name, tensor in host.backend.weights().items()}
            manifest = await host.publish([])
            if rank == 0:
                snapshot = read_snapshot(manifest)
                assert_same(snapshot, {name: expected[name] for name in snapshot})
            found.append(manifest)
            await step(host, scene)
        return found

    return [asyncio.run(work(scene)) for scene in scenes]


def read_with_other_model(scene: Scene, size: int, rank: int) -> str:
    async def work() -> str:
        host = scene.host(size, rank)
        with pytest.raises(CorruptData) as raised:
            await host.load(str(scene.home / "four"))
        return str(raised.value)

    return asyncio.run(work())


def test_ranks_refuse_a_state_of_another_model(make_scene: Callable[[str], Scene]) -> None:
    scene = make_scene("plain")
    train_and_save([scene], 1, "four", 0)
    make_llama(0, hidden_size=16, head_dim=4).save_pretrained(scene.home / "model0")
    for message in run(partial(read_with_other_model, scene, 2), 2):
        assert "model.path" in message


def growth_of_publishing(scene: Scene, size: int, rank: int) -> tuple[int, int, int]:
    """Return how many bytes of memory this process has after a second snapshot that it did not have before, the bytes
    of its shard, and those of a snapshot."""

    async def work() -> tuple[int, int, int]:
        host = scene.host(size, rank)
        await host.publish([])
        reset_peak()
        before = resident("VmRSS")
        manifest = await host.publish([])
        shard = sum(local_part(parameter).nbytes for parameter in host.backend.parameters.values())
        return resident("VmHWM") - before, shard, manifest.nbytes

    return asyncio.run(work())


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # of VmHWM


def resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux, to reset the peak memory")
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a file system in memory, as runs use it")
def test_no_rank_holds_more_than_its_shard_and_a_snapshot_while_it_publishes(
    make_scene: Callable[[str], Scene],
) -> None:
    scene = make_scene("plain")
    large = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 128}
    make_llama(**large).save_pretrained(scene.home / "model0")
    stop_ranks()  # the memory of new processes is measured
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        scene.snapshots = Path(directory)
        first, *others = run(partial(growth_of_publishing, scene, 4), 4)
    slack = 0.05 * first[2]
    for growth, shard, _ in others:
        assert shard < 0.26 * first[2]
        assert growth < shard + slack  # its own rows of the snapshot
    assert first[0] < 2 * first[2] + slack  # this snapshot, and the memory of the next one
