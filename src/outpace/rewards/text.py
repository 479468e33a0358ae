"""The text of a completion, which is a text or a chat."""

from __future__ import annotations

from typing import Any

Completion = str | list[dict[str, Any]]


def last_text(completion: Completion) -> str:
    """A chat is judged by its last message; a message without text counts as empty."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    return content if isinstance(content, str) else ""
