"""Entry point of an environment process: `python -m outpace.rollouts.environments.child FD MEMORY_MB`.

    LoadEnvironment(reference or code)  ─▶ Done
    MakeInstance                        ─▶ InstanceMade(tools)
    ResetInstance, CallTool, GetReward  ─▶ CallReturned | CallRejected | Raised
    DropInstance                        ─▶ Done

The request loop is that of every user-code process (`outpace.runtime.user_code_child`). The process holds one instance
at a time.

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
from dataclasses import dataclass
from numbers import Real
from typing import Any

import msgspec

from outpace.errors import BadInput, one_line, with_article
from outpace.rollouts.tools.functions import Tool, ToolError, result_text, tools_of
from outpace.runtime.by_value import UserCodeSource, decode_values, encodable_text, encode_plain
from outpace.runtime.references import accepted_parameters
from outpace.runtime.user_code_child import DoneReply, NumberedMessage, RaisedReply, serve_user_code


class UnusableResult(Exception):
    """A method returned an unusable value; the message names both."""


@dataclass(frozen=True)
class MethodCall:
    """A call `method(**arguments)` to be made. `convert` checks and converts its result, awaited if needed."""

    method: Callable[..., Any]
    arguments: dict[str, Any]
    convert: Callable[[Any], Any]


class EnvironmentInstance:
    """One environment object: prepares the calls of its methods."""

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


class LoadEnvironment(msgspec.Struct, tag="load"):
    """Load the class; see `outpace.runtime.by_value.UserCodeSource`."""

    id: int
    reference: str
    code: bytes
    setting: str


class MakeInstance(msgspec.Struct, tag="make"):
    id: int


class ResetInstance(msgspec.Struct, tag="reset"):
    """`columns` and `by_value` come from `outpace.runtime.by_value`."""

    id: int
    columns: bytes
    by_value: bool


class CallTool(msgspec.Struct, tag="call"):
    id: int
    name: str
    arguments: bytes
    by_value: bool


class GetReward(msgspec.Struct, tag="reward"):
    id: int


class DropInstance(msgspec.Struct, tag="leave"):
    """Drop the instance, and its event loop with everything still running on it."""

    id: int


class InstanceMade(msgspec.Struct, tag="made"):
    id: int
    tools: dict[str, dict[str, Any]]
    judges: bool


class CallReturned(msgspec.Struct, tag="returned"):
    id: int
    value: Any


class CallRejected(msgspec.Struct, tag="refused"):
    """Invalid arguments, or an unusable result."""

    id: int
    message: str


EnvironmentRequest = LoadEnvironment | MakeInstance | ResetInstance | CallTool | GetReward | DropInstance
EnvironmentReply = DoneReply | InstanceMade | CallReturned | CallRejected | RaisedReply


class EnvironmentServer:
    """Handles requests. Holds the class, and an instance and an event loop once they exist."""

    def __init__(self) -> None:
        self._factory: Callable[[], Any] | None = None
        self._setting = ""
        self._instance: EnvironmentInstance | None = None
        self._runner: asyncio.Runner | None = None

    def handle(self, request: EnvironmentRequest) -> NumberedMessage:
        if isinstance(request, LoadEnvironment):
            self._setting = request.setting
            self._factory = UserCodeSource(request.reference, request.code).load(request.setting)
            return DoneReply(request.id)
        if isinstance(request, DropInstance):
            self._drop()
            return DoneReply(request.id)
        if isinstance(request, MakeInstance):
            return self._make(request)
        return self._run_request(request)

    def wait(self, descriptor: int) -> None:
        """Return once `descriptor` is readable; the event loop, if there is one, runs meanwhile."""
        if self._runner is not None:
            self._runner.run(_wait_readable(descriptor))

    def _make(self, request: MakeInstance) -> InstanceMade:
        assert self._factory is not None, "LoadEnvironment comes first"
        self._drop()
        self._instance = EnvironmentInstance(self._run(MethodCall(self._factory, {}, unchanged)), self._setting)
        tools = {name: tool.schema for name, tool in self._instance.tools.items()}
        return InstanceMade(request.id, tools, self._instance.judges)

    def _run_request(self, request: ResetInstance | CallTool | GetReward) -> CallReturned | CallRejected:
        try:
            call = self._method_call(request)
        except ToolError as error:
            return CallRejected(request.id, encodable_text(str(error)))
        returned = self._call(call)
        try:
            value = call.convert(returned)
        except UnusableResult as error:
            return CallRejected(request.id, encodable_text(str(error)))
        return _reply(request, value)

    def _method_call(self, request: ResetInstance | CallTool | GetReward) -> MethodCall:
        assert self._instance is not None, "MakeInstance comes first"
        if isinstance(request, ResetInstance):
            return self._instance.reset(decode_values(request.columns, request.by_value))
        if isinstance(request, CallTool):
            return self._instance.call(request.name, decode_values(request.arguments, request.by_value))
        return self._instance.reward()

    def _run(self, call: MethodCall) -> Any:
        return call.convert(self._call(call))

    def _call(self, call: MethodCall) -> Any:
        returned = call.method(**call.arguments)
        if not inspect.isawaitable(returned):
            return returned
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_await_result(returned))

    def _drop(self) -> None:
        self._instance = None
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


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


def _reply(request: ResetInstance | CallTool | GetReward, value: Any) -> CallReturned | CallRejected:
    """Build the reply for a value, as text if msgpack cannot encode it."""
    body = encode_plain(value)
    if body is None:
        value = encodable_text(result_text(value))
        body = value.encode()
    if len(body) > MAX_RESULT:
        name = request.name if isinstance(request, CallTool) else "reset"
        return CallRejected(request.id, f"{name} returned {len(body)} bytes; the limit is {MAX_RESULT}")
    return CallReturned(request.id, value)


def main() -> None:
    server = EnvironmentServer()
    serve_user_code("stage", EnvironmentRequest, server.handle, server.wait)


if __name__ == "__main__":
    main()
