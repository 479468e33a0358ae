"""The inside of an environment's process: `python -m outpace.rollouts.environments.stage_child FD MEMORY_MB`.

    Load(reference or code) ─▶ Done        Make ─▶ Made(tools)        Reset, Call, Reward ─▶ Returned | Refused | Raised
                                           Leave ─▶ Done

It is a servant (`outpace.runtime.servant_child`) that holds one instance at a time.

Invariants
- Plain methods run on the main thread. Asynchronous ones run there too, on an event loop that lives as long as the
  instance; what they have started goes on between two calls, unless a plain method holds the thread.
- What a tool returns goes up as it is if msgpack can say it, else as text.
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
"""Bytes of one result."""


class Load(msgspec.Struct, tag="load"):
    """Get the class: see `outpace.runtime.code.Source`."""

    id: int
    reference: str
    code: bytes
    setting: str


class Make(msgspec.Struct, tag="make"):
    id: int


class Reset(msgspec.Struct, tag="reset"):
    """`columns` and `by_value` are those of `outpace.runtime.values`."""

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
    """Let the instance go, and its event loop with what still runs there."""

    id: int


class Made(msgspec.Struct, tag="made"):
    id: int
    tools: dict[str, dict[str, Any]]
    judges: bool


class Returned(msgspec.Struct, tag="returned"):
    id: int
    value: Any


class Refused(msgspec.Struct, tag="refused"):
    """The arguments do not fit, or what came back cannot be used."""

    id: int
    message: str


Order = Load | Make | Reset | Call | Reward | Leave
Answer = Done | Made | Returned | Refused | Raised


class Theatre:
    """Obeys orders; holds the class, and perhaps an instance and an event loop."""

    def __init__(self) -> None:
        self._factory: Callable[[], Any] | None = None
        self._setting = ""
        self._instance: Instance | None = None
        self._runner: asyncio.Runner | None = None

    def obey(self, order: Order) -> Numbered:
        if isinstance(order, Load):
            self._setting = order.setting
            self._factory = Source(order.reference, order.code).load(order.setting)
            return Done(order.id)
        if isinstance(order, Leave):
            self._leave()
            return Done(order.id)
        if isinstance(order, Make):
            return self._make(order)
        return self._performed(order)

    def wait(self, descriptor: int) -> None:
        """Until there is something to read, with the event loop running if there is one."""
        if self._runner is not None:
            self._runner.run(_readable(descriptor))

    def _make(self, order: Make) -> Made:
        assert self._factory is not None, "the class is loaded first"
        self._leave()
        self._instance = Instance(self._perform(Act(self._factory, {}, as_it_is)), self._setting)
        tools = {name: tool.schema for name, tool in self._instance.tools.items()}
        return Made(order.id, tools, self._instance.judges)

    def _performed(self, order: Reset | Call | Reward) -> Returned | Refused:
        try:
            act = self._act(order)
        except ToolError as error:
            return Refused(order.id, sendable(str(error)))
        returned = self._returned(act)
        try:
            value = act.understood(returned)
        except Unusable as error:
            return Refused(order.id, sendable(str(error)))
        return _fit(order, value)

    def _act(self, order: Reset | Call | Reward) -> Act:
        assert self._instance is not None, "an instance is made first"
        if isinstance(order, Reset):
            return self._instance.reset(unpacked(order.columns, order.by_value))
        if isinstance(order, Call):
            return self._instance.call(order.name, unpacked(order.arguments, order.by_value))
        return self._instance.reward()

    def _perform(self, act: Act) -> Any:
        return act.understood(self._returned(act))

    def _returned(self, act: Act) -> Any:
        returned = act.method(**act.arguments)
        if not inspect.isawaitable(returned):
            return returned
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_awaited(returned))

    def _leave(self) -> None:
        self._instance = None
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


async def _awaited(returned: Any) -> Any:
    return await returned


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _fit(order: Reset | Call | Reward, value: Any) -> Returned | Refused:
    """The value in a form that travels."""
    body = encoded(value)
    if body is None:
        value = sendable(as_text(value))
        body = value.encode()
    if len(body) > MAX_RESULT:
        name = order.name if isinstance(order, Call) else "reset"
        return Refused(order.id, f"{name} returned {len(body)} bytes; a result has {MAX_RESULT} at most")
    return Returned(order.id, value)


def main() -> None:
    theatre = Theatre()
    serve("stage", Order, theatre.obey, theatre.wait)


if __name__ == "__main__":
    main()
