"""Components as child processes on this machine, or as processes that connect to this one (`outpace.runtime.remote`).

A component's output goes to its log. On SIGUSR2 it writes its waits, tasks and thread stacks there, if its event loop
still runs; on SIGUSR1 only the thread stacks, even if the loop is stuck (`outpace.runtime.child`).

Invariants
- A child that exits for any reason after it was ready and before `stop` is added to `deaths` promptly, with the end of
  its log if that is readable. If it exits earlier, `start` or `restart` raises.
- From its exit until its restart, every call to it raises, including the calls in flight.
- A process that has connected ends when its connection closes. A lost connection counts as its death.
- `stop` first closes a child's socket, then sends SIGKILL; each wait has a timeout. Callers stop before the components
  they call: a connection lost while its caller is alive is logged as a fault. The cleanup process ends what the
  children have started: immediately when a child dies, otherwise at the end of the run.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import traceback
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import msgspec
import psutil

from outpace import errors
from outpace.runtime import diagnostics
from outpace.runtime.child import STATE_REPORT_HEADER, StartupReply
from outpace.runtime.child_process import ChildProcess
from outpace.runtime.cleanup import CleanupProcess
from outpace.runtime.components import BROKEN_PREFIX, ComponentSpec
from outpace.runtime.process_tree import child_environment
from outpace.runtime.remote import RemoteProcess, RemoteProcesses, StartOrder
from outpace.runtime.rpc import DEFAULT_DEADLINE_S, END, RpcCall, RpcFailure, RpcProxy, close_proxy

STOP_DEADLINE_S = 5.0
LOG_TAIL_LINES = 30
MAX_LOG_READ = 20_000
"""Maximum bytes of a log to read at a time."""

DUMP_S = 2.0
"""How long a process may take to write its state to its log; the same time again after SIGUSR1."""

P = TypeVar("P")


class Component:
    """Parent side of one component, across restarts of its process."""

    def __init__(
        self, spec: ComponentSpec, log: Path, cleanup: CleanupProcess | None, remote: RemoteProcesses | None
    ) -> None:
        self.spec = spec
        self.child: ChildProcess | RemoteProcess | None = None
        self.remote: RpcProxy | None = None
        self.watcher: asyncio.Task[None] | None = None
        self._log = log
        self._cleanup = cleanup
        self._remote = remote
        self._mark = ""  # by which the cleanup process finds what the current process has started
        self._ready = False

    async def start_process(self, append: bool) -> ChildProcess | RemoteProcess:
        """Start its process and wait until the component is ready. Kills the process on failure."""
        self._ready = False
        child: ChildProcess | RemoteProcess
        with self._open_log(append) as output:
            if self.spec.remote is None:
                child = await self._start_child(output)
            else:
                child = await self._start_remote(self.spec.remote)
        self.child = child
        try:
            await self._send_spec(child)
            self._ready = True
        finally:
            if not self._ready:
                child.kill()
                child.channel.close()
                self.sweep()
        return child

    async def _start_child(self, output: BinaryIO) -> ChildProcess:
        environment = _environment(self.spec)
        if self._cleanup is not None:
            self._mark = self._cleanup.new_mark()
            environment |= self._cleanup.marked(self._mark)
        return await ChildProcess.start("outpace.runtime.child", self.spec.name, environment=environment, output=output)

    async def _start_remote(self, number: int) -> RemoteProcess:
        assert self._remote is not None, "a runtime with remote components accepts their processes"
        process = await self._remote.take(self.spec.name, number)
        needed = self.spec.resources
        start = StartOrder(needed.cpus, needed.gpus or [], self.spec.environment, str(self._log.absolute()))
        process.channel.send(start)
        return process

    def _open_log(self, append: bool) -> BinaryIO:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return open(self._log, "ab" if append else "wb")

    async def _send_spec(self, child: ChildProcess | RemoteProcess) -> None:
        name = self.spec.name
        try:
            async with asyncio.timeout(self.spec.start_s):
                child.channel.send(self.spec)
                hello = await child.channel.receive(StartupReply)
        except TimeoutError:
            raise errors.ComponentFailed(name, f"was not ready within {self.spec.start_s:g} s", self._tail()) from None
        if hello is None:
            end = await child.describe_end(STOP_DEADLINE_S)
            raise errors.ComponentFailed(name, f"did not start: it {end}", self._tail())
        if isinstance(hello, RpcFailure):
            raise hello.error(name)

    async def death(self) -> errors.ComponentLost:
        """Wait until the process ends and return the cause."""
        assert self.child is not None, "it has been started"
        how, tail = await self.child.wait_end(), self._tail()
        _, broken_down, why = tail.rpartition("\n")[2].partition(BROKEN_PREFIX)
        return errors.ComponentLost(self.spec.name, why if broken_down else how, tail)

    def sweep(self) -> None:
        """End everything that the component's process has started on this machine."""
        if self._cleanup is not None and self._mark:
            self._cleanup.sweep(self._mark)

    async def stop(self, finished: bool = False) -> None:
        """Close the channel, which makes the process exit; kill it if it does not. `finished`: tell it that the run has
        ended."""
        if self.watcher is not None:
            self.watcher.cancel()
        if self.child is not None and self._ready and finished:
            self.child.channel.send(RpcCall(0, END, b""))
        close_proxy(self.remote)
        if self.child is None:
            return
        self.child.channel.close()
        if not await self.child.gone(STOP_DEADLINE_S):
            self.child.kill()
            await self.child.gone(STOP_DEADLINE_S)

    async def dump_state(self, child: ChildProcess | RemoteProcess) -> str:
        """Return the waits, tasks and thread stacks that its process writes to its log on a signal."""
        if isinstance(child, RemoteProcess):
            return f"{self.spec.name}: {child.where}; SIGUSR2 there writes its stacks to {self._log}"
        state = self._state(child)
        if state != "running":
            return f"{self.spec.name} (process {child.pid}) is {state}"
        length = self._log_size()
        child.send_signal(signal.SIGUSR2)
        await asyncio.sleep(DUMP_S)
        if STATE_REPORT_HEADER not in self._log_since(length):
            child.send_signal(signal.SIGUSR1)
            await asyncio.sleep(DUMP_S)
        dump = self._log_since(length) or "wrote nothing to its log, not even its thread stacks"
        return f"{self.spec.name} (process {child.pid}):\n{dump}"

    def _state(self, child: ChildProcess) -> str:
        if not child.lives:
            return "dead"
        try:
            state = psutil.Process(child.pid).status()
        except psutil.Error:
            return "dead"
        named = {psutil.STATUS_STOPPED: "stopped by a signal", psutil.STATUS_ZOMBIE: "a zombie"}
        return named.get(state, "running") if self._ready else "starting"

    def _tail(self) -> str:
        """Return the end of its log, empty if there is none."""
        lines = self._log_since(self._log_size() - MAX_LOG_READ).splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

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


def _stop_order(component: Component) -> tuple[bool, bool]:
    """Sort key: first the components that no other calls, then those that call others, then the rest."""
    return component.spec.listen is not None, not component.spec.peers


def _environment(spec: ComponentSpec) -> dict[str, str]:
    gpus = spec.resources.gpus
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return child_environment(spec.resources.cpus) | visible | spec.environment


class LocalRuntime:
    """Starts components as `python -m outpace.runtime.child`, watches, restarts and stops them."""

    def __init__(
        self,
        logs: Path,
        append: bool = False,
        cleanup: CleanupProcess | None = None,
        remote: RemoteProcesses | None = None,
    ) -> None:
        """`append` keeps the logs of an earlier start of the same run. `remote` accepts the processes of components
        that are not children."""
        self._logs = logs
        self._append = append
        self._cleanup = cleanup
        self._remote = remote
        self._components: dict[str, Component] = {}
        self._stopping = False
        self.deaths: asyncio.Queue[errors.ComponentFailed] = asyncio.Queue()

    async def start(self, protocol: type[P], spec: ComponentSpec) -> P:
        log = self._logs / f"{spec.name}.log"
        component = self._components[spec.name] = Component(spec, log, self._cleanup, self._remote)
        child = await self._start_process(component, self._append)
        component.remote = RpcProxy(protocol, child.channel, spec.name, DEFAULT_DEADLINE_S)
        return cast(P, component.remote)

    def spec(self, name: str) -> ComponentSpec:
        return self._components[name].spec

    async def restart(self, name: str) -> None:
        component = self._components[name]
        if component.child is not None and not await component.child.gone(STOP_DEADLINE_S):
            raise errors.ComponentFailed(name, "is still running and cannot be restarted")
        component.spec = msgspec.structs.replace(component.spec, attempt=component.spec.attempt + 1)
        child = await self._start_process(component, append=True)
        assert component.remote is not None, "it was started before"
        component.remote.attach(child.channel)

    async def kill(self, name: str) -> None:
        child = self._components[name].child
        if child is not None:
            child.kill()

    async def retire(self, name: str) -> None:
        component = self._components.pop(name)
        await component.stop()
        component.sweep()

    async def ping(self, name: str, deadline_s: float) -> bool:
        remote = self._components[name].remote
        return remote is None or await remote.ping(deadline_s)

    async def dump(self) -> str:
        started = [(each, each.child) for each in self._components.values() if each.child is not None]
        dumps = await asyncio.gather(*(component.dump_state(child) for component, child in started))
        return "\n\n".join([f"controller:\n{diagnostics.describe_waits()}\n{diagnostics.describe_tasks()}", *dumps])

    async def stop(self, finished: bool = False) -> None:
        self._stopping = True
        callers_first = sorted(self._components.values(), key=_stop_order)
        for _, components in itertools.groupby(callers_first, key=_stop_order):
            await asyncio.gather(*(component.stop(finished) for component in components))
        self._components.clear()

    async def _start_process(self, component: Component, append: bool) -> ChildProcess | RemoteProcess:
        child = await component.start_process(append)
        if self._stopping:
            raise errors.ComponentFailed(component.spec.name, "was stopped")
        component.watcher = asyncio.create_task(self._report_death(component), name=f"watch {component.spec.name}")
        return child

    async def _report_death(self, component: Component) -> None:
        """Wait until the process ends. If waiting fails, kill it and report that: its death must never go unnoticed."""
        child = component.child
        assert child is not None, "it has been started"
        try:
            death = await component.death()
        except Exception as error:  # task boundary
            child.kill()
            text = "".join(traceback.format_exception(error))
            why = f"could not be monitored: {type(error).__name__}: {error}"
            death = errors.ComponentLost(component.spec.name, why, text)
        if self._stopping:
            return
        try:
            component.sweep()
            assert component.remote is not None, "it is set as soon as the component is ready"
            component.remote.detach(death)
        finally:
            self.deaths.put_nowait(death)
