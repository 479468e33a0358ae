"""Environment hosts: each holds one instance of an environment class and calls its methods.

    LocalEnvironmentHost     instance in this process: sync methods on threads, async methods on the event loop
    ProcessEnvironmentHost   instance in its own process (`outpace.rollout.environments.child`), which can be killed

Invariants of `LocalEnvironmentHost`
- Async methods run on the worker's event loop and must not block it.
- A thread cannot be killed: a method that hangs is abandoned, and its instance is not given to another episode.
- Every episode gets copies of the columns, so that changes to them stay within the episode.

Invariants of `ProcessEnvironmentHost`
- The process starts and imports the class as soon as the host exists; that time counts for no episode.
- Replies of the process are validated again on this side.
- After a call that has not returned, the process is not used again and is killed with everything it started.

`EnvironmentInstance` calls nothing: it returns a `MethodCall`, to be run on the right thread. Local and process hosts
share it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from outpace.models.chat import Schema
from outpace.rollouts.environments.instance import Act, Instance, as_it_is
from outpace.runtime import threads
from outpace.runtime.limits import TimeLimitError, is_ours, within
from outpace.runtime.servant import CallRaised
from outpace.runtime.servant_child import message_of


class Actor(Protocol):
    """Holder of one environment instance.

    `made`: there is an instance. `tools`: its tool schemas. `judges`: it has `get_reward`. `usable`: another episode
    may use the host. All calls may raise `CallRaised`, `ServantDied`, `TimeLimitError` and `UnusableResult`; `call`
    also `ToolError`."""

    made: bool
    tools: Mapping[str, Schema]
    judges: bool
    instance: object | None  # only if it lives in this process

    @property
    def usable(self) -> bool: ...

    async def make(self, timeout_s: float) -> None: ...

    async def reset(self, columns: dict[str, Any], timeout_s: float) -> str | None: ...

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any: ...

    async def reward(self, timeout_s: float) -> float: ...

    async def drop(self, timeout_s: float) -> None:
        """Drop the instance; the next episode creates another one."""
        ...

    async def end(self, patience_s: float = 0.0) -> None: ...


class LocalActor:
    def __init__(self, factory: Callable[[], object], setting: str) -> None:
        """`setting` is the setting that named the factory."""
        self._factory = factory
        self._setting = setting
        self._pending = 0
        self._instance: Instance | None = None
        self.instance: object | None = None
        self.made = False
        self.tools: Mapping[str, Schema] = {}
        self.judges = False

    @property
    def usable(self) -> bool:
        return self._pending == 0

    async def make(self, timeout_s: float) -> None:
        made = await self._perform(Act(self._factory, {}, as_it_is), timeout_s)
        self._instance, self.instance = Instance(made, self._setting), made
        self.tools = {name: tool.schema for name, tool in self._instance.tools.items()}
        self.judges = self._instance.judges
        self.made = True

    async def reset(self, columns: dict[str, Any], timeout_s: float) -> str | None:
        act = self._current.reset({name: _copied(value) for name, value in columns.items()})
        text: str | None = await self._perform(act, timeout_s)
        return text

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        return await self._perform(self._current.call(name, arguments), timeout_s)

    async def reward(self, timeout_s: float) -> float:
        reward: float = await self._perform(self._current.reward(), timeout_s)
        return reward

    async def drop(self, timeout_s: float) -> None:
        self._instance = self.instance = None
        self.made = False

    async def end(self, patience_s: float = 0.0) -> None:
        await self.drop(patience_s)

    @property
    def _current(self) -> Instance:
        assert self._instance is not None, "make() comes first"
        return self._instance

    async def _perform(self, act: Act, timeout_s: float) -> Any:
        """Run a method call. It is pending until it returns, and stays pending after a timeout or cancellation."""
        self._pending += 1
        try:
            returned = await within(timeout_s, threads.call(act.method, **act.arguments))
        except TimeLimitError:
            raise
        # Boundary to user code, which may raise anything, including SystemExit and CancelledError.
        except BaseException as error:
            if is_ours(error):
                raise
            self._pending -= 1
            raise CallRaised(type(error).__name__, message_of(error), "") from error
        self._pending -= 1
        return act.convert(returned)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # some objects cannot be copied: locks, connections
        return value
