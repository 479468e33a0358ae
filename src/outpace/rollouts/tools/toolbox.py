"""Running what a model calls: all calls of an answer at once, every one answered, in the order in which they were made.

    answer ──▶ read and checked ──▶ functions, MCP servers: side by side ──▶ text, cut ──▶ tool messages
                    │               the environment: one after the other        ▲
                    └── what cannot be run ── error: … ─────────────────────────┘

Invariants
- Every call has exactly one result, whatever it was and whatever the tool did.
- What goes wrong with a call is a `ToolError` and told to the model. Any other exception is that of an environment that
  has died, and goes up once the other calls have ended.
- Nothing waits for a tool beyond its limit: a call that does not end by being cancelled, or a thread, is left behind.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from outpace.errors import BadInput, one_line
from outpace.models.chat import Schema
from outpace.rollouts.tools.arguments import read_arguments
from outpace.rollouts.tools.functions import Tool, ToolError
from outpace.rollouts.tools.results import as_text, bounded
from outpace.runtime import threads
from outpace.runtime.together import together
from outpace.types import Message, ToolCall

SIDE_BY_SIDE = 16
"""Calls of one answer that run at once."""

PER_ANSWER = 128
"""Most calls of one answer that are run, whatever the budget: the model has to read all their results at once."""

Fate = Literal["done", "error", "timeout"]


class ToolTimeout(ToolError):
    """A call that did not come back in time."""


class ToolSource(Protocol):
    """Where tools come from: functions, an MCP server, the environment of an episode."""

    @property
    def tools(self) -> Mapping[str, Schema]:
        """What the model is shown, by name."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run one of them. Raises `ToolError` for what the model should hear."""
        ...


@dataclass(frozen=True)
class Offer:
    """A source and the setting that named it. One that is `ordered` has a state that its calls change: they run one
    after the other, and how long one may take is its own affair."""

    origin: str
    source: ToolSource
    ordered: bool = False


@dataclass(frozen=True)
class ToolLimits:
    timeout_s: float = 30.0
    max_result_chars: int = 16384


@dataclass(frozen=True)
class Result:
    """What the model hears of one call."""

    call: ToolCall
    text: str
    fate: Fate
    failure: str = ""  # how the tool itself failed, if it did

    @property
    def message(self) -> Message:
        name = {"name": bounded(one_line(self.call.name, 100), 100)} if self.call.name else {}
        return {"role": "tool", "tool_call_id": self.call.id, **name, "content": self.text}


class FunctionTools:
    """A `ToolSource` of plain functions."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.tools = {tool.name: tool.schema for tool in tools}

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        return await self._tools[name].call(arguments)


class Toolbox:
    """All that the model may call in one episode."""

    def __init__(self, offers: Sequence[Offer], limits: ToolLimits) -> None:
        self._offers = by_name(offers)
        self._limits = limits
        at_once = asyncio.Semaphore(SIDE_BY_SIDE)
        self._gates = {offer.origin: asyncio.Semaphore(1) if offer.ordered else at_once for offer in offers}
        self.schemas: list[Schema] = [schema for offer in offers for schema in offer.source.tools.values()]

    async def run(self, calls: Sequence[ToolCall], admitted: int, seconds_left: Callable[[], float]) -> list[Result]:
        """The results of all calls, in order. Only the first `admitted` are run, and none beyond the time left."""
        run = min(len(calls), admitted, PER_ANSWER)
        results = await together(*(self._result(call, seconds_left) for call in calls[:run])) if run else []
        too_many = f"error: not run: one answer may make {PER_ANSWER} calls"
        results += [Result(call, too_many, "error") for call in calls[run:admitted]]
        return results + [Result(call, "error: no calls left", "error") for call in calls[admitted:]]

    async def _result(self, call: ToolCall, seconds_left: Callable[[], float]) -> Result:
        try:
            offer, arguments = self._understood(call)
            async with self._gates[offer.origin]:
                text = await self._in_time(offer, call.name, arguments, seconds_left())
            return Result(call, bounded(text, self._limits.max_result_chars), "done")
        except ToolError as error:
            text = bounded(f"error: {error}", self._limits.max_result_chars)
            is_late = isinstance(error, ToolTimeout)
            # A call that the model got wrong has no cause: nothing of the tool failed.
            failure = one_line(str(error).removeprefix(f"{call.name} ")) if is_late or error.__cause__ else ""
            return Result(call, text, "timeout" if is_late else "error", failure)

    def _understood(self, call: ToolCall) -> tuple[Offer, dict[str, Any]]:
        if call.problem:
            raise ToolError(one_line(call.problem))
        if call.name not in self._offers:
            there_are = one_line(", ".join(self._offers), 1000) or "none"
            raise ToolError(f"there is no tool {one_line(repr(call.name), 100)}; there are {there_are}")
        return self._offers[call.name], read_arguments(call.name, call.arguments)

    async def _in_time(self, offer: Offer, name: str, arguments: dict[str, Any], left: float) -> str:
        limit = left if offer.ordered else min(left, self._limits.timeout_s)
        if limit <= 0:
            raise ToolTimeout(f"{name} was not run: the time of the episode is over")
        work = asyncio.ensure_future(_text_of(offer.source.call(name, arguments)))
        try:
            done, _ = await asyncio.wait({work}, timeout=None if limit == math.inf else limit)
        finally:
            if not work.done():
                leave_behind(work)
        if not done:
            why = "the time of the episode is over" if limit == left else f"it took longer than {limit:g} s"
            raise ToolTimeout(f"{name} did not come back: {why}")
        if work.cancelled():
            raise ToolError(f"{name} was cancelled")
        return work.result()


def by_name(offers: Sequence[Offer]) -> dict[str, Offer]:
    """Who offers which tool. Raises `BadInput` where two offer one name."""
    found: dict[str, Offer] = {}
    for offer in offers:
        for name in offer.source.tools:
            if name in found:
                raise BadInput(f"{offer.origin} offers the tool {name}, and so does {found[name].origin}; drop one")
            found[name] = offer
    return found


async def _text_of(call: Any) -> str:
    """The result as text. Turning an object into text is work, and may be the user's code: it is done on a thread."""
    value = await call
    if value is None or isinstance(value, str):
        return as_text(value)
    text, error = await threads.in_thread(partial(as_text, value))
    if error is not None:
        raise ToolError(f"the result cannot be turned into text: {type(error).__name__}")
    return str(text)


_left_behind: set[asyncio.Future[Any]] = set()
"""Calls that nobody waits for any more. The loop itself would forget a task that nobody holds, and complain."""


def leave_behind(work: asyncio.Future[Any]) -> None:
    """Cancel a call without waiting for its end: it may not heed."""
    work.cancel()
    _left_behind.add(work)
    work.add_done_callback(_forget)


def _forget(work: asyncio.Future[Any]) -> None:
    _left_behind.discard(work)
    if not work.cancelled():
        work.exception()  # looked at: the model has been told already that the call did not come back
