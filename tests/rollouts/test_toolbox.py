"""Running tool calls: one result per call, in order, for any call and any behavior of the tool."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.config.sections import ToolsConfig
from outpace.errors import BadInput
from outpace.rollouts.tools.functions import MAX_DEPTH, ToolError, load_tools, result_text, truncate_text
from outpace.rollouts.tools.toolbox import (
    MAX_CALLS_PER_ANSWER,
    MAX_CONCURRENT_CALLS,
    FunctionTools,
    Toolbox,
    ToolSource,
    tools_by_name,
)
from outpace.types import ToolCall
from support import examples, naming


class CoroutineTools:
    """Tools backed by one coroutine each, like those of an environment or a server."""

    ordered = True

    def __init__(self, origin: str, **tools: Any) -> None:
        self.origin = origin
        self._tools = tools
        self.tools: Mapping[str, dict[str, Any]] = {name: {"function": {"name": name}} for name in tools}

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        return await self._tools[name](**arguments)


def box(*functions: Any, timeout_s: float = 30.0, max_result_chars: int = 100, **others: Any) -> Toolbox:
    sources: list[ToolSource] = [FunctionTools(load_tools(functions))]
    if others:
        sources.append(CoroutineTools("rollout.environment", **others))
    return Toolbox(sources, ToolsConfig(timeout_s=timeout_s, max_result_chars=max_result_chars))


def call(name: str, arguments: str = "{}", problem: str = "", number: int = 0) -> ToolCall:
    return ToolCall(f"call-{number}", name, arguments, problem)


def no_limit() -> float:
    return math.inf


async def texts(toolbox: Toolbox, *calls: ToolCall) -> list[str]:
    return [result.text for result in await toolbox.run(calls, len(calls), no_limit)]


def echo(value: Any) -> Any:
    """Say it again."""
    return value


async def test_a_result_is_a_tool_message_with_the_id_of_its_call() -> None:
    (result,) = await box(echo).run([call("echo", '{"value": "a"}', number=7)], 1, no_limit)
    assert result.message == {"role": "tool", "tool_call_id": "call-7", "name": "echo", "content": "a"}
    assert result.status == "done"


async def test_calls_run_concurrently_and_results_keep_their_order() -> None:
    met = asyncio.Event()

    async def first() -> str:
        """Wait for the second."""
        await met.wait()
        return "first"

    async def second() -> str:
        """Let the first go on."""
        met.set()
        return "second"

    assert await texts(box(first, second), call("first"), call("second")) == ["first", "second"]


async def test_environment_calls_run_sequentially() -> None:
    steps: list[str] = []

    async def step(name: str) -> None:
        steps.append(f"{name} begins")
        await asyncio.sleep(0)
        steps.append(f"{name} ends")

    calls = [call("step", json.dumps({"name": name})) for name in "abc"]
    await box(step=step).run(calls, 3, no_limit)
    assert steps == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]


async def test_at_most_max_concurrent_calls_run_at_once() -> None:
    running, most = 0, 0

    async def work() -> None:
        """Be counted."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await texts(box(work), *[call("work")] * 100)
    assert most == MAX_CONCURRENT_CALLS


@pytest.mark.parametrize(
    ("invalid", "words"),
    [
        (call("peek"), ("'peek'", "echo")),
        (call("x" * 10**6), ("'xxxx", "echo")),
        (call("", problem="this tool call is not valid JSON"), ("this tool call is not valid JSON",)),
        (call("echo", "{"), ("echo", "valid JSON")),
        (call("echo", "[" * 100_000), ("echo", "valid JSON")),
        (call("echo", "[1]"), ("echo", "JSON object")),
        (call("echo", "null"), ("echo", "JSON object")),
        (call("echo", ""), ("echo", "value")),
        (call("echo", '{"value": ' + "[" * 500 + "]" * 500 + "}"), ("echo", str(MAX_DEPTH))),
        (call("echo", '{"value": "\\ud800"}'), ("echo",)),
        (call("echo", '{"value": "\ud800"}'), ("echo",)),
        (call("echo", '{"value": ' + "1" * 5000 + "}"), ("echo", "valid JSON")),
        (call("echo", '{"value": 1, "other": 2}'), ("echo", "other")),
    ],
)
async def test_an_invalid_call_gets_an_error_result_and_the_others_run(
    invalid: ToolCall, words: tuple[str, ...]
) -> None:
    failed, done = await box(echo, max_result_chars=1000).run([invalid, call("echo", '{"value": 1}')], 2, no_limit)
    assert failed.text.startswith("error: ")
    assert re.search(naming(*words), failed.text)
    assert len(failed.text) < 500
    assert (failed.status, failed.failure, done.text) == ("error", "", "1")


async def test_empty_arguments_text_means_no_arguments() -> None:
    assert await texts(box(echo), call("echo", "")) == await texts(box(echo), call("echo", "{}"))


async def test_megabyte_arguments_are_passed_on_and_the_result_is_truncated() -> None:
    (text,) = await texts(box(echo), call("echo", json.dumps({"value": "x" * 10**6})))
    kept, note = text.splitlines()
    assert kept == "x" * 100
    assert "999900" in note


class Odd:
    def __str__(self) -> str:
        return "odd"


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no")


def cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, ""),
        (True, "true"),
        ({"ä": [1, None]}, '{"ä": [1, null]}'),
        (b"\x00" * 512, "[512 bytes of binary data]"),
        (bytearray(1), "[1 byte of binary data]"),
        (memoryview(b"abcd").cast("H"), "[4 bytes of binary data]"),
        ({"png": b"123"}, '{"png": "[3 bytes of binary data]"}'),
        (Odd(), '"odd"'),
        (Hostile(), '"<Hostile>"'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (cycle(), "[[...]]"),
        (deep(), "<list>"),
        ("\ud800", "?"),
    ],
)
async def test_any_result_becomes_text(value: Any, text: str) -> None:
    async def tool() -> Any:
        """Give it."""
        return value

    assert await texts(box(tool), call("tool")) == [text]


async def test_a_long_result_is_truncated_with_a_note_of_how_much_is_missing() -> None:
    def flood() -> str:
        """Ten megabytes."""
        return "y" * 10_000_000

    (result,) = await box(flood, max_result_chars=50).run([call("flood")], 1, no_limit)
    kept, note = result.text.splitlines()
    assert kept == "y" * 50
    assert "9999950" in note
    assert result.status == "done"


class UnusualError(BaseException):
    """An exception that is not a subclass of `Exception`."""


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("two\nlines"),
        SystemExit(3),
        KeyError("x"),
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        UnusualError("hm"),
    ],
)
@pytest.mark.parametrize("on_a_thread", [True, False])
async def test_an_exception_becomes_a_one_line_error_result(raised: BaseException, on_a_thread: bool) -> None:
    async def tool() -> None:
        """Fail."""
        raise raised

    def plain() -> None:
        """Fail."""
        raise raised

    plain.__name__ = "tool"
    (result,) = await box(plain if on_a_thread else tool).run([call("tool")], 1, no_limit)
    assert result.text.startswith("error: ")
    assert "tool" in result.text
    assert "\n" not in result.text
    assert result.status == "error"


async def test_a_call_over_its_time_limit_is_abandoned_on_a_thread_and_on_the_loop() -> None:
    release, cancelled = threading.Event(), asyncio.Event()

    def stuck() -> None:
        """Hang."""
        release.wait()

    async def stubborn() -> None:
        """Hang and ignore cancellation."""
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.to_thread(release.wait)

    try:
        results = await box(stuck, stubborn, timeout_s=0.01).run([call("stuck"), call("stubborn")], 2, no_limit)
        await asyncio.wait_for(cancelled.wait(), 60)
    finally:
        release.set()
    assert [result.status for result in results] == ["timeout", "timeout"]
    assert results[0].text.startswith("error: ")
    assert re.search(naming("stuck", "0.01 s"), results[0].text)


async def test_calls_beyond_the_episode_time_limit_are_cancelled_or_not_run() -> None:
    left = iter([0.01, 0.0])
    begun = 0

    async def wait() -> None:
        """Hang."""
        nonlocal begun
        begun += 1
        await asyncio.sleep(3600)

    results = await box(wait=wait).run([call("wait"), call("wait")], 2, lambda: next(left))
    assert begun == 1
    assert [result.status for result in results] == ["timeout", "timeout"]
    assert all(result.text.startswith("error: ") and "wait" in result.text for result in results)
    assert results[0].text != results[1].text


async def test_calls_beyond_the_call_limit_get_an_error_and_are_not_run() -> None:
    ran = 0

    async def tool() -> None:
        """Count."""
        nonlocal ran
        ran += 1

    results = await box(tool).run([call("tool")] * 1000, 3, no_limit)
    assert (ran, len(results)) == (3, 1000)
    assert {result.status for result in results[3:]} == {"error"}
    assert all(result.text.startswith("error: ") for result in results[3:])


async def test_calls_per_answer_are_bounded_even_without_a_call_limit() -> None:
    results = await box(echo).run([call("echo", '{"value": 1}', number=n) for n in range(1000)], 1000, no_limit)
    assert [result.call.id for result in results] == [f"call-{n}" for n in range(1000)]
    assert sum(result.status == "done" for result in results) == MAX_CALLS_PER_ANSWER
    assert results[-1].text.startswith("error: ")
    assert str(MAX_CALLS_PER_ANSWER) in results[-1].text


async def test_a_dead_environment_cancels_the_other_calls_and_propagates() -> None:
    ended = asyncio.Event()

    async def other() -> None:
        """Hang."""
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def die() -> None:
        raise RuntimeError("the environment has died")

    with pytest.raises(RuntimeError, match="has died"):
        await texts(box(other, die=die), call("other"), call("die"))
    await ended.wait()


async def test_a_tool_error_from_an_environment_becomes_the_result() -> None:
    async def refuse() -> None:
        raise ToolError("not now")

    assert await texts(box(refuse=refuse), call("refuse")) == ["error: not now"]


def test_two_sources_with_the_same_tool_name_are_refused_and_both_are_named() -> None:
    first, second = (
        CoroutineTools("tools.mcp: one", add=None),
        CoroutineTools("tools.mcp: two", add=None),
    )
    with pytest.raises(BadInput, match=naming("tools.mcp: one", "tools.mcp: two", "add")):
        tools_by_name([first, second])


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(Hostile()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.binary(), inner) | st.tuples(inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(anything, st.integers(16, 200))
def test_any_tool_result_becomes_bounded_text_that_can_be_encoded(value: Any, limit: int) -> None:
    text = truncate_text(result_text(value), limit)
    text.encode()
    assert len(text) <= limit + 100  # and a note of what was left out


names = st.sampled_from(["echo", "fall", "nothing", ""]) | st.text(max_size=5)
arguments = st.sampled_from(["{}", '{"value": 1}', '{"value": "\\ud800"}', "", "[]", "nul"]) | st.text(max_size=20)
problems = st.just("") | st.text(max_size=10)


def fall() -> None:
    """Fall."""
    raise RuntimeError("\ud800" * 1000)


@examples(50)
@given(st.lists(st.builds(ToolCall, st.uuids().map(str), names, arguments, problems), max_size=20), st.integers(0, 20))
async def test_every_call_gets_one_result_in_order(calls: list[ToolCall], admitted: int) -> None:
    results = await box(echo, fall).run(calls, admitted, no_limit)
    assert [result.message["tool_call_id"] for result in results] == [call.id for call in calls]
    assert all(result.text.startswith("error:") or result.status == "done" for result in results)
    json.dumps([result.message for result in results], ensure_ascii=False).encode()


async def test_the_failure_reason_of_a_call_can_always_be_encoded() -> None:
    def search() -> str:
        """Look it up."""
        raise ValueError("unknown " + chr(0xD83D))

    (result,) = await box(search).run([call("search")], 1, no_limit)
    assert re.search(naming("ValueError", "unknown"), result.failure)
    result.failure.encode()
