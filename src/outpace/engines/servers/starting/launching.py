"""A server that we have started: its process, all that descends from it, and its log.

    launch ─▶ lifeline ─▶ the server, leader of a session of its own ─▶ its workers

Invariants
- Nothing of it outlives `stop`, whatever state it is in: SIGTERM for its leader, then SIGKILL for the whole family.
- It does not outlive us. The kernel kills the leader with the process that started it; what the leader has started is
  in its session, of which the guardian knows (`outpace.runtime.guardian`), and is that one's to end.
- What it prints is in its log and nowhere else. A log that was there before is gone on with; `said` is of this start.
- Its temporary files and sockets are in a directory of its own, which `stop` removes.
- The shared memory that its processes map is recorded while they live, every few seconds and before they are killed;
  `stop` removes it. Where we are killed ourselves, the guardian or the next run does, by the same record.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil

from outpace.errors import BadInput, ServerGone
from outpace.runtime import guardian_child
from outpace.runtime.family import MARK, family_ended, how_it_ended, members
from outpace.runtime.guardian import SessionNote
from outpace.runtime.lifeline import launched
from outpace.runtime.scratch import temporary_directory, temporary_file

log = logging.getLogger(__name__)

LEAVE_S = 3.0
"""How long a server has to leave by itself: its door has five seconds for all of its own ending."""
GONE_S = 1.0
"""How long a killed process may take to be gone."""
RECORD_S = 10.0
"""Between two looks at the shared memory that it uses."""
MOST_READ = 50_000
"""Bytes of the end of a log that are looked at."""
HOST = "127.0.0.1"
LONGEST_SOCKET_DIRECTORY = 70
"""Characters. vLLM names a socket with 36 more, and the path of a socket has at most 107."""


def free_port() -> int:
    """One that nobody has just now. Somebody may take it before the server does: then try another."""
    with socket.socket() as any_free:
        any_free.bind((HOST, 0))
        port: int = any_free.getsockname()[1]
        return port


def refuse_taken(port: int) -> None:
    """Whoever hears at a port that was asked for would be taken for the server that is being started."""
    with socket.socket() as trying:
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended do not matter
        try:
            trying.bind((HOST, port))
        except OSError as error:
            raise BadInput(
                f"launch.port {port}: cannot be had ({error.strerror}); end who has it, or set launch.port = 0"
            ) from error


def port_was_taken(said: str) -> bool:
    """Whether a server that has ended says that it could not have its port."""
    said = said.lower()
    return "address already in use" in said or "errno 98" in said


@contextmanager
def keeping_log(log_path: Path) -> Iterator[None]:
    """The log goes with the directory that it lies in. An error that names it names a copy instead, which stays."""
    try:
        yield
    except (BadInput, ServerGone) as error:
        if str(log_path) not in str(error):
            raise
        raise type(error)(str(error).replace(str(log_path), str(_copy_of(log_path)))) from error


def _copy_of(log_path: Path) -> Path:
    """The log's own path where there is no room for a copy."""
    try:
        return Path(shutil.copyfile(log_path, temporary_file(log_path.stem, ".log")))
    except OSError as error:
        log.warning("%s is not kept: %s", log_path, error)
        return log_path


class ServerProcess:
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
        self._directory = directory
        self._mark = mark
        self._note = note
        self._log = log_path
        self._began = began  # bytes of the log that are of an earlier start
        self._cpu_s = 0.0
        self._stopping: asyncio.Task[None] | None = None
        self._recording = asyncio.create_task(self._record_often())

    @classmethod
    async def launch(cls, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> ServerProcess:
        """Start it with this environment, and a directory of its own inside TMPDIR. Raises `BadInput` where there is no
        such program or directory."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        mark = secrets.token_hex(16)
        directory = temporary_directory("server", env.get("TMPDIR"))
        try:
            env = {**_in_directory(await asyncio.to_thread(directory.__enter__), env), MARK: mark}
        except OSError as error:
            raise BadInput(f"TMPDIR: no directory can be made in {env.get('TMPDIR')}: {error.strerror}") from error
        reading, telling = os.pipe()
        try:
            with log_path.open("ab") as output:
                began = output.tell()  # before the server shares the file, and its position
                process = await asyncio.create_subprocess_exec(
                    *launched(argv, telling), pass_fds=[telling], env=env, start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                )  # fmt: skip
                server = cls(process, mark, SessionNote(process.pid, env), log_path, began, directory)
            os.close(telling)
            telling = -1
            await server._became(argv[0], reading)
            return server
        finally:
            for end in (reading, telling):
                if end >= 0:
                    os.close(end)

    async def _became(self, program: str, reading: int) -> None:
        """Wait until the launcher is the program."""
        try:
            number = await _first_bytes(reading)
        except BaseException:
            await self.stop()
            raise
        if number:
            await self.stop()
            raise BadInput(f"launch.python {program}: cannot be started: {os.strerror(int(number))}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.returncode is None

    @property
    def log_path(self) -> Path:
        return self._log

    async def ended(self) -> str:
        """Waits for its end; says how it was."""
        return how_it_ended(await self._process.wait())

    async def stop(self) -> None:
        """End it and all that it has started. Goes on when whoever waits is cancelled."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def record_shared_memory(self) -> None:
        """Note what its processes map now: they may be killed, all at once, at any moment."""
        self._note.record(await asyncio.to_thread(self._mapped))

    def _mapped(self) -> set[guardian_child.Segment]:
        return guardian_child.mapped(members(self.pid, self._mark))

    async def _record_often(self) -> None:
        while True:
            await self.record_shared_memory()
            await asyncio.sleep(RECORD_S)

    async def _stop(self) -> None:
        self.cpu_s()
        self._recording.cancel()
        await self.record_shared_memory()
        if self.lives:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await self._gone(LEAVE_S)
        gone = await family_ended(self.pid, self._mark)
        if not (await self._gone(GONE_S) and gone):
            log.warning("processes of the server %d cannot be ended", self.pid)
        await asyncio.to_thread(guardian_child.unlink, self._note.segments)
        await asyncio.to_thread(self._directory.__exit__, None, None, None)

    async def _gone(self, within_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._process.wait()
        return not self.lives

    def said(self) -> str:
        """The end of what it has printed, as far as that can be read."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._began, file.seek(0, os.SEEK_END) - MOST_READ))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.said().splitlines()[-lines:])

    def cpu_s(self) -> float:
        """Processor seconds of the server and all that it has started; never less than was said before."""
        with suppress(psutil.Error):
            leader = psutil.Process(self.pid)
            waited_for = leader.cpu_times().children_user + leader.cpu_times().children_system
            times = (_cpu_s(process) for process in [leader, *leader.children(recursive=True)])
            self._cpu_s = max(self._cpu_s, sum(times) + waited_for)
        return self._cpu_s


def _in_directory(directory: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The environment with a server's temporary files in this directory, and vLLM's sockets unless it places them."""
    sockets = {"VLLM_RPC_BASE_PATH": str(directory)} if len(str(directory)) <= LONGEST_SOCKET_DIRECTORY else {}
    return {**sockets, **env, "TMPDIR": str(directory)}


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):  # it has just ended
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


async def _first_bytes(descriptor: int) -> bytes:
    """What comes out of a pipe first; nothing where it closes before."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
    return os.read(descriptor, 16)
