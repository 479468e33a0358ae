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

from learner.ranks import stop_ranks
from learner.small import make_llama, make_records
from learner.worlds import GPUS, ON_GPUS, World, needs_gpu, needs_peft
from outpace.checkpoint.journal import JournalWriter, read_record
from outpace.errors import BadInput, CorruptData
from outpace.learner.backend import LearnerSettings
from outpace.learner.learner import LearnerHost
from outpace.learner.torch_backend import TorchBackend
from outpace.models.slices import local_part
from outpace.types import JournalLocation, Manifest
from outpace.weights.sharded_snapshots import SharedFolderWriter
from outpace.weights.shared_memory import read_snapshot
from support import kept_of, resolved

pytestmark = pytest.mark.slow

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reference and critic": {"kl.coefficient": 0.1, "kl.sync_every": 1, "advantage.name": "gae"},
    "offload": {"learner.offload": True, "kl.coefficient": 0.1},
    "lora": {"lora.rank": 4, "lora.targets": ["q_proj", "o_proj"]},
    "offloaded lora": {"lora.rank": 4, "lora.targets": ["q_proj", "o_proj"], "learner.offload": True},
}
SEVERAL_MACHINES = World(2, several_machines=True)
ON_GPUS_ONLY = ("offload", "offloaded lora")
"""Cases that are like another one on the CPU."""


def every_case(on_cpu: Any, on_gpus: Any) -> list[Any]:
    """Return parameters: each case with `on_cpu`, and with `on_gpus`."""
    peft = {case: (needs_peft,) if "lora" in case else () for case in SETTINGS}
    cpu = [pytest.param(case, on_cpu, marks=marks) for case, marks in peft.items() if case not in ON_GPUS_ONLY]
    gpus = [pytest.param(case, on_gpus, marks=(*needs_gpu, *marks)) for case, marks in peft.items()]
    return cpu + gpus


@dataclass
class Scene:
    """A model on disk, journaled groups, and a checkpoint directory."""

    home: Path
    settings: dict[str, Any]
    places: list[JournalLocation]
    snapshots: Path | None = None

    def host(self, world: World, rank: int, seed: int = 0) -> LearnerHost[TorchBackend]:
        dotted = {"learner.lr": 1e-2, "learner.compile": False, "model.path": str(self.home / f"model{seed}")}
        return LearnerHost(
            LearnerSettings(
                config=resolved(dotted | self.settings | {"learner.devices": world.size}),
                read_group=partial(read_record, self.home / "journal"),
                snapshots=self.snapshots or self.home / "weights",
                incarnation="run",
                threads=1,
                device=world.device,
                ranks=world.join(rank),
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
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()


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


def train_and_save(scene: Scene, target: str, world: World, rank: int) -> Seen:
    async def work() -> Seen:
        host = scene.host(world, rank)
        for _ in range(2):
            await step(host, scene)
        assert await host.save(str(scene.home / target), 2)
        return await see(host)

    return asyncio.run(work())


def load_and_save(scene: Scene, source: str, target: str, world: World, rank: int) -> tuple[Seen, Seen]:
    """Return what was loaded, and the state after one more step."""

    async def work() -> tuple[Seen, Seen]:
        host = scene.host(world, rank, seed=1)
        assert await host.load(str(scene.home / source)) == 2
        loaded = await see(host)
        assert await host.save(str(scene.home / target), 2)
        await step(host, scene)
        return loaded, await see(host)

    return asyncio.run(work())


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
            make_llama(0 if "lora" in case else seed).save_pretrained(home / f"model{seed}")
        writer = JournalWriter(home / "journal", "worker")
        places = [writer.append(kept_of(record.group), record) for record in make_records()]
        writer.close()
        for number in range(4):
            (home / str(number)).mkdir()
        return Scene(home, SETTINGS[case], places)

    return make


@pytest.mark.parametrize(
    ("case", "worlds"),
    every_case([World(4), World(2), World(1, sharded=False), World(4)], [GPUS, GPUS.alone, GPUS]),
)
def test_a_saved_state_resumes_with_other_numbers_of_ranks(
    make_scene: Callable[[str], Scene], case: str, worlds: list[World]
) -> None:
    scene = make_scene(case)
    saved = worlds[0].run(partial(train_and_save, scene, "0"))[0]
    after: list[Seen] = []
    for number, world in enumerate(worlds[1:], start=1):
        for loaded, stepped in world.run(partial(load_and_save, scene, str(number - 1), str(number))):
            assert loaded.counters == saved.counters
            assert_same(loaded.weights, saved.weights)
            assert_same(loaded.optimizer, saved.optimizer)
            after.append(stepped)
    for stepped in after[1:]:
        assert stepped.counters == after[0].counters
        # Sums on a GPU have no fixed order.
        assert_same(stepped.weights, after[0].weights, tolerance=1e-5 if worlds[0].device == "cpu" else 1e-3)
    for file in (scene.home / "0").glob("*.safetensors"):
        for number in range(1, len(worlds)):
            assert_same(load_file(scene.home / str(number) / file.name), load_file(file))


@pytest.mark.parametrize(
    ("case", "world"),
    [*every_case(World(2), GPUS), pytest.param("plain", SEVERAL_MACHINES, id="plain, several machines")],
)
def test_ranks_publish_one_snapshot_of_the_whole_policy(
    make_scene: Callable[[str], Scene], case: str, world: World
) -> None:
    first, *others = world.run(partial(publish_often, make_scene(case)))
    assert [manifest.version for manifest in first] == [0, 1, 2]
    paths = {manifest.path for manifest in first}
    assert len(paths) == (3 if world.several_machines else 2)  # the third replaces the first, in shared memory its rows
    assert all(manifest.tensors for manifest in first)
    assert not any(manifest.tensors for other in others for manifest in other)


def publish_often(scene: Scene, world: World, rank: int) -> list[Manifest]:
    """Return the manifests of three versions. Their snapshots are compared with the weights here."""

    async def work() -> list[Manifest]:
        host, found = scene.host(world, rank), []
        for _ in range(3):
            expected = {name: whole(tensor) for name, tensor in host.backend.weights().items()}
            manifest = await host.publish([])
            if rank == 0:
                snapshot = read_snapshot(manifest)
                assert_same(snapshot, {name: expected[name] for name in snapshot})
            found.append(manifest)
            await step(host, scene)
        return found

    return asyncio.run(work())


def write_elsewhere(home: Path, world: World, rank: int) -> str:
    directory = home / f"only-rank-{rank}-sees-this"
    if rank == 0:
        directory.mkdir()
    ranks = world.join(rank)
    assert ranks is not None
    try:
        SharedFolderWriter(directory, "run", None, ranks)
    except BadInput as error:
        return str(error)
    return ""


def test_a_rank_that_does_not_see_the_folder_of_the_weights_names_the_setting(tmp_path: Path) -> None:
    first, second = SEVERAL_MACHINES.run(partial(write_elsewhere, tmp_path))
    assert not first
    assert second.startswith("weights.dir: ")


def read_with_other_model(scene: Scene, world: World, rank: int) -> str:
    async def work() -> str:
        host = scene.host(world, rank)
        with pytest.raises(CorruptData) as raised:
            await host.load(str(scene.home / "0"))
        return str(raised.value)

    return asyncio.run(work())


@pytest.mark.parametrize("world", [World(2), ON_GPUS])
def test_ranks_refuse_a_state_of_another_model(make_scene: Callable[[str], Scene], world: World) -> None:
    scene = make_scene("plain")
    train_and_save(scene, "0", World(1, sharded=False), 0)
    make_llama(0, hidden_size=16, head_dim=4).save_pretrained(scene.home / "model0")
    for message in world.run(partial(read_with_other_model, scene)):
        assert "model.path" in message


def growth_of_publishing(scene: Scene, world: World, rank: int) -> tuple[int, int, int]:
    """Return how many bytes of memory this process has after a second snapshot that it did not have before, the bytes
    of its shard, and those of a snapshot."""

    async def work() -> tuple[int, int, int]:
        host = scene.host(world, rank)
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
        first, *others = World(4).run(partial(growth_of_publishing, scene))
    slack = 0.05 * first[2]
    for growth, shard, _ in others:
        assert shard < 0.26 * first[2]
        assert growth < shard + slack  # its own rows of the snapshot
    assert first[0] < 2 * first[2] + slack  # this snapshot, and the memory of the next one
