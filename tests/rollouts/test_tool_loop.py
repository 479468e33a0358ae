"""Tool-loop episodes: how they continue, why they stop, and what they return."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.config.sections import RolloutConfig, ToolsConfig
from outpace.errors import ComponentFailed, ContextFull, RequestFailed
from outpace.models.chat_format import parse_text
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.episode import run_episode
from outpace.rollouts.tool_loop import EpisodeUsage, ToolLoop
from outpace.rollouts.tools.functions import load_tools
from outpace.rollouts.tools.toolbox import FunctionTools
from outpace.types import Answer, Episode, Message, StopReason, Task, ToolCall
from support import examples, naming

TASK = Task("t1", "Go.", {"size": 3})

NO_LOGPROBS = np.zeros(0, np.float32)


class ScriptedClient:
    """`ModelClient.chat` with prepared answers. An answer is text, parsed for tool calls as by a chat format, or an
    exception, or a function that returns either; every character is a token."""

    def __init__(self, answers: Iterator[Any] | Sequence[Any], stop: StopReason = "stop") -> None:
        self._answers = iter(answers)
        self._stop = stop
        self.histories: list[list[Message]] = []
        self.tools_sent: list[Sequence[dict[str, Any]]] = []
        self.max_tokens: list[int | None] = []
        self.call_ids: list[str] = []

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), max_tokens: int | None = None
    ) -> Answer:
        self.histories.append(list(messages))
        self.tools_sent.append(tools)
        self.max_tokens.append(max_tokens)
        text = next(self._answers)
        if callable(text):
            text = await text()
        if isinstance(text, Exception):
            raise text
        cut = max_tokens is not None and len(text) > max_tokens
        return self._answer(text[:max_tokens] if cut else text, "length" if cut else self._stop)

    def _answer(self, text: str, stop: StopReason) -> Answer:
        parsed, turn = parse_text(text), len(self.histories)
        calls = tuple(
            ToolCall(f"{turn}.{n}", call.name, call.arguments, call.problem) for n, call in enumerate(parsed.calls)
        )
        self.call_ids += [call.id for call in calls]
        tokens = np.zeros(len(text), np.int32)
        return Answer(str(turn), text, parsed.content, parsed.reasoning, calls, stop, 0, tokens, NO_LOGPROBS, tokens)


class FakeSession:
    """Environment session that records the methods called on it."""

    instance: object | None = None
    origin = "rollout.environment"
    ordered = True

    def __init__(self, **failures: Exception) -> None:
        self.failures = failures
        self.events: list[str] = []
        self.tools = {"step": {"type": "function", "function": {"name": "step"}}}

    async def open(self, task: Task) -> Any:
        return self

    async def reset(self, columns: dict[str, Any]) -> str | None:
        self._note("reset")
        return f" It has {columns['size']} rooms."

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        self._note("call")
        return arguments

    async def reward(self) -> float | None:
        self._note("reward")
        return 0.5

    async def close(self) -> None:
        self._note("close")

    def _note(self, event: str) -> None:
        self.events.append(event)
        if event in self.failures:
            raise self.failures[event]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def loop(*functions: Any, session: Any = None, clock: Callable[[], float] = lambda: 0.0, **limits: Any) -> ToolLoop:
    return ToolLoop(
        [FunctionTools(load_tools(functions or (add,)))], session, RolloutConfig(**limits), ToolsConfig(), clock
    )


async def play(rollout: ToolLoop, answers: Any, **options: Any) -> tuple[Episode, ScriptedClient]:
    client = ScriptedClient(answers, **options)
    return await rollout(TASK, client), client  # type: ignore[arg-type]


def contents(episode: Episode, role: str = "tool") -> list[str]:
    assert isinstance(episode.completion, list)
    return [message["content"] for message in episode.completion if message["role"] == role]


async def test_tool_results_are_returned_to_the_policy_for_its_next_answer() -> None:
    episode, client = await play(loop(), ["Hm. " + call("add", a=1, b=2) + call("add", a=3, b=4), "3 and 7."])
    assert isinstance(episode.completion, list)
    first, *results, last = episode.completion
    assert (first["content"], [made["id"] for made in first["tool_calls"]]) == ("Hm.", ["1.0", "1.1"])
    assert results == [
        {"role": "tool", "tool_call_id": "1.0", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "1.1", "name": "add", "content": "7"},
    ]
    assert last == {"role": "assistant", "content": "3 and 7."}
    assert client.histories == [
        [{"role": "user", "content": "Go."}],
        [{"role": "user", "content": "Go."}, first, *results],
    ]
    assert [schema["function"]["name"] for schema in client.tools_sent[1]] == ["add"]
    assert (episode.stop, episode.error, episode.trajectories) == ("stop", None, [])
    assert episode.metrics == {"turns": 2, "tool_calls": 2, "tool_errors": 0, "tool_timeouts": 0}


async def test_functions_and_environment_tools_are_offered_together() -> None:
    session = FakeSession()
    episode, client = await play(loop(session=session), [call("step", to=1) + call("add", a=1, b=1), "Done."])
    assert contents(episode) == ['{"to": 1}', "2"]
    assert client.histories[0] == [{"role": "user", "content": "Go. It has 3 rooms."}]
    assert [schema["function"]["name"] for schema in client.tools_sent[0]] == ["add", "step"]
    assert episode.rewards == {"environment": 0.5}
    assert session.events == ["reset", "call", "reward", "close"]


@pytest.mark.parametrize("moment", ["reset", "call", "reward"])
async def test_an_environment_that_dies_fails_the_episode_and_is_closed(moment: str) -> None:
    session = FakeSession(**{moment: RuntimeError("died")})
    with pytest.raises(RuntimeError, match="died"):
        await play(loop(session=session), [call("step"), "Done."])
    assert session.events[-2:] == [moment, "close"]


async def test_an_environment_is_closed_when_the_engine_fails_or_the_episode_is_cancelled() -> None:
    session = FakeSession()
    with pytest.raises(ComponentFailed):
        await play(loop(session=session), [ComponentFailed("engine-0", "died")])
    assert session.events == ["reset", "close"]

    requested, session = asyncio.Event(), FakeSession()

    async def hang() -> None:
        requested.set()
        await asyncio.sleep(3600)

    episode = asyncio.create_task(play(loop(session=session), [hang]))
    await requested.wait()
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert session.events == ["reset", "close"]


async def test_a_failing_environment_close_does_not_fail_the_episode() -> None:
    episode, _ = await play(loop(session=FakeSession(close=RuntimeError("stuck"))), ["Done."])
    assert (episode.error, episode.rewards) == (None, {"environment": 0.5})


# ------------------------------------------------------------------------------------------------ why an episode ends


async def test_an_answer_without_a_tool_call_ends_the_episode() -> None:
    episode, _ = await play(loop(), ["Nothing to do."])
    assert (episode.stop, episode.metrics["turns"]) == ("stop", 1)


@pytest.mark.parametrize("text", ["", " \n"])
async def test_an_empty_answer_stops_the_episode_with_reason_empty(text: str) -> None:
    episode, _ = await play(loop(), [text])
    assert (episode.stop, episode.error) == ("empty", None)


@pytest.mark.parametrize("stop", ["length", "aborted"])
async def test_a_truncated_answer_ends_the_episode_without_running_its_calls(stop: StopReason) -> None:
    episode, _ = await play(loop(), [call("add", a=1, b=2)], stop=stop)
    assert (episode.stop, contents(episode)) == (stop, [])


async def test_the_turn_limit_ends_the_episode_after_the_last_calls_have_run() -> None:
    episode, client = await play(loop(max_turns=2), [call("add", a=n, b=0) for n in range(9)])
    assert (episode.stop, contents(episode), len(client.histories)) == ("turns", ["0", "1"], 2)


async def test_the_episode_ends_when_an_answer_exceeds_the_call_limit() -> None:
    two, one = call("add", a=1, b=0) + call("add", a=2, b=0), call("add", a=3, b=0)
    episode, client = await play(loop(max_calls=3), [two, one, two, "never said"])
    *run, fourth, fifth = contents(episode)
    assert run == ["1", "2", "3"]
    assert fourth.startswith("error: ")
    assert fourth == fifth
    assert (episode.stop, len(client.histories)) == ("calls", 3)
    assert episode.metrics["tool_errors"] == 2


async def test_tool_exceptions_are_reported_as_failures_and_invalid_calls_are_not() -> None:
    def divide(a: int, b: int) -> float:
        """Divide.

        Args:
            a: Dividend.
            b: Divisor.
        """
        return a / b

    rollout = ToolLoop([FunctionTools(load_tools([divide]))])
    answers = [call("divide", a=1, b=0), call("divide", a=2, b=0) + call("divide", a="x", b=1) + call("nothing"), "?"]
    episode, _ = await play(rollout, answers)
    assert episode.error is None
    (failure,) = episode.failures
    assert (failure.source, failure.count) == ("tool divide", 2)
    assert re.search(naming("ZeroDivisionError", "division by zero"), failure.reason)


async def test_the_policy_answers_once_more_after_using_exactly_its_call_limit() -> None:
    episode, _ = await play(loop(max_calls=1), [call("add", a=1, b=2), "3."])
    assert (episode.stop, contents(episode)) == ("stop", ["3"])


async def test_a_thousand_calls_in_one_answer_each_get_a_result() -> None:
    episode, _ = await play(loop(max_calls=5), [call("add", a=1, b=1) * 1000])
    assert (episode.stop, len(contents(episode))) == ("calls", 1000)
    assert contents(episode)[:5] == ["2"] * 5
    assert all(result.startswith("error: ") for result in contents(episode)[5:])


async def test_max_tokens_of_an_answer_is_capped_by_the_remaining_token_budget() -> None:
    text = call("add", a=1, b=2)
    episode, client = await play(
        loop(max_episode_tokens=2 * len(text) + 3, max_tokens=len(text)), [text, text, "abcdef"]
    )
    assert client.max_tokens == [None, None, 3]
    assert episode.stop == "tokens"
    assert contents(episode, "assistant")[-1] == "abc"


async def test_an_episode_without_tokens_left_ends_after_running_the_calls() -> None:
    text = call("add", a=1, b=2)
    episode, client = await play(loop(max_episode_tokens=len(text)), [text])
    assert (episode.stop, contents(episode), len(client.histories)) == ("tokens", ["3"], 1)


async def test_the_time_limit_ends_the_episode_after_the_calls_of_an_answer() -> None:
    now = 0.0

    async def wait() -> str:
        """Let time pass."""
        nonlocal now
        now += 7.0
        return "waited"

    rollout = loop(wait, max_seconds=10.0, clock=lambda: now)
    episode, client = await play(rollout, [call("wait")] * 9)
    assert (episode.stop, contents(episode), len(client.histories)) == ("seconds", ["waited", "waited"], 2)


async def test_a_request_in_flight_at_the_time_limit_is_cancelled_and_the_rest_is_graded() -> None:
    cancelled = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    episode, _ = await play(loop(session=FakeSession(), max_seconds=0.05), [call("step"), hang])
    assert cancelled.is_set()
    assert (episode.stop, episode.error, episode.rewards) == ("seconds", None, {"environment": 0.5})
    assert contents(episode) == ["{}"]


async def test_a_tool_call_running_at_the_time_limit_is_cancelled() -> None:
    now = 0.0

    async def wait() -> None:
        """Hang."""
        nonlocal now
        now = 1.0
        await asyncio.sleep(3600)

    episode, _ = await play(loop(wait, max_seconds=0.05, clock=lambda: now), [call("wait")])
    (result,) = contents(episode)
    assert re.search(naming("error: ", "wait"), result)
    assert (episode.stop, episode.metrics["tool_timeouts"]) == ("seconds", 1)


async def test_a_conversation_that_exceeds_the_context_ends_and_is_graded() -> None:
    full = ContextFull("the prompt has 9 tokens, the context 8")
    episode, _ = await play(loop(session=FakeSession()), [call("step"), full])
    assert (episode.stop, episode.error, episode.rewards) == ("context", None, {"environment": 0.5})
    assert contents(episode) == ["{}"]


async def test_an_episode_without_any_answer_fails() -> None:
    async def hang() -> None:
        await asyncio.sleep(3600)

    session = FakeSession()
    episode, _ = await play(loop(session=session), [ContextFull("the prompt has 9 tokens, the context 8")])
    assert (episode.stop, episode.error) == ("context", "the prompt has 9 tokens, the context 8")
    assert session.events == ["reset", "close"]
    episode, _ = await play(loop(max_seconds=0.05), [hang])
    assert episode.stop == "seconds"
    assert re.search(naming("rollout.max_seconds", "0.05 s"), episode.error or "")


@pytest.mark.parametrize("failure", [RequestFailed("not finite"), TimeoutError("unrelated")])
async def test_other_request_failures_propagate(failure: Exception) -> None:
    with pytest.raises(type(failure)):
        await play(loop(max_seconds=3600.0), [failure])


# ----------------------------------------------------------------------------------------------------- properties


@settings(deadline=None)
@given(
    limits=st.builds(
        RolloutConfig,
        max_turns=st.integers(1, 5),
        max_calls=st.none() | st.integers(1, 10),
        max_episode_tokens=st.none() | st.integers(1, 50),
        max_seconds=st.none() | st.integers(1, 10),
        max_tokens=st.none() | st.integers(1, 20),
    ),
    events=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(0, 4)), max_size=10),
)
def test_no_sequence_of_answers_exceeds_the_limits(limits: RolloutConfig, events: list[tuple[int, int, int]]) -> None:
    """`EpisodeUsage` alone: each event is an answer with a number of tokens, calls and seconds."""
    now = 0.0
    spent = EpisodeUsage(limits, lambda: now)
    run = 0
    for tokens, calls, seconds in events:
        if spent.stop_reason() is not None:
            break
        most = spent.max_tokens()
        usual = tokens if limits.max_tokens is None else min(tokens, limits.max_tokens)
        spent.answered(usual if most is None else min(usual, most))
        run += spent.admit(calls)
        now += seconds
    assert spent.turns <= limits.max_turns
    assert spent.tokens <= (limits.max_episode_tokens or spent.tokens)
    assert run <= (limits.max_calls or run)


words = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        '{"name": "fall"}',
        '{"name": "no\\ud800"}',
        "<think>",
        "</think>",
        "{",
        "[",
        "<|end|>",
        "\x00",
        "ü",
        " ",
    ]
)


returned = (
    st.none() | st.text() | st.binary() | st.floats() | st.lists(st.binary() | st.integers()) | st.just("\ud800" * 99)
)
raised = st.sampled_from(
    [RuntimeError("<tool_call>\ud800"), KeyError(), SystemExit(1), StopIteration(), TimeoutError()]
)


@examples(60)
@given(st.lists(st.lists(words, max_size=8).map("".join), min_size=6, max_size=6), returned | raised)
async def test_for_any_answers_and_tool_outcomes_the_episode_ends_and_every_call_gets_a_result(
    texts: list[str], outcome: Any
) -> None:
    def fall() -> Any:
        """Fall."""
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    episode, client = await play(loop(add, fall, max_turns=5, max_calls=4), texts)
    assert episode.error is None
    assert episode.stop in ("stop", "empty", "turns", "calls")
    assert isinstance(episode.completion, list)
    answered = [message["tool_call_id"] for message in episode.completion if message["role"] == "tool"]
    assert answered == client.call_ids
    assert episode.metrics["turns"] <= 5
    assert episode.metrics["tool_calls"] - episode.metrics["tool_errors"] <= 4


# ----------------------------------------------------------------------------------------------- with the real client


async def test_an_episode_is_one_trajectory_that_trains_only_sampled_tokens(
    make_engine: Any, make_client: Callable[..., PolicyClient], tokenizer: Any
) -> None:
    answers = [call("add", a=1, b=2) + call("nothing") + tokenizer.eos_token, "3." + tokenizer.eos_token]
    engine = make_engine(answers)
    episode = await run_episode(loop(), TASK, make_client(engine), 60.0)
    assert episode.error is None
    assert contents(episode)[0] == "3"
    (trajectory,) = episode.trajectories
    sampled = [token for answer in answers for token in tokenizer.encode(answer, add_special_tokens=False)]
    assert trajectory.tokens[trajectory.mask].tolist() == sampled
    assert (episode.stop, episode.requests) == ("stop", ["7.0.0", "7.0.1"])


async def test_any_tool_result_can_be_tokenized(
    make_engine: Any, make_client: Callable[..., PolicyClient], tokenizer: Any
) -> None:
    def odd() -> Any:
        """Half a character."""
        return {"half": "\ud800", "binary": b"\xff"}

    engine = make_engine([call("odd") + tokenizer.eos_token, "Done." + tokenizer.eos_token])
    episode = await run_episode(loop(odd), TASK, make_client(engine), 60.0)
    assert (episode.error, contents(episode)) == (None, ['{"half": "?", "binary": "[1 byte of binary data]"}'])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "no\\ud800"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800", "b": 1}}</tool_call>',
        "<tool_call>" + "[" * 5000,
        "<tool_call>" + '{"name": "add", "arguments": {"a": 1, "b": ' + "[" * 200 + "]" * 200 + "}}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": "' + "x" * 10_000 + '", "b": 1}}</tool_call>',
        '<tool_call>{"name": "add"}' * 300,
    ],
)
async def test_malformed_tool_calls_never_fail_the_episode(
    make_engine: Any, make_client: Callable[..., PolicyClient], tokenizer: Any, text: str
) -> None:
    engine = make_engine([text + tokenizer.eos_token, "Done." + tokenizer.eos_token])
    episode = await run_episode(loop(max_calls=100), TASK, make_client(engine), 60.0)
    assert episode.error is None
    assert all(result.startswith("error:") for result in contents(episode))
    assert contents(episode)
