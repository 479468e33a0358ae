"""MERGED"""

from __future__ import annotations

import json
from pathlib import Path

from outpace.types import Adapter, Manifest, Version
from outpace.weights.files import Folders


class AdapterFolders:
    """One folder per version of a LoRA adapter, in PEFT format."""

    def __init__(self, directory: Path) -> None:
        self._folders = Folders(directory, "adapter_model.safetensors")

    def write(self, manifest: Manifest) -> Path:
        assert manifest.adapter is not None, "the snapshot is not an adapter"
        return self._folders.write(manifest, {"adapter_config.json": config_of(manifest.adapter)})

    def remove(self, version: Version) -> None:
        self._folders.remove(version)

    def clear(self) -> None:
        self._folders.clear()


def config_of(adapter: Adapter) -> bytes:
    """Return `adapter_config.json` with every field that a reader might otherwise default differently."""
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": adapter.targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    return json.dumps(settings, indent=2).encode()
