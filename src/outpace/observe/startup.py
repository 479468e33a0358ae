"""What engines say while their servers start, which may take minutes: passed on from their logs to people.

    the server is starting, 35 s so far: Loading weights took 1.2 seconds

Behind the seconds stands the last line of the server's own log, whatever that is. It is shown where it reads like
something that is being done, and once; otherwise the seconds have to do.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from outpace.errors import one_line

LOOK_S = 10.0
TAIL_BYTES = 4096

_HOW_FAR = re.compile(r"(?P<seconds>the server is starting, \d+ s so far)(?::\s*(?P<doing>.*))?")
_STAGE = re.compile(r"(?P<words>(?!Using\b)[A-Z][a-z]+ing\b[^{}=\[\]<>|]*)")
"""What servers call the stages of their start begins so: "Loading weights", "Capturing CUDA graphs"."""

STAGE_CHARS = 80


class Telling:
    """Says what one engine says of its server, without noise and without saying a stage twice."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._word = ""
        self._stage = ""

    def __call__(self, word: str) -> None:
        if not word or word == self._word:
            return
        self._word = word
        how_far = _HOW_FAR.fullmatch(word)
        if how_far is None:
            self._say(word)
            return
        stage = stage_in(how_far["doing"] or "")
        is_told = stage in ("", self._stage)
        self._stage = stage or self._stage
        self._say(how_far["seconds"] + ("" if is_told else f": {stage}"))


def stage_in(line: str) -> str:
    """What the line of a log says is being done; empty where it says something else. Settings that follow are cut."""
    match = _STAGE.match(line.strip())
    if match is None:
        return ""
    words = match["words"]
    if words != line.strip():  # the last word belongs to what was cut: `… with config: model=`
        words = words.rpartition(" ")[0]
    words = re.split(r" with (?:config|args)\b|: ?\d+%", words)[0].rstrip(" .,:;(…")
    return one_line(words, STAGE_CHARS) if " " in words else ""


class EngineLogs:
    """The newest word of each engine on its server, if there is one. What a log holds already is not news."""

    def __init__(self, logs: Path, engines: Iterable[str], say: Callable[[str], None]) -> None:
        self._telling = {logs / f"{name}.log": Telling(_in_the_name_of(name, say)) for name in engines}
        self._old = {log: log.stat().st_size for log in self._telling if log.exists()}

    async def follow(self, every_s: float = LOOK_S) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self._look()

    async def finish(self) -> None:
        """Once all engines have started: what was said since the last look, but for progress."""
        await self._look(progress=False)

    async def _look(self, progress: bool = True) -> None:
        for log, tell in self._telling.items():
            word = await asyncio.to_thread(newest_word, log, self._old.get(log, 0))
            if progress or not _HOW_FAR.fullmatch(word):
                tell(word)


def _in_the_name_of(name: str, say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda word: say(f"{name}: {word}")


def newest_word(log: Path, begin: int = 0) -> str:
    """The last line from `begin` on that speaks of a server, without its date and place; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    words = [line[line.index("the server is ") :] for line in lines if "the server is " in line]
    return words[-1] if words else ""
