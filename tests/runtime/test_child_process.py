"""Starting a child and forwarding its output, when something goes wrong on this side."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from outpace.runtime.child_process import ChildProcess, ProcessOutput


async def test_a_child_that_cannot_be_connected_to_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(**_: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    before = psutil.Process().children()
    monkeypatch.setattr(asyncio, "open_connection", refuse)
    with pytest.raises(OSError, match="too many"):
        await ChildProcess.start(
            "outpace.rewards.grader_process", "0", environment={}, output=subprocess.DEVNULL, new_session=True
        )
    assert psutil.Process().children() == before


async def test_output_that_cannot_be_written_is_dropped_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "no space left on device")

    reading, writing = os.pipe()
    output = await ProcessOutput.of(reading, "a child")
    with monkeypatch.context() as full:
        full.setattr(sys, "stderr", FullDisk())
        os.write(writing, b"first\nlast\n")
        os.close(writing)
        await output.finish()
    assert output.last_line == "last"
    assert "a child" in caplog.text
    assert "no space left" in caplog.text
