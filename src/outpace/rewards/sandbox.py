"""Running a program that a model wrote, as far from everything else as the system allows.

    run_python ─▶ keeper (outpace.rewards.sandboxed) ─▶ program
        ▲            │ report: how it ended, what kept it apart
        └── stdout, stderr: the first `output_kb` of each

What holds, given the namespaces (root, or a system that lets users have their own; `Isolation` says what was had):
- No network. No file but those of Python and the system's libraries, read-only, and a small one in memory that goes
  away with it. No other process to be seen. As root: another user, one per run.
What holds always: limits of time, address space, processes, file size and output; an empty environment; no descriptor
of ours; no way to gain rights; a filter of system calls on x86-64 and ARM, which alone forbids sockets too, but for
connected pairs of streams; and the end of everything it started.

What this does NOT stop:
- A hole in the kernel: the program makes system calls of the kernel that everybody shares.
- Using what is granted: `processes` times `memory_mb` of memory, all cores for `timeout_s`.
- Watching how busy the machine is (side channels).
- Reading whatever lies among Python's own packages and in /usr.
- Without namespaces: reading files that its user may read, and writing where all may write, `file_mb` a file and any
  number of them. As root that is another user, and what it leaves in /tmp, /var/tmp and /dev/shm is removed. As an
  ordinary user it is you, with your files: what it writes outside its directory stays, it may send signals to your
  processes, and look into them where the system lets one process of yours trace another. One warning in the log says
  so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil

from outpace.config.agents import SandboxConfig
from outpace.errors import BadInput, OutpaceError, one_line
from outpace.rewards.leftovers import remove_owned, remove_tree
from outpace.rewards.streams import CHUNK, Kept, feed, reader
from outpace.rewards.syscalls import compiled
from outpace.runtime.family import MARK, end_family

log = logging.getLogger(__name__)

Status = Literal["ok", "error", "timeout", "memory", "killed"]

KEEPER = Path(__file__).with_name("sandboxed.py")
START_LIMIT_S = 20.0
"""On top of the program's own time: what a busy machine may take to make the namespaces and start an interpreter."""
END_LIMIT_S = 2.0
"""How long to wait for the ends of pipes after everybody has been killed who could hold them."""
FIRST_UID, UIDS = 0x40000000, 0x20000000
"""Users that no system gives out. One is drawn per run, so that nothing of any other run is counted or reached."""


class SandboxFailed(OutpaceError):
    """The system would not start a program at all; nothing that the program did."""


@dataclass(frozen=True)
class SandboxLimits:
    timeout_s: float = 5.0
    memory_mb: int = 512
    processes: int = 16
    output_kb: int = 64
    file_mb: int = 16

    @classmethod
    def of(cls, config: SandboxConfig) -> SandboxLimits:
        return cls(config.timeout_s, config.memory_mb, config.processes, config.output_kb, config.file_mb)


@dataclass(frozen=True)
class Isolation:
    """What kept one program apart, beyond the limits that always hold."""

    network: bool = False
    files: bool = False
    processes: bool = False
    ipc: bool = False
    user: bool = False
    syscalls: bool = False

    def missing(self) -> list[str]:
        """In words for people; empty where nothing of yours can be reached."""
        lacks = {
            "network access is not cut off": not (self.network or self.syscalls),
            "files that its user may read are visible": not self.files,
            "other processes are visible": not (self.processes and self.files),
            "it runs as your own user": not self.user and not (self.files and self.processes),
        }
        return [words for words, lack in lacks.items() if lack]


@dataclass(frozen=True)
class SandboxResult:
    """`status` and the output are for people and for comparing; only `exit_code` says how the program ended, negative
    for a signal and None where it was stopped. `truncated`: there was more output than is kept."""

    status: Status
    exit_code: int | None
    stdout: str
    stderr: str
    seconds: float
    truncated: bool = False
    isolation: Isolation = field(default_factory=Isolation)


def check_available() -> None:
    """Raise a `BadInput` where there is no sandbox to be had."""
    if sys.platform != "linux":
        raise BadInput(f"sandbox: programs can be run on Linux only, this is {sys.platform}")


async def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: SandboxLimits,
    arguments: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    channel: socket.socket | None = None,
) -> SandboxResult:
    """Run `code` as a program. It finds `files` in its working directory, and inherits `channel` if one is given."""
    directory = tempfile.mkdtemp(prefix="outpace-sandbox-")
    try:
        run = _Run(directory, limits)
        return await run.whole({"program.py": code, **(files or {})}, ["program.py", *arguments], stdin, channel)
    finally:
        await asyncio.shield(asyncio.to_thread(remove_tree, directory))


class _Run:
    def __init__(self, directory: str, limits: SandboxLimits) -> None:
        self._directory = directory
        self._limits = limits
        self._uid = FIRST_UID + secrets.randbelow(UIDS)
        self._mark = secrets.token_hex(16)
        if os.geteuid() == 0:
            os.chown(directory, self._uid, self._uid)

    async def whole(
        self, files: dict[str, str], command: list[str], stdin: str, channel: socket.socket | None
    ) -> SandboxResult:
        spec = self._spec(files, command, [] if channel is None else [channel.fileno()])
        started = time.monotonic()
        process, told = await self._start(spec)
        out, err = Kept(self._limits.output_kb * 1024), Kept(self._limits.output_kb * 1024)
        pipes = [out.read(process.stdout), err.read(process.stderr), feed(process.stdin, stdin)]
        tasks = [asyncio.create_task(pipe) for pipe in pipes]
        report: dict[str, Any] = {}
        try:
            report = await self._reported(told)
        finally:
            await asyncio.shield(self._finish(process, report, tasks))  # also for somebody who is cancelled meanwhile
        return _result(report, out, err, time.monotonic() - started)

    async def _reported(self, told: int) -> dict[str, Any]:
        """What keeper and first said, all lines in one, as far as it came. Both have ended when it ends."""
        stream, transport = await reader(told)
        said = bytearray()
        try:
            async with asyncio.timeout(self._limits.timeout_s + START_LIMIT_S):
                while chunk := await stream.read(CHUNK):
                    said += chunk
        except TimeoutError:
            log.warning("a sandbox did not report in time and was ended")
        finally:
            transport.close()
        return {key: value for line in said.splitlines() for key, value in json.loads(line).items()}

    def _spec(self, files: dict[str, str], command: list[str], channel: list[int]) -> dict[str, Any]:
        limits, home = self._limits, self._directory
        real = Path(os.path.realpath(sys.executable))
        return {
            "timeout_s": limits.timeout_s, "memory_mb": limits.memory_mb, "processes": limits.processes,
            "file_mb": limits.file_mb, "disk_mb": 4 * limits.file_mb + 16,
            "uid": self._uid, "caller": os.geteuid(), "directory": home, "files": files, "channel": channel,
            "python": sys.executable, "command": command, "filter": compiled().hex(),
            "readable": [sys.prefix, sys.base_prefix, sys.base_exec_prefix, str(real.parent.parent)],
            "environment": {
                "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home, MARK: self._mark,
            },
        }  # fmt: skip

    async def _start(self, spec: dict[str, Any]) -> tuple[asyncio.subprocess.Process, int]:
        """The keeper, and the descriptor of its report."""
        reading, writing = os.pipe()
        spec_fd = os.memfd_create("outpace-sandbox")
        try:
            os.write(spec_fd, json.dumps(spec).encode())
            os.lseek(spec_fd, 0, os.SEEK_SET)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(KEEPER), str(spec_fd), str(writing),
                pass_fds=[spec_fd, writing, *spec["channel"]], env={MARK: self._mark}, cwd="/", start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                limit=CHUNK,
            )  # fmt: skip
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
            os.close(spec_fd)
        return process, reading

    async def _finish(
        self, process: asyncio.subprocess.Process, report: dict[str, Any], tasks: list[asyncio.Task[None]]
    ) -> None:
        """Nothing of the program is left afterwards, whatever became of the run."""
        isolation = report.get("isolation", {})
        if not isolation.get("processes"):  # else the kernel has seen to it
            await asyncio.to_thread(_end_all, process.pid, self._mark, self._uid)
        if not isolation.get("files") and os.geteuid() == 0:
            await asyncio.to_thread(remove_owned, self._uid)
        tasks = [*tasks, asyncio.create_task(_ended(process))]
        await asyncio.wait(tasks, timeout=END_LIMIT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ended(process: asyncio.subprocess.Process) -> None:
    await process.wait()  # which is also the end of its pipes


def _end_all(leader: int, mark: str, uid: int) -> None:
    """The family, and whoever else is the run's own user: that mark cannot be dropped."""
    gone = end_family(leader, mark)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == uid:
                process.kill()
    if not gone:
        log.warning("a sandboxed program left processes of group %d that cannot be ended", leader)


def _result(report: dict[str, Any], out: Kept, err: Kept, seconds: float) -> SandboxResult:
    if "failure" in report:
        raise SandboxFailed(f"the sandbox could not start a program: {report['failure']}")
    if "isolation" not in report or "syscalls" not in report:  # the last that is said before the program begins
        raise SandboxFailed(f"the sandbox did not come up: {one_line(err.text) or 'not a word from it'}")
    isolation = Isolation(**report["isolation"], syscalls=report["syscalls"])
    exit_code = report.get("status")
    _warn_once(tuple(isolation.missing()))
    return SandboxResult(
        _status(exit_code, "timeout" in report, err.text),
        exit_code,
        out.text,
        err.text,
        seconds,
        out.truncated or err.truncated,
        isolation,
    )


def _status(exit_code: int | None, timed_out: bool, stderr: str) -> Status:
    if timed_out or exit_code == -signal.SIGXCPU:
        return "timeout"
    if exit_code is None or exit_code < 0:
        return "killed"
    if exit_code == 0:
        return "ok"
    last = stderr.rstrip().rpartition("\n")[2]
    return "memory" if last.startswith("MemoryError") else "error"


@cache
def _warn_once(missing: tuple[str, ...]) -> None:
    if missing:
        log.warning("the sandbox is weaker than it could be on this system: %s", "; ".join(missing))
