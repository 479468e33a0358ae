from __future__ import annotations

import os
from pathlib import Path

import pytest

from outpace.checkpoint.commit import fsync_path, write_durably


def test_durable_writes_leave_no_file_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    write_durably(tmp_path / "file", b"{}")
    fsync_path(tmp_path / "file")
    fsync_path(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"{}"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_raises_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_durably(tmp_path / "file", b"{}")
