"""Sandbox: run a program written by a model, isolated as far as the system allows.

    run_python ─▶ supervisor (outpace.rewards.sandboxed) ─▶ program
        ▲            │ report: exit status and the isolation achieved
        └── stdout, stderr: the first `output_kb` of each

Guarantees with namespaces (as root, or where user namespaces are permitted; `Isolation` reports what was achieved):
- No network. No files except Python and the system libraries (read-only) and a small in-memory file system that is
  discarded. No other processes visible. As root: a separate user per run.
Guarantees in every case: limits on time, address space, processes, file size and output; an empty environment; no
inherited file descriptors; no privilege escalation; a seccomp filter on x86-64 and ARM, which also forbids all sockets
except connected stream pairs; every process the program started is killed.

NOT prevented:
- Kernel exploits: the program makes system calls to the shared kernel.
- Using the granted resources: `processes` times `memory_mb` of memory, all cores for `timeout_s`.
- Side channels, such as machine load.
- Reading Python's installed packages and /usr.
- Without namespaces: reading files that its user may read, and writing to world-writable directories, any number of
  files of up to `file_mb`. As root this is a separate user, and its files in /tmp, /var/tmp and /dev/shm are removed.
  As an ordinary user, the program runs as you: files it writes outside its directory remain, and it may signal your
  processes, and trace them if the system allows it. The log warns about this once.

The program's files may be hostile to removal (unreadable directories, trees deeper than PATH_MAX, links to other
places): `remove_tree` moves the contents of subdirectories up to the top, one level at a time, through file descriptors
and never through a link.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil

from outpace.config.sections import SandboxConfig
from outpace.errors import BadInput, OutpaceError, one_line
from outpace.rewards.syscalls import compile_filter
from outpace.runtime.child_process import pipe_reader, write_input
from outpace.runtime.process_table import MARK_VARIABLE, new_mark
from outpace.runtime.process_tree import end_process_tree

CHUNK = 64 * 1024
DROP_PAUSE_S = 0.01
"""Wait after each dropped chunk, so that backpressure slows down a program that floods its output."""


class BoundedOutput:
    """Keeps the first `limit` bytes of a stream; the rest is read and dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = bytearray()
        self.truncated = False

    @property
    def text(self) -> str:
        return self._bytes.decode("utf-8", "replace")

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None, "the process was started with pipes"
        while chunk := await stream.read(CHUNK):
            left = self._limit - len(self._bytes)
            self._bytes += chunk[:left]
            if len(chunk) > left:
                self.truncated = True
                await asyncio.sleep(DROP_PAUSE_S)


log = logging.getLogger(__name__)

WORLD_WRITABLE = ("/tmp", "/var/tmp", "/dev/shm")
"""World-writable directories."""


def remove_tree(path: str) -> None:
    """Remove a directory and its contents; log a warning if the system refuses."""
    try:
        top = _open_directory(path, None)
        try:
            while names := os.listdir(top):
                for name in names:
                    _remove(name, top)
        finally:
            os.close(top)
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("cannot remove the files of a sandboxed program: %s", error)


def remove_owned(uid: int, directories: tuple[str, ...] = WORLD_WRITABLE) -> None:
    """Remove everything that the run's user id left in the world-writable directories."""
    for directory in directories:
        with suppress(FileNotFoundError):
            names = os.listdir(directory)
            for path in (os.path.join(directory, name) for name in names):
                _remove_if_owned(path, uid)


def _remove_if_owned(path: str, uid: int) -> None:
    with suppress(FileNotFoundError):  # the directory is shared: the entry may vanish
        found = os.lstat(path)
        if found.st_uid != uid:
            return
        if stat.S_ISDIR(found.st_mode):
            remove_tree(path)
        else:
            os.unlink(path)


def _remove(name: str, top: int) -> None:
    """Remove one entry of the top directory; its subdirectories are moved up to the top."""
    if _try_unlink(name, top):
        return
    here = _open_directory(name, top)
    try:
        for inner in os.listdir(here):
            if not _try_unlink(inner, here):
                os.close(_open_directory(inner, here))  # makes it writable: rename requires that
                os.rename(inner, f"moved-{secrets.token_hex(16)}", src_dir_fd=here, dst_dir_fd=top)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=top)


def _try_unlink(name: str, directory: int) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        return False
    return True


def _open_directory(name: str, directory: int | None) -> int:
    """Open a directory for reading after restoring the owner's permissions."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(handle)


Status = Literal["ok", "error", "timeout", "memory", "killed"]

SANDBOX_SCRIPT = Path(__file__).with_name("sandboxed.py")
START_LIMIT_S = 20.0
"""Added to the program's own timeout: time to create the namespaces and start an interpreter on a busy machine."""
END_LIMIT_S = 2.0
"""How long to wait for pipes to close after every process that could hold them has been killed."""
FIRST_UID, UIDS = 0x40000000, 0x20000000
"""Range of user ids that no system assigns. One is drawn per run, so that runs share neither limits nor files."""


class SandboxFailed(OutpaceError):
    """The sandbox could not start; not the program's fault."""


@dataclass(frozen=True)
class Isolation:
    """Isolation achieved for one program, beyond the limits that always hold."""

    network: bool = False
    files: bool = False
    processes: bool = False
    ipc: bool = False
    user: bool = False
    syscalls: bool = False

    def missing(self) -> list[str]:
        """Describe the missing isolation; empty if the program could not reach anything of this user."""
        lacks = {
            "network access is not blocked": not (self.network or self.syscalls),
            "files that its user may read are visible": not self.files,
            "other processes are visible": not (self.processes and self.files),
            "the program runs as your own user": not self.user and not (self.files and self.processes),
        }
        return [words for words, lacking in lacks.items() if lacking]


@dataclass(frozen=True)
class SandboxResult:
    """Result of one program. Only `exit_code` is authoritative: negative for a signal, None if the program was stopped.

    `status` and the output are for people and for comparison. `truncated`: output beyond the limit was dropped."""

    status: Status
    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool = False
    isolation: Isolation = field(default_factory=Isolation)


def check_available() -> None:
    """Raise `BadInput` if this system has no sandbox."""
    if sys.platform != "linux":
        raise BadInput(f"sandbox: requires Linux, this is {sys.platform}")


async def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: SandboxConfig,
    arguments: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    channel: socket.socket | None = None,
) -> SandboxResult:
    """Run `code` as a program with `files` in its working directory. It inherits `channel` if given."""
    directory = tempfile.mkdtemp(prefix="outpace-sandbox-")
    try:
        run = _SandboxRun(directory, limits)
        return await run.execute({"program.py": code, **(files or {})}, ["program.py", *arguments], stdin, channel)
    finally:
        await asyncio.shield(asyncio.to_thread(remove_tree, directory))


class _SandboxRun:
    def __init__(self, directory: str, limits: SandboxConfig) -> None:
        self._directory = directory
        self._limits = limits
        self._uid = FIRST_UID + secrets.randbelow(UIDS)
        self._mark = new_mark()
        if os.geteuid() == 0:
            os.chown(directory, self._uid, self._uid)

    async def execute(
        self, files: dict[str, str], command: list[str], stdin: str, channel: socket.socket | None
    ) -> SandboxResult:
        spec = self._spec(files, command, [] if channel is None else [channel.fileno()])
        process, report_fd = await self._start(spec)
        out, err = BoundedOutput(self._limits.output_kb * 1024), BoundedOutput(self._limits.output_kb * 1024)
        pipes = [
            out.read(process.stdout),
            err.read(process.stderr),
            write_input(process.stdin, stdin.encode("utf-8", "replace")),
        ]
        tasks = [asyncio.create_task(pipe) for pipe in pipes]
        report: dict[str, Any] = {}
        try:
            report = await self._read_report(report_fd)
        finally:
            await asyncio.shield(self._finish(process, report, tasks))  # even if cancelled
        return _result(report, out, err)

    async def _read_report(self, report_fd: int) -> dict[str, Any]:
        """Read the report of supervisor and init, merged into one dict. At end of file both have exited."""
        stream, transport = await pipe_reader(report_fd)
        lines = bytearray()
        try:
            async with asyncio.timeout(self._limits.timeout_s + START_LIMIT_S):
                while chunk := await stream.read(CHUNK):
                    lines += chunk
        except TimeoutError:
            log.warning("a sandbox did not report in time and was killed")
        finally:
            transport.close()
        return {key: value for line in lines.splitlines() for key, value in json.loads(line).items()}

    def _spec(self, files: dict[str, str], command: list[str], channel: list[int]) -> dict[str, Any]:
        limits, home = self._limits, self._directory
        real = Path(os.path.realpath(sys.executable))
        return {
            "timeout_s": limits.timeout_s, "memory_mb": limits.memory_mb, "processes": limits.processes,
            "file_mb": limits.file_mb, "disk_mb": 4 * limits.file_mb + 16,
            "uid": self._uid, "caller": os.geteuid(), "directory": home, "files": files, "channel": channel,
            "python": sys.executable, "command": command, "filter": compile_filter().hex(),
            "readable": [sys.prefix, sys.base_prefix, sys.base_exec_prefix, str(real.parent.parent)],
            "environment": {
                "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home,
                MARK_VARIABLE: self._mark,
            },
        }  # fmt: skip

    async def _start(self, spec: dict[str, Any]) -> tuple[asyncio.subprocess.Process, int]:
        """Start the supervisor; return its process and the file descriptor of its report."""
        reading, writing = os.pipe()
        spec_fd = os.memfd_create("outpace-sandbox")
        try:
            os.write(spec_fd, json.dumps(spec).encode())
            os.lseek(spec_fd, 0, os.SEEK_SET)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(SANDBOX_SCRIPT), str(spec_fd), str(writing),
                pass_fds=[spec_fd, writing, *spec["channel"]], env={MARK_VARIABLE: self._mark}, cwd="/",
                start_new_session=True,
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
        """Clean up: afterwards no process or file of the program is left, however the run ended."""
        isolation = report.get("isolation", {})
        if not isolation.get("processes"):  # otherwise the kernel killed them with the namespace
            await asyncio.to_thread(_kill_all, process.pid, self._mark, self._uid)
        if not isolation.get("files") and os.geteuid() == 0:
            await asyncio.to_thread(remove_owned, self._uid)
        tasks = [*tasks, asyncio.create_task(_wait_for_exit(process))]
        await asyncio.wait(tasks, timeout=END_LIMIT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_exit(process: asyncio.subprocess.Process) -> None:
    await process.wait()  # also waits for its pipes to close


def _kill_all(leader: int, mark: str, uid: int) -> None:
    """Kill the process tree and every process of the run's user id, which a process cannot shed."""
    killed = end_process_tree(leader, mark)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == uid:
                process.kill()
    if not killed:
        log.warning("a sandboxed program left processes of group %d that cannot be killed", leader)


def _result(report: dict[str, Any], out: BoundedOutput, err: BoundedOutput) -> SandboxResult:
    if "failure" in report:
        raise SandboxFailed(f"the sandbox could not start the program: {report['failure']}")
    if "isolation" not in report or "syscalls" not in report:  # both are reported before the program starts
        raise SandboxFailed(f"the sandbox did not start: {one_line(err.text) or 'no output'}")
    isolation = Isolation(**report["isolation"], syscalls=report["syscalls"])
    exit_code = report.get("status")
    _warn_once(tuple(isolation.missing()))
    return SandboxResult(
        _status(exit_code, "timeout" in report, err.text),
        exit_code,
        out.text,
        err.text,
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
        log.warning("the sandbox is not fully isolated on this system: %s", "; ".join(missing))
