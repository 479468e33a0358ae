"""Snapshots as folders that other programs load: safetensors plus small files.

    SnapshotFolders   one folder per version: a whole model, or a LoRA adapter in PEFT format, which vLLM and SGLang
                      load next to their model
    plugin_path       the outpace plugin for vLLM, on a separate path

Tensors of an adapter snapshot have their PEFT names, for example `base_model.model.<module>.lora_A.weight`.

Invariants
- Checksums are verified while writing: a folder with its final name is complete and matches the manifest.
- The directory of the folders is exclusive: everything in it may be deleted.
- Importing this module does not import torch.
"""

from __future__ import annotations

import json
import shutil
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outpace.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config_json
from outpace.types import Manifest, TensorSpec, Version
from outpace.weights.snapshot import ITEM_BYTES, open_snapshot, require_space

MODEL = "model.safetensors"

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8  # required by the format
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class SnapshotFolders:
    """One folder per version of one run."""

    def __init__(self, directory: Path) -> None:
        """Deletes the previous content of `directory`."""
        self._directory = directory
        self._written: dict[Version, Path] = {}
        self.clear()

    def write(self, manifest: Manifest) -> Path:
        """Write the snapshot. On error nothing is left behind.

        Raises `CorruptData`, or `OutpaceError` when the disk is full."""
        self.remove(manifest.version)
        self._directory.mkdir(parents=True, exist_ok=True)
        folder = self._directory / f"{manifest.incarnation}-{manifest.version}"
        partial = folder.with_name(folder.name + ".partial")
        header = safetensors_header(manifest.tensors)
        require_space(self._directory, manifest.nbytes + len(header))
        try:
            partial.mkdir()
            if manifest.adapter is not None:
                (partial / ADAPTER_CONFIG).write_bytes(adapter_config_json(manifest.adapter))
            _write_tensors(partial / (MODEL if manifest.adapter is None else ADAPTER_WEIGHTS), header, manifest)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._written[manifest.version] = folder
        return folder

    def remove(self, version: Version) -> None:
        """Delete a version. Readers with open files can finish reading."""
        folder = self._written.pop(version, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def keep_only(self, version: Version) -> None:
        for other in [written for written in self._written if written != version]:
            self.remove(other)

    def clear(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._written = {}


def _write_tensors(path: Path, header: bytes, manifest: Manifest) -> None:
    with open_snapshot(manifest) as snapshot, path.open("wb") as file:
        file.write(header)
        for spec in safetensors_order(manifest.tensors):
            for piece in snapshot.chunks(spec):
                file.write(piece)


def safetensors_header(tensors: list[TensorSpec]) -> bytes:
    """Return the header of a safetensors file. The tensors follow it in `safetensors_order`."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in safetensors_order(tensors):
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def safetensors_order(tensors: list[TensorSpec]) -> list[TensorSpec]:
    """Sort the widest dtypes first, which keeps every tensor aligned: the format does not allow padding."""
    return sorted(tensors, key=lambda spec: -ITEM_BYTES[spec.dtype])


PACKAGE = "outpace_vllm"

_METADATA = f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: 0\n"
_ENTRY_POINTS = f"[vllm.general_plugins]\noutpace = {PACKAGE}:register\n"


def plugin_path(directory: Path) -> Path:
    """Copy the vLLM plugin and its entry point into a directory for the PYTHONPATH of a server; return the directory.

    The server may run in another environment. Adding our site-packages instead would shadow its own packages, above all
    torch."""
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None, "the plugin is installed with outpace"
    root = directory / "vllm-plugin"
    metadata = root / f"{PACKAGE}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(_METADATA)
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(spec.origin).parent, root / PACKAGE, dirs_exist_ok=True, ignore=ignored)
    return root
