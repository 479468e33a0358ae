"""OpenAI's chat and text completions: parse requests, build responses and stream events. Pure functions.

Messages and tools are passed on unchanged, except that content becomes one text and `developer` becomes `system`. The
id of a response is its request id, which a rollout can use to reward the answer. With `n` above 1 it is the id of the
first request. Every choice also has its own `request_id`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec

from outpace.rollouts.gateway.protocol import GatewayReply, PolicyRequest, RequestRejected, extra_fields, pinned_fields
from outpace.rollouts.gateway.validation import (
    Json,
    forced_functions,
    sample_count,
    stop_strings,
    token_limit,
    validate_request,
)
from outpace.types import Message, ToolCall


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


class _Common(msgspec.Struct):
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _Streaming | None = None


class _ForcedFunction(msgspec.Struct):
    type: Literal["function"]
    function: _Named


class _Chat(_Common, kw_only=True):
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ForcedFunction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[int | str]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


# ------------------------------------------------------------------------------------------------------------ requests


def read_chat(body: Json) -> PolicyRequest:
    request = validate_request(body, _Chat)
    if not request.messages:
        raise RequestRejected("messages is empty", param="messages")
    if request.top_logprobs:
        raise RequestRejected(
            "top_logprobs: only 0 is supported (logprobs of the sampled tokens)", param="top_logprobs"
        )
    allowed = request.tool_choice != "none"
    return PolicyRequest(
        messages=[_message(message, index) for index, message in enumerate(body["messages"])],
        n=sample_count(request.n),
        tools=(body.get("tools") or ()) if allowed else (),
        calls=allowed,
        must_call=_must_call(request.tool_choice, [tool.function.name for tool in request.tools or ()]),
        template_kwargs=request.chat_template_kwargs or {},
        max_tokens=token_limit(request.max_completion_tokens or request.max_tokens),
        stop=stop_strings(request.stop),
        stream=bool(request.stream),
        usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        logprobs=bool(request.logprobs),
        pinned=pinned_fields(body),
    )


def read_completion(body: Json) -> PolicyRequest:
    request = validate_request(body, _Completion)
    if request.best_of not in (None, request.n or 1):
        raise RequestRejected("best_of: must be equal to n; no answer is left out", param="best_of")
    if request.echo or request.suffix:
        raise RequestRejected("echo and suffix are not supported", param="echo" if request.echo else "suffix")
    if request.logprobs is not None and not 0 <= request.logprobs <= 1:
        raise RequestRejected(
            "logprobs: must be 0 or 1; only logprobs of the sampled tokens are supported", param="logprobs"
        )
    return PolicyRequest(
        prompt=_prompt(request.prompt),
        n=sample_count(request.n),
        max_tokens=token_limit(request.max_tokens),
        stop=stop_strings(request.stop),
        stream=bool(request.stream),
        usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        logprobs=request.logprobs is not None,
        pinned=pinned_fields(body),
    )


def _must_call(choice: str | _ForcedFunction | None, tools: Sequence[str]) -> Sequence[str]:
    if isinstance(choice, _ForcedFunction):
        return forced_functions(choice.function.name, tools)
    return forced_functions(None, tools) if choice == "required" else ()


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


# ----------------------------------------------------------------------------------------------------------- responses


def chat_response(replies: Sequence[GatewayReply], model: str, request: PolicyRequest) -> Json:
    choices = [
        _finished({"message": chat_message(reply)}, reply, index, _chat_logprobs(reply))
        for index, reply in enumerate(replies)
    ]
    return _response(replies, model, "chat.completion", choices)


def completion_response(replies: Sequence[GatewayReply], model: str, request: PolicyRequest) -> Json:
    choices = [
        _finished({"text": reply.content}, reply, index, _completion_logprobs(reply))
        for index, reply in enumerate(replies)
    ]
    return _response(replies, model, "text_completion", choices)


def chat_message(reply: GatewayReply) -> Json:
    calls = {"tool_calls": [_call(call) for call in reply.calls]} if reply.calls else {}
    reasoning = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    content = None if reply.calls and not reply.content else reply.content
    return {"role": "assistant", "content": content, "refusal": None, **reasoning, **calls}


def usage(replies: Sequence[GatewayReply]) -> Json:
    """Return the token counts of a response: the prompt counts once, as in OpenAI's API."""
    prompt, sampled = replies[0].prompt_tokens, sum(reply.tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def models(model: str) -> Json:
    return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "outpace"}]}


class CompletionStream:
    """Stream events of text completions: a choice per sample, each with its index."""

    kind = "text_completion"

    def __init__(self, request_id: str, model: str, request: PolicyRequest) -> None:
        self._head = _head(request_id, self.kind, model)
        self._usage = request.usage
        self._n = request.n

    def opening(self) -> Iterator[Json]:
        yield from ()

    def delta(self, text: str, index: int = 0) -> Iterator[Json]:
        yield self._event(_choice({"text": text}, index))

    def closing(self, replies: Sequence[GatewayReply]) -> Iterator[Json]:
        """Yield the parts of the finished answers that have not been sent."""
        for index, reply in enumerate(replies):
            yield from self._end(reply, index)
        if self._usage:
            yield {**self._head, "choices": [], "usage": usage(replies)}

    def _end(self, reply: GatewayReply, index: int) -> Iterator[Json]:
        ended = _finished({"text": reply.unsent}, reply, index, _completion_logprobs(reply))
        yield {**self._event(ended), **extra_fields(reply.pinned)}

    def _event(self, choice: Json) -> Json:
        return {**self._head, "choices": [choice], **({"usage": None} if self._usage else {})}


class ChatStream(CompletionStream):
    """Stream events of chat completions."""

    kind = "chat.completion.chunk"

    def opening(self) -> Iterator[Json]:
        for index in range(self._n):
            yield self._event(_choice({"delta": {"role": "assistant", "content": ""}}, index))

    def delta(self, text: str, index: int = 0) -> Iterator[Json]:
        yield self._event(_choice({"delta": {"content": text}}, index))

    def _end(self, reply: GatewayReply, index: int) -> Iterator[Json]:
        if reply.reasoning:
            yield self._event(_choice({"delta": {"reasoning_content": reply.reasoning}}, index))
        if reply.unsent:
            yield from self.delta(reply.unsent, index)
        for number, call in enumerate(reply.calls):
            yield self._event(_choice({"delta": {"tool_calls": [{"index": number, **_call(call)}]}}, index))
        ended = _finished({"delta": {}}, reply, index, _chat_logprobs(reply))
        yield {**self._event(ended), **extra_fields(reply.pinned)}


def _response(replies: Sequence[GatewayReply], model: str, kind: str, choices: list[Json]) -> Json:
    first = replies[0]
    return {
        **_head(first.id, kind, model),
        "choices": choices,
        "usage": usage(replies),
        **extra_fields(first.pinned),
    }


def _choice(part: Json, index: int) -> Json:
    return {"index": index, **part, "logprobs": None, "finish_reason": None}


def _finished(part: Json, reply: GatewayReply, index: int, logprobs: Json | None) -> Json:
    ended = {"logprobs": logprobs, "finish_reason": reply.finish, "request_id": reply.id}
    return {**_choice(part, index), **ended}


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
