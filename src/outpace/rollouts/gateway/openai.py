"""OpenAI API: parse requests, build responses and stream events. Pure functions.

Requests are untrusted: every field that is used is validated, all others are ignored. Messages and tools are passed on
unchanged, except that content becomes one text and `developer` becomes `system`. The id of a response is the id of the
request, by which a rollout can assign the answer a reward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal, TypeVar

import msgspec

from outpace.rollouts.gateway.protocol import GatewayReply, PolicyRequest, RequestRejected, extra_fields, pinned_fields
from outpace.rollouts.tools.functions import json_children
from outpace.types import Message, ToolCall

S = TypeVar("S", bound=msgspec.Struct)

MAX_DEPTH = 64
"""Maximum nesting of a request: chat templates and JSON encoders are recursive."""
MAX_SIZE = 1_000_000
"""Maximum number of characters and values in a request; longer than any context, so it is rejected unrendered."""


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Named(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Named


class _Streaming(msgspec.Struct):
    include_usage: bool | None = None


class _Format(msgspec.Struct):
    type: str = "text"


class _Common(msgspec.Struct):
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _Streaming | None = None


class _Chat(_Common, kw_only=True):
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: _Format | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[int | str]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


# ------------------------------------------------------------------------------------------------------------ requests


def read_chat(body: dict[str, Any]) -> PolicyRequest:
    request = validate_request(body, _Chat)
    _check_single(request.n, "n")
    if not request.messages:
        raise RequestRejected("messages is empty", param="messages")
    if request.top_logprobs:
        raise RequestRejected(
            "top_logprobs: only 0 is supported (logprobs of the sampled tokens)", param="top_logprobs"
        )
    if request.response_format is not None and request.response_format.type != "text":
        kind = request.response_format.type
        raise RequestRejected(f"response_format: {kind} is not supported, only text", param="response_format")
    allowed = _calls_allowed(request.tool_choice)
    return PolicyRequest(
        messages=[_message(message, index) for index, message in enumerate(body["messages"])],
        tools=(body.get("tools") or ()) if allowed else (),
        calls=allowed,
        max_tokens=_limit(request.max_completion_tokens or request.max_tokens),
        stop=_stops(request.stop),
        stream=bool(request.stream),
        usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        logprobs=bool(request.logprobs),
        pinned=pinned_fields(body),
    )


def read_completion(body: dict[str, Any]) -> PolicyRequest:
    request = validate_request(body, _Completion)
    _check_single(request.n, "n")
    _check_single(request.best_of, "best_of")
    if request.echo or request.suffix:
        raise RequestRejected("echo and suffix are not supported", param="echo" if request.echo else "suffix")
    if request.logprobs is not None and not 0 <= request.logprobs <= 1:
        raise RequestRejected(
            "logprobs: must be 0 or 1; only logprobs of the sampled tokens are supported", param="logprobs"
        )
    return PolicyRequest(
        prompt=_prompt(request.prompt),
        max_tokens=_limit(request.max_tokens),
        stop=_stops(request.stop),
        stream=bool(request.stream),
        usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        logprobs=request.logprobs is not None,
        pinned=pinned_fields(body),
    )


def validate_request(body: dict[str, Any], shape: type[S]) -> S:
    """Validate a request and return the fields that are used."""
    _check_size(body)
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        param = place.rstrip("`") or None
        raise RequestRejected(f"{param}: {message}" if param else message, param=param) from None


def _check_size(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    size = 0
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in json_children(outer)]
        size += sum(len(value) if isinstance(value, str) else 1 for value in level)
        if size > MAX_SIZE:
            message = f"the request has more than {MAX_SIZE:,} characters, which exceeds any context"
            raise RequestRejected(message, code="context_length_exceeded")
        if not level:
            return
    raise RequestRejected(f"the request is nested deeper than {MAX_DEPTH} levels")


def _message(message: Message, index: int) -> Message:
    if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
        param = f"messages[{index}].tool_call_id"
        raise RequestRejected(f"{param}: required; a tool result must name its call", param=param)
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": _content(message.get("content"), index)}


def _content(content: str | list[dict[str, Any]] | None, index: int) -> str:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part["type"] != "text" or part.get("text") is None:
            param = f"messages[{index}].content"
            raise RequestRejected(f"{param}: parts of type {part['type']} are not supported, only text", param=param)
    return "".join(part["text"] for part in content)


def _calls_allowed(choice: str | dict[str, Any] | None) -> bool:
    if choice in (None, "auto", "none"):
        return choice != "none"
    raise RequestRejected(
        "tool_choice: only auto and none are supported; tool calls cannot be forced", param="tool_choice"
    )


def _check_single(count: int | None, name: str) -> None:
    if count not in (None, 1):
        raise RequestRejected(f"{name}: only 1 is supported; send several requests instead", param=name)


def _limit(tokens: int | None) -> int | None:
    if tokens is not None and tokens < 1:
        raise RequestRejected(f"max_tokens: must be at least 1, got {tokens}", param="max_tokens")
    return tokens


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if "" in stops:
        raise RequestRejected("stop: must not contain an empty string", param="stop")
    return stops


def _prompt(prompt: str | list[int | str]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    tokens = [token for token in prompt if isinstance(token, int) and 0 <= token < 1 << 31]
    if tokens and len(tokens) == len(prompt):
        return tokens
    raise RequestRejected(
        "prompt: must be one text or one list of token ids; send several requests instead", param="prompt"
    )


Json = dict[str, Any]


def chat_response(reply: GatewayReply, model: str) -> Json:
    return _response(reply, model, "chat.completion", {"message": chat_message(reply)}, _chat_logprobs(reply))


def completion_response(reply: GatewayReply, model: str) -> Json:
    return _response(reply, model, "text_completion", {"text": reply.content}, _completion_logprobs(reply))


def chat_message(reply: GatewayReply) -> Json:
    calls = {"tool_calls": [_call(call) for call in reply.calls]} if reply.calls else {}
    reasoning = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    content = None if reply.calls and not reply.content else reply.content
    return {"role": "assistant", "content": content, "refusal": None, **reasoning, **calls}


def usage(reply: GatewayReply) -> Json:
    total = reply.prompt_tokens + reply.tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.tokens, "total_tokens": total}


def models(model: str) -> Json:
    return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "outpace"}]}


class CompletionStream:
    """Stream events of one plain completion."""

    kind = "text_completion"

    def __init__(self, request_id: str, model: str, request: PolicyRequest) -> None:
        self._head = _head(request_id, self.kind, model)
        self._usage = request.usage

    def opening(self) -> Iterator[Json]:
        yield from ()

    def delta(self, text: str) -> Iterator[Json]:
        yield self._event({"text": text})

    def closing(self, reply: GatewayReply, rest: str) -> Iterator[Json]:
        """Yield the parts of the finished answer that have not been sent."""
        yield from self._end(reply, {"text": rest}, _completion_logprobs(reply))

    def _end(self, reply: GatewayReply, part: Json, logprobs: Json | None) -> Iterator[Json]:
        yield {**self._event(part, reply.finish, logprobs), **extra_fields(reply.pinned)}
        if self._usage:
            yield {**self._head, "choices": [], "usage": usage(reply)}

    def _event(self, part: Json, finish: str | None = None, logprobs: Json | None = None) -> Json:
        return {**self._head, "choices": [_choice(part, logprobs, finish)], **({"usage": None} if self._usage else {})}


class ChatStream(CompletionStream):
    """Stream events of one chat completion."""

    kind = "chat.completion.chunk"

    def opening(self) -> Iterator[Json]:
        yield self._event({"delta": {"role": "assistant", "content": ""}})

    def delta(self, text: str) -> Iterator[Json]:
        yield self._event({"delta": {"content": text}})

    def closing(self, reply: GatewayReply, rest: str) -> Iterator[Json]:
        if reply.reasoning:
            yield self._event({"delta": {"reasoning_content": reply.reasoning}})
        if rest:
            yield from self.delta(rest)
        for index, call in enumerate(reply.calls):
            yield self._event({"delta": {"tool_calls": [{"index": index, **_call(call)}]}})
        yield from self._end(reply, {"delta": {}}, _chat_logprobs(reply))


def _response(reply: GatewayReply, model: str, kind: str, part: Json, logprobs: Json | None) -> Json:
    return {
        **_head(reply.id, kind, model),
        "choices": [_choice(part, logprobs, reply.finish)],
        "usage": usage(reply),
        **extra_fields(reply.pinned),
    }


def _choice(part: Json, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": 0, **part, "logprobs": logprobs, "finish_reason": finish}


def _head(request_id: str, kind: str, model: str) -> Json:
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(reply: GatewayReply) -> Json | None:
    if not reply.logprobs:
        return None
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in reply.logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(reply: GatewayReply) -> Json | None:
    if not reply.logprobs:
        return None
    tokens = [text for text, _ in reply.logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [logprob for _, logprob in reply.logprobs],
        "top_logprobs": None,
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)),
    }
