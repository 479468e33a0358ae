"""MERGED"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import BinaryIO, Literal

import psutil

from outpace import errors
from outpace.runtime.child import STACKS, Broken, Hello
from outpace.runtime.family import how_it_ended
from outpace.runtime.rpc import Channel
from outpace.runtime.spec import BROKEN, PartSpec

STOP_DEADLINE_S = 5.0
LOG_TAIL_LINES = 30
MAX_LOG_READ = 20_000
"""Most bytes of a log that are read at a time."""

LogMode = Literal["ab", "wb"]


class PartProcess:
    """Parent side of one component process, from its start to its end, with its log."""

    def __init__(self, spec: PartSpec, process: asyncio.subprocess.Process, channel: Channel, log: Path) -> None:
        self._spec = spec
        self._process = process
        self._log = log
        self._ready = False
        self.channel = channel

    @classmethod
    async def launch(cls, spec: PartSpec, environment: dict[str, str], log: Path, mode: LogMode) -> PartProcess:
        """Start the process. It is not ready before `send_spec`."""
        ours, theirs = socket.socketpair()
        with theirs, _open(log, mode) as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "outpace.runtime.child", str(theirs.fileno()), str(os.getpid()),
                pass_fds=[theirs.fileno()], env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        return cls(spec, process, Channel(*await asyncio.open_connection(sock=ours)), log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.returncode is None

    async def introduce(self) -> None:
        """Send the spec and wait until the component is ready. Kills the process on failure."""
        try:
            await self._send_spec()
            self._ready = True
        finally:
            if not self._ready:
                self.kill()
                self.channel.close()

    async def _send_spec(self) -> None:
        name = self._spec.name
        try:
            async with asyncio.timeout(self._spec.start_s):
                await self.channel.send(self._spec)
                hello = await self.channel.receive(Hello)
        except TimeoutError:
            raise errors.PartFailed(name, f"was not ready within {self._spec.start_s:g} s", self.tail()) from None
        except OSError:
            hello = None
        if hello is None:
            raise errors.PartFailed(name, f"did not start: it {await self._describe_end()}", self.tail())
        if isinstance(hello, Broken):
            if hello.kind == errors.BadInput.__name__:
                raise errors.BadInput(hello.message)
            raise errors.PartFailed(name, f"{hello.kind}: {hello.message}", hello.traceback)

    async def ended(self) -> errors.PartLost:
        """Wait until the process ends and return the cause."""
        how, tail = how_it_ended(await self._process.wait()), self.tail()
        _, broken_down, why = tail.rpartition("\n")[2].partition(BROKEN)
        return errors.PartLost(self._spec.name, why if broken_down else how, tail)

    def kill(self) -> None:
        if self.lives:
            self._process.kill()

    async def stop(self) -> None:
        """Close the channel, which makes the process exit; kill it if it does not."""
        self.channel.close()
        if not await self.gone():
            self.kill()
            await self.gone()

    async def gone(self) -> bool:
        """Wait up to `STOP_DEADLINE_S` for the process to end. Returns whether it has."""
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def tail(self) -> str:
        """Return the end of its log, empty if there is none."""
        lines = self._log_since(self._log_size() - MAX_LOG_READ).splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    async def speak(self, within_s: float) -> str:
        """Return the waits, tasks and thread stacks that the process writes to its log on a signal."""
        state = self._state()
        if state != "running" or not self._ready:
            return f"{self._spec.name} (process {self.pid}) is {state}"
        length = self._log_size()
        self._process.send_signal(signal.SIGUSR2)
        await asyncio.sleep(within_s)
        if STACKS not in self._log_since(length):
            self._process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(within_s)
        dump = self._log_since(length) or "wrote nothing to its log, not even its thread stacks"
        return f"{self._spec.name} (process {self.pid}):\n{dump}"

    def _state(self) -> str:
        if not self.lives:
            return "dead"
        try:
            state = psutil.Process(self.pid).status()
        except psutil.Error:
            return "dead"
        named = {psutil.STATUS_STOPPED: "stopped by a signal", psutil.STATUS_ZOMBIE: "a zombie"}
        return named.get(state, "running") if self._ready else "starting"

    def _log_size(self) -> int:
        """Size in bytes, 0 if the log was removed: reporting a death must not depend on the log."""
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _log_since(self, length: int) -> str:
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, length))
                return log.read(MAX_LOG_READ).decode(errors="replace").strip()
        except OSError:
            return ""

    async def _describe_end(self) -> str:
        if not await self.gone():  # the socket closes shortly before the process ends
            return "closed its connection"
        return how_it_ended(await self._process.wait())


def _open(path: Path, mode: LogMode) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, mode)
