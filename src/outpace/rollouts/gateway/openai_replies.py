"""MERGED"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from outpace.rollouts.gateway.wanted import Reply, Wanted, notes
from outpace.types import ToolCall

Json = dict[str, Any]


def chat_response(reply: Reply, model: str) -> Json:
    choice = {
        "index": 0,
        "message": chat_message(reply),
        "logprobs": _chat_logprobs(reply),
        "finish_reason": reply.finish,
    }
    return {
        **_head(reply.id, "chat.completion", model),
        "choices": [choice],
        "usage": usage(reply),
        **notes(reply.pinned),
    }


def chat_message(reply: Reply) -> Json:
    calls = {"tool_calls": [_call(call) for call in reply.calls]} if reply.calls else {}
    reasoning = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    content = None if reply.calls and not reply.content else reply.content
    return {"role": "assistant", "content": content, "refusal": None, **reasoning, **calls}


def completion_response(reply: Reply, model: str) -> Json:
    choice = {
        "index": 0,
        "text": reply.content,
        "logprobs": _completion_logprobs(reply.logprobs),
        "finish_reason": reply.finish,
    }
    return {
        **_head(reply.id, "text_completion", model),
        "choices": [choice],
        "usage": usage(reply),
        **notes(reply.pinned),
    }


def usage(reply: Reply) -> Json:
    total = reply.prompt_tokens + reply.tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.tokens, "total_tokens": total}


def models(model: str) -> Json:
    return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "outpace"}]}


class ChatStream:
    """Stream events of one chat completion."""

    def __init__(self, request_id: str, model: str, request: Wanted) -> None:
        self._head = _head(request_id, "chat.completion.chunk", model)
        self._request = request

    def opening(self) -> Iterator[Json]:
        yield self._event({"role": "assistant", "content": ""})

    def delta(self, text: str) -> Iterator[Json]:
        yield self._event({"content": text})

    def closing(self, reply: Reply, rest: str) -> Iterator[Json]:
        """Yield the parts of the finished answer that have not been sent."""
        if reply.reasoning:
            yield self._event({"reasoning_content": reply.reasoning})
        if rest:
            yield from self.delta(rest)
        for index, call in enumerate(reply.calls):
            yield self._event({"tool_calls": [{"index": index, **_call(call)}]})
        yield {**self._event({}, reply.finish, _chat_logprobs(reply)), **notes(reply.pinned)}
        if self._request.usage:
            yield {**self._head, "choices": [], "usage": usage(reply)}

    def _event(self, delta: Json, finish: str | None = None, logprobs: Json | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "choices": [choice], **({"usage": None} if self._request.usage else {})}


class CompletionStream:
    """Stream events of one plain completion."""

    def __init__(self, request_id: str, model: str, request: Wanted) -> None:
        self._head = _head(request_id, "text_completion", model)
        self._request = request

    def opening(self) -> Iterator[Json]:
        yield from ()

    def delta(self, text: str) -> Iterator[Json]:
        yield self._event(text)

    def closing(self, reply: Reply, rest: str) -> Iterator[Json]:
        yield {**self._event(rest, reply.finish, _completion_logprobs(reply.logprobs)), **notes(reply.pinned)}
        if self._request.usage:
            yield {**self._head, "choices": [], "usage": usage(reply)}

    def _event(self, text: str, finish: str | None = None, logprobs: Json | None = None) -> Json:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "choices": [choice], **({"usage": None} if self._request.usage else {})}


def _head(request_id: str, kind: str, model: str) -> Json:
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(reply: Reply) -> Json | None:
    if not reply.logprobs:
        return None
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in reply.logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(logprobs: Sequence[tuple[str, float]]) -> Json | None:
    if not logprobs:
        return None
    offsets = [0]
    for text, _ in logprobs:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": [text for text, _ in logprobs],
        "token_logprobs": [logprob for _, logprob in logprobs],
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }
