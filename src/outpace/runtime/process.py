"""One process that is a part, as its parent sees it: from its start to its end, with its log.

What it prints is its log. On SIGUSR2 it writes there what it is doing, if its event loop still runs; on SIGUSR1 the
stacks of its threads, even where the loop is stuck (`outpace.runtime.child`).
"""

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
MOST_DUMPED = 20_000
"""Bytes of its log that are read at a time."""

LogMode = Literal["ab", "wb"]


class PartProcess:
    def __init__(self, spec: PartSpec, process: asyncio.subprocess.Process, channel: Channel, log: Path) -> None:
        self._spec = spec
        self._process = process
        self._log = log
        self._ready = False
        self.channel = channel

    @classmethod
    async def launch(cls, spec: PartSpec, environment: dict[str, str], log: Path, mode: LogMode) -> PartProcess:
        """Start it; it is not ready before `introduce`."""
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
        """Tell it what it is, and wait until it can be called. If it cannot, it is killed."""
        try:
            await self._become()
            self._ready = True
        finally:
            if not self._ready:
                self.kill()
                self.channel.close()

    async def _become(self) -> None:
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
            raise errors.PartFailed(name, f"did not start: it {await self._how_it_ended()}", self.tail())
        if isinstance(hello, Broken):
            if hello.kind == errors.BadInput.__name__:
                raise errors.BadInput(hello.message)
            raise errors.PartFailed(name, f"{hello.kind}: {hello.message}", hello.traceback)

    async def ended(self) -> errors.PartLost:
        """Waits for its end; says how it was."""
        how, said = how_it_ended(await self._process.wait()), self.tail()
        _, broken_down, why = said.rpartition("\n")[2].partition(BROKEN)
        return errors.PartLost(self._spec.name, why if broken_down else how, said)

    def kill(self) -> None:
        if self.lives:
            self._process.kill()

    async def stop(self) -> None:
        """A closed channel asks it to leave; after that it is killed."""
        self.channel.close()
        if not await self.gone():
            self.kill()
            await self.gone()

    async def gone(self) -> bool:
        """Gives it a while to end; whether it has."""
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def tail(self) -> str:
        """The end of its log, as far as there is one."""
        lines = self._said_since(self._logged() - MOST_DUMPED).splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    async def speak(self, within_s: float) -> str:
        """What it is doing, by its own account where it still gives one."""
        state = self._state()
        if state != "running" or not self._ready:
            return f"{self._spec.name} (process {self.pid}) is {state}"
        length = self._logged()
        self._process.send_signal(signal.SIGUSR2)
        await asyncio.sleep(within_s)
        if STACKS not in self._said_since(length):
            self._process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(within_s)
        said = self._said_since(length) or "says nothing, not even where its threads are"
        return f"{self._spec.name} (process {self.pid}):\n{said}"

    def _state(self) -> str:
        if not self.lives:
            return "dead"
        try:
            state = psutil.Process(self.pid).status()
        except psutil.Error:
            return "dead"
        named = {psutil.STATUS_STOPPED: "stopped by a signal", psutil.STATUS_ZOMBIE: "a zombie"}
        return named.get(state, "running") if self._ready else "starting"

    def _logged(self) -> int:
        """Bytes. A log that somebody has removed counts as an empty one: what is to be told does not depend on it."""
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _said_since(self, length: int) -> str:
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, length))
                return log.read(MOST_DUMPED).decode(errors="replace").strip()
        except OSError:
            return ""

    async def _how_it_ended(self) -> str:
        if not await self.gone():  # a socket closes a moment before its process ends
            return "closed its connection"
        return how_it_ended(await self._process.wait())


def _open(path: Path, mode: LogMode) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, mode)
