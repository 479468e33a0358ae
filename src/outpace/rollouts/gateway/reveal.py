"""MERGED"""

from __future__ import annotations

import re
from collections.abc import Sequence

TAGS = (
    "<tool_call", "<tool_use", "<tools", "<function", "<invoke", "<arg_", "<minimax:", "<seed:", "<think", "</think",
    "<|", "<\uff5c", "[TOOL_CALL", "[THINK]", "[/THINK]",
)  # fmt: skip
"""Opening tags of tool calls and reasoning, over all supported model families."""

_UNTAGGED_CALL = re.compile(r"[\[{]")
_INCOMPLETE_CHARACTER = "\ufffd"
_UNCERTAIN_END = re.compile(rf"[\s{_INCOMPLETE_CHARACTER}]+\Z")


def shown(text: str, stops: Sequence[str] = ()) -> str:
    """Return the prefix of the parsed `text` that will be a prefix of the final content.

    Empty if the text starts with white space, which is stripped from answers with tool calls, or with a bracket, which
    may be an untagged tool call."""
    if not text or text[0].isspace() or _UNTAGGED_CALL.match(text):
        return ""
    return _UNCERTAIN_END.sub("", plainly_shown(text, (*TAGS, *stops)))


def plainly_shown(text: str, stops: Sequence[str]) -> str:
    """Return the prefix of plain text before the first of `stops`, or before what may be the start of one."""
    whole = text.rstrip(_INCOMPLETE_CHARACTER)  # first: otherwise a partial stop string before it is not at the end
    return whole[: min((_tag_start(whole, stop) for stop in stops), default=len(whole))]


def opens_reasoning(prompt_end: str) -> bool:
    """Return whether an answer to this prompt starts inside a reasoning block."""
    return prompt_end.rstrip().endswith(("<think>", "[THINK]"))


def _tag_start(text: str, tag: str) -> int:
    """Return where `tag` starts in the text, or where a partial tag starts at its end."""
    found = text.find(tag)
    if found >= 0:
        return found
    pieces = (length for length in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:length]))
    return len(text) - next(pieces, 0)
