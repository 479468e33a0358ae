"""Systems that keep programs less apart than this one, for tests of the sandbox."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from outpace.rewards import sandbox
from outpace.rewards.sandbox import SANDBOX_SCRIPT


def readable_python() -> str:
    """An interpreter that another user can start."""
    for candidate in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""):
        real = os.path.realpath(candidate) if candidate else ""
        if real and all(os.stat(place).st_mode & 0o005 == 0o005 for place in (real, *Path(real).parents)):
            return candidate
    pytest.skip("there is no Python here that other users can read")


def open_to_all(directory: Path) -> None:
    """Let other users pass through a directory of the tests."""
    for place in (*directory.parents, directory):
        if place.owner() == "root" and "/pytest-of-" in str(place):
            os.chmod(place, 0o755)


def forbid_namespaces(monkeypatch: pytest.MonkeyPatch, directory: Path, as_oneself: bool = False) -> None:
    """From now on sandboxes get no namespaces; `as_oneself` they get no other user either, as with an ordinary one."""
    text = SANDBOX_SCRIPT.read_text().replace("    return bool(libc.unshare(flag) == 0)", "    return False")
    if as_oneself:
        text = text.replace("    os.setresuid(uid, uid, uid)\n", "")
        text = text.replace('int(spec["uid"]) if os.geteuid() == 0 else os.geteuid()', "os.geteuid()")
    elif os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    else:
        monkeypatch.setattr(sys, "executable", readable_python())
        open_to_all(directory)
    weak = directory / "weak.py"
    weak.write_text(text)
    monkeypatch.setattr(sandbox, "SANDBOX_SCRIPT", weak)
