"""Digests of message histories, used to find the answer that a request continues from.

A history is a chain of digests, one per message. Two messages are equal if they have the same meaning: tool-call ids,
empty fields, white space around an answer, key order in arguments and omitted reasoning do not matter. Role, tools and
`chat_template_kwargs` must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from outpace.models.chat import NO_KWARGS, Schema, TemplateKwargs
from outpace.types import Message

Digest = bytes


def prefix_digests(
    role: str, tools: Sequence[Schema], messages: Sequence[Message], template_kwargs: TemplateKwargs = NO_KWARGS
) -> list[Digest]:
    """Return, for each message, the digest of the conversation up to and including it."""
    return list(_chain(_digest(b"", [role, list(tools), dict(template_kwargs)]), messages))


def extend_digest(digest: Digest, message: Message) -> Digest:
    """Return the digest of a conversation extended by `message`."""
    return _digest(digest, comparable_message(message))


def comparable_message(message: Message) -> list[Any]:
    """Return the content of a message in a form that can be compared."""
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    content = content_text(message.get("content"))
    role = message.get("role")
    return [role, content.strip() if role == "assistant" else content, calls, message.get("name")]


def answer_marks(messages: Sequence[Message]) -> tuple[Digest, ...]:
    """Return, for each answer, a digest of its call ids and reasoning. It distinguishes answers with equal content."""
    return tuple(
        _digest(b"", [[call.get("id") for call in message.get("tool_calls") or ()], message.get("reasoning_content")])
        for message in messages
        if message.get("role") == "assistant"
    )


def exact_key(tools: Sequence[Schema], messages: Sequence[Message], template_kwargs: TemplateKwargs) -> Hashable:
    """Return a key that is equal only for identical conversations, which are rendered identically."""
    if not tools and not template_kwargs and all(map(_is_plain, messages)):
        return tuple((message["role"], message["content"]) for message in messages)
    return _digest(b"exact", [list(tools), list(messages), dict(template_kwargs)])


def _is_plain(message: Message) -> bool:
    return len(message) == 2 and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def call_digest(names: Sequence[str], tools: Sequence[Schema], template_kwargs: TemplateKwargs) -> Digest:
    """Return the cache key of the opening of a forced tool call."""
    return _digest(b"call", [list(names), list(tools), dict(template_kwargs)])


def content_text(content: Any) -> str:
    """Return the content of a message as text, with its parts concatenated."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return str(content)


def _chain(digest: Digest, messages: Sequence[Message]) -> Iterator[Digest]:
    for message in messages:
        digest = extend_digest(digest, message)
        yield digest


def _call(call: dict[str, Any]) -> list[Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return [function.get("name"), arguments]
    return [function.get("name"), arguments or {}]


def _digest(before: Digest, value: Any) -> Digest:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=before).digest()
