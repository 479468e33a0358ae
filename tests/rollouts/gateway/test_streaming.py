"""Streams: pieces that add up to the answer and never have to be retracted."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outpace.models.chat_format import parse_text
from outpace.rollouts.gateway.protocol import stable_prefix, stable_text_prefix

HI: list[Any] = [{"role": "user", "content": "hi"}]
ADD: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = 'let me see <tool_call>{"name": "add", "arguments": {"a": 1, "b": "ö"}}</tool_call>'


async def test_text_is_streamed_as_it_is_generated(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine("one two three<|end|>", by_hand=True)
    agent = agent_of(await gateway.open(policy(engine)))
    stream = await agent.chat.completions.create(
        model="m", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    opening = await anext(stream)
    assert (opening.id, opening.choices[0].delta.role) == ("7.0.0", "assistant")
    await engine.write(5)
    assert (await anext(stream)).choices[0].delta.content == "one t"
    await engine.write(8)  # the white space may be trailing
    await engine.write(9)
    streamed = ""
    while streamed != "wo t":
        streamed += (await anext(stream)).choices[0].delta.content
    await engine.write(99)
    rest = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest[:-1]) == "hree"
    assert rest[-2].choices[0].finish_reason == "stop"
    assert (rest[-1].choices, rest[-1].usage.completion_tokens) == ([], 14)


async def test_a_tool_call_is_withheld_from_the_text_and_streamed_as_a_call(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine(CALL, by_hand=True)
    agent = agent_of(await gateway.open(policy(engine)))
    stream = await agent.chat.completions.create(model="m", messages=HI, tools=ADD, stream=True)
    await anext(stream)
    await engine.write(len("let me s"))
    streamed = (await anext(stream)).choices[0].delta.content
    await engine.write(999)
    rest = [chunk async for chunk in stream]
    assert streamed + "".join(chunk.choices[0].delta.content or "" for chunk in rest) == "let me see"
    calls = [call for chunk in rest for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls] == [(0, "add")]
    assert json.loads(calls[0].function.arguments) == {"a": 1, "b": "ö"}
    assert rest[-1].choices[0].finish_reason == "tool_calls"


async def test_an_incomplete_character_is_not_streamed(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine("aé😀z", by_hand=True)
    agent = agent_of(await gateway.open(policy(engine)))
    stream = await agent.chat.completions.create(model="m", messages=HI, stream=True)
    await anext(stream)
    await engine.write(1)
    streamed = [(await anext(stream)).choices[0].delta.content]
    for tokens in range(2, 9):
        await engine.write(tokens)
        await asyncio.sleep(0)
    streamed += [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(streamed) == "aé😀z"
    assert not any("\ufffd" in text for text in streamed)


async def test_reasoning_opened_by_the_prompt_is_not_streamed_as_content(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any, tokenizer: Any
) -> None:
    thinker = copy.deepcopy(tokenizer)
    thinker.chat_template += "<think>\n"
    engine = typing_engine("hm</think>\n\nyes", with_tokenizer=thinker, by_hand=True)
    agent = agent_of(await gateway.open(policy(engine, with_tokenizer=thinker)))
    stream = await agent.chat.completions.create(model="m", messages=HI, stream=True)
    for tokens in (1, 2, 99):
        await engine.write(tokens)
        await asyncio.sleep(0.02)  # time for a wrong piece to be sent
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "yes"
    assert engine.prompts[0].endswith("<think>")


PIECES = st.sampled_from(
    ["a", " ", "\n", "<", ">", "é", "😀", "\ufffd", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}',
     '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "{", "[", "<tool", "x < y", "<think>", "<|", "word "]
)  # fmt: skip


@given(st.lists(PIECES, max_size=8).map("".join))
def test_the_stable_prefix_of_partial_text_is_a_prefix_of_the_final_content(text: str) -> None:
    content = parse_text(text).content
    for length in range(len(text)):
        read = parse_text(text[:length])
        if not (read.calls or read.reasoning):
            assert content.startswith(stable_prefix(read.content)), text[:length]


@given(st.lists(st.sampled_from(["a", "é", " ", ". ", "x<y", "\n"]), min_size=1, max_size=30).map("".join))
def test_the_stable_prefix_of_plain_text_leaves_out_only_trailing_white_space(text: str) -> None:
    if not text[0].isspace():
        assert stable_prefix(text) in (text.rstrip(), text.rstrip().removesuffix("<"))


@given(st.text(max_size=40), st.text(min_size=1, max_size=4))
def test_the_stable_prefix_ends_before_a_stop_string(text: str, stop: str) -> None:
    assert stop not in stable_prefix(text, [stop])


@given(st.text("ab€é\ufffd <", max_size=12), st.text("ab€é <", min_size=1, max_size=3))
def test_a_stop_string_is_never_streamed_even_byte_by_byte(text: str, stop: str) -> None:
    written = (text + stop).encode()
    if (text + stop).find(stop) == len(text):  # otherwise the answer would have ended earlier
        for length in range(len(written)):
            assert text.startswith(stable_text_prefix(written[:length].decode(errors="replace"), [stop]))
