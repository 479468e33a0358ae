"""Progress messages while servers start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outpace.monitoring.console import EngineLogWatcher, StartupReporter, latest_message, startup_stage


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


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("Loading weights took 0.17 seconds", "Loading weights took 0.17 seconds"),
        ("Starting to load model /models/starter...", "Starting to load model /models/starter"),
        (
            "Initializing a V1 LLM engine (v0.32.0) with config: model='/m', x=None",
            "Initializing a V1 LLM engine (v0.32.0)",
        ),
        ("Loading safetensors checkpoint shards: 50% Completed | 1/2", "Loading safetensors checkpoint shards"),
        ("", ""),
        ("warnings.warn(", ""),
        ("auto thread binding: reserved_cpus=[], local_world_size=1", ""),
        ("Using max model len 1024", ""),
        ("Traceback (most recent call last):", ""),
        ("Warning", ""),
    ],
)
def test_only_log_lines_that_describe_a_start_up_stage_are_shown(line: str, stage: str) -> None:
    assert startup_stage(line) == stage


def test_only_the_seconds_are_printed_if_the_stage_is_unknown_or_unchanged() -> None:
    printed: list[str] = []
    report = StartupReporter(printed.append)
    so_far = "the server is starting, {} s so far"
    for seconds, doing in ((5, ": "), (10, ": warnings.warn("), (15, ": Loading weights"), (20, ": Loading weights")):
        report(so_far.format(seconds) + doing)
        report(so_far.format(seconds) + doing)
    report("the server is up")
    assert printed == [
        so_far.format(5),
        so_far.format(10),
        so_far.format(15) + ": Loading weights",
        so_far.format(20),
        "the server is up",
    ]
