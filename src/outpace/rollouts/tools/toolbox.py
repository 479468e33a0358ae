"""Toolbox: runs the tool calls of an answer concurrently and returns one result per call, in call order.

    answer ──▶ parse and check ──▶ functions, MCP servers: concurrent ──▶ text, truncated ──▶ tool messages
                    │              environment: sequential                   ▲
                    └── invalid call ── error: … ────────────────────────────┘

Invariants
- Every call has exactly one result.
- An error of a call is a `ToolError` and is returned to the model. Any other exception means that the environment
  failed; it propagates after the other calls have ended.
- No call is awaited beyond its timeout. A call that ignores cancellation, or a thread, keeps running unobserved.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from outpace.config.sections import ToolsConfig
from outpace.errors import BadInput, one_line
from outpace.models.chat import Schema
from outpace.rollouts.tools.functions import Tool, ToolError, read_arguments, result_text, truncate_text
from outpace.runtime import async_tools
from outpace.runtime.async_tools import gather_or_cancel
from outpace.types import Message, ToolCall

MAX_CONCURRENT_CALLS = 16
"""Maximum number of concurrent calls of one answer."""

MAX_CALLS_PER_ANSWER = 128
"""Maximum number of calls of one answer that run, regardless of the budget: all results go into one prompt."""

CallStatus = Literal["done", "error", "timeout"]


class ToolTimeout(ToolError):
    """A call exceeded its timeout."""


class ToolSource(Protocol):
    """Provides tools: functions, an MCP server, or the environment of an episode.

    `origin` is the setting it comes from. An `ordered` source is stateful: its calls run one at a time, and it applies
    its own timeout."""

    @property
    def origin(self) -> str: ...

    @property
    def ordered(self) -> bool: ...

    @property
    def tools(self) -> Mapping[str, Schema]:
        """Tool schemas by name."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run a tool. Raises `ToolError` for errors to return to the model."""
        ...


@dataclass(frozen=True)
class ToolResult:
    """Result of one call, as returned to the model."""

    call: ToolCall
    text: str
    status: CallStatus
    failure: str = ""  # reason, if the tool itself failed

    @property
    def message(self) -> Message:
        name = {"name": truncate_text(one_line(self.call.name, 100), 100)} if self.call.name else {}
        return {"role": "tool", "tool_call_id": self.call.id, **name, "content": self.text}


class FunctionTools:
    """A `ToolSource` of plain functions."""

    ordered = False

    def __init__(self, tools: Sequence[Tool], origin: str = "tools.functions") -> None:
        self.origin = origin
        self._tools = {tool.name: tool for tool in tools}
        self.tools = {tool.name: tool.schema for tool in tools}

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        return await self._tools[name].call(arguments)


class Toolbox:
    """All tools that the model can call in one episode."""

    def __init__(self, sources: Sequence[ToolSource], limits: ToolsConfig) -> None:
        self._sources = tools_by_name(sources)
        self._limits = limits
        concurrent = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._semaphores = {source.origin: asyncio.Semaphore(1) if source.ordered else concurrent for source in sources}
        self.schemas: list[Schema] = [schema for source in sources for schema in source.tools.values()]

    async def run(
        self, calls: Sequence[ToolCall], admitted: int, seconds_left: Callable[[], float]
    ) -> list[ToolResult]:
        """Return the results of all calls, in order. Runs only the first `admitted` calls, within the time left."""
        run = min(len(calls), admitted, MAX_CALLS_PER_ANSWER)
        results = await gather_or_cancel(*(self._result(call, seconds_left) for call in calls[:run])) if run else []
        too_many = f"error: not run: an answer may make at most {MAX_CALLS_PER_ANSWER} calls"
        results += [ToolResult(call, too_many, "error") for call in calls[run:admitted]]
        return results + [ToolResult(call, "error: no calls left", "error") for call in calls[admitted:]]

    async def _result(self, call: ToolCall, seconds_left: Callable[[], float]) -> ToolResult:
        try:
            source, arguments = self._parse(call)
            async with self._semaphores[source.origin]:
                text = await self._run_with_timeout(source, call.name, arguments, seconds_left())
            return ToolResult(call, truncate_text(text, self._limits.max_result_chars), "done")
        except ToolError as error:
            text = truncate_text(f"error: {error}", self._limits.max_result_chars)
            is_timeout = isinstance(error, ToolTimeout)
            # An invalid call has no `__cause__`: the tool itself did not fail.
            failure = one_line(str(error).removeprefix(f"{call.name} ")) if is_timeout or error.__cause__ else ""
            return ToolResult(call, text, "timeout" if is_timeout else "error", failure)

    def _parse(self, call: ToolCall) -> tuple[ToolSource, dict[str, Any]]:
        if call.problem:
            raise ToolError(one_line(call.problem))
        if call.name not in self._sources:
            available = one_line(", ".join(self._sources), 1000) or "none"
            raise ToolError(f"there is no tool {one_line(repr(call.name), 100)}; available tools: {available}")
        return self._sources[call.name], read_arguments(call.name, call.arguments)

    async def _run_with_timeout(self, source: ToolSource, name: str, arguments: dict[str, Any], left: float) -> str:
        limit = left if source.ordered else min(left, self._limits.timeout_s)
        if limit <= 0:
            raise ToolTimeout(f"{name} was not run: the time limit of the episode is reached")
        work = asyncio.ensure_future(_text_of(source.call(name, arguments)))
        try:
            done, _ = await asyncio.wait({work}, timeout=None if limit == math.inf else limit)
        finally:
            if not work.done():
                cancel_without_waiting(work)
        if not done:
            reason = "the time limit of the episode is reached" if limit == left else f"it took longer than {limit:g} s"
            raise ToolTimeout(f"{name} timed out: {reason}")
        if work.cancelled():
            raise ToolError(f"{name} was cancelled")
        return work.result()


def tools_by_name(sources: Sequence[ToolSource]) -> dict[str, ToolSource]:
    """Map each tool name to its source. Raises `BadInput` if two sources have a tool of the same name."""
    found: dict[str, ToolSource] = {}
    for source in sources:
        for name in source.tools:
            if name in found:
                raise BadInput(f"{source.origin} and {found[name].origin} both have a tool named {name}; remove one")
            found[name] = source
    return found


async def _text_of(call: Any) -> str:
    """Await a call and convert its result to text. Objects are converted on a thread: it may be slow user code."""
    value = await call
    if value is None or isinstance(value, str):
        return result_text(value)
    text, error = await async_tools.run_in_thread(partial(result_text, value))
    if error is not None:
        raise ToolError(f"cannot convert the result to text: {type(error).__name__}")
    return str(text)


_abandoned: set[asyncio.Future[Any]] = set()
"""Cancelled calls that are no longer awaited. Keeps references: asyncio may garbage-collect an unreferenced task."""


def cancel_without_waiting(work: asyncio.Future[Any]) -> None:
    """Cancel a call without waiting for it: it may ignore the cancellation."""
    work.cancel()
    _abandoned.add(work)
    work.add_done_callback(_forget)


def _forget(work: asyncio.Future[Any]) -> None:
    _abandoned.discard(work)
    if not work.cancelled():
        work.exception()  # mark as retrieved: the model already got the timeout error
