"""MERGED"""

from __future__ import annotations

from typing import Any

Completion = str | list[dict[str, Any]]


def last_text(completion: Completion) -> str:
    """Return the text to score: the completion itself, or the last message of a chat.

    A tool message counts as empty: an episode that ran out of turns right after a tool call has not answered, even if
    the tool result is correct. So does a message without text."""
    if isinstance(completion, str):
        return completion
    if not completion or completion[-1].get("role") == "tool":
        return ""
    content = completion[-1].get("content")
    return content if isinstance(content, str) else ""
