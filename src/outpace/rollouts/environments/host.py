"""Environment hosts: each holds one instance of an environment class and calls its methods.

    LocalEnvironmentHost     instance in this process: sync methods on threads, async methods on the event loop
    ProcessEnvironmentHost   instance in its own process (`outpace.rollouts.environments.child`), which can be killed

Invariants of `LocalEnvironmentHost`
- Async methods run on the worker's event loop and must not block it.
- A thread cannot be killed: a method that hangs is abandoned, and its instance is not given to another episode.
- Every episode gets copies of the columns, so that changes to them stay within the episode.

Invariants of `ProcessEnvironmentHost`
- The process starts and imports the class as soon as the host exists; `timeout_s` excludes that time.
- Replies of the process are validated again on this side.
- If a call does not return, the process is not used again and is killed with everything it started.
"""

from __future__ import annotations

import asyncio
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from outpace.errors import BadInput
from outpace.models.chat import Schema
from outpace.monitoring.metric_table import forward_log
from outpace.rollouts.environments.child import (
    MAX_RESULT,
    CallRejected,
    CallResult,
    Environment,
    EnvironmentInstance,
    MethodCall,
    UnusableResult,
    unchanged,
)
from outpace.rollouts.tools.functions import ToolError
from outpace.runtime import async_tools
from outpace.runtime.async_tools import TimeLimitError, is_own_cancellation, with_time_limit
from outpace.runtime.by_value import UserCodeSource, encode_values
from outpace.runtime.rpc import RpcFailure, qualified_name
from outpace.runtime.user_code import LOAD_LIMIT_S, UserCodeDied, UserCodeError, UserCodeProcess

T = TypeVar("T")


class EnvironmentHost(ABC):
    """Holder of one environment instance.

    `made`: there is an instance. `tools`: its tool schemas. `judges`: it has `get_reward`. `usable`: another episode
    may use the host. All calls may raise `UserCodeError`, `UserCodeDied`, `TimeLimitError` and `UnusableResult`; `call`
    also `ToolError`."""

    def __init__(self) -> None:
        self.made = False
        self.tools: Mapping[str, Schema] = {}
        self.judges = False
        self.instance: object | None = None  # only if it lives in this process

    @property
    @abstractmethod
    def usable(self) -> bool: ...

    @abstractmethod
    async def make(self, timeout_s: float) -> None: ...

    @abstractmethod
    async def reset(self, columns: dict[str, Any], timeout_s: float) -> str | None: ...

    @abstractmethod
    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any: ...

    @abstractmethod
    async def reward(self, timeout_s: float) -> float: ...

    @abstractmethod
    async def drop(self, timeout_s: float) -> None:
        """Drop the instance; the next episode creates another one."""

    @abstractmethod
    async def end(self, patience_s: float = 0.0) -> None: ...


class LocalEnvironmentHost(EnvironmentHost):
    def __init__(self, factory: Callable[[], object], setting: str) -> None:
        """`setting` is the setting that named the factory."""
        super().__init__()
        self._factory = factory
        self._setting = setting
        self._pending = 0
        self._instance: EnvironmentInstance | None = None

    @property
    def usable(self) -> bool:
        return self._pending == 0

    async def make(self, timeout_s: float) -> None:
        made = await self._perform(MethodCall(self._factory, {}, unchanged), timeout_s)
        self._instance, self.instance = EnvironmentInstance(made, self._setting), made
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
    def _current(self) -> EnvironmentInstance:
        assert self._instance is not None, "make() comes first"
        return self._instance

    async def _perform(self, act: MethodCall, timeout_s: float) -> Any:
        """Run a method call. It is pending until it returns, and stays pending after a timeout or cancellation."""
        self._pending += 1
        try:
            returned = await with_time_limit(timeout_s, async_tools.call_user_function(act.method, **act.arguments))
        except TimeLimitError:
            raise
        # Boundary to user code, which may raise anything, including SystemExit and CancelledError.
        except BaseException as error:
            if is_own_cancellation(error):
                raise
            self._pending -= 1
            raise UserCodeError(RpcFailure.of(0, error)) from error
        self._pending -= 1
        return act.convert(returned)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # some objects cannot be copied: locks, connections
        return value


class ProcessEnvironmentHost(EnvironmentHost):
    def __init__(self, source: UserCodeSource, setting: str, memory_mb: int | None = None) -> None:
        """`setting` is the setting that named the class."""
        super().__init__()
        self._process = UserCodeProcess(
            "outpace.rollouts.environments.child", Environment, "an environment", memory_mb, max_answer=2 * MAX_RESULT
        )
        self._loading = asyncio.create_task(self._load(source, setting))

    @property
    def usable(self) -> bool:
        if not self._loading.done():
            return True
        return not self._loading.cancelled() and self._loading.exception() is None and self._process.usable

    async def make(self, timeout_s: float) -> None:
        await asyncio.shield(self._loading)
        try:
            instance = await self._call(lambda environment: environment.make(), timeout_s)
        except UserCodeError as error:
            raise _as_bad_input(error) from error
        self.tools, self.judges, self.made = instance.tools, instance.judges, True

    async def reset(self, columns: dict[str, Any], timeout_s: float) -> str | None:
        try:
            body, by_value = encode_values(columns)
        except BadInput as error:
            raise UnusableResult(f"requires environment.isolation = thread: {error}") from error
        text = _value(await self._call(lambda environment: environment.reset(body, by_value), timeout_s))
        if text is not None and not isinstance(text, str):
            raise self._process.broken()
        return text

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        try:
            body, by_value = encode_values(arguments)
        except BadInput:
            raise ToolError(f"{name}: the arguments are nested too deeply") from None
        result = await self._call(lambda environment: environment.call(name, body, by_value), timeout_s)
        if isinstance(result, CallRejected):
            raise ToolError(result.message)
        forward_log(result.logged, dropped=result.dropped)
        return result.value

    async def reward(self, timeout_s: float) -> float:
        reward = _value(await self._call(lambda environment: environment.reward(), timeout_s))
        if not isinstance(reward, float) or not math.isfinite(reward):
            raise self._process.broken()
        return reward

    async def drop(self, timeout_s: float) -> None:
        self.made = False
        await self._call(lambda environment: environment.drop(), timeout_s)

    async def end(self, patience_s: float = 0.0) -> None:
        self._loading.cancel()
        await asyncio.wait({self._loading})
        if not self._loading.cancelled():
            self._loading.exception()  # mark as retrieved: `make` has raised it
        await self._process.end(patience_s)

    async def _load(self, source: UserCodeSource, setting: str) -> None:
        try:
            await self._process.call(
                lambda environment: environment.load(source.reference, source.code, setting), LOAD_LIMIT_S
            )
        except TimeLimitError:
            raise UserCodeDied("did not start and import the class in time") from None
        except UserCodeError as error:
            raise _as_bad_input(error) from error

    async def _call(self, request: Callable[[Environment], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        if not self.usable:
            raise UserCodeDied("is no longer usable")
        return await self._process.call(request, timeout_s)


def _value(result: CallResult) -> Any:
    if isinstance(result, CallRejected):
        raise UnusableResult(result.message)
    forward_log(result.logged, dropped=result.dropped)
    return result.value


def _as_bad_input(error: UserCodeError) -> Exception:
    """Turn a `BadInput` raised in the process back into a `BadInput` here."""
    return BadInput(error.message) if error.kind == qualified_name(BadInput) else error
