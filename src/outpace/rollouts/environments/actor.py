"""Who holds an instance of an environment class, and the one that holds it in this process.

Invariants of `LocalActor`
- Plain methods run on threads, asynchronous ones on the event loop, which they must not block.
- A thread cannot be killed: a method that hangs is abandoned, and no other episode gets its instance.
- Every episode gets copies of the columns, so that one which changes its own changes nobody else's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

from outpace.models.chat import Schema
from outpace.rollouts.environments.instance import Act, Instance, as_it_is
from outpace.rollouts.environments.kinds import Factory
from outpace.runtime import threads
from outpace.runtime.limits import TimeLimitError, is_ours, within
from outpace.runtime.servant import CallRaised
from outpace.runtime.servant_child import message_of


class Actor(Protocol):
    """All calls may raise `CallRaised`, `ServantDied`, `TimeLimitError` and `Unusable`, `call` also `ToolError`.

    `made` says whether there is an instance, `tools` and `judges` are what it has; `usable` says whether another
    episode may have the actor."""

    made: bool
    tools: Mapping[str, Schema]
    judges: bool
    instance: object | None  # where it lives in this process

    @property
    def usable(self) -> bool: ...

    async def make(self, timeout_s: float) -> None: ...

    async def reset(self, columns: dict[str, Any], timeout_s: float) -> str | None: ...

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any: ...

    async def reward(self, timeout_s: float) -> float: ...

    async def leave(self, timeout_s: float) -> None:
        """Let the instance go; the next episode makes another one."""
        ...

    async def end(self, patience_s: float = 0.0) -> None: ...


class LocalActor:
    def __init__(self, factory: Factory, setting: str) -> None:
        """`setting` is where the factory was named."""
        self._factory = factory
        self._setting = setting
        self._lost = 0
        self._instance: Instance | None = None
        self.instance: object | None = None
        self.made = False
        self.tools: Mapping[str, Schema] = {}
        self.judges = False

    @property
    def usable(self) -> bool:
        return self._lost == 0

    async def make(self, timeout_s: float) -> None:
        made = await self._perform(Act(self._factory, {}, as_it_is), timeout_s)
        self._instance, self.instance = Instance(made, self._setting), made
        self.tools = {name: tool.schema for name, tool in self._instance.tools.items()}
        self.judges = self._instance.judges
        self.made = True

    async def reset(self, columns: dict[str, Any], timeout_s: float) -> str | None:
        act = self._present.reset({name: _own(value) for name, value in columns.items()})
        text: str | None = await self._perform(act, timeout_s)
        return text

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        return await self._perform(self._present.call(name, arguments), timeout_s)

    async def reward(self, timeout_s: float) -> float:
        reward: float = await self._perform(self._present.reward(), timeout_s)
        return reward

    async def leave(self, timeout_s: float) -> None:
        self._instance = self.instance = None
        self.made = False

    async def end(self, patience_s: float = 0.0) -> None:
        await self.leave(patience_s)

    @property
    def _present(self) -> Instance:
        assert self._instance is not None, "an instance is made first"
        return self._instance

    async def _perform(self, act: Act, timeout_s: float) -> Any:
        """A call counts as lost until it has come back; one that was given up stays so."""
        self._lost += 1
        try:
            returned = await within(timeout_s, threads.call(act.method, **act.arguments))
        except TimeLimitError:
            raise
        # The boundary to the user's code, which may raise anything: it may try to exit, and say that it was cancelled.
        except BaseException as error:
            if is_ours(error):
                raise
            self._lost -= 1
            raise CallRaised(type(error).__name__, message_of(error), "") from error
        self._lost -= 1
        return act.understood(returned)


def _own(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # copying asks the object, which may refuse: a lock, a connection
        return value
