"""The Anthropic protocol: the same answers as content blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest

HI: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}]
RESULT = {"type": "tool_result", "tool_use_id": "x"}
CALL = 'see <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>'


async def send(http: Any, endpoint: Any, **changes: Any) -> tuple[int, str]:
    headers = {"x-api-key": endpoint.api_key, "anthropic-version": "2023-06-01"}
    async with http.post(f"{endpoint.base_url}/messages", json={**HI, **changes}, headers=headers) as response:
        return response.status, await response.text()


def events(text: str) -> list[dict[str, Any]]:
    """Parse server-sent events; each has its type in the event line and in its data."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_an_answer_is_returned_as_content_blocks(
    gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    engine = typing_engine("<think>hm</think>hello<|end|>")
    endpoint = await gateway.open(policy(engine))
    status, text = await send(http, endpoint, system="be kind", temperature=0, stop_sequences=["!"])
    answer = json.loads(text)
    assert status == 200
    assert [(block["type"], block.get("text")) for block in answer["content"]] == [
        ("thinking", None),
        ("text", "hello"),
    ]
    assert (answer["id"], answer["role"], answer["stop_reason"]) == ("7.0.0", "assistant", "end_turn")
    assert answer["usage"]["output_tokens"] == len("<think>hm</think>hello") + 1
    assert answer["outpace"] == {"pinned": ["temperature"]}
    assert engine.prompts == ["<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"]
    assert engine.samplings[0].stop_strings == ["!"]


async def test_a_tool_call_and_its_result_continue_the_same_trajectory(
    gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    client = policy(typing_engine(CALL, "it is 3<|end|>"))
    endpoint = await gateway.open(client)
    _, text = await send(http, endpoint, tools=TOOLS)
    answer = json.loads(text)
    assert answer["stop_reason"] == "tool_use"
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
    call = answer["content"][1]
    assert (call["name"], call["input"]) == ("add", {"a": 1})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3"}]}
    messages = [
        *HI["messages"],
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    _, text = await send(http, endpoint, tools=TOOLS, messages=messages)
    assert json.loads(text)["content"] == [{"type": "text", "text": "it is 3"}]
    assert (len(client.trajectories()), client.breaks) == (1, 0)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
async def test_a_forced_tool_call_is_completed_by_the_policy(
    choice: dict[str, str], gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    engine = typing_engine(', "arguments": {"a": 1}}</tool_call><|end|>')
    _, text = await send(http, await gateway.open(policy(engine)), tools=TOOLS, tool_choice=choice)
    (call,) = json.loads(text)["content"]
    assert (call["name"], call["input"]) == ("add", {"a": 1})
    assert engine.prompts[0].endswith('<|assistant|><tool_call>{"name": "add"')


async def test_a_stream_starts_and_stops_every_content_block(
    gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    endpoint = await gateway.open(policy(typing_engine(CALL)))
    streamed = events((await send(http, endpoint, tools=TOOLS, stream=True))[1])
    kinds = [event["type"] for event in streamed if event["type"] != "content_block_delta"]
    assert kinds == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    deltas = [(event["index"], event["delta"]) for event in streamed if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for index, delta in deltas if index == 0) == "see"
    assert json.loads("".join(delta["partial_json"] for index, delta in deltas if index == 1)) == {"a": 1}
    assert streamed[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("content", "shown"), [("boom", "error: boom"), ("error: boom", "error: boom"), ("", "error: ")]
)
async def test_a_tool_result_marked_as_an_error_starts_with_error(
    content: str, shown: str, gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    engine = typing_engine("oh<|end|>")
    failed = {**RESULT, "is_error": True, "content": [{"type": "text", "text": content}]}
    await send(http, await gateway.open(policy(engine)), messages=[{"role": "user", "content": [failed]}])
    assert engine.prompts == [f"<|tool|>{shown}<|end|><|assistant|>"]


@pytest.mark.parametrize(
    "change",
    [
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool"}, "tools": TOOLS},
        {"tool_choice": {"type": "tool", "name": "multiply"}, "tools": TOOLS},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image", "source": {}}]}]}]},
        {"system": [{"type": "image", "source": {}}]},
        {"tools": [{"name": "add"}]},
    ],
)
async def test_an_unsupported_request_gets_an_invalid_request_error(
    change: dict[str, Any], gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    client = policy(typing_engine("hello"))
    status, text = await send(http, await gateway.open(client), **change)
    assert (status, json.loads(text)["type"], json.loads(text)["error"]["type"]) == (
        400, "error", "invalid_request_error",
    )  # fmt: skip
    assert client.requests == []
