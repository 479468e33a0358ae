"""A run as a user starts it, with all its processes tracked, and readers for the files it writes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from support import as_arguments, read_lines, start_command

Settings = dict[str, Any]
StartRun = Callable[..., "LiveRun"]

POLL_S = 0.05
START_LIMIT_S = 180.0


class LiveRun:
    """`outpace train`, observed from outside."""

    def __init__(self, *arguments: str, launcher: Sequence[str] = ()) -> None:
        """`launcher`: a module that starts it, with its arguments."""
        self._process = start_command("train", "--quiet", *arguments, launcher=launcher, start_new_session=True)
        self.pid = self._process.pid
        self.processes = {psutil.Process(self.pid)}  # every process of the run that was ever seen
        self.output = ""

    def until(self, condition: Callable[[], Any], within_s: float = START_LIMIT_S) -> Any:
        """Poll until the condition holds and return its value; the run must not end before."""
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, f"not within {within_s:g} s"
            self._update_processes()
            time.sleep(POLL_S)
        return found

    def end(self, within_s: float) -> int:
        """Wait for the end and return the exit code; the output is in `output`."""
        deadline = time.monotonic() + within_s
        while self._process.poll() is None:
            assert time.monotonic() < deadline, f"did not end within {within_s:g} s"
            self._update_processes()
            time.sleep(POLL_S)
        self.output = "".join(self._process.communicate())
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every process of the run, as a suspended machine stops them all."""
        self._update_processes()
        # The controller first: it could notice that the others do not respond.
        for process in sorted(self.living_processes(), key=lambda process: process.pid != self.pid):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def component_pid(self, name: str) -> int:
        """Return the pid of this component, found by the log file it writes to."""

        def find() -> int | None:
            self._update_processes()
            found = [child.pid for child in self.living_processes() if _output_of(child.pid).endswith(f"/{name}.log")]
            return found[0] if found else None

        return int(self.until(find))

    def living_processes(self) -> list[psutil.Process]:
        return [process for process in self.processes if _is_alive(process)]

    def remaining_processes(self, within_s: float = 30.0) -> list[psutil.Process]:
        """Return the processes that are still alive after this time."""
        _, alive = psutil.wait_procs(self.living_processes(), timeout=within_s)
        return [process for process in alive if _is_alive(process)]

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._update_processes()
        for process in [*self.living_processes(), self._process]:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self._process.communicate()

    def _update_processes(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.processes |= set(psutil.Process(self.pid).children(recursive=True))


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _output_of(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/2")
    return ""


# ------------------------------------------------------------------------------------------------------- files of a run


def arguments(settings: Settings, **changes: Any) -> list[str]:
    """Settings as arguments. In `changes`, `__` stands for the dot of a key and None leaves a setting out."""
    merged = settings | {key.replace("__", "."): value for key, value in changes.items()}
    return as_arguments({key: value for key, value in merged.items() if value is not None})


def steps_of(run: Path) -> list[int]:
    """Return the recorded steps; an incomplete last line does not count."""
    if not (run / "metrics.jsonl").exists():
        return []
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def visits_of(run: Path) -> Counter[tuple[int, int]]:
    """Count how often each task of each epoch is recorded as trained or otherwise finalized, without replays."""
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
