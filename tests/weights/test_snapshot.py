from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import CorruptData, OutpaceError
from outpace.weights import snapshot
from outpace.weights.shared_memory import SnapshotWriter
from support import naming
from weights_support import flip


def test_an_intact_snapshot_is_verified_without_torch(tmp_path: Path) -> None:
    manifest = SnapshotWriter(tmp_path, "a").publish(3, {"t": torch.arange(5.0)}, [])
    (tmp_path / "manifest").write_bytes(msgspec.msgpack.encode(manifest))
    program = (
        "import msgspec, sys; from pathlib import Path; from outpace.types import Manifest;"
        "from outpace.weights import delta, files, snapshot;"
        "from outpace.engines.server import transports;"
        f"data = Path({str(tmp_path / 'manifest')!r}).read_bytes();"
        "snapshot.verify(msgspec.msgpack.decode(data, type=Manifest)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@given(data=st.data())
def test_every_flipped_bit_of_header_and_tensors_is_detected(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tensors = {"a": torch.arange(40.0), "b": torch.arange(9, dtype=torch.int64), "c": torch.ones(3).bfloat16()}
    manifest = SnapshotWriter(tmp_path_factory.mktemp("bits"), "run").publish(3, tensors, [])
    snapshot.verify(manifest)
    header = range(len(snapshot.pack_header("run", 3)))
    places = [header, *(range(spec.offset, spec.offset + spec.nbytes) for spec in manifest.tensors)]
    place = data.draw(st.sampled_from(places))
    flip(Path(manifest.path), data.draw(st.sampled_from(place)), data.draw(st.integers(0, 7)))
    with pytest.raises(CorruptData):
        snapshot.verify(manifest)


def test_a_tensor_longer_than_a_chunk_is_verified_to_its_end(tmp_path: Path) -> None:
    manifest = SnapshotWriter(tmp_path, "a").publish(1, {"t": torch.zeros(snapshot.CHUNK // 4 + 3)}, [])
    snapshot.verify(manifest)
    flip(Path(manifest.path), manifest.tensors[0].offset + manifest.tensors[0].nbytes - 1)
    with pytest.raises(CorruptData, match=r"^(?=.*checksum).*\bt\b"):
        snapshot.verify(manifest)


@pytest.mark.parametrize(
    "change", [{"shape": [6]}, {"nbytes": 19}, {"dtype": "complex64"}, {"dtype": "bfloat16"}, {"nbytes": 2**60}]
)
def test_a_manifest_that_contradicts_itself_is_refused_before_anything_is_read(
    tmp_path: Path, change: dict[str, object]
) -> None:
    manifest = SnapshotWriter(tmp_path, "a").publish(1, {"t": torch.zeros(5)}, [])
    wrong = msgspec.structs.replace(manifest, tensors=[msgspec.structs.replace(manifest.tensors[0], **change)])
    with pytest.raises(CorruptData, match=r"\bt\b.*\bbytes\b"):
        snapshot.verify(wrong)


def test_reuse_of_a_snapshot_during_verification_is_detected(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "a")
    manifest = writer.publish(1, {"t": torch.zeros(5)}, [])
    writer.publish(2, {"t": torch.zeros(5)}, [])
    with pytest.raises(CorruptData, match="snapshot"), snapshot.open_snapshot(manifest):
        writer.publish(3, {"t": torch.zeros(5)}, [])


def test_a_replaced_file_stays_intact_for_readers_that_have_it_open(tmp_path: Path) -> None:
    snapshot.allocate(tmp_path / "w", 8192)
    with open(tmp_path / "w", "rb") as held:
        snapshot.allocate(tmp_path / "w", 4096)
        assert os.fstat(held.fileno()).st_size == 8192


def test_a_lack_of_disk_space_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match=naming(str(tmp_path), "MB", "free")):
        snapshot.require_space(tmp_path, 2**62)
