"""The leftover check at the end of every test session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leftovers import LeftoverCheck

pytestmark = pytest.mark.timeout(120)

LEAKY = """
import subprocess, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory

def test_leaves_things_behind():
    segment = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")
    folder = tempfile.mkdtemp()
    started = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, start_new_session=True)
    with open({report!r}, "w") as file:
        print(segment._name, folder, started.pid, file=file)
    time.sleep(5)  # time for the check to see the segment
"""
TIDY = """
import subprocess, tempfile
from multiprocessing import shared_memory

def test_leaves_nothing_behind():
    segment = shared_memory.SharedMemory(create=True, size=4096)
    with tempfile.TemporaryDirectory(), subprocess.Popen(["sleep", "600"]) as started:
        started.kill()
    segment.close()
    segment.unlink()
"""


def session(tmp_path: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_it.py").write_text(tests)
    words = [sys.executable, "-m", "pytest", "-p", "leftovers", "-p", "no:cacheprovider", "-q", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    environment["OUTPACE_LEFTOVERS_PATIENCE_S"] = "0" if tests is not TIDY else "20"
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [*words, f"--rootdir={tmp_path}", str(tmp_path)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param([], id="one process"), pytest.param(["-n1"], id="xdist")])
def test_a_session_that_leaves_things_behind_fails_and_lists_them(tmp_path: Path, options: list[str]) -> None:
    report = tmp_path / "report"
    ended = session(tmp_path, LEAKY.format(report=str(report)), *options)
    segment, folder, pid = report.read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    Path("/dev/shm", segment.removeprefix("/")).unlink()
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
    assert "1 passed" in ended.stdout
    for left in (f"{pid}: sleep 600", f"/dev/shm{segment}", folder):
        assert left in ended.stdout


@pytest.mark.parametrize(
    "options", [pytest.param([], id="one process"), pytest.param(["-n1"], id="xdist", marks=pytest.mark.slow)]
)
def test_a_session_that_leaves_nothing_behind_passes(tmp_path: Path, options: list[str]) -> None:
    ended = session(tmp_path, TIDY, *options)
    assert ended.returncode == 0, ended.stdout


def test_processes_of_other_programs_are_not_reported() -> None:
    environment = dict(os.environ)
    with LeftoverCheck() as check, subprocess.Popen(["sleep", "600"], env=environment) as other:
        assert check.found(patience_s=0) == []
        other.kill()
