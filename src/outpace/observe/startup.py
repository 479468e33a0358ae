"""MERGED"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from outpace.errors import one_line

LOG_POLL_S = 10.0
LOG_TAIL_BYTES = 4096

_PROGRESS = re.compile(r"(?P<seconds>the server is starting, \d+ s so far)(?::\s*(?P<doing>.*))?")
_STAGE = re.compile(r"(?P<stage>(?!Using\b)[A-Z][a-z]+ing\b[^{}=\[\]<>|]*)")
"""Matches log lines that name a startup stage: "Loading weights", "Capturing CUDA graphs"."""

MAX_STAGE_CHARS = 80


class Telling:
    """Forwards the startup messages of one server. Drops repeated messages and reports each stage once."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._last_message = ""
        self._stage = ""

    def __call__(self, message: str) -> None:
        if not message or message == self._last_message:
            return
        self._last_message = message
        progress = _PROGRESS.fullmatch(message)
        if progress is None:
            self._report(message)
            return
        stage = stage_in(progress["doing"] or "")
        is_known = stage in ("", self._stage)
        self._stage = stage or self._stage
        self._report(progress["seconds"] + ("" if is_known else f": {stage}"))


def stage_in(line: str) -> str:
    """Return the startup stage that a log line names, without trailing settings; empty if it names none."""
    match = _STAGE.match(line.strip())
    if match is None:
        return ""
    stage = match["stage"]
    if stage != line.strip():  # the last word belongs to the text that was cut: `… with config: model=`
        stage = stage.rpartition(" ")[0]
    stage = re.split(r" with (?:config|args)\b|: ?\d+%", stage)[0].rstrip(" .,:;(…")
    return one_line(stage, MAX_STAGE_CHARS) if " " in stage else ""


class EngineLogs:
    """Reports the latest server message in each engine's log. Ignores what the logs contained at construction."""

    def __init__(self, logs: Path, engines: Iterable[str], report: Callable[[str], None]) -> None:
        self._reporters = {logs / f"{name}.log": Telling(_with_prefix(name, report)) for name in engines}
        self._initial_sizes = {log: log.stat().st_size for log in self._reporters if log.exists()}

    async def follow(self, every_s: float = LOG_POLL_S) -> None:
        """Poll the logs until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self._poll()

    async def finish(self) -> None:
        """Report messages since the last poll, without progress. Call when all engines have started."""
        await self._poll(progress=False)

    async def _poll(self, progress: bool = True) -> None:
        for log, report in self._reporters.items():
            message = await asyncio.to_thread(newest_word, log, self._initial_sizes.get(log, 0))
            if progress or not _PROGRESS.fullmatch(message):
                report(message)


def _with_prefix(name: str, report: Callable[[str], None]) -> Callable[[str], None]:
    return lambda message: report(f"{name}: {message}")


def newest_word(log: Path, begin: int = 0) -> str:
    """Return the last server message ("the server is …") after byte `begin`, without timestamp and logger name; empty
    if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    messages = [line[line.index("the server is ") :] for line in lines if "the server is " in line]
    return messages[-1] if messages else ""
