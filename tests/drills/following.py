"""A run as a user starts it, followed from outside: its starts, its processes, its progress, what it leaves.

    start ─▶ follow ─▶ (killed, or failed) ─▶ resume ─▶ follow ─▶ … ─▶ exit 0

Every process of a run carries a mark in its environment, by which it is found wherever it went. Nothing in here trusts
what the run says about itself, except its log files.
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
LOOK_S = 0.05
SCRATCH_OWNER = "/owner.lock"
MODULES = {"outpace.rewards.grader": "grader", "outpace.rollouts.environments.child": "environment"}

Hook = Callable[["Run"], None]


@dataclass
class Start:
    """One start of a run and how it ended; `code` None: it did not end within its limit, and was killed for that."""

    code: int | None
    seconds: float
    said: str  # the end of its output


@dataclass
class Run:
    """A run in `home`: `home/run` is its own directory, `home/tmp` all that it has for temporary files."""

    home: Path
    arguments: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    pid: int = 0
    began: float = 0.0  # the latest start, by the wall clock
    scratch: set[Path] = field(default_factory=set)  # directories in shared memory that were ever its
    marks: Steps = field(default_factory=lambda: Steps())

    def __post_init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self.dir = self.home / "run"
        self.temporary = self.home / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)

    def finish(self, limit_s: float, most_starts: int, hook: Hook | None = None) -> bool:
        """Start it, and again until it is done; whether it got there."""
        while len(self.starts) < most_starts:
            if self.start(limit_s, hook).code in (0, None):
                break
        return self.starts[-1].code == 0

    def start(self, limit_s: float, hook: Hook | None = None) -> Start:
        """Start or resume it, and follow it to its end."""
        output = self.home / f"output-{len(self.starts) + 1}.txt"
        began = time.monotonic()
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "outpace.cli", "train", *self._words()],
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

    def _words(self) -> list[str]:
        if (self.dir / "config.toml").exists():
            return ["--quiet", "--resume", str(self.dir)]
        return ["--quiet", f"--run.dir={self.dir}", "--run.overwrite=true", *self.arguments]

    def _variables(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary), MARK: self.mark, **self.environment}

    def _follow(self, process: subprocess.Popen[bytes], until: float, hook: Hook | None) -> int | None:
        while (code := process.poll()) is None:
            if time.monotonic() > until:
                return None
            self.scratch |= set(_scratch_of(process.pid))
            self.marks.look(self.dir / "metrics.jsonl")
            if hook is not None:
                hook(self)
            time.sleep(LOOK_S)
        self.marks.look(self.dir / "metrics.jsonl")
        return code

    @property
    def is_training(self) -> bool:
        """This start has trained a step."""
        return self.marks.last > 0 and self.marks.seen[-1][0] > self.began

    # ---------------------------------------------------------------------------------------------------- processes

    def processes(self) -> dict[int, str]:
        """The processes of this run that live, by number, with what each is."""
        needle = f"{MARK}={self.mark}".encode()
        return {pid: role_of(pid) for pid in _pids() if needle in _read(pid, "environ") and not _is_gone(pid)}

    def kill_all(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def leftovers(self, patience_s: float = 5.0) -> list[str]:
        """What is still there of a run that has ended. A killed process may take a moment to be gone."""
        until = time.monotonic() + patience_s
        while (alive := self.processes()) and time.monotonic() < until:
            time.sleep(LOOK_S)
        found = [f"process {pid} ({role})" for pid, role in alive.items()]
        found += [str(path) for path in self.scratch if path.exists()]
        return found + [f"tmp/{path.name}" for path in self.temporary.iterdir()]


class Steps:
    """When a metrics file got its newest line: enough to say how long a recovery took."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []  # when the file got its last line, and the step of that
        self._stamp: tuple[int, int, int] | None = None

    def look(self, file: Path) -> None:
        try:
            status = file.stat()
        except OSError:
            return
        min_version = (status.st_ino, status.st_size, status.st_mtime_ns)
        if min_version != self._stamp:
            self._stamp = min_version
            step = last_step(file)
            if not self.seen or self.seen[-1][1] != step:
                self.seen.append((status.st_mtime, step))

    @property
    def last(self) -> int:
        return self.seen[-1][1] if self.seen else 0

    def recovery_s(self, died_at: float) -> float | None:
        """From a death to the next step trained after it; None where no step was left to train."""
        before = [step for when, step in self.seen if when <= died_at]
        lowest = before[-1] if before else 0
        for when, step in self.seen:
            if when > died_at:
                if step > lowest:
                    return when - died_at
                lowest = step
        return None


def last_step(file: Path) -> int:
    """Of the last whole line; 0 where there is none."""
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - 65536))
        whole = lines.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    with suppress(ValueError):
        return int(json.loads(whole)["step"])
    return 0


def role_of(pid: int) -> str:
    """What a process of a run is: by the module it runs, and for a part by the log that it writes."""
    words = _read(pid, "cmdline").decode(errors="replace").split("\0")
    for module, role in MODULES.items():
        if module in words:
            return role
    if "outpace.runtime.child" in words:
        with suppress(OSError):
            return Path(os.readlink(f"/proc/{pid}/fd/2")).stem
        return "part"
    return "controller" if "outpace.cli" in words else "other"


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has gone, or is somebody else's
        return b""


def _is_gone(pid: int) -> bool:
    state = _read(pid, "stat").rpartition(b")")[2].split()
    return not state or state[0] in (b"Z", b"X")


def _scratch_of(pid: int) -> Iterator[Path]:
    """Where this process keeps snapshots and sockets: it holds the lock in there open."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.endswith(SCRATCH_OWNER):
                    yield Path(target).parent
