"""OpenAI's Responses API: convert input items to messages, and answers to responses and stream events. Pure functions.

A function call is merged into the assistant message before it, because the policy wrote both in one answer. Reasoning
items that the agent sends back are dropped: the policy's reasoning is already in the recorded tokens. Only text and
functions that the agent runs are supported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from outpace.rollouts.gateway.protocol import GatewayReply, PolicyRequest, RequestRejected, extra_fields, pinned_fields
from outpace.rollouts.gateway.validation import Json, constrained, forced_functions, token_limit, validate_request
from outpace.types import Message, ToolCall


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Item(msgspec.Struct):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[_Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str = "{}"
    output: str | list[_Part] = ""


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _ForcedFunction(msgspec.Struct):
    type: Literal["function"]
    name: str


class _Format(msgspec.Struct):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Request(msgspec.Struct, kw_only=True):
    input: str | list[_Item] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ForcedFunction | None = None
    max_output_tokens: int | None = None
    text: _Text | None = None
    store: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


NOT_SUPPORTED = {
    "reasoning": "the policy reasons as its chat template lets it; use chat_template_kwargs",
    "background": "the answer is always waited for",
    "conversation": "conversations are not kept; use previous_response_id",
    "prompt": "stored prompts do not exist here; send the input itself",
    "top_logprobs": "only logprobs of the sampled tokens exist",
    "max_tool_calls": "it limits tools that run on the server, and here the agent runs all tools",
}
"""Fields that are refused when they are set, and why."""

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests the logprobs of the sampled tokens."""

ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "metadata")


# ------------------------------------------------------------------------------------------------------------ requests


def read_response_request(body: Json) -> PolicyRequest:
    request = validate_request(body, _Request)
    _check_supported(body, request)
    messages = list(_messages(request.input))
    if not messages and request.previous_response_id is None:
        raise RequestRejected("input is empty", param="input")
    allowed = request.tool_choice != "none"
    tools = [_schema(tool) for tool in request.tools or ()]
    return PolicyRequest(
        messages=messages,
        instructions=request.instructions,
        previous=request.previous_response_id,
        store=request.store is not False,
        tools=tools if allowed else (),
        calls=allowed,
        must_call=_must_call(request.tool_choice, [tool.name for tool in request.tools or ()]),
        template_kwargs=request.chat_template_kwargs or {},
        max_tokens=token_limit(request.max_output_tokens, "max_output_tokens"),
        stream=bool(request.stream),
        logprobs=LOGPROBS in (request.include or ()),
        pinned=pinned_fields(body),
        echo={
            **{name: body.get(name) for name in ECHOED},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in tools],
            "store": request.store is not False,
        },
    )


def _check_supported(body: Json, request: _Request) -> None:
    for name, reason in NOT_SUPPORTED.items():
        value = body.get(name)
        if any(part is not None for part in value.values()) if isinstance(value, dict) else value:
            raise RequestRejected(f"{name}: not supported: {reason}", param=name)
    if body.get("parallel_tool_calls") is False:
        raise RequestRejected(
            "parallel_tool_calls: the policy decides how many calls it makes; leave this out",
            param="parallel_tool_calls",
        )
    if body.get("truncation") == "auto":
        raise RequestRejected("truncation: only disabled is supported; shorten the input instead", param="truncation")
    if request.text is not None and request.text.format is not None and request.text.format.type != "text":
        raise constrained("text.format", request.text.format.type)
    for index, tool in enumerate(request.tools or ()):
        if tool.type != "function" or not tool.name:
            param = f"tools[{index}]"
            message = f"{param}: tools of type {tool.type} are not supported; only functions, which the agent runs"
            raise RequestRejected(message, param=param)


def _must_call(choice: str | _ForcedFunction | None, tools: Sequence[str]) -> Sequence[str]:
    if isinstance(choice, _ForcedFunction):
        return forced_functions(choice.name, tools)
    return forced_functions(None, tools) if choice == "required" else ()


def _schema(tool: _Tool) -> Json:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _messages(items: str | list[_Item]) -> Iterator[Message]:
    """Convert input items to messages; adjacent items of one answer become one message."""
    if isinstance(items, str):
        yield from [{"role": "user", "content": items}] if items else []
        return
    answer: Message | None = None  # not yet complete
    for index, item in enumerate(items):
        if item.type == "function_call":
            answer = answer or {"role": "assistant", "content": ""}
            answer.setdefault("tool_calls", []).append(_call(item, index))
            continue
        if answer is not None:
            yield answer
            answer = None
        message = _message(item, index)
        if message is not None and message["role"] == "assistant":
            answer = message
        elif message is not None:
            yield message
    if answer is not None:
        yield answer


def _message(item: _Item, index: int) -> Message | None:
    """Convert an item that is not a call; None for reasoning."""
    if item.type == "reasoning":
        return None
    if item.type == "function_call_output" and item.call_id is not None:
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, index)}
    if item.type == "message" and item.role is not None:
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": _text(item.content or "", index)}
    missing = {"message": "role", "function_call_output": "call_id"}.get(item.type)
    problem = f"{missing} is missing" if missing else f"items of type {item.type} are not supported"
    raise RequestRejected(f"input[{index}]: {problem}", param=f"input[{index}]")


def _call(item: _Item, index: int) -> Json:
    if item.name is None or item.call_id is None:
        raise RequestRejected(f"input[{index}]: name or call_id is missing", param=f"input[{index}]")
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _text(content: str | list[_Part], index: int) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("input_text", "output_text"):
            message = f"input[{index}]: parts of type {part.type} are not supported, only text"
            raise RequestRejected(message, param=f"input[{index}]")
    return "".join(part.text for part in content)


# ----------------------------------------------------------------------------------------------------------- responses


def response_object(replies: Sequence[GatewayReply], model: str, request: PolicyRequest) -> Json:
    (reply,) = replies
    cut = reply.finish == "length"
    return {
        **_head(reply.id, model, request),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(reply),
        "usage": _usage(reply),
        **extra_fields(reply.pinned),
    }


def _head(request_id: str, model: str, request: PolicyRequest) -> Json:
    """Return a response that has no output yet."""
    return {
        "id": request_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        **request.echo,
    }


def _usage(reply: GatewayReply) -> Json:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.tokens,
    }


def _items(reply: GatewayReply) -> list[Json]:
    """Return the output items of a finished answer, in order. If it was truncated, the last item is incomplete."""
    text = reply.content or not reply.calls
    items = [
        *([_reasoning_item(reply)] if reply.reasoning else []),
        *([_message_item(reply.id, [_text_part(reply.content, reply)], "completed")] if text else []),
        *(_call_item(reply.id, index, call) for index, call in enumerate(reply.calls)),
    ]
    if reply.finish == "length":
        items[-1]["status"] = "incomplete"
    return items


def _reasoning_item(reply: GatewayReply) -> Json:
    content = [{"type": "reasoning_text", "text": reply.reasoning}]
    return {"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": content, "status": "completed"}


def _message_item(request_id: str, content: list[Json], status: str) -> Json:
    return {"type": "message", "id": f"msg_{request_id}", "role": "assistant", "status": status, "content": content}


def _text_part(text: str, reply: GatewayReply | None = None) -> Json:
    logprobs = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in (reply.logprobs if reply else ())
    ]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call_item(request_id: str, index: int, call: ToolCall) -> Json:
    return {
        "type": "function_call",
        "id": f"fc_{request_id}_{index}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


class ResponseStream:
    """Stream events of one response: its output items, each opened and closed."""

    def __init__(self, request_id: str, model: str, request: PolicyRequest) -> None:
        self._id, self._model, self._request = request_id, model, request
        self._events = 0
        self._items = 0  # finished output items
        self._in_text = False

    def opening(self) -> Iterator[Json]:
        response = _head(self._id, self._model, self._request)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def delta(self, text: str, index: int = 0) -> Iterator[Json]:
        if not self._in_text:
            self._in_text = True
            yield self._added(_message_item(self._id, [], "in_progress"))
            yield self._inside("content_part.added", f"msg_{self._id}", part=_text_part(""))
        if text:
            yield self._inside("output_text.delta", f"msg_{self._id}", delta=text, logprobs=[])

    def closing(self, replies: Sequence[GatewayReply]) -> Iterator[Json]:
        """Yield the remaining items of the finished answer, in order. Reasoning is left out if text was streamed."""
        (reply,) = replies
        for item in _items(reply):
            if item["type"] == "reasoning" and self._in_text:
                continue
            yield from self._rest(item, reply)
            yield self._event("response.output_item.done", output_index=self._items, item=item)
            self._items += 1
        response = response_object(replies, self._model, self._request)
        yield self._event(f"response.{response['status']}", response=response)

    def _rest(self, item: Json, reply: GatewayReply) -> Iterator[Json]:
        """Yield the events of an item that have not been sent, except its `output_item.done`."""
        if item["type"] == "message":
            (part,) = item["content"]
            yield from self.delta(reply.unsent)
            yield self._inside("output_text.done", item["id"], text=part["text"], logprobs=part["logprobs"])
            yield self._inside("content_part.done", item["id"], part=part)
        elif item["type"] == "reasoning":
            yield self._added({**item, "content": [], "status": "in_progress"})
            yield self._inside("reasoning_text.delta", item["id"], delta=reply.reasoning)
            yield self._inside("reasoning_text.done", item["id"], text=reply.reasoning)
        else:
            yield self._added({**item, "arguments": "", "status": "in_progress"})
            arguments, place = item["arguments"], {"item_id": item["id"], "output_index": self._items}
            yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
            yield self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)

    def _added(self, item: Json) -> Json:
        return self._event("response.output_item.added", output_index=self._items, item=item)

    def _inside(self, kind: str, item_id: str, **fields: Any) -> Json:
        place = {"item_id": item_id, "output_index": self._items, "content_index": 0}
        return self._event(f"response.{kind}", **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}
