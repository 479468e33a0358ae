"""Servers that take their time are seen to be starting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outpace.monitoring.console import EngineLogWatcher, StartupReporter, latest_message, startup_stage


def test_the_newest_word_on_a_server_is_told_without_date_and_place(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    assert latest_message(log) == ""
    log.write_text("2026 INFO a.b: the server is starting, 5 s so far: x\n2026 INFO a.b: the server is up\nelse\n")
    assert latest_message(log) == "the server is up"


async def test_every_word_is_told_once(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    said: list[str] = []
    heard = asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        heard.set()

    logs = EngineLogWatcher(tmp_path, ["engine-0", "engine-1"], say)
    log.write_text("INFO: the server is starting, 5 s so far\n")
    following = asyncio.create_task(logs.follow(every_s=0.001))
    await heard.wait()
    heard.clear()
    await asyncio.sleep(0.02)
    log.write_text("INFO: the server is starting, 10 s so far\n")
    await heard.wait()
    following.cancel()
    assert said == ["engine-0: the server is starting, 5 s so far", "engine-0: the server is starting, 10 s so far"]


async def test_a_warning_of_a_quick_start_is_told_at_its_end_but_neither_progress_nor_old_lines(tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").write_text("INFO: the server is busy, said the run before\n")
    said: list[str] = []
    logs = EngineLogWatcher(tmp_path, ["engine-0", "engine-1", "engine-2"], said.append)
    (tmp_path / "engine-1.log").write_text("WARNING: the server is busy\n")
    (tmp_path / "engine-2.log").write_text("INFO: the server is starting, 5 s so far\n")
    await logs.finish()
    assert said == ["engine-1: the server is busy"]


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
def test_only_what_reads_like_a_stage_of_the_start_is_shown(line: str, stage: str) -> None:
    assert startup_stage(line) == stage


def test_seconds_are_told_alone_where_there_is_no_stage_or_it_was_told_before() -> None:
    said: list[str] = []
    tell = StartupReporter(said.append)
    so_far = "the server is starting, {} s so far"
    for seconds, doing in ((5, ": "), (10, ": warnings.warn("), (15, ": Loading weights"), (20, ": Loading weights")):
        tell(so_far.format(seconds) + doing)
        tell(so_far.format(seconds) + doing)
    tell("the server is up")
    assert said == [
        so_far.format(5),
        so_far.format(10),
        so_far.format(15) + ": Loading weights",
        so_far.format(20),
        "the server is up",
    ]
