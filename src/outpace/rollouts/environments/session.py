"""Environment sessions: the environment of one episode, opened for a task and closed at its end.

    EnvironmentSessions.open(task) ─▶ kind ─▶ idle or new host ─▶ make ─▶ EnvironmentSession: reset, call, …, reward
                                                  ▲                                                     │
                                                  └──── close: host kept if usable, else ended ◀────────┘

    one kind, unnamed    rollout.environment, or Trainer(environment=Class)                every task uses it
    several, by name     environment.kinds, or Trainer(environment={"maze": Maze, …})      a task column selects one

A host (`outpace.rollouts.environments.host`) holds one instance of the user's class, in this process or in its own. A
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
from inspect import Parameter
from typing import Any, TypeVar

from outpace.config import Config
from outpace.config.sections import EnvironmentConfig, ToolsConfig
from outpace.errors import BadInput, OutpaceError, one_line
from outpace.models.chat import Schema
from outpace.rollouts.environments.child import UnusableResult
from outpace.rollouts.environments.host import EnvironmentHost, LocalEnvironmentHost, ProcessEnvironmentHost
from outpace.rollouts.tools.functions import ToolError, tools_of
from outpace.runtime.async_tools import TimeLimitError
from outpace.runtime.by_value import UserCodeSource, source_by_value
from outpace.runtime.references import (
    BY_KEYWORD,
    absolute_reference,
    closest_names,
    is_reference,
    load_function,
    parameters_of,
)
from outpace.runtime.registry import ENVIRONMENTS
from outpace.runtime.user_code import END_LIMIT_S, ProcessPool, UserCodeDied, UserCodeError
from outpace.types import Task

EnvironmentFactory = Callable[[], object]
"""An environment class, or a function that returns an instance."""
EnvironmentArgument = EnvironmentFactory | Mapping[str, EnvironmentFactory | str]
"""The `environment` argument of `Trainer`: a factory, or factories or references by kind."""

VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

SINGLE_KIND = ""
"""Name of the kind in a run with one environment for all tasks."""


class UnknownEnvironmentKind(OutpaceError):
    """A task names an environment kind that the run does not have."""


@dataclass(frozen=True)
class EnvironmentSource:
    """Factory of one kind: `reference`, or `factory` if that is empty. `setting` is the setting that named it."""

    setting: str
    reference: str = ""
    factory: EnvironmentFactory | None = None

    def load(self) -> EnvironmentFactory:
        """Return the factory for use in this process."""
        return self.factory if self.factory is not None else load_function(self.reference, self.setting)

    def source(self) -> UserCodeSource:
        """Return the source from which another process loads the factory."""
        return (
            UserCodeSource(absolute_reference(self.reference))
            if self.factory is None
            else source_by_value(self.factory)
        )


def resolve_kinds(config: Config, given: EnvironmentArgument | None = None) -> dict[str, EnvironmentSource]:
    """Return the environments of a run by kind; empty if none is configured."""
    named, kinds = config.rollout.environment_class, config.environment.kinds
    ways = {"rollout.environment": named, "environment.kinds": kinds, "environment": given}
    used = [way for way, value in ways.items() if value]
    if len(used) > 1:
        raise BadInput(f"{used[0]}: {used[1]} also names environments; keep only one of the two")
    if named is not None:
        return {SINGLE_KIND: _origin("rollout.environment", named)}
    if given is not None and not isinstance(given, Mapping):
        return {SINGLE_KIND: _origin("environment", given)}
    prefix = "environment.kinds." if kinds else "environment: "
    return {name: _origin(f"{prefix}{name}", one) for name, one in (kinds or given or {}).items()}


def check_kinds(origins: Mapping[str, EnvironmentSource], column: str, first: Task | None = None) -> None:
    """Raise `BadInput` for errors that can be found before the run starts; `first` is the first task."""
    for name, origin in origins.items():
        if not isinstance(name, str) or (not name and len(origins) > 1):
            raise BadInput(f"environment.kinds: {name!r} is not a valid name; use non-empty text")
        _check(origin)
    if origins and first is not None:
        try:
            kind = kind_of_task(first, origins, column)
        except UnknownEnvironmentKind as error:
            raise BadInput(f"environment.column: {error}") from None
        _check_columns(origins[kind], first)


def all_give_rewards(origins: Mapping[str, EnvironmentSource]) -> bool:
    """Return whether every kind has `get_reward`. Factories that are functions are assumed to."""
    factories = [origin.load() for origin in origins.values()]
    return all(not isinstance(factory, type) or hasattr(factory, "get_reward") for factory in factories)


def kind_of_task(task: Task, origins: Mapping[str, EnvironmentSource], column: str) -> str:
    """Return the kind that the task names; raises `UnknownEnvironmentKind` if the run does not have it."""
    if set(origins) == {SINGLE_KIND}:
        return SINGLE_KIND
    if column not in task.columns:
        raise UnknownEnvironmentKind(f"task {task.id} has no column {column} to name its environment")
    kind: Any = task.columns[column]
    if isinstance(kind, str) and kind in origins:
        return kind
    close = closest_names(kind, origins) if isinstance(kind, str) else []
    hint = f"did you mean {close[0]}?" if close else f"available: {', '.join(origins)}"
    shown = one_line(repr(kind), 60)
    raise UnknownEnvironmentKind(
        f"task {task.id}: {column} is {shown}, which is not an environment of this run; {hint}"
    )


def _origin(setting: str, given: EnvironmentFactory | str) -> EnvironmentSource:
    if isinstance(given, str) and is_reference(given):
        return EnvironmentSource(setting, given)
    if isinstance(given, str):
        return EnvironmentSource(setting, factory=ENVIRONMENTS.find(given, setting))
    if not callable(given):
        shown = one_line(repr(given), 60)
        raise BadInput(f"{setting}: {shown} is neither a class nor a function that returns an environment")
    return EnvironmentSource(setting, factory=given)


def _check_columns(origin: EnvironmentSource, task: Task) -> None:
    """Raise `BadInput` if `reset` requires columns that the tasks do not have."""
    reset = getattr(origin.load(), "reset", None)
    if not isinstance(origin.load(), type) or reset is None:
        return
    parameters = (parameters_of(reset) or [])[1:]  # without self
    required = {each.name for each in parameters if each.kind in BY_KEYWORD and each.default is each.empty}
    if missing := required - {*task.columns, "prompt"}:
        have = ", ".join(sorted(task.columns)) or "none"
        needs = ", ".join(sorted(missing))
        raise BadInput(f"{origin.setting}: reset requires {needs}; columns of the tasks: {have}")


def _check(origin: EnvironmentSource) -> None:
    factory = origin.load()
    if not isinstance(factory, type):  # a function's result is checked once it is called, without arguments
        if required := [
            p.name for p in parameters_of(factory) or [] if p.default is p.empty and p.kind not in VARIADIC
        ]:
            raise BadInput(
                f"{origin.setting}: {getattr(factory, '__name__', 'the function')} requires {', '.join(required)}; "
                "name a class with reset, or a function without arguments that returns an environment"
            )
        return
    if not callable(getattr(factory, "reset", None)):
        raise BadInput(f"{origin.setting}: {factory.__name__} has no method reset(**columns)")
    tools_of(factory, origin.setting)


log = logging.getLogger(__name__)

T = TypeVar("T")


class EnvironmentFailed(OutpaceError):
    """Creating an environment, its `reset` or its `get_reward` raised or returned an unusable value."""


class EnvironmentDied(EnvironmentFailed):
    """The environment's process has exited or is no longer usable; the episode cannot continue."""


class EnvironmentTimeout(EnvironmentFailed):
    """A method exceeded its timeout. The environment cannot be used any more."""


def reset_columns(task: Task) -> dict[str, Any]:
    """Return the values that `reset` may take by name: every column, and the prompt."""
    return {**task.columns, "prompt": task.prompt}


@contextmanager
def _errors_of(label: str, method: str, limit: str, timeout_s: float) -> Iterator[None]:
    """Convert failures to errors that name the environment and the method."""
    try:
        yield
    except TimeLimitError:
        raise EnvironmentTimeout(f"{label}: {method} took longer than {limit} = {timeout_s:g} s") from None
    except UserCodeDied as error:
        raise EnvironmentDied(f"the process of {label} {error} during {method}") from None
    except UserCodeError as error:
        raise EnvironmentFailed(f"{label}: {method} raised {error.said}") from error
    except UnusableResult as error:
        raise EnvironmentFailed(f"{label}: {error}") from error.__cause__


class EnvironmentSession:
    """The environment of one episode, over a host that has an instance.

    Each call runs in its own task: a cancelled call keeps running until its timeout, and the next call waits for it."""

    origin = "rollout.environment"
    ordered = True

    def __init__(
        self,
        host: EnvironmentHost,
        label: str,
        environment: EnvironmentConfig,
        tools: ToolsConfig,
        pool: ProcessPool[EnvironmentHost],
    ) -> None:
        self._host = host
        self._label = label
        self._timeout_s = environment.timeout_s
        self._call_timeout_s = tools.timeout_s
        self._pool = pool
        self._reuse = environment.reuse
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def tools(self) -> Mapping[str, Schema]:
        """Schema of each tool as shown to the model, by name."""
        return self._host.tools

    @property
    def instance(self) -> object | None:
        """The environment itself; None if it lives in another process."""
        return self._host.instance

    async def reset(self, columns: dict[str, Any]) -> str | None:
        """Start the episode with the columns that `reset` accepts; return an optional text to show to the model."""
        return await self._run_exclusively(
            lambda: self._host.reset(columns, self._timeout_s), self._method_errors("reset")
        )

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; return text or JSON-like values. The message of a `ToolError` is shown to the model."""
        if name not in self.tools:
            raise ToolError(f"unknown tool {name!r}; available tools: {', '.join(self.tools) or 'none'}")
        errors = _errors_of(self._label, name, "tools.timeout_s", self._call_timeout_s)
        return await self._run_exclusively(lambda: self._tool(name, arguments), errors)

    async def reward(self) -> float | None:
        """Return the environment's reward; None if it has no `get_reward`."""
        if not self._host.judges:
            return None
        return await self._run_exclusively(
            lambda: self._host.reward(self._timeout_s), self._method_errors("get_reward")
        )

    async def close(self) -> None:
        """End the session, whether or not the episode succeeded."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._cancel_running()
            if self._host.usable and not self._reuse:
                with self._method_errors("releasing the instance"):
                    await self._host.drop(self._timeout_s)
        except EnvironmentFailed as error:
            log.warning("%s", error)
        finally:
            self._pool.put_back(self._host)

    async def _tool(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            return await self._host.call(name, arguments, self._call_timeout_s)
        except UserCodeError as error:
            raise ToolError(f"{name} raised {error.said}") from error

    def _method_errors(self, method: str) -> AbstractContextManager[None]:
        return _errors_of(self._label, method, "environment.timeout_s", self._timeout_s)

    async def _run_exclusively(
        self, work: Callable[[], Coroutine[Any, Any, T]], errors: AbstractContextManager[None]
    ) -> T:
        async def locked() -> T:
            async with self._lock:
                if not self._host.usable:  # a method may still be running
                    why = "it has exited, or one of its calls has not returned"
                    raise EnvironmentDied(f"{self._label} is no longer usable: {why}")
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


class EnvironmentSessions:
    """Opens environment sessions for the episodes of one rollout worker, and pools their hosts."""

    def __init__(
        self,
        origins: Mapping[str, EnvironmentSource],
        environment: EnvironmentConfig,
        tools: ToolsConfig,
        spare: int = 1,
    ) -> None:
        """`spare` processes of each kind are started ahead, so that episodes do not wait for Python and imports."""
        self._origins = dict(origins)
        self._environment = environment
        self._tools = tools
        self._spare = spare if environment.isolation == "process" else 0
        self._pools = {name: ProcessPool(_host_factory(origin, environment)) for name, origin in origins.items()}

    async def open(self, task: Task) -> EnvironmentSession:
        """Open a session of the kind that the task names: an exclusive instance, not yet reset."""
        name = kind_of_task(task, self._origins, self._environment.column)
        label = f"environment {name}" if name else "the environment"
        pool, timeout_s = self._pools[name], self._environment.timeout_s
        with _errors_of(label, "creating it", "environment.timeout_s", timeout_s):
            host = pool.take()
            try:
                if not host.made:
                    await host.make(timeout_s)
            except BaseException:
                pool.put_back(host)
                raise
        pool.start_spares(self._spare)
        return EnvironmentSession(host, label, self._environment, self._tools, pool)

    async def close(self) -> None:
        """End all environments, including those of running episodes."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))


def _host_factory(origin: EnvironmentSource, environment: EnvironmentConfig) -> Callable[[], EnvironmentHost]:
    if environment.isolation == "process":
        source = origin.source()
        return lambda: ProcessEnvironmentHost(source, origin.setting, environment.memory_mb)
    factory = origin.load()
    return lambda: LocalEnvironmentHost(factory, origin.setting)
