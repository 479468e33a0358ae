"""ServerProcess: a launched server with its descendants, log and shared memory. Also finds the cause of a failed start.

    launch ─▶ die_with_parent ─▶ server, leader of its own session ─▶ its workers

Invariants
- No process outlives `stop`, whatever its state: SIGTERM to the leader, then SIGKILL to the whole process tree.
- The server does not outlive us. The kernel kills the leader with its parent. The cleanup process
  (`outpace.runtime.cleanup`) has a record of the session and kills the descendants.
- Output goes only to the log. An existing log is appended to; `log_text` returns only output of this start.
- Temporary files and sockets are in a private directory, which `stop` removes.
- Shared memory mapped by the server's processes is recorded every few seconds and before they are killed; `stop`
  removes it. If we are killed, the cleanup process or the next run removes it using the same record.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil

from outpace.errors import BadInput, ServerGone, one_line
from outpace.runtime import cleanup_process
from outpace.runtime.child_process import describe_exit, end_program, start_program
from outpace.runtime.cleanup import SessionNote, temporary_directory, temporary_file
from outpace.runtime.process_table import MARK_VARIABLE, ProcessTable, new_mark, process_start_time

log = logging.getLogger(__name__)

TERMINATE_S = 3.0
"""Grace period after SIGTERM. The server engine has five seconds for its whole shutdown."""
GONE_S = 1.0
"""Time for a killed process to disappear."""
RECORD_S = 10.0
"""Interval at which the server's shared memory is recorded."""
LOG_TAIL_BYTES = 50_000
"""Bytes read from the end of a log."""
HOST = "127.0.0.1"
MAX_SOCKET_DIRECTORY = 70
"""Characters. vLLM appends 36 more for a socket name, and a socket path has at most 107."""


def free_port() -> int:
    """A port that is free now. Another process may take it before the server does: then try another."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port_free(port: int) -> None:
    """Raise `BadInput` if the port is in use: its owner would be mistaken for the server being launched."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise BadInput(
                f"launch.port {port}: not available ({error.strerror}); "
                "stop the process that uses it or set launch.port = 0"
            ) from error


def port_was_taken(log_text: str) -> bool:
    """Whether the log of a server says that its port was in use."""
    log_text = log_text.lower()
    return "address already in use" in log_text or "errno 98" in log_text


@contextmanager
def keep_log_copy(log_path: Path) -> Iterator[None]:
    """On an error that names the log, keep a copy of it and name that instead: its directory is about to be removed."""
    try:
        yield
    except (BadInput, ServerGone) as error:
        if str(log_path) not in str(error):
            raise
        raise type(error)(str(error).replace(str(log_path), str(_copy_log(log_path)))) from error


def _copy_log(log_path: Path) -> Path:
    """Copy the log to a temporary file; returns the original path if that fails."""
    try:
        return Path(shutil.copyfile(log_path, temporary_file(log_path.stem, ".log")))
    except OSError as error:
        log.warning("cannot keep a copy of %s: %s", log_path, error)
        return log_path


class ServerProcess:
    """A launched server: its process tree, log, temporary directory and shared memory."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        mark: str,
        note: SessionNote,
        log_path: Path,
        began: int,
        directory: AbstractContextManager[Path],
    ) -> None:
        self._process = process
        self._start = process_start_time(process.pid)
        self._directory = directory
        self._mark = mark
        self._note = note
        self._log = log_path
        self._began = began  # log bytes written before this start
        self._cpu_s = 0.0
        self._stopping: asyncio.Task[None] | None = None
        self._recording = asyncio.create_task(self._record_periodically())

    @classmethod
    async def launch(cls, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> ServerProcess:
        """Launch a server with this environment and a private directory inside TMPDIR. Raises `BadInput` if the program
        or TMPDIR does not exist."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        mark = new_mark(env.get(MARK_VARIABLE))
        directory = temporary_directory("server", env.get("TMPDIR"))
        try:
            env = {
                **_with_temporary_directory(await asyncio.to_thread(directory.__enter__), env),
                MARK_VARIABLE: mark,
            }
        except OSError as error:
            raise BadInput(f"TMPDIR: cannot create a directory in {env.get('TMPDIR')}: {error.strerror}") from error
        try:
            with log_path.open("ab") as output:
                began = output.tell()  # before the server shares the file and its position
                process = await start_program(
                    argv, env, mark, "launch.python", stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
                )
        except BaseException:
            await asyncio.to_thread(directory.__exit__, None, None, None)
            raise
        return cls(process, mark, SessionNote(process.pid, env), log_path, began, directory)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def log_path(self) -> Path:
        return self._log

    async def ended(self) -> str:
        """Wait for the process to exit. Returns a description of its exit status."""
        return describe_exit(await self._process.wait())

    async def stop(self) -> None:
        """Stop the server and all its descendants. Runs to its end even if the caller is cancelled."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def record_shared_memory(self) -> None:
        """Record the shared memory that its processes map now, since all of them may be killed at any moment."""
        self._note.record(await asyncio.to_thread(self._mapped_segments))

    def _mapped_segments(self) -> set[cleanup_process.Segment]:
        processes = ProcessTable().find({self._mark: {self.pid: self._start}})
        return cleanup_process.mapped_segments(processes[self._mark])

    async def _record_periodically(self) -> None:
        while True:
            await self.record_shared_memory()
            await asyncio.sleep(RECORD_S)

    async def _stop(self) -> None:
        self.cpu_s()
        self._recording.cancel()
        await self.record_shared_memory()
        if self.alive:
            with suppress(ProcessLookupError, TimeoutError):
                self._process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(TERMINATE_S):
                    await self._process.wait()
        await end_program(self._process, self._mark, "server", GONE_S)
        await asyncio.to_thread(cleanup_process.unlink_segments, self._note.segments)
        await asyncio.to_thread(self._directory.__exit__, None, None, None)

    def log_text(self) -> str:
        """The end of its output since this start; empty if it cannot be read."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._began, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def cpu_s(self) -> float:
        """CPU seconds of the server and its descendants; never decreases."""
        with suppress(psutil.Error):
            leader = psutil.Process(self.pid)
            waited_for = leader.cpu_times().children_user + leader.cpu_times().children_system
            times = (_cpu_s(process) for process in [leader, *leader.children(recursive=True)])
            self._cpu_s = max(self._cpu_s, sum(times) + waited_for)
        return self._cpu_s


def _with_temporary_directory(directory: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Set TMPDIR to this directory, and vLLM's socket path unless `env` sets it or the path is too long."""
    sockets = {"VLLM_RPC_BASE_PATH": str(directory)} if len(str(directory)) <= MAX_SOCKET_DIRECTORY else {}
    return {**sockets, **env, "TMPDIR": str(directory)}


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):  # it has just exited
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


_PREFIX = re.compile(r"^(\(\S+ pid=\d+\)\s*)?((ERROR|WARNING|INFO|CRITICAL) [\d:. -]+(\[[^\]]*\] )?)?")
"""vLLM's log prefix: process, level, time, source location."""

_RAISED = re.compile(r"^[\w.]*(Error|Exception): \S")
_ARGUMENT_ERROR = re.compile(r"(^|: )error: (?P<said>.+)|^Value error, (?P<value>.+)")
"""Errors of the command-line parser and of rejected settings; the most specific messages."""

_DIED = re.compile(r"worker ?proc\b.* died unexpectedly", re.IGNORECASE)
"""A worker that died without a message, e.g. by a native crash. Later exceptions are only consequences."""

_FOLLOW_UPS = ("see root cause above", "failed core proc", "validation error for", "enginedeaderror", "cancellederror")
"""Follow-up messages of other processes, which do not name the cause."""

_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"unrecognized arguments", "this server version does not have that flag; check launch.args"),
    (r"invalid choice|expected (one|at least one) argument|invalid .* value", "check launch.args"),
    (r"free memory on device", "lower launch.gpu_memory: another process uses the rest"),
    (r"out of memory|outofmemory|can't allocate|bad_alloc", "lower launch.gpu_memory, engine.slots or engine.context"),
    (r"kv ?cache.* (needed|larger than|is not enough)|no available memory for the cache blocks",
     "lower engine.context or raise launch.gpu_memory (on a CPU: launch.env VLLM_CPU_KVCACHE_SPACE)"),
    (r"max_model_len .*greater than", "lower engine.context"),
    (_DIED.pattern, "see its log; try another model.dtype or launch.env"),
    (r"address already in use", "set another launch.port, or 0 for a free port"),
    (r"no module named", "set launch.python to the Python of an environment that has the server installed"),
    (r"not a local folder|does not appear to have a file|is not a valid model identifier", "check model.path"),
    (r"unknown .*backend|invalid weight transfer backend|outpace.*not (found|registered)",
     "the server cannot import outpace's plugin; remove PYTHONPATH from launch.env"),
)  # fmt: skip


def cause_of(log_text: str) -> str:
    """The log line that explains why a server exited, with a remedy if one is known; empty if there is none."""
    lines = [_PREFIX.sub("", line).strip() for line in log_text.splitlines()]
    lines = [line for line in lines if line and not any(follow_up in line.lower() for follow_up in _FOLLOW_UPS)]
    raised = [line for line in lines if _RAISED.match(line)]
    died = [line for line in lines if _DIED.search(line)]
    return _with_remedy(one_line(_argument_error(lines) or (died[:1] or raised or lines or [""])[-1]))


def last_line(log_text: str) -> str:
    """The last non-empty log line without its prefix, to show progress."""
    lines = [_PREFIX.sub("", line).strip() for line in log_text.splitlines()]
    return one_line(next((line for line in reversed(lines) if line), ""), 120)


def _argument_error(lines: list[str]) -> str:
    for line in reversed(lines):
        if match := _ARGUMENT_ERROR.search(line):
            return match["said"] or match["value"]
    return ""


def _with_remedy(line: str) -> str:
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, line, re.IGNORECASE):
            return f"{line}; {remedy}"
    return line
