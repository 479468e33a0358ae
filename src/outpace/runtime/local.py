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
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec
import psutil

from outpace import errors
from outpace.runtime import diagnostics
from outpace.runtime.child import STATE_REPORT_HEADER, StartupReply
from outpace.runtime.child_process import ChildProcess, describe_exit
from outpace.runtime.cleanup import CleanupProcess
from outpace.runtime.components import BROKEN_PREFIX, ComponentSpec
from outpace.runtime.process_tree import child_environment
from outpace.runtime.rpc import RpcFailure, attach_proxy, close_proxy, detach_proxy, ping_proxy, proxy

STOP_DEADLINE_S = 5.0
LOG_TAIL_LINES = 30
MAX_LOG_READ = 20_000
"""Most bytes of a log that are read at a time."""

LogMode = Literal["ab", "wb"]


class ComponentProcess:
    """Parent side of one component process, from its start to its end, with its log."""

    def __init__(self, spec: ComponentSpec, child: ChildProcess, log: Path) -> None:
        self._spec = spec
        self._log = log
        self._ready = False
        self.child = child

    @classmethod
    async def launch(
        cls, spec: ComponentSpec, environment: dict[str, str], log: Path, mode: LogMode
    ) -> ComponentProcess:
        """Start the process. It is not ready before `send_spec`."""
        with _open(log, mode) as output:
            child = await ChildProcess.start("outpace.runtime.child", environment=environment, output=output)
        return cls(spec, child, log)

    async def send_spec(self) -> None:
        """Send the spec and wait until the component is ready. Kills the process on failure."""
        try:
            await self._send_spec()
            self._ready = True
        finally:
            if not self._ready:
                self.child.kill()
                self.child.channel.close()

    async def _send_spec(self) -> None:
        name = self._spec.name
        try:
            async with asyncio.timeout(self._spec.start_s):
                await self.child.channel.send(self._spec)
                hello = await self.child.channel.receive(StartupReply)
        except TimeoutError:
            raise errors.ComponentFailed(name, f"was not ready within {self._spec.start_s:g} s", self.tail()) from None
        except OSError:
            hello = None
        if hello is None:
            end = await self.child.describe_end(STOP_DEADLINE_S)
            raise errors.ComponentFailed(name, f"did not start: it {end}", self.tail())
        if isinstance(hello, RpcFailure):
            raise hello.error(name)

    async def death(self) -> errors.ComponentLost:
        """Wait until the process ends and return the cause."""
        how, tail = describe_exit(await asyncio.shield(self.child.ended)), self.tail()
        _, broken_down, why = tail.rpartition("\n")[2].partition(BROKEN_PREFIX)
        return errors.ComponentLost(self._spec.name, why if broken_down else how, tail)

    async def stop(self) -> None:
        """Close the channel, which makes the process exit; kill it if it does not."""
        self.child.channel.close()
        if not await self.child.gone(STOP_DEADLINE_S):
            self.child.kill()
            await self.child.gone(STOP_DEADLINE_S)

    def tail(self) -> str:
        """Return the end of its log, empty if there is none."""
        lines = self._log_since(self._log_size() - MAX_LOG_READ).splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    async def dump_state(self, within_s: float) -> str:
        """Return the waits, tasks and thread stacks that the process writes to its log on a signal."""
        state = self._state()
        if state != "running" or not self._ready:
            return f"{self._spec.name} (process {self.child.pid}) is {state}"
        length = self._log_size()
        self.child.send_signal(signal.SIGUSR2)
        await asyncio.sleep(within_s)
        if STATE_REPORT_HEADER not in self._log_since(length):
            self.child.send_signal(signal.SIGUSR1)
            await asyncio.sleep(within_s)
        dump = self._log_since(length) or "wrote nothing to its log, not even its thread stacks"
        return f"{self._spec.name} (process {self.child.pid}):\n{dump}"

    def _state(self) -> str:
        if not self.child.lives:
            return "dead"
        try:
            state = psutil.Process(self.child.pid).status()
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


def _open(path: Path, mode: LogMode) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, mode)


P = TypeVar("P")

DUMP_S = 2.0
"""How long a process may take to write its state to its log; the same time again after SIGUSR1."""


@dataclass
class _Component:
    """State of a component that is kept across restarts of its process."""

    spec: ComponentSpec
    process: ComponentProcess | None = None
    mark: str = ""  # by which the cleanup process finds what this process has started
    remote: object = None
    watcher: asyncio.Task[None] | None = None


def _stop_order(component: _Component) -> tuple[bool, bool]:
    """Sort key: first the components that no other calls, then those that call others, then the rest."""
    return component.spec.listen is not None, not component.spec.peers


def _environment(spec: ComponentSpec) -> dict[str, str]:
    gpus = spec.resources.gpus
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return child_environment(spec.resources.cpus) | visible | spec.environment


class LocalRuntime:
    """Starts components as `python -m outpace.runtime.child`, watches, restarts and stops them."""

    def __init__(self, logs: Path, append: bool = False, cleanup: CleanupProcess | None = None) -> None:
        """`append` keeps the logs of an earlier start of the same run."""
        self._logs = logs
        self._append = append
        self._cleanup = cleanup
        self._components: dict[str, _Component] = {}
        self._stopping = False
        self.deaths: asyncio.Queue[errors.ComponentFailed] = asyncio.Queue()

    async def start(self, protocol: type[P], spec: ComponentSpec) -> P:
        component = self._components[spec.name] = _Component(spec)
        process = await self._launch(component, "ab" if self._append else "wb")
        remote = proxy(protocol, process.child.channel, spec.name)
        component.remote = remote
        self._watch(component, process)
        return remote

    def spec(self, name: str) -> ComponentSpec:
        return self._components[name].spec

    async def restart(self, name: str) -> None:
        component = self._components[name]
        if component.process is not None and not await component.process.child.gone(STOP_DEADLINE_S):
            raise errors.ComponentFailed(name, "is still running and cannot be restarted")
        component.spec = msgspec.structs.replace(component.spec, attempt=component.spec.attempt + 1)
        process = await self._launch(component, "ab")
        attach_proxy(component.remote, process.child.channel)
        self._watch(component, process)

    async def kill(self, name: str) -> None:
        process = self._components[name].process
        if process is not None:
            process.child.kill()

    async def retire(self, name: str) -> None:
        component = self._components.pop(name)
        await self._stop(component)
        self._sweep(component)

    async def ping(self, name: str, deadline_s: float) -> bool:
        return await ping_proxy(self._components[name].remote, deadline_s)

    async def dump(self) -> str:
        processes = [component.process for component in self._components.values() if component.process is not None]
        dumps = await asyncio.gather(*(process.dump_state(DUMP_S) for process in processes))
        return "\n\n".join([f"controller:\n{diagnostics.describe_waits()}\n{diagnostics.describe_tasks()}", *dumps])

    async def stop(self) -> None:
        self._stopping = True
        callers_first = sorted(self._components.values(), key=_stop_order)
        for _, components in itertools.groupby(callers_first, key=_stop_order):
            await asyncio.gather(*(self._stop(component) for component in components))
        self._components.clear()

    async def _launch(self, component: _Component, mode: LogMode) -> ComponentProcess:
        log = self._logs / f"{component.spec.name}.log"
        environment = _environment(component.spec)
        if self._cleanup is not None:
            component.mark = self._cleanup.new_mark()
            environment = environment | self._cleanup.marked(component.mark)
        process = component.process = await ComponentProcess.launch(component.spec, environment, log, mode)
        try:
            await process.send_spec()
        except BaseException:  # `send_spec` has killed it
            self._sweep(component)
            raise
        if self._stopping:
            raise errors.ComponentFailed(component.spec.name, "was stopped")
        return process

    def _watch(self, component: _Component, process: ComponentProcess) -> None:
        name = component.spec.name
        component.watcher = asyncio.create_task(self._report_death(component, process), name=f"watch {name}")

    async def _report_death(self, component: _Component, process: ComponentProcess) -> None:
        death = await self._wait_for_end(process, component.spec.name)
        if self._stopping:
            return
        try:
            self._sweep(component)
            detach_proxy(component.remote, death)
        finally:
            self.deaths.put_nowait(death)

    async def _wait_for_end(self, process: ComponentProcess, name: str) -> errors.ComponentLost:
        """Wait until the process ends. If waiting fails, kill it and report that: its death must never go unnoticed."""
        try:
            return await process.death()
        except Exception as error:  # task boundary
            process.child.kill()
            text = "".join(traceback.format_exception(error))
            return errors.ComponentLost(name, f"could not be monitored: {type(error).__name__}: {error}", text)

    def _sweep(self, component: _Component) -> None:
        if self._cleanup is not None:
            self._cleanup.sweep(component.mark)

    async def _stop(self, component: _Component) -> None:
        if component.watcher is not None:
            component.watcher.cancel()
        close_proxy(component.remote)
        if component.process is not None:
            await component.process.stop()
