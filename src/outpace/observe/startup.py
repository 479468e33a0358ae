"""What engines say while their servers start, which may take minutes: passed on from their logs to people."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

LOOK_S = 10.0
TAIL_BYTES = 4096


async def follow(logs: Path, engines: Iterable[str], say: Callable[[str], None], every_s: float = LOOK_S) -> None:
    """Until it is cancelled: the newest word of each engine on its server, if there is one."""
    names = list(engines)
    said: dict[str, str] = {}
    while True:
        await asyncio.sleep(every_s)
        for name in names:
            word = await asyncio.to_thread(newest_word, logs / f"{name}.log")
            if word and word != said.get(name):
                said[name] = word
                say(f"{name}: {word}")


def newest_word(log: Path) -> str:
    """The last line that speaks of a server, without its date and place; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    words = [line[line.index("the server is ") :] for line in lines if "the server is " in line]
    return words[-1] if words else ""
