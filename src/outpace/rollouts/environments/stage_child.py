"""Entry point of an environment process: `python -m outpace.rollouts.environments.stage_child FD MEMORY_MB`.

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
from collections.abc import Callable
from typing import Any

import msgspec

from outpace.rollouts.environments.instance import Act, Instance, Unusable, as_it_is
from outpace.rollouts.tools.functions import ToolError
from outpace.rollouts.tools.results import as_text
from outpace.runtime.code import Source
from outpace.runtime.servant_child import Done, Numbered, Raised, serve
from outpace.runtime.values import encoded, sendable, unpacked

MAX_RESULT = 1 << 25
"""Maximum size of one result in bytes."""


class Load(msgspec.Struct, tag="load"):
    """Load the class; see `outpace.runtime.by_value.Source`."""

    id: int
    reference: str
    code: bytes
    setting: str


class Make(msgspec.Struct, tag="make"):
    id: int


class Reset(msgspec.Struct, tag="reset"):
    """`columns` and `by_value` come from `outpace.runtime.by_value`."""

    id: int
    columns: bytes
    by_value: bool


class Call(msgspec.Struct, tag="call"):
    id: int
    name: str
    arguments: bytes
    by_value: bool


class Reward(msgspec.Struct, tag="reward"):
    id: int


class Leave(msgspec.Struct, tag="leave"):
    """Drop the instance, and its event loop with everything still running on it."""

    id: int


class Made(msgspec.Struct, tag="made"):
    id: int
    tools: dict[str, dict[str, Any]]
    judges: bool


class Returned(msgspec.Struct, tag="returned"):
    id: int
    value: Any


class Refused(msgspec.Struct, tag="refused"):
    """Invalid arguments, or an unusable result."""

    id: int
    message: str


Order = Load | Make | Reset | Call | Reward | Leave
Answer = Done | Made | Returned | Refused | Raised


class EnvironmentServer:
    """Handles requests. Holds the class, and an instance and an event loop once they exist."""

    def __init__(self) -> None:
        self._factory: Callable[[], Any] | None = None
        self._setting = ""
        self._instance: Instance | None = None
        self._runner: asyncio.Runner | None = None

    def handle(self, request: Order) -> Numbered:
        if isinstance(request, Load):
            self._setting = request.setting
            self._factory = Source(request.reference, request.code).load(request.setting)
            return Done(request.id)
        if isinstance(request, Leave):
            self._drop()
            return Done(request.id)
        if isinstance(request, Make):
            return self._make(request)
        return self._run_request(request)

    def wait(self, descriptor: int) -> None:
        """Return once `descriptor` is readable; the event loop, if there is one, runs meanwhile."""
        if self._runner is not None:
            self._runner.run(_wait_readable(descriptor))

    def _make(self, request: Make) -> Made:
        assert self._factory is not None, "LoadEnvironment comes first"
        self._drop()
        self._instance = Instance(self._run(Act(self._factory, {}, as_it_is)), self._setting)
        tools = {name: tool.schema for name, tool in self._instance.tools.items()}
        return Made(request.id, tools, self._instance.judges)

    def _run_request(self, request: Reset | Call | Reward) -> Returned | Refused:
        try:
            call = self._method_call(request)
        except ToolError as error:
            return Refused(request.id, sendable(str(error)))
        returned = self._call(call)
        try:
            value = call.convert(returned)
        except Unusable as error:
            return Refused(request.id, sendable(str(error)))
        return _reply(request, value)

    def _method_call(self, request: Reset | Call | Reward) -> Act:
        assert self._instance is not None, "MakeInstance comes first"
        if isinstance(request, Reset):
            return self._instance.reset(unpacked(request.columns, request.by_value))
        if isinstance(request, Call):
            return self._instance.call(request.name, unpacked(request.arguments, request.by_value))
        return self._instance.reward()

    def _run(self, call: Act) -> Any:
        return call.convert(self._call(call))

    def _call(self, call: Act) -> Any:
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


def _reply(request: Reset | Call | Reward, value: Any) -> Returned | Refused:
    """Build the reply for a value, as text if msgpack cannot encode it."""
    body = encoded(value)
    if body is None:
        value = sendable(as_text(value))
        body = value.encode()
    if len(body) > MAX_RESULT:
        name = request.name if isinstance(request, Call) else "reset"
        return Refused(request.id, f"{name} returned {len(body)} bytes; the limit is {MAX_RESULT}")
    return Returned(request.id, value)


def main() -> None:
    server = EnvironmentServer()
    serve("stage", Order, server.handle, server.wait)


if __name__ == "__main__":
    main()
