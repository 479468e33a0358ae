"""Preallocation of snapshot buffers before they are needed."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from outpace.weights import snapshot
from outpace.weights.shared_memory import SnapshotWriter, read_snapshot


def test_preallocated_buffers_are_used(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "run")
    tensors = {"a": torch.arange(6.0)}
    writer.lay_out(tensors)
    for version in range(4):
        leased = [version - 2]  # a slow engine still reads this version
        writer.preallocate(leased)
        made = writer.buffers
        manifest = writer.publish(version, {"a": tensors["a"] + version}, leased)
        assert writer.buffers == made
        assert torch.equal(read_snapshot(manifest)["a"], tensors["a"] + version)
    assert writer.buffers == 3


def test_no_buffer_is_preallocated_while_one_is_free(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "run")
    writer.publish(0, {"a": torch.zeros(3)}, [])
    for _ in range(3):
        writer.preallocate([])
    assert writer.buffers == 2


def test_a_copy_waits_for_a_buffer_that_is_being_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SnapshotWriter(tmp_path, "run")
    tensors = {"a": torch.zeros(3)}
    writer.lay_out(tensors)
    begun, go_on = threading.Event(), threading.Event()
    allocate = snapshot.allocate

    def slowly(path: Path, nbytes: int) -> mmap.mmap:
        begun.set()
        assert go_on.wait(60)
        return allocate(path, nbytes)

    monkeypatch.setattr(snapshot, "allocate", slowly)
    with ThreadPoolExecutor(2) as threads:
        allocating = threads.submit(writer.preallocate, ())
        assert begun.wait(60)
        copying = threads.submit(writer.publish, 0, tensors, ())
        go_on.set()
        allocating.result(60)
        assert copying.result(60).version == 0
    assert writer.buffers == 1
