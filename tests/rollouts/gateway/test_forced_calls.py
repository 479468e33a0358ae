"""Forced tool calls: their opening is context that is not trained, and the policy writes the rest."""

from __future__ import annotations

import copy
import json
from typing import Any

import openai
import pytest

from support import naming

HI: list[Any] = [{"role": "user", "content": "hi"}]
ADD, MULTIPLY = (
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("add", "multiply")
)
NAMED = {"type": "function", "function": {"name": "add"}}
REST = ', "arguments": {"a": 1}}</tool_call><|end|>'


@pytest.mark.parametrize(
    ("choice", "tools", "opening"),
    [
        (NAMED, [ADD, MULTIPLY], '<tool_call>{"name": "add"'),
        ("required", [ADD], '<tool_call>{"name": "add"'),
        ("required", [ADD, MULTIPLY], '<tool_call>{"name": "'),
    ],
    ids=["named", "required of one tool", "required of two tools"],
)
async def test_the_opening_of_a_forced_call_is_in_the_prompt_and_only_the_rest_is_trained(
    choice: Any, tools: Any, opening: str, gateway: Any, policy: Any, typing_engine: Any, agent_of: Any, tokenizer: Any
) -> None:
    rest = REST if opening.endswith('add"') else f'add"{REST}'
    engine = typing_engine(rest, "it is 3<|end|>")
    client = policy(engine)
    agent = agent_of(await gateway.open(client))
    answer = await agent.chat.completions.create(model="m", messages=HI, tools=tools, tool_choice=choice)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", None)
    assert engine.prompts[0].endswith("<|assistant|>" + opening)
    (kept,) = client.trajectories()
    assert tokenizer.decode(kept.tokens[kept.mask]) == rest
    assert tokenizer.decode(kept.tokens[~kept.mask]).endswith(opening)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == ((~kept.mask).sum(), kept.mask.sum())
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    messages = [*HI, message.model_dump(exclude_none=True), result]
    await agent.chat.completions.create(model="m", messages=messages, tools=tools)
    assert (len(client.trajectories()), client.breaks) == (1, 0)


async def test_a_streamed_forced_call_is_a_whole_call(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine(REST))))
    requested = agent.chat.completions.create(model="m", messages=HI, tools=[ADD], tool_choice=NAMED, stream=True)
    chunks = [chunk async for chunk in await requested]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})


async def test_a_forced_call_that_is_not_completed_is_content_with_its_opening(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine(", hm"))))
    requested = {"model": "m", "messages": HI, "tools": [ADD], "tool_choice": NAMED}
    (choice,) = (await agent.chat.completions.create(**requested)).choices
    assert (choice.message.content, choice.message.tool_calls) == ('<tool_call>{"name": "add", hm', None)


async def test_a_chat_format_that_does_not_show_calls_refuses_to_force_them(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any, tokenizer: Any
) -> None:
    silent = copy.deepcopy(tokenizer)
    silent.chat_template = tokenizer.chat_template.replace("message.tool_calls or []", "[]")
    client = policy(typing_engine("x", with_tokenizer=silent), with_tokenizer=silent)
    agent = agent_of(await gateway.open(client))
    with pytest.raises(openai.BadRequestError, match=naming("tool_choice", "auto")):
        await agent.chat.completions.create(model="m", messages=HI, tools=[ADD], tool_choice="required")
    assert not client.trajectories()
