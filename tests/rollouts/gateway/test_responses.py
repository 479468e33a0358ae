"""OpenAI's Responses API as the official client uses it, on real policy clients."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from outpace.errors import RequestFailed
from support import naming

ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = 'let me see <tool_call>{"name": "add", "arguments": {"a": 1, "b": "ö"}}</tool_call><|end|>'


async def test_a_response_has_the_text_and_its_usage(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine("<think>hm</think>hello<|end|>")
    client = policy(engine)
    agent = agent_of(await gateway.open(client))
    answer = await agent.responses.create(model="m", input="hi", instructions="be kind", temperature=0)
    assert (answer.id, answer.model, answer.status, answer.output_text) == (
        "7.0.0",
        "policy-model",
        "completed",
        "hello",
    )
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    (kept,) = client.trajectories()
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == ((~kept.mask).sum(), kept.mask.sum())
    assert answer.model_extra["outpace"]["pinned"] == ["temperature"]
    assert engine.prompts == ["<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"]


@pytest.mark.parametrize("by_id", [False, True], ids=["whole input", "previous_response_id"])
async def test_a_function_call_and_its_output_continue_the_trajectory(
    by_id: bool, gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine(CALL, "it is 3<|end|>", "yes<|end|>")
    client = policy(engine)
    agent = agent_of(await gateway.open(client))
    common: dict[str, Any] = {"model": "m", "instructions": "be kind", "tools": [ADD]}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    first = await agent.responses.create(input=items, **common)
    text, call = first.output
    assert (text.content[0].text, call.name, json.loads(call.arguments)) == ("let me see", "add", {"a": 1, "b": "ö"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    earlier = [*items, *(item.model_dump(exclude_none=True) for item in first.output), result]
    if by_id:
        second = await agent.responses.create(input=[result], previous_response_id=first.id, **common)
        third = await agent.responses.create(input="sure?", previous_response_id=second.id, **common)
    else:
        second = await agent.responses.create(input=earlier, **common)
        more = [*earlier, *(item.model_dump(exclude_none=True) for item in second.output)]
        third = await agent.responses.create(input=[*more, {"role": "user", "content": "sure?"}], **common)
    assert (second.output_text, third.output_text) == ("it is 3", "yes")
    assert engine.prompts[2].endswith("<|tool|>3<|end|><|assistant|>it is 3<|end|><|user|>sure?<|end|><|assistant|>")
    assert (len(client.trajectories()), client.breaks) == (1, 0)


async def test_a_streamed_response_ends_with_the_whole_response(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine(CALL))))
    async with agent.responses.stream(model="m", input="hi", tools=[ADD], store=True) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    text, call = final.output
    assert (text.content[0].text, json.loads(call.arguments)) == ("let me see", {"a": 1, "b": "ö"})
    assert final.usage.output_tokens == len(CALL) + 1 - len("<tool_call></tool_call><|end|>") + 3


async def test_a_failure_during_a_stream_is_raised_by_the_client(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine(RequestFailed("logits are not finite")))))
    with pytest.raises(openai.APIError, match="logits are not finite"):
        _ = [event async for event in await agent.responses.create(model="m", input="hi", stream=True)]


async def test_a_forced_call_is_completed_and_a_truncated_answer_is_incomplete(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    engine = typing_engine(', "arguments": {}}</tool_call><|end|>', "hello")
    agent = agent_of(await gateway.open(policy(engine)))
    choice = {"type": "function", "name": "add"}
    forced = await agent.responses.create(model="m", input="hi", tools=[ADD], tool_choice=choice)
    assert [(item.type, item.name) for item in forced.output] == [("function_call", "add")]
    cut = await agent.responses.create(model="m", input="hi", max_output_tokens=5)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "hello")
    assert engine.samplings[1].max_tokens == 5


async def test_a_response_that_this_episode_has_not_stored_cannot_be_continued(
    gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    agent = agent_of(await gateway.open(policy(typing_engine("hello"))))
    other = agent_of(await gateway.open(policy(typing_engine("hello"), episode=1)))
    of_other = await other.responses.create(model="m", input="hi")
    not_stored = await agent.responses.create(model="m", input="hi", store=False)
    for response in (of_other, not_stored):
        with pytest.raises(openai.BadRequestError, match=naming("previous_response_id", response.id)) as refused:
            await agent.responses.create(model="m", input="more", previous_response_id=response.id)
        assert refused.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tools", [{"type": "web_search"}], ("web_search", "functions")),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": {}}}, ("json_schema", "importance weight")),
        ("reasoning", {"effort": "high"}, ("chat_template_kwargs",)),
        ("background", True, ()),
        ("conversation", "c", ("previous_response_id",)),
        ("truncation", "auto", ("disabled",)),
        ("max_output_tokens", 0, ("0",)),
        ("tool_choice", {"type": "web_search"}, ("web_search",)),
        ("input", [], ("empty",)),
        ("input", [{"type": "item_reference", "id": "x"}], ("item_reference",)),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], ("input_image",)),
        ("input", [{"type": "function_call_output", "output": "3"}], ("call_id",)),
    ],
)
async def test_what_cannot_be_trained_exactly_is_refused_in_one_line(
    field: str, value: Any, words: tuple[str, ...], gateway: Any, policy: Any, typing_engine: Any, agent_of: Any
) -> None:
    client = policy(typing_engine("hello"))
    agent = agent_of(await gateway.open(client))
    with pytest.raises(openai.BadRequestError) as refused:
        await agent.responses.create(**{"model": "m", "input": "hi", field: value})
    assert re.search(naming(field, *words), refused.value.body["message"])
    assert refused.value.param.startswith(field)
    assert client.requests == []
