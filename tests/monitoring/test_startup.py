"""Progress messages while servers start."""

from __future__ import annotations

import asyncio
from pathlib import Path

from outpace.monitoring.console import EngineLogWatcher, latest_message


def test_the_latest_log_message_is_returned_without_date_and_logger_name(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    assert latest_message(log) == ""
    log.write_text("2026 INFO a.b: the server is starting, 5 s so far: x\n2026 INFO a.b: the server is up\nelse\n")
    assert latest_message(log) == "the server is up"


async def test_every_message_is_printed_once(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    printed: list[str] = []
    has_printed = asyncio.Event()

    def print_line(text: str) -> None:
        printed.append(text)
        has_printed.set()

    logs = EngineLogWatcher(tmp_path, ["engine-0", "engine-1"], print_line)
    log.write_text("INFO: the server is starting, 5 s so far\n")
    following = asyncio.create_task(logs.follow(every_s=0.001))
    await has_printed.wait()
    has_printed.clear()
    await asyncio.sleep(0.02)
    log.write_text("INFO: the server is starting, 10 s so far\n")
    await has_printed.wait()
    following.cancel()
    assert printed == ["engine-0: the server is starting, 5 s so far", "engine-0: the server is starting, 10 s so far"]


async def test_finish_prints_warnings_but_neither_progress_nor_lines_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").write_text("INFO: the server is busy, in an earlier run\n")
    printed: list[str] = []
    logs = EngineLogWatcher(tmp_path, ["engine-0", "engine-1", "engine-2"], printed.append)
    (tmp_path / "engine-1.log").write_text("WARNING: the server is busy\n")
    (tmp_path / "engine-2.log").write_text("INFO: the server is starting, 5 s so far\n")
    await logs.finish()
    assert printed == ["engine-1: the server is busy"]
