"""Environments as an episode sees them: one stage each, opened for a task and closed in the end.

    Stages.open(task) ─▶ kind ─▶ an idle actor, or a new one ─▶ make ─▶ Stage: reset, call, call, …, reward
                                        ▲                                                        │
                                        └─────────── close: kept if it is sound, else ended ◀────┘

An actor holds one instance of the user's class: in this process (`actor`) or in one of its own (`process_actor`). A
stage says the same of both.

Invariants
- An instance belongs to one episode at a time, and its methods run one at a time.
- Every call ends at its time limit. What goes wrong ends as one of the errors below, with one line that names the kind
  and the method, and touches no other episode.
- With `reuse` an instance is used again, after another `reset`, only if every call of the last episode has come back.
- After `close` no process is left, nor a task or a descriptor.
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
    """Making an environment, its `reset` or its `get_reward` raised or gave something unusable."""


class EnvironmentDied(EnvironmentFailed):
    """The process of the environment has ended, or is not used any more; the episode cannot go on."""


class TimeLimit(EnvironmentFailed):
    """A method did not come back in time. An environment in a process is lost with it."""


class Stage(Protocol):
    """One environment, as its episode sees it."""

    @property
    def tools(self) -> Mapping[str, Schema]:
        """What the model is shown of each tool, by name."""
        ...

    @property
    def instance(self) -> object | None:
        """The environment itself; None where it lives in another process."""
        ...

    async def reset(self, columns: dict[str, Any]) -> str | None:
        """Begin: the environment takes the columns it wants, and may give a text to show."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """What the tool gave, as text or JSON-like values. `ToolError` is for the model to hear."""
        ...

    async def reward(self) -> float | None:
        """None: it has no `get_reward`."""
        ...

    async def close(self) -> None:
        """The episode is over, well or not."""
        ...


def columns_of(task: Task) -> dict[str, Any]:
    """What `reset` may ask for by name: every column, and the prompt."""
    return {**task.columns, "prompt": task.prompt}


@dataclass(frozen=True)
class StageLimits:
    """How long a method may take, in seconds."""

    timeout_s: float = 60.0
    call_timeout_s: float = 30.0


@dataclass(frozen=True)
class _Told:
    """Says what went wrong in the words of the episode."""

    label: str

    @contextmanager
    def of(self, method: str, limit: str, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except TimeLimitError:
            raise TimeLimit(f"{self.label}: {method} took longer than {limit} = {timeout_s:g} s") from None
        except ServantDied as error:
            raise EnvironmentDied(f"the process of {self.label} {error} in {method}") from None
        except CallRaised as error:
            raise EnvironmentFailed(f"{self.label}: {method} raised {error.said}") from error
        except Unusable as error:
            raise EnvironmentFailed(f"{self.label}: {error}") from error.__cause__


class _OpenStage:
    """`Stage`, over an actor that has an instance.

    A call runs in a task of its own: whoever gives it up leaves it running until its limit, and the next call waits
    for it."""

    def __init__(self, actor: Actor, told: _Told, limits: StageLimits, home: Household[Actor], reuse: bool) -> None:
        self._actor = actor
        self._told = told
        self._limits = limits
        self._home = home
        self._reuse = reuse
        self._turn = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def tools(self) -> Mapping[str, Schema]:
        return self._actor.tools

    @property
    def instance(self) -> object | None:
        return self._actor.instance

    async def reset(self, columns: dict[str, Any]) -> str | None:
        timeout_s = self._limits.timeout_s
        return await self._alone(lambda: self._actor.reset(columns, timeout_s), self._own("reset"))

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if name not in self.tools:
            raise ToolError(f"there is no tool {name!r}; there are {', '.join(self.tools) or 'none'}")
        timeout_s = self._limits.call_timeout_s
        telling = self._told.of(name, "tools.timeout_s", timeout_s)
        return await self._alone(lambda: self._tool(name, arguments, timeout_s), telling)

    async def reward(self) -> float | None:
        if not self._actor.judges:
            return None
        timeout_s = self._limits.timeout_s
        return await self._alone(lambda: self._actor.reward(timeout_s), self._own("get_reward"))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._give_up()
            if self._actor.usable and not self._reuse:
                with self._own("leaving it"):
                    await self._actor.leave(self._limits.timeout_s)
        except EnvironmentFailed as error:
            log.warning("%s", error)
        finally:
            self._home.put_back(self._actor)

    async def _tool(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        try:
            return await self._actor.call(name, arguments, timeout_s)
        except CallRaised as error:
            raise ToolError(f"{name} raised {error.said}") from error

    def _own(self, method: str) -> AbstractContextManager[None]:
        return self._told.of(method, "environment.timeout_s", self._limits.timeout_s)

    async def _alone(self, work: Callable[[], Coroutine[Any, Any, T]], telling: AbstractContextManager[None]) -> T:
        async def in_turn() -> T:
            async with self._turn:
                if not self._actor.usable:  # a method is still running, or nobody knows whether it is
                    why = "it has ended, or a call of it has not come back"
                    raise EnvironmentDied(f"{self._told.label} is not used any more: {why}")
                with telling:
                    return await work()

        task = asyncio.create_task(in_turn())
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: whoever waited for it may have given it up

    async def _give_up(self) -> None:
        """Nobody waits any more for what still runs. It may not heed: then the instance is lost, as `usable` says."""
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=END_LIMIT_S)


class Stages:
    """Where the episodes of one rollout worker get their environments."""

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
        """`column` names the kind of a task. `memory_mb` limits the address space of each process; `spare` of each kind
        are started ahead, because a Python with its imports takes a moment."""
        self._origins = dict(origins)
        self._column = column
        self._limits = limits or StageLimits()
        self._reuse = reuse
        apart = isolation == "process"
        self._spare = spare if apart else 0
        self._homes = {
            name: Household(_apart(origin, memory_mb) if apart else _here(origin)) for name, origin in origins.items()
        }

    @classmethod
    def of(cls, origins: Mapping[str, Origin], environment: EnvironmentConfig, tools: ToolsConfig) -> Stages:
        """As a config says."""
        limits = StageLimits(environment.timeout_s, tools.timeout_s)
        return cls(origins, environment.column, limits, environment.isolation, environment.reuse, environment.memory_mb)

    async def open(self, task: Task) -> Stage:
        """An environment of the kind that the task names: an instance that nobody else uses, not yet reset."""
        name = kind_of(task, self._origins, self._column)
        home, told, timeout_s = self._homes[name], _Told(_label(name)), self._limits.timeout_s
        with told.of("making it", "environment.timeout_s", timeout_s):
            actor = home.take()
            try:
                if not actor.made:
                    await actor.make(timeout_s)
            except BaseException:
                home.put_back(actor)
                raise
        home.stock(self._spare)
        return _OpenStage(actor, told, self._limits, home, self._reuse)

    async def close(self) -> None:
        """End all environments, also those of episodes under way."""
        await asyncio.gather(*(home.close() for home in self._homes.values()))


def _here(origin: Origin) -> Callable[[], Actor]:
    factory = origin.load()
    return lambda: LocalActor(factory, origin.setting)


def _apart(origin: Origin, memory_mb: int | None) -> Callable[[], Actor]:
    source = origin.source()
    return lambda: ProcessActor(source, origin.setting, memory_mb)


def _label(kind: str) -> str:
    return f"environment {kind}" if kind else "the environment"
