"""Components as child processes on this machine.

A component's output goes to its log. On SIGUSR2 it writes its waits, tasks and thread stacks there, if its event loop
still runs; on SIGUSR1 only the thread stacks, even if the loop is stuck (`outpace.runtime.child`).

Invariants
- A child that exits for any reason after it was ready and before `stop` is added to `deaths` promptly, with the end of
  its log if that is readable. If it exits earlier, `start` or `restart` raises.
- From its exit until its restart, every call to it raises, including the calls in flight.
- `stop` first closes a child's socket, then sends SIGKILL; each wait has a timeout. Components that call others stop
  before those: a connection lost while its caller is alive is logged as a fault. The cleanup process ends what the
  children have started: immediately when a child dies, otherwise at the end of the run.
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

DUMP_S = 2.0
"""How long a process may take to write its state to its log; the same time again after SIGUSR1."""


@dataclass
class _Component:
    """State of a component that is kept across restarts of its process."""

    spec: PartSpec
    environment: dict[str, str]
    process: PartProcess | None = None
    mark: str = ""  # by which the cleanup process finds what this process has started
    remote: object = None
    watcher: asyncio.Task[None] | None = None


def _stop_order(component: _Component) -> tuple[bool, bool]:
    """Sort key: first the components that no other calls, then those that call others, then the rest."""
    return component.spec.listen is not None, not component.spec.peers


class LocalRuntime:
    """Starts components as `python -m outpace.runtime.child`, watches, restarts and stops them."""

    def __init__(self, logs: Path, append: bool = False, guardian: Guardian | None = None) -> None:
        """`append` keeps the logs of an earlier start of the same run."""
        self._logs = logs
        self._append = append
        self._cleanup = guardian
        self._components: dict[str, _Component] = {}
        self._stopping = False
        self.deaths: asyncio.Queue[errors.PartFailed] = asyncio.Queue()

    async def start(self, protocol: type[P], spec: PartSpec, environment: dict[str, str]) -> P:
        component = self._components[spec.name] = _Component(spec, environment)
        process = await self._launch(component, "ab" if self._append else "wb")
        remote = proxy(protocol, process.channel, spec.name)
        component.remote = remote
        self._watch(component, process)
        return remote

    async def restart(self, name: str) -> None:
        component = self._components[name]
        if component.process is not None and not await component.process.gone():
            raise errors.PartFailed(name, "is still running and cannot be restarted")
        component.spec = msgspec.structs.replace(component.spec, attempt=component.spec.attempt + 1)
        process = await self._launch(component, "ab")
        attach(component.remote, process.channel)
        self._watch(component, process)

    async def kill(self, name: str) -> None:
        process = self._components[name].process
        if process is not None:
            process.kill()

    async def retire(self, name: str) -> None:
        component = self._components.pop(name)
        await self._stop(component)
        self._sweep(component)

    async def ping(self, name: str, deadline_s: float) -> bool:
        return await ping(self._components[name].remote, deadline_s)

    async def dump(self) -> str:
        processes = [component.process for component in self._components.values() if component.process is not None]
        dumps = await asyncio.gather(*(process.speak(DUMP_S) for process in processes))
        return "\n\n".join([f"controller:\n{stacks.waits()}\n{stacks.tasks()}", *dumps])

    async def stop(self) -> None:
        self._stopping = True
        callers_first = sorted(self._components.values(), key=_stop_order)
        for _, components in itertools.groupby(callers_first, key=_stop_order):
            await asyncio.gather(*(self._stop(component) for component in components))
        self._components.clear()

    async def _launch(self, component: _Component, mode: LogMode) -> PartProcess:
        log = self._logs / f"{component.spec.name}.log"
        environment = component.environment
        if self._cleanup is not None:
            component.mark = self._cleanup.new_mark()
            environment = environment | self._cleanup.marked(component.mark)
        process = component.process = await PartProcess.launch(component.spec, environment, log, mode)
        if self._cleanup is not None:
            self._cleanup.watch(component.mark, process.pid)
        try:
            await process.introduce()
        except BaseException:  # `send_spec` has killed it
            self._sweep(component)
            raise
        if self._stopping:
            raise errors.PartFailed(component.spec.name, "was stopped")
        return process

    def _watch(self, component: _Component, process: PartProcess) -> None:
        name = component.spec.name
        component.watcher = asyncio.create_task(self._report_death(component, process), name=f"watch {name}")

    async def _report_death(self, component: _Component, process: PartProcess) -> None:
        death = await self._wait_for_end(process, component.spec.name)
        if self._stopping:
            return
        try:
            self._sweep(component)
            detach(component.remote, death)
        finally:
            self.deaths.put_nowait(death)

    async def _wait_for_end(self, process: PartProcess, name: str) -> errors.PartLost:
        """Wait until the process ends. If waiting fails, kill it and report that: its death must never go unnoticed."""
        try:
            return await process.ended()
        except Exception as error:  # task boundary
            process.kill()
            text = "".join(traceback.format_exception(error))
            return errors.PartLost(name, f"could not be monitored: {type(error).__name__}: {error}", text)

    def _sweep(self, component: _Component) -> None:
        if self._cleanup is not None:
            self._cleanup.sweep(component.mark)

    async def _stop(self, component: _Component) -> None:
        if component.watcher is not None:
            component.watcher.cancel()
        close_proxy(component.remote)
        if component.process is not None:
            await component.process.stop()
