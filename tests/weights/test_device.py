"""Snapshots in GPU memory. Tests of buffers and checksums need no GPU; tests with another process do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outpace.types import Manifest
from outpace.weights.cuda_ipc import DeviceSnapshotWriter
from outpace_vllm.ipc import DeviceMemoryError, open_device_memory, word_sums
from support import examples


class FakeDriver:
    """A fake CUDA driver whose handles are buffer indices."""

    def __init__(self) -> None:
        self.memory: list[Tensor] = []

    def share(self, memory: Tensor, owner: bytes) -> bytes:
        self.memory.append(memory)
        return str(len(self.memory) - 1).encode()

    def content(self, manifest: Manifest) -> Tensor:
        assert manifest.device is not None
        return self.memory[int(manifest.device.handle)]


def writer_on(driver: FakeDriver, dtype: torch.dtype | None = None) -> DeviceSnapshotWriter:
    return DeviceSnapshotWriter("cpu", "a", dtype, driver.share)


def weights_of(version: int, device: str = "cpu") -> dict[str, Tensor]:
    torch.manual_seed(version)
    embedding = torch.randn(7, 5, device=device)
    return {
        "embed": embedding,
        "scalar": torch.tensor(float(version), device=device),
        "odd": torch.randn(3, device=device).bfloat16(),
        "head": embedding,
        "turned": torch.arange(12.0, device=device).view(3, 4).t(),
        "steps": torch.tensor([version, 2, 3], device=device),
        "empty": torch.zeros(0, 4, device=device),
    }


def tensors_in(content: Tensor, manifest: Manifest) -> dict[str, Tensor]:
    return {
        spec.name: content[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec in manifest.tensors
    }


def places(manifest: Manifest) -> list[tuple[int, int]]:
    return [(spec.offset, spec.nbytes) for spec in manifest.tensors]


def assert_holds(content: Tensor, manifest: Manifest, version: int) -> None:
    expected = weights_of(version)
    del expected["head"]
    found = tensors_in(content.cpu(), manifest)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert manifest.device is not None
    assert word_sums(content, places(manifest)) == manifest.device.sums


def test_a_published_snapshot_is_read_back_with_tied_weights_stored_once() -> None:
    driver = FakeDriver()
    manifest = writer_on(driver).publish(3, weights_of(3), [])
    assert (manifest.incarnation, manifest.version, manifest.path) == ("a", 3, "")
    assert_holds(driver.content(manifest), manifest, 3)


def test_floating_point_weights_are_cast_and_integers_are_not() -> None:
    driver = FakeDriver()
    manifest = writer_on(driver, torch.bfloat16).publish(1, weights_of(1), [])
    found = tensors_in(driver.content(manifest), manifest)
    assert torch.equal(found["embed"], weights_of(1)["embed"].bfloat16())
    assert found["steps"].dtype == torch.int64


def test_every_flipped_bit_changes_only_the_checksum_of_its_tensor() -> None:
    driver = FakeDriver()
    manifest = writer_on(driver).publish(0, weights_of(0), [])
    content = driver.content(manifest)
    assert manifest.device is not None
    for number, spec in enumerate(manifest.tensors):
        for byte in {0, spec.nbytes - 1} if spec.nbytes else ():
            for bit in range(8):
                content[spec.offset + byte] ^= 1 << bit
                sums = word_sums(content, places(manifest))
                assert [n for n, s in enumerate(sums) if s != manifest.device.sums[n]] == [number]
                content[spec.offset + byte] ^= 1 << bit


@examples(40)
@given(st.lists(st.sets(st.integers(0, 3), max_size=2), min_size=1, max_size=12))
def test_the_latest_and_every_leased_snapshot_stay_intact(lease_ages: list[set[int]]) -> None:
    """Before each publish some recent versions are leased; a released version is not leased again."""
    driver = FakeDriver()
    writer = writer_on(driver)
    alive: dict[int, Manifest] = {}
    for version, ages in enumerate(lease_ages):
        leased = {v for v in (version - 1 - age for age in ages) if v in alive}
        alive = {v: m for v, m in alive.items() if v in leased or v == version - 1}
        alive[version] = writer.publish(version, weights_of(version), leased)
        for v, manifest in alive.items():
            assert_holds(driver.content(manifest), manifest, v)
    assert writer.buffers <= 2 + 2 + 1


def test_a_snapshot_that_is_not_sealed_yet_is_not_overwritten() -> None:
    driver = FakeDriver()
    writer = writer_on(driver)
    drafts = [writer.copy(version, weights_of(version), []) for version in range(3)]
    for version, draft in enumerate(drafts):
        manifest = writer.seal(draft)
        assert_holds(driver.content(manifest), manifest, version)


def test_a_preallocated_buffer_is_used_by_the_next_copy() -> None:
    driver = FakeDriver()
    writer = writer_on(driver)
    for version in range(4):
        writer.lay_out(weights_of(version))
        writer.preallocate([version - 1])
        ready = writer.buffers
        manifest = writer.publish(version, weights_of(version), [version - 1])
        assert writer.buffers == ready
        assert_holds(driver.content(manifest), manifest, version)
    assert writer.buffers == 2


def test_publishing_tensors_with_changed_shapes_is_an_error() -> None:
    writer = writer_on(FakeDriver())
    writer.publish(0, {"t": torch.zeros(3)}, [])
    with pytest.raises(AssertionError, match="shapes"):
        writer.publish(1, {"t": torch.zeros(4)}, [])


@pytest.mark.parametrize("handle", [b"", b"outpaceG", b"x" * 104])
def test_an_invalid_handle_is_refused_before_the_driver_is_called(handle: bytes) -> None:
    with pytest.raises(DeviceMemoryError, match="handle"):
        open_device_memory(handle, 0, 1)


# ------------------------------------------------------------------------------------------------- with a real GPU

READER = """
import sys, msgspec, torch
from outpace.types import Manifest
from outpace_vllm.ipc import close_device_memory, open_device_memory, word_sums

for line in sys.stdin:
    manifest = msgspec.json.decode(line, type=Manifest)
    content = open_device_memory(manifest.device.handle, 0, manifest.device.nbytes)
    sums = word_sums(content, [(s.offset, s.nbytes) for s in manifest.tensors])
    whole = sums == manifest.device.sums
    del content
    close_device_memory() if manifest.version % 2 else None
    print(manifest.version, whole, flush=True)
"""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Reader:
    """Another process that opens snapshots and reports whether their checksums match."""

    def __init__(self, directory: Path) -> None:
        program = directory / "reader.py"
        program.write_text(READER)
        self.process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def reads(self, manifest: Manifest) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(manifest).decode() + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> int:
        """Close the input of the process and return its exit code."""
        self.process.communicate(timeout=30)
        return self.process.returncode


def large(version: int) -> dict[str, Tensor]:
    return {"small": torch.full((3,), float(version), device="cuda"), "t": torch.randn(4_000_000, device="cuda")}


@pytest.mark.gpu
@needs_gpu
def test_another_process_reads_every_snapshot_and_detects_a_flipped_bit(tmp_path: Path) -> None:
    writer = DeviceSnapshotWriter("cuda", "a", torch.bfloat16)
    reader = Reader(tmp_path)
    for version in range(20):
        assert reader.reads(writer.publish(version, large(version), [])) == f"{version} True"
    draft = writer.copy(20, large(20), [])
    manifest = writer.seal(draft)
    draft.buffer.content[manifest.tensors[1].offset + 5] ^= 1
    torch.cuda.synchronize()
    assert reader.reads(manifest) == "20 False"
    assert writer.buffers <= 3
    assert reader.end() == 0


@pytest.mark.gpu
@needs_gpu
def test_killed_readers_do_not_leak_memory_of_the_writer(tmp_path: Path) -> None:
    writer = DeviceSnapshotWriter("cuda", "a", torch.bfloat16)
    for version in range(3):
        reader = Reader(tmp_path)
        assert reader.reads(writer.publish(2 * version, large(0), [])) == f"{2 * version} True"
        reader.process.kill()
        reader.end()
    before = torch.cuda.memory_allocated()
    writer.close()
    torch.cuda.empty_cache()
    assert before - torch.cuda.memory_allocated() >= 2 * 8_000_000


@pytest.mark.gpu
@needs_gpu
def test_a_reader_releases_and_reopens_memory_when_writers_change(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    first = DeviceSnapshotWriter("cuda", "a")
    second = DeviceSnapshotWriter("cuda", "b")
    assert reader.reads(first.publish(0, large(0), [])) == "0 True"
    assert reader.reads(second.publish(2, large(2), [])) == "2 True"
    assert reader.reads(first.publish(4, large(4), [])) == "4 True", "the memory is opened again"
    assert reader.end() == 0


@pytest.mark.gpu
@needs_gpu
def test_training_steps_queued_after_the_copy_do_not_change_the_snapshot() -> None:
    writer = DeviceSnapshotWriter("cuda", "a")
    weight = torch.ones(50_000_000, device="cuda")
    draft = writer.copy(0, {"w": weight}, [])
    for _ in range(20):
        weight.add_(1)
    manifest = writer.seal(draft)
    assert bool((tensors_in(draft.buffer.content, manifest)["w"] == 1).all())
    assert manifest.seconds > 0
