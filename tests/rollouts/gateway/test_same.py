"""Streamed and whole answers are identical in every protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = 'see <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
MESSAGES_TOOL = {"name": "add", "input_schema": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
REQUESTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI, "tools": [CHAT_TOOL]},
    "completions": {"prompt": "hi"},
    "messages": {"messages": HI, "max_tokens": 500, "tools": [MESSAGES_TOOL]},
    "responses": {"input": "hi", "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}]},
}
STOP_FIELD = {"chat/completions": "stop", "completions": "stop", "messages": "stop_sequences"}


# ------------------------------------------------------------------------------ assembling the events as a client does


def folded_chat(events: list[Any]) -> Any:
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [
        {key: value for key, value in call.items() if key != "index"}
        for delta in deltas
        for call in delta.get("tool_calls", ())
    ]
    return {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "reasoning": "".join(delta.get("reasoning_content", "") for delta in deltas),
        "calls": calls,
        "finish": events[-1]["choices"][0]["finish_reason"],
        "outpace": events[-1].get("outpace"),
    }


def whole_chat(body: Any) -> Any:
    message = body["choices"][0]["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": message.get("tool_calls", []),
        "finish": body["choices"][0]["finish_reason"],
        "outpace": body.get("outpace"),
    }


def folded_completion(events: list[Any]) -> Any:
    text = "".join(event["choices"][0]["text"] for event in events)
    return text, events[-1]["choices"][0]["finish_reason"], events[-1].get("outpace")


def whole_completion(body: Any) -> Any:
    return body["choices"][0]["text"], body["choices"][0]["finish_reason"], body.get("outpace")


def folded_messages(events: list[Any]) -> Any:
    blocks = [dict(event["content_block"]) for event in events if event["type"] == "content_block_start"]
    assert sum(event["type"] == "content_block_stop" for event in events) == len(blocks)
    for event in events:
        if event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                kind = delta["type"].removesuffix("_delta")
                block[kind] += delta[kind]
    ended = next(event for event in events if event["type"] == "message_delta")
    return blocks, ended["delta"]["stop_reason"], ended["usage"], events[0]["message"].get("outpace")


def whole_messages(body: Any) -> Any:
    return body["content"], body["stop_reason"], body["usage"], body.get("outpace")


def folded_response(events: list[Any]) -> Any:
    """The items as their own events give them, and the rest from the response in the last event."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == list(range(len(done)))
    for event in done:
        item, streamed = event["item"], texts.get(event["output_index"], "")
        assert streamed == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    return [event["item"] for event in done], *whole_response(events[-1]["response"])[1:]


def whole_response(body: Any) -> Any:
    return body["output"], body["status"], body["usage"], body.get("outpace")


READ = {
    "chat/completions": (whole_chat, folded_chat),
    "completions": (whole_completion, folded_completion),
    "messages": (whole_messages, folded_messages),
    "responses": (whole_response, folded_response),
}


def pieces(events: list[Any]) -> int:
    """The number of events that contain text."""
    kinds = ("content_block_delta", "response.output_text.delta")
    chunks = [event["choices"][0] for event in events if "choices" in event]
    texts = [chunk.get("text") or chunk.get("delta", {}).get("content") for chunk in chunks]
    return sum(map(bool, texts)) + sum(event.get("type") in kinds for event in events)


# --------------------------------------------------------------------------------- the same request, whole and streamed


class WholeAndStreamed:
    """Sends the same request to two equal episodes, once for a whole answer and once for a token-by-token stream."""

    def __init__(self, gateway: Any, policy: Any, typing_engine: Any, http: Any) -> None:
        self._gateway, self._policy, self._typing_engine, self._http = gateway, policy, typing_engine, http

    async def compare(
        self, path: str, text: str, stops: Sequence[str] = (), patience_s: float = 0.05, **more: Any
    ) -> tuple[Any, Any, int]:
        """The whole answer, the streamed answer, and the number of text pieces in the stream."""
        request = {"model": "m", **REQUESTS[path], **more}
        whole, folded = READ[path]
        body = await self._post(self._typing_engine(text), path, request, stops)
        engine = self._typing_engine(text, by_hand=True)
        stream, _ = await asyncio.gather(
            self._post(engine, path, {**request, "stream": True}, stops), engine.write_slowly(patience_s)
        )
        lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        return whole(json.loads(body)), folded(events), pieces(events)

    async def _post(self, engine: Any, path: str, body: Any, stops: Sequence[str]) -> str:
        endpoint = await self._gateway.open(self._policy(engine, stop_strings=tuple(stops)))
        headers = {"x-api-key": endpoint.api_key}
        async with self._http.post(f"{endpoint.base_url}/{path}", json=body, headers=headers) as response:
            assert response.status == 200
            text: str = await response.text()
            return text


@pytest.fixture
def both(gateway: Any, policy: Any, typing_engine: Any, http: Any) -> WholeAndStreamed:
    return WholeAndStreamed(gateway, policy, typing_engine, http)


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize(
    "text",
    [
        "", " padded ", "ends in \n", "\ufffd", '{"a": 1}', "über <b>html</b>", "maybe</think> yes",
        "a <think>b</think>", "<think>because</think>yes", "<think>unfinished", CALL, f"<think>so</think>{CALL}",
        f"{CALL} and {CALL}", "<tool_call>{nonsense</tool_call>", "x <tool_call>{nonsense</tool_call> y",
    ],
)  # fmt: skip
async def test_streamed_and_whole_answers_are_equal(path: str, text: str, both: WholeAndStreamed) -> None:
    whole, streamed, _ = await both.compare(path, text, temperature=0)
    assert streamed == whole


@pytest.mark.parametrize("path", STOP_FIELD)
@pytest.mark.parametrize("source", ["the run's", "the request's", "both"])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("hello STOP", "STOP"),
        ("hello ST", "STOP"),
        ("one STSTOP", "STOP"),
        ("ab€", "b€"),
        ("STOP", "STOP"),
        ("a\n", "\n"),
    ],
)
async def test_a_stop_string_is_in_neither_answer(
    path: str, source: str, text: str, stop: str, both: WholeAndStreamed
) -> None:
    ours = {"the run's": [stop], "the request's": [], "both": ["el", "b"]}[source]
    theirs = {} if source == "the run's" else {STOP_FIELD[path]: [stop]}
    whole, streamed, _ = await both.compare(path, text, ours, **theirs)
    assert streamed == whole
    assert text.removesuffix(stop) in json.dumps(whole, ensure_ascii=False)
    assert stop not in json.dumps(whole, ensure_ascii=False)


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_stream_has_many_pieces(path: str, both: WholeAndStreamed) -> None:
    """Otherwise the tests above would compare an answer with itself."""
    whole, streamed, count = await both.compare(path, "one two three STOP", ["STOP"], patience_s=60)
    assert streamed == whole
    assert count >= len("onetwothree")


@pytest.mark.parametrize(("path", "choice"), [("chat/completions", "none"), ("messages", {"type": "none"})])
async def test_a_tool_call_under_tool_choice_none_is_plain_text(path: str, choice: Any, both: WholeAndStreamed) -> None:
    text = f"<think>so</think>{CALL}"
    whole, streamed, _ = await both.compare(path, text, tool_choice=choice)
    assert streamed == whole
    content = whole["content"] if path != "messages" else whole[0]
    assert content == (text if path != "messages" else [{"type": "text", "text": text}])
    if path != "messages":
        assert (whole["calls"], whole["reasoning"]) == ([], "")
