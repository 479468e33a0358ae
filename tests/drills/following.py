"""A run as a user starts it, observed from outside: its starts, processes, progress and leftovers.

    start ─▶ follow ─▶ (killed, or failed) ─▶ resume ─▶ follow ─▶ … ─▶ exit 0

Every process of a run has a mark in its environment, which finds it even after it was reparented. Apart from its
log files, nothing here relies on what the run reports about itself.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "OUTPACE_DRILL"
POLL_S = 0.05
RUNTIME_DIRECTORY_LOCK = "/owner.lock"
MODULES = {"outpace.rewards.grader_process": "grader", "outpace.rollouts.environments.child": "environment"}

Hook = Callable[["Run"], None]


@dataclass
class Start:
    """One start of a run and how it ended. `code` is None if it exceeded its time limit and was killed."""

    code: int | None
    seconds: float
    output: str  # the end of its output


@dataclass
class Run:
    """A run in `home`: `home/run` is its own directory, `home/tmp` its directory for temporary files."""

    home: Path
    arguments: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    pid: int = 0
    began: float = 0.0  # the latest start, by the wall clock
    runtime_directories: set[Path] = field(default_factory=set)  # every runtime directory it ever had in shared memory
    step_log: StepLog = field(default_factory=lambda: StepLog())

    def __post_init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self.dir = self.home / "run"
        self.temporary = self.home / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)

    def finish(self, limit_s: float, most_starts: int, hook: Hook | None = None) -> bool:
        """Start the run repeatedly until it is done. Returns whether it finished."""
        while len(self.starts) < most_starts:
            if self.start(limit_s, hook).code in (0, None):
                break
        return self.starts[-1].code == 0

    def start(self, limit_s: float, hook: Hook | None = None) -> Start:
        """Start or resume the run and follow it to its end."""
        output = self.home / f"output-{len(self.starts) + 1}.txt"
        began = time.monotonic()
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "outpace.cli", "train", *self._command_arguments()],
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=self._variables(), start_new_session=True,
            )  # fmt: skip
        self.pid, self.began = process.pid, time.time()
        try:
            code = self._follow(process, began + limit_s, hook)
        finally:
            if process.poll() is None:
                self.kill_all()
                process.wait()
        self.starts.append(Start(code, time.monotonic() - began, output.read_text(errors="replace")[-4000:]))
        return self.starts[-1]

    def _command_arguments(self) -> list[str]:
        if (self.dir / "config.toml").exists():
            return ["--quiet", "--resume", str(self.dir)]
        return ["--quiet", f"--run.dir={self.dir}", "--run.overwrite=true", *self.arguments]

    def _variables(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary), MARK: self.mark, **self.environment}

    def _follow(self, process: subprocess.Popen[bytes], until: float, hook: Hook | None) -> int | None:
        while (code := process.poll()) is None:
            if time.monotonic() > until:
                return None
            self.runtime_directories |= set(_runtime_directories_of(process.pid))
            self.step_log.update(self.dir / "metrics.jsonl")
            if hook is not None:
                hook(self)
            time.sleep(POLL_S)
        self.step_log.update(self.dir / "metrics.jsonl")
        return code

    @property
    def is_training(self) -> bool:
        """This start has trained a step."""
        return self.step_log.last > 0 and self.step_log.seen[-1][0] > self.began

    # -------------------------------------------------------------------------------------------------------- processes

    def processes(self) -> dict[int, str]:
        """Return the living processes of this run: role by pid."""
        needle = f"{MARK}={self.mark}".encode()
        return {pid: role_of(pid) for pid in _pids() if needle in _read(pid, "environ") and not _is_gone(pid)}

    def kill_all(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def leftovers(self, patience_s: float = 5.0) -> list[str]:
        """Return what an ended run has left behind. A killed process may take a moment to disappear."""
        until = time.monotonic() + patience_s
        while (alive := self.processes()) and time.monotonic() < until:
            time.sleep(POLL_S)
        found = [f"process {pid} ({role})" for pid, role in alive.items()]
        found += [str(path) for path in self.runtime_directories if path.exists()]
        return found + [f"tmp/{path.name}" for path in self.temporary.iterdir()]


class StepLog:
    """The times at which a metrics file got its lines, to measure how long a recovery took."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []  # time of the last line, and its step
        self._fingerprint: tuple[int, int, int] | None = None

    def update(self, file: Path) -> None:
        try:
            status = file.stat()
        except OSError:
            return
        fingerprint = (status.st_ino, status.st_size, status.st_mtime_ns)
        if fingerprint != self._fingerprint:
            self._fingerprint = fingerprint
            step = last_step(file)
            if not self.seen or self.seen[-1][1] != step:
                self.seen.append((status.st_mtime, step))

    @property
    def last(self) -> int:
        return self.seen[-1][1] if self.seen else 0

    def recovery_s(self, died_at: float) -> float | None:
        """Seconds from a death to the next step trained after it; None if no step was left to train."""
        before = [step for when, step in self.seen if when <= died_at]
        lowest = before[-1] if before else 0
        for when, step in self.seen:
            if when > died_at:
                if step > lowest:
                    return when - died_at
                lowest = step
        return None


def last_step(file: Path) -> int:
    """Return the step of the last complete line; 0 if there is none."""
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - 65536))
        whole = lines.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    with suppress(ValueError):
        return int(json.loads(whole)["step"])
    return 0


def role_of(pid: int) -> str:
    """Return the role of a process: by the module it runs, and for a component by the log file it writes."""
    arguments = _read(pid, "cmdline").decode(errors="replace").split("\0")
    for module, role in MODULES.items():
        if module in arguments:
            return role
    if "outpace.runtime.child" in arguments:
        with suppress(OSError):
            return Path(os.readlink(f"/proc/{pid}/fd/2")).stem
        return "component"
    return "controller" if "outpace.cli" in arguments else "other"


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return b""


def _is_gone(pid: int) -> bool:
    state = _read(pid, "stat").rpartition(b")")[2].split()
    return not state or state[0] in (b"Z", b"X")


def _runtime_directories_of(pid: int) -> Iterator[Path]:
    """Yield the runtime directories of this process: it holds their lock file open."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.endswith(RUNTIME_DIRECTORY_LOCK):
                    yield Path(target).parent
