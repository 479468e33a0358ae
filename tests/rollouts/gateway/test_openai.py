"""The OpenAI protocol as the official client uses it, on real policy clients."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import openai
import pytest

from outpace.errors import BadInput, ComponentFailed, ContextFull, RequestFailed
from support import naming

HI: list[Any] = [{"role": "user", "content": "hi"}]
ADD: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = 'let me see <tool_call>{"name": "add", "arguments": {"a": 1, "b": "ö"}}</tool_call>'


async def collect(requested: Any) -> list[Any]:
    """Every chunk of a stream."""
    return [chunk async for chunk in await requested]


async def test_a_chat_completion_returns_the_answer_and_its_usage(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine("hello<|end|>")
    client = policy(engine)
    endpoint = await gateway.open(client)
    answer = await agent_of(endpoint).chat.completions.create(model="whatever", messages=HI)
    assert (answer.id, answer.model, answer.object) == ("7.0.0", "policy-model", "chat.completion")
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls is None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (6, len(client.trajectories()[0].tokens) - 6)
    assert client.requests == ["7.0.0"]


async def test_a_history_that_continues_an_answer_stays_one_trajectory(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    client = policy(typing_engine(CALL + "<|end|>", "it is 3<|end|>"))
    agent = agent_of(await gateway.open(client))
    first = await agent.chat.completions.create(model="m", messages=HI, tools=ADD)
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": "ö"})
    assert message.content == "let me see"
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    messages = [*HI, message.model_dump(exclude_none=True), result]
    second = await agent.chat.completions.create(model="m", messages=messages, tools=ADD)
    assert second.choices[0].message.content == "it is 3"
    assert (len(client.trajectories()), client.breaks) == (1, 0)


async def test_the_sampling_settings_of_the_run_are_pinned_and_reported_to_the_agent(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = typing_engine("hello")
    agent = agent_of(await gateway.open(policy(engine)))
    for _ in range(2):
        answer = await agent.chat.completions.create(
            model="m", messages=HI, temperature=0, top_p=0.1, presence_penalty=1, seed=4
        )
        assert answer.model_extra["outpace"]["pinned"] == ["temperature", "top_p", "presence_penalty", "seed"]
    assert [(sent.temperature, sent.top_p) for sent in engine.samplings] == [(0.5, 1.0)] * 2
    assert sum("temperature" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(("requested", "sent"), [(3, 3), (5000, 2000), (None, 2000)])
async def test_a_requested_token_limit_is_capped_by_that_of_the_run(
    requested: int | None, sent: int, gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine("hello")
    agent = agent_of(await gateway.open(policy(engine)))
    await agent.chat.completions.create(model="m", messages=HI, max_completion_tokens=requested)
    await agent.chat.completions.create(model="m", messages=HI, max_tokens=requested, stop=["!"])
    assert [sampling.max_tokens for sampling in engine.samplings] == [sent, sent]
    assert [sampling.stop_strings for sampling in engine.samplings] == [[], ["!"]]


async def test_a_truncated_answer_has_finish_reason_length(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine("hello"))))
    answer = await agent.chat.completions.create(model="m", messages=HI, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"


async def test_reasoning_is_separate_from_the_content(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine("<think>hm</think>\n\nyes"))))
    message = (await agent.chat.completions.create(model="m", messages=HI)).choices[0].message
    assert (message.content, message.reasoning_content) == ("yes", "hm")
    parts = [chunk async for chunk in await agent.chat.completions.create(model="m", messages=HI, stream=True)]
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "yes"
    reasoning = [part.choices[0].delta.model_extra.get("reasoning_content") for part in parts]
    assert [text for text in reasoning if text] == ["hm"]


async def test_logprobs_are_those_of_the_sampled_tokens(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine("abc"))))
    requested = {"model": "m", "messages": HI, "logprobs": True, "top_logprobs": 0}
    whole = (await agent.chat.completions.create(**requested)).choices[0].logprobs
    assert [token.token for token in whole.content] == ["a", "b", "c"]
    assert [token.logprob for token in whole.content] == pytest.approx([-0.01, -0.02, -0.03])
    chunks = [chunk async for chunk in await agent.chat.completions.create(**requested, stream=True)]
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [logprobs.content for logprobs in streamed] == [whole.content]
    plain = (await agent.completions.create(model="m", prompt="x", logprobs=0)).choices[0].logprobs
    assert (plain.tokens, plain.text_offset) == (["a", "b", "c"], [0, 1, 2])


async def test_text_and_token_id_prompts_are_completed(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any, tokenizer: Any
) -> None:
    engine = typing_engine(" two<|end|>")
    agent = agent_of(await gateway.open(policy(engine)))
    for prompt in ("one,", tokenizer.encode("one,", add_special_tokens=False), ["one,"]):
        answer = await agent.completions.create(model="m", prompt=prompt)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" two", "stop")
    chunks = [chunk async for chunk in await agent.completions.create(model="m", prompt="one,", stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == " two"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert engine.prompts == ["one,"] * 4


async def test_the_model_is_listed(gateway: Any, policy: Any, typing_engine: Any, agent_of: Any) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine("x"))))
    assert [model.id async for model in agent.models.list()] == ["policy-model"]


async def test_tool_choice_none_hides_the_tools_and_parses_no_calls(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine(CALL)
    agent = agent_of(await gateway.open(policy(engine)))
    answer = await agent.chat.completions.create(model="m", messages=HI, tools=ADD, tool_choice="none")
    assert "add" not in engine.prompts[0]
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].finish_reason == "stop"


async def test_a_history_with_a_call_under_tool_choice_none_starts_a_new_trajectory(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    client = policy(typing_engine(CALL + "<|end|>", "so be it<|end|>"))
    agent = agent_of(await gateway.open(client))
    requested: dict[str, Any] = {"model": "m", "tool_choice": "none"}
    message = (await agent.chat.completions.create(messages=HI, **requested)).choices[0].message
    messages = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": "no tools!"}]
    assert (await agent.chat.completions.create(messages=messages, **requested)).choices[
        0
    ].message.content == "so be it"
    assert (len(client.trajectories()), client.breaks) == (2, 1)


async def test_an_unparseable_tool_call_stays_in_the_content(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine("<tool_call>{nonsense</tool_call>"))))
    choice = (await agent.chat.completions.create(model="m", messages=HI, tools=ADD)).choices[0]
    assert choice.message.content == "<tool_call>{nonsense</tool_call>"
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


async def test_a_developer_message_is_a_system_message_and_text_parts_are_joined(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine("hello")
    agent = agent_of(await gateway.open(policy(engine)))
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    await agent.chat.completions.create(
        model="m", messages=[{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    )
    assert engine.prompts == ["<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("n", 0, ("0",)),
        ("n", 129, ("128", "129")),
        ("tool_choice", "required", ("tools",)),
        ("tool_choice", {"type": "custom", "custom": {"name": "add"}}, ("custom",)),
        ("top_logprobs", 3, ("0",)),
        ("response_format", {"type": "json_schema"}, ("json_schema", "constrained sampling", "importance weight")),
        ("logit_bias", {"5": 2}, ("constrained sampling", "importance weight")),
        ("max_tokens", 0, ("0",)),
        ("max_tokens", "many", ("Expected `int | null`, got `str`",)),
        ("stop", [""], ("empty",)),
        ("messages", [], ("empty",)),
        ("messages", "hi", ("Expected `array`, got `str`",)),
        ("messages", [{"role": "king", "content": "hi"}], ()),
        ("messages", [{"role": "user", "content": 7}], ()),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], ("image_url",)),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], ("text",)),
        ("messages", [*HI, {"role": "tool", "content": "3"}], ("tool_call_id",)),
        ("tools", [{"type": "search"}], ()),
    ],
)
async def test_an_unsupported_field_value_is_refused_with_a_reason(
    field: str, value: Any, words: tuple[str, ...], gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    client = policy(typing_engine("hello"))
    agent = agent_of(await gateway.open(client))
    with pytest.raises(openai.BadRequestError) as refused:
        await agent.chat.completions.create(**{"model": "m", "messages": HI, field: value})
    assert re.search(naming(field, *words), refused.value.message.partition(" - ")[2])  # without the client's prefix
    assert refused.value.type == "invalid_request_error"
    assert (refused.value.param or "").startswith(field)
    assert client.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 0), ("best_of", 2), ("echo", True), ("suffix", "x"), ("logprobs", 5), ("prompt", ["a", "b"])],
)
async def test_text_completions_refuse_unsupported_fields(
    field: str, value: Any, gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine("hello"))))
    with pytest.raises(openai.BadRequestError) as refused:
        await agent.completions.create(**{"model": "m", "prompt": "x", field: value})
    assert refused.value.param == field


async def test_unknown_fields_are_ignored(gateway: Any, policy: Any, typing_engine: Any, agent_of: Any) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine("hello"))))
    extra = {"user": "me", "store": True, "reasoning_effort": "high", "nonsense": [1, {"a": None}]}
    answer = await agent.chat.completions.create(model="m", messages=HI, extra_body=extra)
    assert answer.choices[0].message.content == "hello"


@pytest.mark.parametrize(
    ("failure", "kind", "code"),
    [
        (ContextFull("the prompt has 9 tokens, the context 8"), openai.BadRequestError, "context_length_exceeded"),
        (RequestFailed("logits are not finite"), openai.BadRequestError, None),
        (BadInput("the chat template shows the model no tools"), openai.BadRequestError, None),
        (ComponentFailed("engine", "was stopped"), openai.InternalServerError, None),
        (ZeroDivisionError("oh"), openai.InternalServerError, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_request_reports_its_reason(
    failure: Exception, kind: Any, code: str | None, stream: bool,
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any,
) -> None:  # fmt: skip
    client = policy(typing_engine(failure))
    agent = agent_of(await gateway.open(client))
    requested = agent.chat.completions.create(model="m", messages=HI, stream=stream)
    with pytest.raises(openai.APIError if stream else kind, match=str(failure).split(":")[-1].strip()) as raised:
        await (collect(requested) if stream else requested)
    assert raised.value.code == code
    serious = await gateway.close_session(client)
    assert serious is (failure if isinstance(failure, ComponentFailed) else None)
