"""Entry point of an environment process: `python -m outpace.rollouts.environments.child FD PARENT MEMORY_MB`.

Calls are served as in every user-code process (`outpace.runtime.user_code_child`). The process holds one instance at a
time.

Invariants
- Sync methods run on the main thread. Async methods run there too, on an event loop that lives as long as the instance;
  tasks they started keep running between calls, unless a sync method blocks the thread.
- A tool result is sent unchanged if msgpack can encode it, else as text.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import msgspec

from outpace.errors import BadInput, one_line, with_article
from outpace.monitoring.metric_table import Logged, MetricLog, collecting
from outpace.rollouts.tools.functions import Tool, ToolError, result_text, tools_of
from outpace.runtime.by_value import UserCodeSource, decode_values, encode_plain
from outpace.runtime.references import accepted_parameters
from outpace.runtime.user_code_child import serve_user_code
from outpace.runtime.wire import encodable_text


class UnusableResult(Exception):
    """A method returned an unusable value; the message names both."""


@dataclass(frozen=True)
class MethodCall:
    """A call `method(**arguments)` to be made. `convert` checks and converts its result, awaited if needed."""

    method: Callable[..., Any]
    arguments: dict[str, Any]
    convert: Callable[[Any], Any]


class EnvironmentInstance:
    """One environment object. Its methods return a `MethodCall` for the caller to run on the right thread."""

    def __init__(self, made: Any, setting: str) -> None:
        """Raises `BadInput` if `made` is not an environment; `setting` is the setting that named it."""
        if not callable(getattr(made, "reset", None)):
            raise BadInput(f"{setting}: {type(made).__name__} has no method reset(**columns)")
        self._made = made
        self.tools = _tools(type(made), setting)
        self.judges = hasattr(made, "get_reward")

    def reset(self, columns: dict[str, Any]) -> MethodCall:
        """Pass the columns that `reset` names, or all if it takes `**columns`."""
        names = accepted_parameters(self._made.reset, columns)
        return MethodCall(self._made.reset, {name: columns[name] for name in columns if name in names}, _text)

    def call(self, name: str, arguments: dict[str, Any]) -> MethodCall:
        """Raises `ToolError` for invalid arguments."""
        return MethodCall(getattr(self._made, name), self.tools[name].checked(arguments), unchanged)

    def reward(self) -> MethodCall:
        return MethodCall(self._made.get_reward, {}, _number)


def unchanged(returned: Any) -> Any:
    return returned


_tools_by_class: dict[type, dict[str, Tool]] = {}


def _tools(environment: type, setting: str) -> dict[str, Tool]:
    """Return the tools of a class, cached: building their schemas is too slow to repeat per episode."""
    if environment not in _tools_by_class:
        _tools_by_class[environment] = tools_of(environment, setting)
    return _tools_by_class[environment]


def _text(returned: Any) -> str | None:
    if returned is not None and not isinstance(returned, str):
        raise UnusableResult(f"reset returned {with_article(type(returned).__name__)}, not text or None")
    return returned


def _number(returned: Any) -> float:
    try:
        number = float(returned) if isinstance(returned, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UnusableResult(f"get_reward returned {one_line(repr(returned), 60)}, not a finite number")
    return number


MAX_RESULT = 1 << 25
"""Maximum size of one result in bytes."""


class InstanceMade(msgspec.Struct):
    tools: dict[str, dict[str, Any]]
    judges: bool


class CallReturned(msgspec.Struct, tag="returned", omit_defaults=True):
    """`logged`: metrics that the method reported."""

    value: Any
    logged: list[Logged] = []
    dropped: int = 0


class CallRejected(msgspec.Struct, tag="rejected"):
    """Invalid arguments, or an unusable result."""

    message: str


CallResult = CallReturned | CallRejected


class Environment(Protocol):
    """The calls that an environment process serves. Values are encoded as in `outpace.runtime.by_value`."""

    async def load(self, reference: str, code: bytes, setting: str) -> None:
        """Load the class; see `outpace.runtime.by_value.UserCodeSource`."""
        ...

    async def make(self) -> InstanceMade: ...

    async def reset(self, columns: bytes, by_value: bool) -> CallResult: ...

    async def call(self, name: str, arguments: bytes, by_value: bool) -> CallResult: ...

    async def reward(self) -> CallResult: ...

    async def drop(self) -> None:
        """Drop the instance, and its event loop with everything still running on it."""
        ...


class EnvironmentServer:
    """Implements `Environment` with blocking methods. Holds the class, and an instance and an event loop once they
    exist."""

    def __init__(self) -> None:
        self._factory: Callable[[], Any] | None = None
        self._setting = ""
        self._instance: EnvironmentInstance | None = None
        self._runner: asyncio.Runner | None = None

    def load(self, reference: str, code: bytes, setting: str) -> None:
        self._setting = setting
        self._factory = UserCodeSource(reference, code).load(setting)

    def make(self) -> InstanceMade:
        assert self._factory is not None, "load() comes first"
        self.drop()
        self._instance = EnvironmentInstance(self._run(self._factory), self._setting)
        tools = {name: tool.schema for name, tool in self._instance.tools.items()}
        return InstanceMade(tools, self._instance.judges)

    def reset(self, columns: bytes, by_value: bool) -> CallResult:
        return self._result("reset", lambda instance: instance.reset(decode_values(columns, by_value)))

    def call(self, name: str, arguments: bytes, by_value: bool) -> CallResult:
        return self._result(name, lambda instance: instance.call(name, decode_values(arguments, by_value)))

    def reward(self) -> CallResult:
        return self._result("get_reward", lambda instance: instance.reward())

    def drop(self) -> None:
        self._instance = None
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def wait(self, descriptor: int) -> None:
        """Return once `descriptor` is readable; the event loop, if there is one, runs meanwhile."""
        if self._runner is not None:
            self._runner.run(_wait_readable(descriptor))

    def _result(self, name: str, prepare: Callable[[EnvironmentInstance], MethodCall]) -> CallResult:
        assert self._instance is not None, "make() comes first"
        try:
            call = prepare(self._instance)
        except ToolError as error:
            return CallRejected(encodable_text(str(error)))
        with collecting() as log:
            returned = self._run(call.method, **call.arguments)
        try:
            return _encodable(name, call.convert(returned), log)
        except UnusableResult as error:
            return CallRejected(encodable_text(str(error)))

    def _run(self, method: Callable[..., Any], **arguments: Any) -> Any:
        returned = method(**arguments)
        if not inspect.isawaitable(returned):
            return returned
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_await_result(returned), context=copy_context())  # with the log of this call


async def _await_result(returned: Any) -> Any:
    return await returned


async def _wait_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _encodable(name: str, value: Any, log: MetricLog) -> CallResult:
    """Return the result of a method, as text if msgpack cannot encode it."""
    body = encode_plain(value)
    if body is None:
        value = encodable_text(result_text(value))
        body = value.encode()
    if len(body) > MAX_RESULT:
        return CallRejected(f"{name} returned {len(body)} bytes; the limit is {MAX_RESULT}")
    return CallReturned(value, log.take(), log.dropped)


if __name__ == "__main__":
    server = EnvironmentServer()
    serve_user_code("environment", server, Environment, server.wait)
