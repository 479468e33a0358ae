"""Parts as child processes of this machine.

Invariants
- A child that exits, for whatever reason, once it was ready and before `stop` is an item of `deaths` within moments,
  with the end of its log where that can be read. One that exits earlier is what `start` or `restart` raises.
- From its end until it is started again every call to it raises, and so does every call that was under way.
- `stop` asks a child to leave by closing its socket and then sends SIGKILL, waiting for each with a bound. Parts that
  call others stop before those: a connection that is lost while its caller lives is a fault, and logged as one. What
  the children have started is the guardian's to end: at once where one dies, with the run otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from outpace import errors
from outpace.runtime import stacks
from outpace.runtime.guardian import Guardian
from outpace.runtime.process import LogMode, PartProcess
from outpace.runtime.rpc import attach, close_proxy, detach, ping, proxy
from outpace.runtime.spec import PartSpec

P = TypeVar("P")

SPEAKING_S = 2.0
"""How long parts have to say what they are doing; as long again if they did not."""


@dataclass
class _Part:
    """What stays of a part while one process after the other is it."""

    spec: PartSpec
    environment: dict[str, str]
    process: PartProcess | None = None
    mark: str = ""  # by which the guardian finds what that process has started
    remote: object = None
    watcher: asyncio.Task[None] | None = None


def _is_called(part: _Part) -> tuple[bool, bool]:
    """False for parts that no other part calls, which sort first; of the others, those that call one themselves do."""
    return part.spec.listen is not None, not part.spec.peers


class LocalRuntime:
    """Starts parts as `python -m outpace.runtime.child`, watches them, starts them again, stops them."""

    def __init__(self, logs: Path, append: bool = False, guardian: Guardian | None = None) -> None:
        """`append` keeps what an earlier start of the same run has logged."""
        self._logs = logs
        self._append = append
        self._guardian = guardian
        self._parts: dict[str, _Part] = {}
        self._stopping = False
        self.deaths: asyncio.Queue[errors.PartFailed] = asyncio.Queue()

    async def start(self, protocol: type[P], spec: PartSpec, environment: dict[str, str]) -> P:
        part = self._parts[spec.name] = _Part(spec, environment)
        process = await self._launch(part, "ab" if self._append else "wb")
        remote = proxy(protocol, process.channel, spec.name)
        part.remote = remote
        self._watch(part, process)
        return remote

    async def restart(self, name: str) -> None:
        part = self._parts[name]
        if part.process is not None and not await part.process.gone():
            raise errors.PartFailed(name, "is still running and cannot be started again")
        part.spec = msgspec.structs.replace(part.spec, attempt=part.spec.attempt + 1)
        process = await self._launch(part, "ab")
        attach(part.remote, process.channel)
        self._watch(part, process)

    async def kill(self, name: str) -> None:
        process = self._parts[name].process
        if process is not None:
            process.kill()

    async def retire(self, name: str) -> None:
        part = self._parts.pop(name)
        await self._stop(part)
        self._sweep(part)

    async def ping(self, name: str, deadline_s: float) -> bool:
        return await ping(self._parts[name].remote, deadline_s)

    async def dump(self) -> str:
        processes = [part.process for part in self._parts.values() if part.process is not None]
        said = await asyncio.gather(*(process.speak(SPEAKING_S) for process in processes))
        return "\n\n".join([f"controller:\n{stacks.waits()}\n{stacks.tasks()}", *said])

    async def stop(self) -> None:
        self._stopping = True
        callers_first = sorted(self._parts.values(), key=_is_called)
        for _, parts in itertools.groupby(callers_first, key=_is_called):
            await asyncio.gather(*(self._stop(part) for part in parts))
        self._parts.clear()

    async def _launch(self, part: _Part, mode: LogMode) -> PartProcess:
        log = self._logs / f"{part.spec.name}.log"
        environment = part.environment
        if self._guardian is not None:
            part.mark = self._guardian.new_mark()
            environment = environment | self._guardian.marked(part.mark)
        process = part.process = await PartProcess.launch(part.spec, environment, log, mode)
        if self._guardian is not None:
            self._guardian.watch(part.mark, process.pid)
        try:
            await process.introduce()
        except BaseException:  # it was killed
            self._sweep(part)
            raise
        if self._stopping:
            raise errors.PartFailed(part.spec.name, "was stopped")
        return process

    def _watch(self, part: _Part, process: PartProcess) -> None:
        part.watcher = asyncio.create_task(self._tell_death(part, process), name=f"watch {part.spec.name}")

    async def _tell_death(self, part: _Part, process: PartProcess) -> None:
        death = await self._end_of(process, part.spec.name)
        if self._stopping:
            return
        try:
            self._sweep(part)
            detach(part.remote, death)
        finally:
            self.deaths.put_nowait(death)

    async def _end_of(self, process: PartProcess, name: str) -> errors.PartLost:
        """Always comes: a part that nobody watches would be missed by nobody."""
        try:
            return await process.ended()
        except Exception as error:  # the boundary of the task
            process.kill()
            text = "".join(traceback.format_exception(error))
            return errors.PartLost(name, f"could not be watched: {type(error).__name__}: {error}", text)

    def _sweep(self, part: _Part) -> None:
        if self._guardian is not None:
            self._guardian.sweep(part.mark)

    async def _stop(self, part: _Part) -> None:
        if part.watcher is not None:
            part.watcher.cancel()
        close_proxy(part.remote)
        if part.process is not None:
            await part.process.stop()
