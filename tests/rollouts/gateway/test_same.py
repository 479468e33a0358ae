"""Streamed and whole answers say the same, to the letter, in every protocol."""

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
ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI, "tools": [CHAT_TOOL]},
    "completions": {"prompt": "hi"},
    "messages": {"messages": HI, "max_tokens": 500, "tools": [MESSAGES_TOOL]},
}
STOP_FIELD = {"chat/completions": "stop", "completions": "stop", "messages": "stop_sequences"}


# ----------------------------------------------------------------------------------- what a client makes of the events


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


READ = {
    "chat/completions": (whole_chat, folded_chat),
    "completions": (whole_completion, folded_completion),
    "messages": (whole_messages, folded_messages),
}


def pieces(events: list[Any]) -> int:
    """How many of the events have text in them."""
    texts = [
        event["delta"].get("text")
        if event.get("type") == "content_block_delta"
        else event["choices"][0].get("text") or event["choices"][0].get("delta", {}).get("content")
        for event in events
        if "choices" in event or event.get("type") == "content_block_delta"
    ]
    return sum(bool(text) for text in texts)


# ---------------------------------------------------------------------------------------------------------- asked twice


class Both:
    """Asks the same of two equal episodes, once for all of it and once for a stream, token by token."""

    def __init__(self, gateway: Any, policy: Any, typing_engine: Any, http: Any) -> None:
        self._gateway, self._policy, self._typing_engine, self._http = gateway, policy, typing_engine, http

    async def ask(
        self, path: str, text: str, stops: Sequence[str] = (), patience_s: float = 0.05, **more: Any
    ) -> tuple[Any, Any, int]:
        """What the whole answer says, what the stream does, and in how many pieces of text."""
        asked = {"model": "m", **ASKED[path], **more}
        whole, folded = READ[path]
        body = await self._post(self._typing_engine(text), path, asked, stops)
        engine = self._typing_engine(text, by_hand=True)
        stream, _ = await asyncio.gather(
            self._post(engine, path, {**asked, "stream": True}, stops), engine.write_slowly(patience_s)
        )
        lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        return whole(json.loads(body)), folded(events), pieces(events)

    async def _post(self, engine: Any, path: str, body: Any, stops: Sequence[str]) -> str:
        endpoint = await self._gateway.open(self._policy(engine, stop_strings=tuple(stops)))
        headers = {"x-api-key": endpoint.api_key}
        async with self._http.post(f"{endpoint.base_url}/{path}", json=body, headers=headers) as response:
            assert response.status == 200
            told: str = await response.text()
            return told


@pytest.fixture
def both(gateway: Any, policy: Any, typing_engine: Any, http: Any) -> Both:
    return Both(gateway, policy, typing_engine, http)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    "text",
    [
        "", " padded ", "ends in \n", "\ufffd", '{"a": 1}', "über <b>html</b>", "maybe</think> yes",
        "a <think>b</think>", "<think>because</think>yes", "<think>unfinished", CALL, f"<think>so</think>{CALL}",
        f"{CALL} and {CALL}", "<tool_call>{nonsense</tool_call>", "x <tool_call>{nonsense</tool_call> y",
    ],
)  # fmt: skip
async def test_streamed_and_whole_answers_say_the_same(path: str, text: str, both: Both) -> None:
    whole, streamed, _ = await both.ask(path, text, temperature=0)
    assert streamed == whole


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("whose", ["the run's", "the request's", "both"])
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
async def test_the_string_that_ends_an_answer_is_in_neither(
    path: str, whose: str, text: str, stop: str, both: Both
) -> None:
    ours = {"the run's": [stop], "the request's": [], "both": ["el", "b"]}[whose]
    theirs = {} if whose == "the run's" else {STOP_FIELD[path]: [stop]}
    whole, streamed, _ = await both.ask(path, text, ours, **theirs)
    assert streamed == whole
    assert text.removesuffix(stop) in json.dumps(whole, ensure_ascii=False)
    assert stop not in json.dumps(whole, ensure_ascii=False)


@pytest.mark.parametrize("path", ASKED)
async def test_the_pieces_of_a_stream_are_many(path: str, both: Both) -> None:
    """Or the tests above would compare an answer with itself."""
    whole, streamed, count = await both.ask(path, "one two three STOP", ["STOP"], patience_s=60)
    assert streamed == whole
    assert count >= len("onetwothree")


@pytest.mark.parametrize(("path", "choice"), [("chat/completions", "none"), ("messages", {"type": "none"})])
async def test_a_call_that_was_not_to_be_made_is_text_like_all_the_rest(path: str, choice: Any, both: Both) -> None:
    text = f"<think>so</think>{CALL}"
    whole, streamed, _ = await both.ask(path, text, tool_choice=choice)
    assert streamed == whole
    said = whole["content"] if path != "messages" else whole[0]
    assert said == (text if path != "messages" else [{"type": "text", "text": text}])
    if path != "messages":
        assert (whole["calls"], whole["reasoning"]) == ([], "")
