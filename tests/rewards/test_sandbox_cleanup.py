"""Files that sandboxed programs leave behind are removed, and nothing else."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import traceback
from pathlib import Path

import pytest

from outpace.config.sections import SandboxConfig
from outpace.rewards.sandbox import WORLD_WRITABLE, remove_tree, run_python
from rewards_support import forbid_namespaces, open_to_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

MESS = """
import os, sys
for place in sys.argv[1:]:
    os.makedirs(place + '/deep/closed')
    open(place + '/deep/closed/file', 'w').write('x')
    os.symlink('/', place + '/deep/closed/link')
    os.chmod(place + '/deep/closed', 0)
    os.chmod(place + '/deep', 0)
    os.chmod(place, 0)
"""


def test_files_of_the_sandbox_user_in_world_writable_directories_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_namespaces(monkeypatch, tmp_path)
    name = f"outpace-mess-{secrets.token_hex(8)}"
    places = [os.path.join(place, name) for place in WORLD_WRITABLE if os.path.isdir(place)]
    bystander = Path(places[0] + "-of-another-user")
    bystander.write_text("mine")
    try:
        result = asyncio.run(run_python(MESS, limits=SandboxConfig(timeout_s=20.0), arguments=[*places, "own"]))
        assert result.status == "ok", result.stderr
        assert [place for place in places if os.path.lexists(place)] == []
        assert bystander.read_text() == "mine"
    finally:
        bystander.unlink()


def test_a_directory_tree_is_removed_despite_depth_permissions_and_symlinks(tmp_path: Path) -> None:
    open_to_all(tmp_path)
    os.chmod(tmp_path, 0o777)
    child = os.fork()
    if child == 0:
        os._exit(_create_and_remove(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert (tmp_path / "outside" / "kept").read_text() == "x"
    assert (tmp_path / "outside").stat().st_mode & 0o777 == 0o750


def _create_and_remove(place: Path) -> int:
    """Run as an ordinary user, to whom permissions apply."""
    try:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        os.chdir(place)
        os.mkdir("outside")
        Path("outside/kept").write_text("x")
        os.chmod("outside", 0o750)
        os.mkdir("tree")
        os.chdir("tree")
        for _ in range(250):
            os.symlink(place / "outside", "link")
            os.mkdir("d" * 20)
            os.chdir("d" * 20)
        Path("file").write_text("x")
        for _ in range(251):
            os.chmod(".", 0o300)
            os.chdir("..")
            os.chmod("d" * 20 if os.path.lexists("d" * 20) else "tree", 0)
        remove_tree(str(place / "tree"))
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
