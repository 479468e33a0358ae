"""MERGED"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "outpace_vllm"

_METADATA = f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: 0\n"
_ENTRY_POINTS = f"[vllm.general_plugins]\noutpace = {PACKAGE}:register\n"


def plugin_path(directory: Path) -> Path:
    """Copy the vLLM plugin and its entry point into a directory for the PYTHONPATH of a server; return the directory.

    The server may run in another environment. Adding our site-packages instead would shadow its own packages, torch
    first of all."""
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
