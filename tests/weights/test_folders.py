from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from outpace.errors import CorruptData, OutpaceError
from outpace.types import LoraAdapter, Manifest
from outpace.weights.files import SnapshotFolders
from outpace.weights.shared_memory import SnapshotWriter
from support import naming
from weights_support import flip

TENSORS = {
    "odd": torch.tensor([True, False, True]),
    "embed": torch.randn(7, 5).bfloat16(),
    "scalar": torch.tensor(2.5),
    "steps": torch.arange(4),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return SnapshotWriter(tmp_path, "run").publish(3, TENSORS, [])


def test_a_snapshot_folder_contains_the_published_tensors_as_safetensors(tmp_path: Path, manifest: Manifest) -> None:
    folder = SnapshotFolders(tmp_path / "folders").write(manifest)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_flipped_bit_leaves_no_folder_and_the_previous_folder_intact(tmp_path: Path, manifest: Manifest) -> None:
    """Fault 31."""
    folders = SnapshotFolders(tmp_path / "folders")
    before = folders.write(SnapshotWriter(tmp_path, "run2").publish(2, TENSORS, []))
    flip(Path(manifest.path), manifest.tensors[1].offset)
    with pytest.raises(CorruptData, match=naming("checksum", "embed")):
        folders.write(manifest)
    assert list((tmp_path / "folders").iterdir()) == [before]
    load_file(before / "model.safetensors")


def test_a_folder_can_be_written_again(tmp_path: Path, manifest: Manifest) -> None:
    folders = SnapshotFolders(tmp_path / "folders")
    assert folders.write(manifest) == folders.write(manifest)


def test_folders_are_removed_by_version_and_leftovers_at_startup(tmp_path: Path, manifest: Manifest) -> None:
    directory = tmp_path / "folders"
    SnapshotFolders(directory).write(manifest)
    folders = SnapshotFolders(directory)
    assert not directory.exists()
    kept = folders.write(manifest)
    other = folders.write(SnapshotWriter(tmp_path, "next").publish(4, TENSORS, []))
    folders.keep_only(3)
    assert (kept.exists(), other.exists()) == (True, False)
    folders.remove(3)
    folders.remove(3)
    assert list(directory.iterdir()) == []


def test_a_full_directory_is_reported_before_anything_is_written(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], 0, *real[5:])))
    with pytest.raises(OutpaceError, match=naming(str(tmp_path / "folders"), "0 MB", "free")):
        SnapshotFolders(tmp_path / "folders").write(manifest)
    assert list((tmp_path / "folders").iterdir()) == []


def test_an_adapter_is_written_as_a_folder_in_peft_format(tmp_path: Path) -> None:
    tensors = {"base_model.model.model.layers.0.q_proj.lora_A.weight": torch.randn(4, 8)}
    published = SnapshotWriter(tmp_path, "run").publish(1, tensors, [])
    manifest = msgspec.structs.replace(published, adapter=LoraAdapter(4, 8.0, ["q_proj"]))
    folders = SnapshotFolders(tmp_path / "adapters")
    folder = folders.write(manifest)
    assert load_file(folder / "adapter_model.safetensors").keys() == tensors.keys()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert config["target_modules"] == ["q_proj"]
    folders.remove(1)
    assert not folder.exists()
