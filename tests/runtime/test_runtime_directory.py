from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.runtime.cleanup import RuntimeDirectory, temporary_directory, temporary_file


def test_the_next_run_removes_the_directory_of_a_killed_run_but_not_of_a_live_one(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal; from pathlib import Path; from outpace.runtime.cleanup import RuntimeDirectory;"
        "directory = RuntimeDirectory(Path(sys.argv[1])); os.kill(directory.cleanup.pid, signal.SIGKILL);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    living = RuntimeDirectory(tmp_path)
    another = RuntimeDirectory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, another.path.name}
    living.remove()
    another.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_directory_of_a_killed_process_is_removed_by_the_next_run_and_one_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = (
        "import os, signal; from outpace.runtime.cleanup import temporary_directory\n"
        "with temporary_directory('killed'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with temporary_directory("living") as living:
        (living / "file").touch()
        RuntimeDirectory().remove()
        assert (living / "file").exists()
        assert list(tmp_path.iterdir()) == [living.parent]
    assert list(tmp_path.iterdir()) == []


def test_the_log_of_a_failed_start_is_kept_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    new, old = temporary_file("server", ".log"), temporary_file("server", ".log")
    os.utime(old, (0, 0))
    RuntimeDirectory().remove()
    assert list(tmp_path.iterdir()) == [new]


def test_a_directory_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could name any directory or process for removal."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    victim, foreign = tmp_path / "victim", tmp_path / f"outpace-{os.getuid()}-foreign"
    victim.mkdir()
    foreign.mkdir()
    (foreign / "owner.lock").write_text(json.dumps({"files": str(victim)}))
    if os.getuid() != 0:
        pytest.skip("only root can give files to another user")
    os.chown(foreign, 12345, 12345)
    RuntimeDirectory().remove()
    assert victim.exists()
    assert foreign.exists()


def test_the_runtime_directory_is_private(tmp_path: Path) -> None:
    directory = RuntimeDirectory(tmp_path)
    assert os.stat(directory.path).st_mode & 0o777 == 0o700
    directory.remove()
