"""Outpace's plugin for vLLM, laid out so that a server in another environment finds it."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "outpace_vllm"

_METADATA = f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: 0\n"
_ENTRY_POINTS = f"[vllm.general_plugins]\noutpace = {PACKAGE}:register\n"


def plugin_path(directory: Path) -> Path:
    """A directory for the server's PYTHONPATH: the plugin and its entry point, and nothing else.

    The place where it is installed would not do: everything else in there, torch first of all, would be found before
    the server's own."""
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None, "the plugin is part of what is installed"
    root = directory / "vllm-plugin"
    described = root / f"{PACKAGE}-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(_METADATA)
    (described / "entry_points.txt").write_text(_ENTRY_POINTS)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(spec.origin).parent, root / PACKAGE, dirs_exist_ok=True, ignore=ignored)
    return root
