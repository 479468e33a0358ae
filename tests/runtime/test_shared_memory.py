"""Cleanup of shared memory left by killed processes of a run, and of nothing else."""

from __future__ import annotations

import mmap
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.runtime.cleanup import CleanupProcess
from outpace.runtime.process_table import ProcessTable

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no shared memory in the file system"),
]

CREATOR = """
import mmap, multiprocessing, sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
semaphore = multiprocessing.get_context("spawn").Semaphore()
if len(sys.argv) > 1:
    file = open(sys.argv[1], "r+b")
    mapping = mmap.mmap(file.fileno(), 4096)
print(memory.name, f"sem.{semaphore._semlock.name[1:]}", flush=True)
time.sleep(600)
"""
"""A program that creates a segment and a semaphore; it also maps the file given as an argument."""


class Creator:
    """A process of a run, with the mark of one of its components."""

    def __init__(self, cleanup: CleanupProcess, *arguments: str) -> None:
        self.mark = cleanup.new_mark()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CREATOR, *arguments],
            env={**os.environ, **cleanup.marked(self.mark)}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.segments = [Path("/dev/shm") / name for name in self.process.stdout.readline().split()]
        assert len(self.existing()) == 2

    def existing(self) -> list[Path]:
        return [segment for segment in self.segments if segment.exists()]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def cleanup(tmp_path: Path) -> CleanupProcess:
    return CleanupProcess(tmp_path / "index")


def kill_trackers(creator: Creator) -> None:
    """Kill the resource trackers, which would remove the segments themselves."""
    for number in ProcessTable().find({creator.mark: {}})[creator.mark] - {creator.process.pid}:
        os.kill(number, signal.SIGKILL)


@pytest.mark.parametrize("tracked", [True, False])
def test_shared_memory_of_processes_killed_by_the_cleanup_process_is_removed(
    cleanup: CleanupProcess, tracked: bool
) -> None:
    creator = Creator(cleanup)
    if not tracked:
        kill_trackers(creator)
    cleanup.dismiss()
    creator.close()
    assert creator.existing() == []


def test_shared_memory_that_another_process_still_maps_is_left_alone(cleanup: CleanupProcess) -> None:
    creator = Creator(cleanup)
    kill_trackers(creator)
    with creator.segments[0].open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        cleanup.dismiss()
        creator.close()
        assert creator.existing() == creator.segments[:1]
    creator.segments[0].unlink()


def test_a_user_file_in_dev_shm_is_left_alone(cleanup: CleanupProcess) -> None:
    dataset = Path("/dev/shm") / f"dataset-{secrets.token_hex(8)}"
    dataset.write_bytes(bytes(4096))
    try:
        creator = Creator(cleanup, str(dataset))
        cleanup.dismiss()
        creator.close()
        assert creator.existing() == []
        assert dataset.exists()
    finally:
        dataset.unlink()
