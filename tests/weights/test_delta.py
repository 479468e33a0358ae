from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from outpace.errors import CorruptData
from outpace.types import Manifest
from outpace.weights import delta, snapshot
from outpace.weights.delta import LocalSnapshot
from outpace.weights.shared_memory import SnapshotWriter, read_snapshot
from weights_support import flip

NOISE = torch.Generator().manual_seed(0)


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {
        "large": torch.randn(300, 400, generator=NOISE).to(dtype),
        "norm": torch.randn(7, generator=NOISE).to(dtype),
        "steps": torch.tensor([1, 2, 3]),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "scalar": torch.tensor(0.5, dtype=dtype),
    }


def changed(tensors: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return the tensors with about this share of the elements of the large tensor changed."""
    after = {name: tensor.clone() for name, tensor in tensors.items()}
    where = torch.rand(after["large"].shape, generator=NOISE) < share
    after["large"][where] += 1
    return after


def assert_local(local: Manifest, expected: dict[str, Tensor]) -> None:
    found = read_snapshot(local)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 0.5])
def test_a_local_copy_is_updated_by_deltas_for_any_share_of_changes(
    tmp_path: Path, dtype: torch.dtype, share: float
) -> None:
    writer, local = SnapshotWriter(tmp_path, "a", deltas=tmp_path), LocalSnapshot(tmp_path)
    before = weights(dtype)
    _, travelled = local.update_to(first := writer.publish(1, before, []))
    assert (first.delta, travelled) == (None, first.nbytes)
    after = changed(before, share)
    second = writer.publish(2, after, [])
    assert second.delta is not None
    assert second.delta.base == 1
    here, travelled = local.update_to(second)
    assert travelled == second.delta.nbytes == os.path.getsize(second.delta.path)
    assert travelled < second.nbytes * min(1, share * 1.1 + 0.14)
    assert (here.version, here.delta) == (2, None)
    assert_local(here, after)


def test_a_delta_that_would_save_little_is_not_written(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "a", deltas=tmp_path)
    writer.publish(1, {"t": torch.zeros(64)}, [])
    assert writer.publish(2, {"t": torch.ones(64)}, []).delta is None
    assert [path.suffix for path in tmp_path.iterdir()] == [".weights"] * 2


def test_a_copy_without_the_base_version_reads_the_whole_snapshot(tmp_path: Path) -> None:
    writer, local = SnapshotWriter(tmp_path, "a", deltas=tmp_path), LocalSnapshot(tmp_path)
    tensors = weights()
    local.update_to(writer.publish(1, tensors, []))
    writer.publish(2, changed(tensors, 0.5), [])
    third = writer.publish(3, tensors, [])
    here, travelled = local.update_to(third)
    assert travelled == third.nbytes
    assert_local(here, tensors)
    assert local.damaged_deltas == 0


def test_weights_of_another_incarnation_are_not_used_as_a_base(tmp_path: Path) -> None:
    tensors = weights()
    local = LocalSnapshot(tmp_path)
    local.update_to(SnapshotWriter(tmp_path, "a").publish(1, tensors, []))
    writer = SnapshotWriter(tmp_path, "b", deltas=tmp_path)
    writer.publish(1, changed(tensors, 0.1), [])
    second = writer.publish(2, after := changed(tensors, 0.1), [])
    here, travelled = local.update_to(second)
    assert travelled == second.nbytes
    assert_local(here, after)


def test_a_snapshot_of_another_size_gets_a_new_file_and_open_mappings_do_not_shrink(tmp_path: Path) -> None:
    local = LocalSnapshot(tmp_path)
    small, _ = local.update_to(SnapshotWriter(tmp_path, "a").publish(1, {"t": torch.ones(4)}, []))
    with open(small.path, "rb") as held:
        local.update_to(SnapshotWriter(tmp_path, "b").publish(1, {"t": torch.ones(2)}, []))
        assert os.fstat(held.fileno()).st_size == snapshot.data_end(small.tensors)


@given(data=st.data())
def test_every_flipped_bit_of_a_delta_is_detected_and_the_whole_snapshot_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tmp_path = tmp_path_factory.mktemp("delta")
    writer, local = SnapshotWriter(tmp_path, "a", deltas=tmp_path), LocalSnapshot(tmp_path)
    before = {"t": torch.arange(300.0)}
    local.update_to(writer.publish(1, before, []))
    second = writer.publish(2, after := {"t": before["t"] + (torch.arange(300) % 50 == 0)}, [])
    assert second.delta is not None
    flip(Path(second.delta.path), data.draw(st.integers(0, second.delta.nbytes - 1)), data.draw(st.integers(0, 7)))
    here, travelled = local.update_to(second)
    assert travelled == second.nbytes
    assert local.damaged_deltas == 1
    assert_local(here, after)


@pytest.mark.parametrize("damage", ["gone", "shorter", "longer", "another"])
def test_a_missing_truncated_or_foreign_delta_file_is_refused(tmp_path: Path, damage: str) -> None:
    writer, local = SnapshotWriter(tmp_path, "a", deltas=tmp_path), LocalSnapshot(tmp_path)
    tensors = weights()
    local.update_to(writer.publish(1, tensors, []))
    second = writer.publish(2, after := changed(tensors, 0.01), [])
    assert second.delta is not None
    path = Path(second.delta.path)
    match damage:
        case "gone":
            path.unlink()
        case "shorter":
            os.truncate(path, second.delta.nbytes - 1)
        case "longer":
            path.write_bytes(path.read_bytes() + b"x")
        case "another":
            other = SnapshotWriter(tmp_path, "b", deltas=tmp_path)
            other.publish(1, tensors, [])
            foreign = other.publish(2, after, []).delta
            assert foreign is not None
            second = msgspec.structs.replace(second, delta=foreign)
    here, travelled = local.update_to(second)
    assert (travelled, local.damaged_deltas) == (second.nbytes, 1)
    assert_local(here, after)


def test_a_corrupt_base_is_detected_by_the_checksum_of_the_result(tmp_path: Path) -> None:
    writer, local = SnapshotWriter(tmp_path, "a", deltas=tmp_path), LocalSnapshot(tmp_path)
    tensors = weights()
    here, _ = local.update_to(writer.publish(1, tensors, []))
    flip(Path(here.path), here.tensors[0].offset + 5)
    second = writer.publish(2, after := changed(tensors, 0.01), [])
    here, travelled = local.update_to(second)
    assert (travelled, local.damaged_deltas) == (second.nbytes, 1)
    assert_local(here, after)


def test_with_delta_and_snapshot_both_damaged_the_copy_is_dropped_and_the_next_snapshot_read_whole(
    tmp_path: Path,
) -> None:
    writer, local = SnapshotWriter(tmp_path, "a", deltas=tmp_path), LocalSnapshot(tmp_path)
    tensors = weights()
    first, _ = local.update_to(writer.publish(1, tensors, []))
    second = writer.publish(2, changed(tensors, 0.01), [])
    assert second.delta is not None
    flip(Path(second.delta.path), 100)
    flip(Path(second.path), second.tensors[0].offset)
    with pytest.raises(CorruptData):
        local.update_to(second)
    with pytest.raises(CorruptData, match="snapshot"):
        read_snapshot(first)
    third = writer.publish(3, after := changed(tensors, 0.02), [])
    here, travelled = local.update_to(third)
    assert travelled == third.nbytes
    assert_local(here, after)


def test_the_base_of_a_delta_that_is_being_written_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two snapshots are sealed concurrently; while the later one is compared with its base, others are copied."""
    writer = SnapshotWriter(tmp_path, "a", deltas=tmp_path)
    tensors = [weights()]
    tensors += [changed(tensors[0], 0.01) for _ in range(3)]
    first = writer.publish(0, tensors[0], [])
    one, two = writer.copy(1, tensors[1], []), writer.copy(2, tensors[2], [])
    write = delta.write_delta

    def meanwhile(*arguments: object) -> object:
        monkeypatch.setattr(delta, "write_delta", write)
        writer.seal(one)
        writer.copy(3, tensors[3], [])
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(delta, "write_delta", meanwhile)
    second = writer.seal(two)
    assert second.delta is not None
    assert second.delta.base == 0
    read_snapshot(first)
    local = LocalSnapshot(tmp_path)
    local.update_to(first)
    assert local.update_to(second)[1] == second.delta.nbytes


def test_a_delta_is_removed_with_the_buffer_of_its_snapshot(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "a", deltas=tmp_path)
    tensors = weights()
    for version in range(10):
        writer.publish(version, tensors := changed(tensors, 0.01), [])
    assert len(list(tmp_path.glob("*.delta"))) == writer.buffers == 2
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_skips_the_delta_and_keeps_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    writer = SnapshotWriter(tmp_path, "a", deltas=tmp_path)
    writer.publish(1, weights(), [])
    monkeypatch.setattr(delta, "_write_all", full)
    manifest = writer.publish(2, tensors := weights(), [])
    assert manifest.delta is None
    assert_local(manifest, tensors)
    assert list(tmp_path.glob("*.partial")) == []


raw = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


@given(data=st.data(), dtype=raw, part=st.integers(1, 70_000), length=st.integers(0, 150_000))
def test_a_delta_round_trips_between_any_two_arrays_of_equal_length(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: type, part: int, length: int
) -> None:
    few = data.draw(arrays.arrays(np.int64, st.integers(0, 30), elements=st.integers(0, max(length - 1, 0))))
    dense = data.draw(st.sampled_from([0.0, 0.02, 0.2, 0.9]))
    before = np.random.default_rng(length).integers(0, 2, length).astype(dtype)
    after = before.copy()
    after[np.random.default_rng(part).random(length) < dense] += 1
    if length:
        after[few] += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "PART", max(part, length // 4))
        pieces = [
            bytes(memoryview(piece).cast("B")) if not isinstance(piece, bytes) else piece
            for start in range(0, length, delta.PART)
            for piece in delta._encode(before[start : start + delta.PART], after[start : start + delta.PART])
        ]
        path = tmp_path_factory.mktemp("parts") / "pieces"
        path.write_bytes(b"".join(pieces))
        with path.open("rb") as file:
            for start in range(0, length, delta.PART):
                delta._decode(file, before[start : start + delta.PART])
            assert file.read() == b""
    assert np.array_equal(before, after)


def test_a_damaged_delta_is_refused_before_memory_is_modified(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "a", deltas=tmp_path)
    tensors = weights()
    first = writer.publish(1, tensors, [])
    second = writer.publish(2, changed(tensors, 0.01), [])
    assert second.delta is not None
    flip(Path(second.delta.path), second.delta.nbytes - 1)
    memory = bytearray(before := Path(first.path).read_bytes())
    with pytest.raises(CorruptData, match="checksum"):
        delta.apply_delta(second, memory)
    assert memory == before
