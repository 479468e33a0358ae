"""Servers that take their time are seen to be starting."""

from __future__ import annotations

import asyncio
from pathlib import Path

from outpace.observe.startup import follow, newest_word


def test_the_newest_word_on_a_server_is_told_without_date_and_place(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    assert newest_word(log) == ""
    log.write_text("2026 INFO a.b: the server is starting, 5 s so far: x\n2026 INFO a.b: the server is up\nelse\n")
    assert newest_word(log) == "the server is up"


async def test_every_word_is_told_once(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("INFO: the server is starting, 5 s so far\n")
    said: list[str] = []
    heard = asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        heard.set()

    following = asyncio.create_task(follow(tmp_path, ["engine-0", "engine-1"], say, every_s=0.001))
    await heard.wait()
    heard.clear()
    await asyncio.sleep(0.02)
    log.write_text("INFO: the server is starting, 10 s so far\n")
    await heard.wait()
    following.cancel()
    assert said == ["engine-0: the server is starting, 5 s so far", "engine-0: the server is starting, 10 s so far"]
