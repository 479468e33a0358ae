"""The text of a completion, which is a text or a chat."""

from __future__ import annotations

from typing import Any

Completion = str | list[dict[str, Any]]


def last_text(completion: Completion) -> str:
    """A chat is judged by its last message. One without text counts as empty, and so does what a tool said: an episode
    that ran out of turns right after a call has given no answer, even if the tool's result is the right one."""
    if isinstance(completion, str):
        return completion
    if not completion or completion[-1].get("role") == "tool":
        return ""
    content = completion[-1].get("content")
    return content if isinstance(content, str) else ""
