from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outpace.errors import CorruptData, OutpaceError
from outpace.types import Manifest
from outpace.weights import shared_memory
from outpace.weights.shared_memory import SnapshotWriter, read_snapshot
from support import examples, naming
from weights_support import flip


def weights_of(version: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(version)
    embedding = torch.randn(7, 5).to(dtype)
    return {
        "embed": embedding,
        "scalar": torch.tensor(float(version), dtype=dtype),
        "norm": torch.randn(3).to(dtype),
        "head": embedding,
        "steps": torch.tensor([version, 2, 3]),
        "empty": torch.zeros(0, 4, dtype=dtype),
    }


def assert_holds(manifest: Manifest, version: int, dtype: torch.dtype = torch.float32) -> None:
    expected = weights_of(version, dtype)
    del expected["head"]
    found = read_snapshot(manifest)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_published_snapshot_is_read_back_with_tied_weights_stored_once(tmp_path: Path, dtype: torch.dtype) -> None:
    manifest = SnapshotWriter(tmp_path, "a").publish(3, weights_of(3, dtype), [])
    assert (manifest.incarnation, manifest.version) == ("a", 3)
    assert_holds(manifest, 3, dtype)


def test_floating_point_weights_are_cast_and_integers_are_not(tmp_path: Path) -> None:
    manifest = SnapshotWriter(tmp_path, "a", torch.bfloat16).publish(1, weights_of(1), [])
    found = read_snapshot(manifest)
    assert torch.equal(found["embed"], weights_of(1)["embed"].bfloat16())
    assert found["steps"].dtype == torch.int64


def test_tensors_that_are_not_contiguous_are_stored_in_their_own_order(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    manifest = SnapshotWriter(tmp_path, "a").publish(0, {"t": tensor}, [])
    assert torch.equal(read_snapshot(manifest)["t"], tensor)


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    manifest = SnapshotWriter(tmp_path, "a").publish(0, weights_of(0), [])
    path = Path(manifest.path)
    for spec in manifest.tensors:
        for byte in {0, spec.nbytes - 1} if spec.nbytes else ():
            flip(path, spec.offset + byte)
            with pytest.raises(CorruptData, match=spec.name):
                read_snapshot(manifest)
            flip(path, spec.offset + byte)
    assert_holds(manifest, 0)


def test_a_buffer_reused_for_another_version_is_detected_before_the_copy(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "a")
    manifests = [writer.publish(version, weights_of(version), []) for version in range(3)]
    assert manifests[2].path == manifests[0].path, "version 0 is not leased"
    with pytest.raises(CorruptData, match="snapshot"):
        read_snapshot(manifests[0])
    assert_holds(manifests[1], 1)
    assert_holds(manifests[2], 2)


@pytest.mark.parametrize("verify", [True, False])
def test_a_buffer_overwritten_during_the_copy_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    writer = SnapshotWriter(tmp_path, "a")
    first = writer.publish(0, weights_of(0), [])
    writer.publish(1, weights_of(1), [])
    read_tensor = shared_memory._read_tensor

    def overwrite_meanwhile(*arguments: Any) -> Tensor:
        tensor = read_tensor(*arguments)
        if writer._buffers.latest == 1:
            writer.publish(2, weights_of(2), [])
        return tensor

    monkeypatch.setattr(shared_memory, "_read_tensor", overwrite_meanwhile)
    with pytest.raises(CorruptData, match="snapshot"):
        read_snapshot(first, verify=verify)


def test_a_snapshot_that_is_being_written_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SnapshotWriter(tmp_path, "a")
    first = writer.publish(0, weights_of(0), [])
    writer.publish(1, weights_of(1), [])

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle of the copy")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            writer.copy(2, weights_of(2), [])  # into the buffer of version 0
    with pytest.raises(CorruptData, match="snapshot"):
        read_snapshot(first)


def test_weights_of_another_incarnation_are_refused(tmp_path: Path) -> None:
    manifest = SnapshotWriter(tmp_path, "a").publish(0, weights_of(0), [])
    SnapshotWriter(tmp_path, "b").publish(0, weights_of(1), [])
    stolen = Manifest("b", 0, manifest.path, manifest.tensors)
    with pytest.raises(CorruptData, match="snapshot"):
        read_snapshot(stolen)


def test_a_missing_or_truncated_file_raises_corrupt_data(tmp_path: Path) -> None:
    manifest = SnapshotWriter(tmp_path, "a").publish(0, weights_of(0), [])
    os.truncate(manifest.path, manifest.tensors[1].offset + 1)
    with pytest.raises(CorruptData, match=naming("file", manifest.tensors[1].name)):
        read_snapshot(manifest)
    os.unlink(manifest.path)
    with pytest.raises(CorruptData, match="version 0"):
        read_snapshot(manifest)


@examples(40)
@given(st.lists(st.sets(st.integers(0, 3), max_size=2), min_size=1, max_size=12))
def test_the_latest_and_every_leased_snapshot_stay_intact(
    tmp_path_factory: pytest.TempPathFactory, lease_ages: list[set[int]]
) -> None:
    """Before each publish some recent versions are leased; a released version is not leased again."""
    writer = SnapshotWriter(tmp_path_factory.mktemp("weights"), "a")
    alive: dict[int, Manifest] = {}
    for version, ages in enumerate(lease_ages):
        leased = {v for v in (version - 1 - age for age in ages) if v in alive}
        alive = {v: m for v, m in alive.items() if v in leased or v == version - 1}
        alive[version] = writer.publish(version, weights_of(version), leased)
        for v, manifest in alive.items():
            assert_holds(manifest, v)
    assert writer.buffers <= 2 + 2 + 1
    writer.close()


def test_the_number_of_buffers_stays_bounded_over_many_publishes(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "a")
    for version in range(1000):
        writer.publish(version, {"t": torch.full((4,), float(version))}, [version - 1, version - 2])
    assert writer.buffers <= 4
    assert len(list(tmp_path.iterdir())) == writer.buffers


def test_a_snapshot_that_is_not_sealed_yet_is_not_overwritten(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "a")
    drafts = [writer.copy(version, weights_of(version), []) for version in range(3)]
    assert writer.buffers == 3
    for version, draft in enumerate(drafts):
        assert_holds(writer.seal(draft), version)


def test_a_full_directory_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], 0, *real[5:])))
    with pytest.raises(OutpaceError, match=naming(str(tmp_path), "0 MB", "free")):
        SnapshotWriter(tmp_path, "a").publish(0, weights_of(0), [])
    assert list(tmp_path.iterdir()) == []


def test_publishing_tensors_with_changed_shapes_is_an_error(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "a")
    writer.publish(0, {"t": torch.zeros(3)}, [])
    with pytest.raises(AssertionError, match="shapes"):
        writer.publish(1, {"t": torch.zeros(4)}, [])


def test_closing_removes_the_files(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "a")
    writer.publish(0, weights_of(0), [])
    writer.close()
    assert list(tmp_path.iterdir()) == []
