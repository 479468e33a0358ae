"""Simulates systems with weaker isolation, for tests of the sandbox."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from outpace.rewards import sandbox
from outpace.rewards.sandbox import SANDBOX_SCRIPT


def readable_python() -> str:
    """Return a Python interpreter that other users can execute."""
    for candidate in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""):
        real = os.path.realpath(candidate) if candidate else ""
        if real and all(os.stat(place).st_mode & 0o005 == 0o005 for place in (real, *Path(real).parents)):
            return candidate
    pytest.skip("no Python interpreter here is readable by other users")


def open_to_all(directory: Path) -> None:
    """Let other users traverse a test directory."""
    for place in (*directory.parents, directory):
        if place.owner() == "root" and "/pytest-of-" in str(place):
            os.chmod(place, 0o755)


def forbid_namespaces(monkeypatch: pytest.MonkeyPatch, directory: Path, same_user: bool = False) -> None:
    """Run sandboxes without namespaces; with `same_user` also without a separate user, as for an ordinary user."""
    text = SANDBOX_SCRIPT.read_text().replace("    return bool(libc.unshare(flag) == 0)", "    return False")
    if same_user:
        text = text.replace("    os.setresuid(uid, uid, uid)\n", "")
        text = text.replace('int(spec["uid"]) if os.geteuid() == 0 else os.geteuid()', "os.geteuid()")
    elif os.geteuid() != 0:
        pytest.skip("needs root to switch users")
    else:
        monkeypatch.setattr(sys, "executable", readable_python())
        open_to_all(directory)
    weak = directory / "weak.py"
    weak.write_text(text)
    monkeypatch.setattr(sandbox, "SANDBOX_SCRIPT", weak)
