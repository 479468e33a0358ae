"""MERGED"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from outpace.types import Message

Digest = bytes


def digests(role: str, tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> list[Digest]:
    """Return, for each message, the digest of the conversation up to and including it."""
    return list(_chain(_digest(b"", [role, list(tools)]), messages))


def followed_by(digest: Digest, message: Message) -> Digest:
    """Return the digest of a conversation extended by `message`."""
    return _digest(digest, said(message))


def said(message: Message) -> list[Any]:
    """Return the content of a message in a form that can be compared."""
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    content = text_of(message.get("content"))
    role = message.get("role")
    return [role, content.strip() if role == "assistant" else content, calls, message.get("name")]


def marks_of(messages: Sequence[Message]) -> tuple[Digest, ...]:
    """Return, for each answer, a digest of its call ids and reasoning. It tells answers of equal content apart."""
    return tuple(
        _digest(b"", [[call.get("id") for call in message.get("tool_calls") or ()], message.get("reasoning_content")])
        for message in messages
        if message.get("role") == "assistant"
    )


def exact_digest(tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> Digest:
    """Return a digest that is equal only for identical conversations, which are rendered identically."""
    return _digest(b"exact", [list(tools), list(messages)])


def text_of(content: Any) -> str:
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
        digest = followed_by(digest, message)
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
