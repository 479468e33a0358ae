"""A run as a user starts it, with all its processes in sight, and the books that it leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from support import as_arguments, read_lines, start_command

Settings = dict[str, Any]
Runs = Callable[..., "LiveRun"]

LOOK_S = 0.05
STARTING_S = 180.0


class LiveRun:
    """`outpace train`, followed from outside."""

    def __init__(self, *words: str) -> None:
        self._process = start_command("train", "--quiet", *words, start_new_session=True)
        self.pid = self._process.pid
        self.family = {psutil.Process(self.pid)}  # all that was ever seen of its processes
        self.said = ""

    def until(self, condition: Callable[[], Any], within_s: float = STARTING_S) -> Any:
        """Look until the condition holds; the run must not end before."""
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, f"not within {within_s:g} s"
            self._look()
            time.sleep(LOOK_S)
        return found

    def end(self, within_s: float) -> int:
        """Its exit code; what it said is in `said`."""
        deadline = time.monotonic() + within_s
        while self._process.poll() is None:
            assert time.monotonic() < deadline, f"did not end within {within_s:g} s"
            self._look()
            time.sleep(LOOK_S)
        self.said = "".join(self._process.communicate())
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def signal_all(self, number: signal.Signals) -> None:
        """To every process of the run, as a suspended machine stops them all."""
        self._look()
        for process in sorted(self.living(), key=lambda one: one.pid != self.pid):  # who could notice goes first
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def part(self, name: str) -> int:
        """The process that is this part, which writes to the log of that name."""

        def find() -> int | None:
            self._look()
            found = [child.pid for child in self.living() if _output_of(child.pid).endswith(f"/{name}.log")]
            return found[0] if found else None

        return int(self.until(find))

    def living(self) -> list[psutil.Process]:
        return [one for one in self.family if _lives(one)]

    def orphans(self, within_s: float = 30.0) -> list[psutil.Process]:
        """What is left of its processes after so long."""
        _, alive = psutil.wait_procs(self.living(), timeout=within_s)
        return [one for one in alive if _lives(one)]

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._look()
        for process in [*self.living(), self._process]:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self._process.communicate()

    def _look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.family |= set(psutil.Process(self.pid).children(recursive=True))


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _output_of(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/2")
    return ""


# -------------------------------------------------------------------------------------------------- what a run has left


def words(settings: Settings, **changes: Any) -> list[str]:
    """Settings as arguments; in the changes `__` stands for the dot of a key, and None leaves a setting out."""
    merged = settings | {key.replace("__", "."): value for key, value in changes.items()}
    return as_arguments({key: value for key, value in merged.items() if value is not None})


def steps_of(run: Path) -> list[int]:
    """The steps on record; a line that is being written counts when it is whole."""
    if not (run / "metrics.jsonl").exists():
        return []
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def visits_of(run: Path) -> Counter[tuple[int, int]]:
    """How often each task of each epoch is on record, as trained or as settled otherwise; replays are no visits."""
    found: Counter[tuple[int, int]] = Counter()
    for line in read_lines(run / "batches.jsonl"):
        trained = [group for group in line["groups"] if not group.get("replay")]
        found.update((visit["epoch"], visit["task"]) for visit in [*trained, *line.get("settled", [])])
    return found


def every_task_once(epochs: int, tasks: int = 24) -> Counter[tuple[int, int]]:
    return Counter((epoch, task) for epoch in range(epochs) for task in range(tasks))


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found
