"""Environment sessions: the environment of one episode, opened for a task and closed at its end; and the registry.

    EnvironmentSessions.open(task) ─▶ kind ─▶ idle or new host ─▶ make ─▶ EnvironmentSession: reset, call, …, reward
                                                  ▲                                                     │
                                                  └──── close: host kept if usable, else ended ◀────────┘

    one kind, unnamed    rollout.environment, or Trainer(environment=Class)                every task uses it
    several, by name     environment.kinds, or Trainer(environment={"maze": Maze, …})      a task column selects one

A host (`outpace.rollout.environments.host`) holds one instance of the user's class, in this process or in its own. A
session behaves the same for both.

Invariants
- An instance belongs to one episode at a time, and its methods run one at a time.
- Every call ends at its timeout. Failures become one of the errors below, with a one-line message that names the kind
  and the method; they do not affect other episodes.
- With `reuse`, an instance is used again, after another `reset`, only if every call of the last episode has returned.
- After `close` no process, task or file descriptor is left.
- Configuration errors that can be found before the run starts raise `BadInput`. A task that names an unknown kind later
  in the run fails its own episodes, with a message that names the task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from outpace.config.agents import EnvironmentConfig, ToolsConfig
from outpace.errors import OutpaceError
from outpace.models.chat import Schema
from outpace.rollouts.environments.actor import Actor, LocalActor
from outpace.rollouts.environments.instance import Unusable
from outpace.rollouts.environments.kinds import Origin, kind_of
from outpace.rollouts.environments.process_actor import ProcessActor
from outpace.rollouts.tools.functions import ToolError
from outpace.runtime.household import Household
from outpace.runtime.limits import TimeLimitError
from outpace.runtime.servant import END_LIMIT_S, CallRaised, ServantDied
from outpace.types import Task

log = logging.getLogger(__name__)

T = TypeVar("T")


class EnvironmentFailed(OutpaceError):
    """Creating an environment, its `reset` or its `get_reward` raised or returned an unusable value."""


class EnvironmentDied(EnvironmentFailed):
    """The environment's process has exited or is no longer usable; the episode cannot continue."""


class TimeLimit(EnvironmentFailed):
    """A method exceeded its timeout. An environment in a process is lost with it."""


class Stage(Protocol):
    """The environment of one episode."""

    @property
    def tools(self) -> Mapping[str, Schema]:
        """Schema of each tool as shown to the model, by name."""
        ...

    @property
    def instance(self) -> object | None:
        """The environment itself; None if it lives in another process."""
        ...

    async def reset(self, columns: dict[str, Any]) -> str | None:
        """Start the episode with the columns that `reset` accepts; return an optional text to show to the model."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; return text or JSON-like values. The message of a `ToolError` is shown to the model."""
        ...

    async def reward(self) -> float | None:
        """Return the environment's reward; None if it has no `get_reward`."""
        ...

    async def close(self) -> None:
        """End the session, whether or not the episode succeeded."""
        ...


def columns_of(task: Task) -> dict[str, Any]:
    """Return the values that `reset` may take by name: every column, and the prompt."""
    return {**task.columns, "prompt": task.prompt}


@dataclass(frozen=True)
class StageLimits:
    """Timeouts of environment methods and of tool calls, in seconds."""

    timeout_s: float = 60.0
    call_timeout_s: float = 30.0


@dataclass(frozen=True)
class _ErrorContext:
    """Converts failures to errors that name the environment and the method."""

    label: str

    @contextmanager
    def of(self, method: str, limit: str, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except TimeLimitError:
            raise TimeLimit(f"{self.label}: {method} took longer than {limit} = {timeout_s:g} s") from None
        except ServantDied as error:
            raise EnvironmentDied(f"the process of {self.label} {error} during {method}") from None
        except CallRaised as error:
            raise EnvironmentFailed(f"{self.label}: {method} raised {error.said}") from error
        except Unusable as error:
            raise EnvironmentFailed(f"{self.label}: {error}") from error.__cause__


class _OpenStage:
    """`EnvironmentSession` over a host that has an instance.

    Each call runs in its own task: a cancelled call keeps running until its timeout, and the next call waits for it."""

    def __init__(
        self, host: Actor, context: _ErrorContext, limits: StageLimits, pool: Household[Actor], reuse: bool
    ) -> None:
        self._host = host
        self._context = context
        self._limits = limits
        self._pool = pool
        self._reuse = reuse
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def tools(self) -> Mapping[str, Schema]:
        return self._host.tools

    @property
    def instance(self) -> object | None:
        return self._host.instance

    async def reset(self, columns: dict[str, Any]) -> str | None:
        timeout_s = self._limits.timeout_s
        return await self._run_exclusively(lambda: self._host.reset(columns, timeout_s), self._method_errors("reset"))

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if name not in self.tools:
            raise ToolError(f"unknown tool {name!r}; available tools: {', '.join(self.tools) or 'none'}")
        timeout_s = self._limits.call_timeout_s
        errors = self._context.of(name, "tools.timeout_s", timeout_s)
        return await self._run_exclusively(lambda: self._tool(name, arguments, timeout_s), errors)

    async def reward(self) -> float | None:
        if not self._host.judges:
            return None
        timeout_s = self._limits.timeout_s
        return await self._run_exclusively(lambda: self._host.reward(timeout_s), self._method_errors("get_reward"))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._cancel_running()
            if self._host.usable and not self._reuse:
                with self._method_errors("releasing the instance"):
                    await self._host.drop(self._limits.timeout_s)
        except EnvironmentFailed as error:
            log.warning("%s", error)
        finally:
            self._pool.put_back(self._host)

    async def _tool(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        try:
            return await self._host.call(name, arguments, timeout_s)
        except CallRaised as error:
            raise ToolError(f"{name} raised {error.said}") from error

    def _method_errors(self, method: str) -> AbstractContextManager[None]:
        return self._context.of(method, "environment.timeout_s", self._limits.timeout_s)

    async def _run_exclusively(
        self, work: Callable[[], Coroutine[Any, Any, T]], errors: AbstractContextManager[None]
    ) -> T:
        async def locked() -> T:
            async with self._lock:
                if not self._host.usable:  # a method may still be running
                    why = "it has exited, or one of its calls has not returned"
                    raise EnvironmentDied(f"{self._context.label} is no longer usable: {why}")
                with errors:
                    return await work()

        task = asyncio.create_task(locked())
        self._running.add(task)
        task.add_done_callback(self._task_done)
        return await asyncio.shield(task)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: the caller may have been cancelled

    async def _cancel_running(self) -> None:
        """Cancel running calls. If one does not stop in time, the host is no longer `usable`."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=END_LIMIT_S)


class Stages:
    """Opens environment sessions for the episodes of one rollout worker, and pools their hosts."""

    def __init__(
        self,
        origins: Mapping[str, Origin],
        column: str = "environment",
        limits: StageLimits | None = None,
        isolation: Literal["thread", "process"] = "thread",
        reuse: bool = False,
        memory_mb: int | None = None,
        spare: int = 1,
    ) -> None:
        """`column` is the task column that names the kind. `memory_mb` limits the address space of each process.
        `spare` processes of each kind are started ahead, to hide the start-up time of Python and its imports."""
        self._origins = dict(origins)
        self._column = column
        self._limits = limits or StageLimits()
        self._reuse = reuse
        in_process = isolation == "process"
        self._spare = spare if in_process else 0
        self._pools = {
            name: Household(_process_host(origin, memory_mb) if in_process else _local_host(origin))
            for name, origin in origins.items()
        }

    @classmethod
    def of(cls, origins: Mapping[str, Origin], environment: EnvironmentConfig, tools: ToolsConfig) -> Stages:
        """Build from the config."""
        limits = StageLimits(environment.timeout_s, tools.timeout_s)
        return cls(origins, environment.column, limits, environment.isolation, environment.reuse, environment.memory_mb)

    async def open(self, task: Task) -> Stage:
        """Open a session of the kind that the task names: an exclusive instance, not yet reset."""
        name = kind_of(task, self._origins, self._column)
        pool, context, timeout_s = self._pools[name], _ErrorContext(_label(name)), self._limits.timeout_s
        with context.of("creating it", "environment.timeout_s", timeout_s):
            host = pool.take()
            try:
                if not host.made:
                    await host.make(timeout_s)
            except BaseException:
                pool.put_back(host)
                raise
        pool.stock(self._spare)
        return _OpenStage(host, context, self._limits, pool, self._reuse)

    async def close(self) -> None:
        """End all environments, including those of running episodes."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))


def _local_host(origin: Origin) -> Callable[[], Actor]:
    factory = origin.load()
    return lambda: LocalActor(factory, origin.setting)


def _process_host(origin: Origin, memory_mb: int | None) -> Callable[[], Actor]:
    source = origin.source()
    return lambda: ProcessActor(source, origin.setting, memory_mb)


def _label(kind: str) -> str:
    return f"environment {kind}" if kind else "the environment"
