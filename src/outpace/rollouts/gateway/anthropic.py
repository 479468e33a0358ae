"""Anthropic API: convert content blocks to messages, and answers to responses and stream events. Pure functions.

Tool results in a user turn become separate messages; a failed one starts with `error: `. Thinking blocks that the agent
sends back are dropped: the policy's reasoning is already in the recorded tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from outpace.rollouts.gateway.protocol import GatewayReply, PolicyRequest, RequestRejected, extra_fields, pinned_fields
from outpace.rollouts.gateway.validation import Json, constrained, forced_functions, validate_request
from outpace.types import Message

ERROR = "error: "
"""Prefix of failed tool results, as for outpace's own tools."""

FORCED = ("any", "tool")
"""Values of `tool_choice.type` that force a tool call."""

_STOP_REASON = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    is_error: bool | None = None
    content: str | list[_Block] | None = None


class _Turn(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str = ""


class _Choice(msgspec.Struct):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None


class _Output(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Messages(msgspec.Struct, kw_only=True):
    messages: list[_Turn]
    max_tokens: int
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: _Output | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ------------------------------------------------------------------------------------------------------------ requests


def read_messages(body: Json) -> PolicyRequest:
    request = validate_request(body, _Messages)
    if request.output_config is not None and request.output_config.format:
        raise constrained("output_config.format")
    choice = request.tool_choice or _Choice("auto")
    if choice.type == "tool" and choice.name is None:
        raise RequestRejected("tool_choice.name: required with type tool", param="tool_choice")
    if request.max_tokens < 1 or not request.messages or "" in (request.stop_sequences or ()):
        raise RequestRejected("messages and stop_sequences must not be empty, and max_tokens must be at least 1")
    system = [{"role": "system", "content": _text(request.system)}] if request.system else []
    return PolicyRequest(
        messages=[*system, *(message for turn in request.messages for message in _messages(turn))],
        tools=[_tool(tool) for tool in request.tools or ()] if choice.type != "none" else (),
        calls=choice.type != "none",
        must_call=_must_call(choice, [tool.name for tool in request.tools or ()]),
        template_kwargs=request.chat_template_kwargs or {},
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or (),
        stream=bool(request.stream),
        pinned=pinned_fields(body),
    )


def _must_call(choice: _Choice, tools: Sequence[str]) -> Sequence[str]:
    return forced_functions(choice.name if choice.type == "tool" else None, tools) if choice.type in FORCED else ()


def _messages(turn: _Turn) -> Iterator[Message]:
    blocks = [_Block("text", turn.content)] if isinstance(turn.content, str) else turn.content
    _check_block_types(blocks, _BLOCKS[turn.role])
    text = _text([block for block in blocks if block.type == "text"])
    if turn.role == "assistant":
        calls = [_call(block) for block in blocks if block.type == "tool_use"]
        yield {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        return
    results = [block for block in blocks if block.type == "tool_result"]
    for block in results:
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
    if text or not results:
        yield {"role": "user", "content": text}


_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}


def _text(blocks: str | list[_Block]) -> str:
    if isinstance(blocks, str):
        return blocks
    _check_block_types(blocks, ("text",))
    return "".join(block.text for block in blocks)


def _result(block: _Block) -> str:
    text = _text(block.content or "")
    return f"{ERROR}{text}" if block.is_error and not text.startswith(ERROR) else text


def _check_block_types(blocks: list[_Block], supported: Sequence[str]) -> None:
    for block in blocks:
        if block.type not in supported:
            raise RequestRejected(f"messages: blocks of type {block.type} are not supported here", param="messages")


def _call(block: _Block) -> Json:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool(tool: _Tool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


# ----------------------------------------------------------------------------------------------------------- responses


def messages_response(replies: Sequence[GatewayReply], model: str, request: PolicyRequest) -> Json:
    (reply,) = replies
    thinking = [{"type": "thinking", "thinking": reply.reasoning, "signature": ""}] if reply.reasoning else []
    text = [{"type": "text", "text": reply.content}] if reply.content or not reply.calls else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in reply.calls
    ]
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.tokens}
    message = _message(reply.id, model, [*thinking, *text, *calls], _STOP_REASON[reply.finish], usage)
    return {**message, **extra_fields(reply.pinned)}


def error_body(kind: str, message: str) -> Json:
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesStream:
    """Stream events of one answer: text and tool-use blocks, each opened and closed."""

    def __init__(self, request_id: str, model: str, request: PolicyRequest) -> None:
        self._id, self._model, self._pinned = request_id, model, request.pinned
        self._blocks = 0
        self._in_text = False

    def opening(self) -> Iterator[Json]:
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = _message(self._id, self._model, [], None, usage)
        yield {"type": "message_start", "message": {**message, **extra_fields(self._pinned)}}

    def delta(self, text: str, index: int = 0) -> Iterator[Json]:
        if not self._in_text:
            self._in_text = True
            yield self._start({"type": "text", "text": ""})
        if text:
            yield self._inside({"type": "text_delta", "text": text})

    def closing(self, replies: Sequence[GatewayReply]) -> Iterator[Json]:
        """Yield the remaining blocks of the finished answer, in order. Reasoning is left out if text was streamed."""
        (reply,) = replies
        if reply.reasoning and not self._in_text:
            yield self._start({"type": "thinking", "thinking": "", "signature": ""})
            yield self._inside({"type": "thinking_delta", "thinking": reply.reasoning})
            yield self._stop()
        if reply.content or not reply.calls:
            yield from self.delta(reply.unsent)
            yield self._stop()
        for call in reply.calls:
            yield self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            yield self._inside({"type": "input_json_delta", "partial_json": call.arguments})
            yield self._stop()
        ended = {"stop_reason": _STOP_REASON[reply.finish], "stop_sequence": None}
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.tokens}
        yield {"type": "message_delta", "delta": ended, "usage": usage}
        yield {"type": "message_stop"}

    def _start(self, block: Json) -> Json:
        return {"type": "content_block_start", "index": self._blocks, "content_block": block}

    def _inside(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _stop(self) -> Json:
        self._blocks += 1
        return {"type": "content_block_stop", "index": self._blocks - 1}


def _message(request_id: str, model: str, content: list[Json], stop: str | None, usage: Json) -> Json:
    return {
        "id": request_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": usage,
    }
