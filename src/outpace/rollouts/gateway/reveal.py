"""How much of an unfinished answer can be shown already.

Whoever streams cannot take back. So only that beginning of a text is shown which every way to read the finished one
leaves as it is: from the first thing on that may be, or become, a tool call or reasoning, everything is held back, and
so are half a character, white space that may turn out to be at the end, and what may be the string that ends it all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

TAGS = (
    "<tool_call", "<tool_use", "<tools", "<function", "<invoke", "<arg_", "<minimax:", "<seed:", "<think", "</think",
    "<|", "<\uff5c", "[TOOL_CALL", "[THINK]", "[/THINK]",
)  # fmt: skip
"""How tool calls and reasoning begin, over all families of models that are known."""

_BARE_CALL = re.compile(r"[\[{]")
_HALF_A_CHARACTER = "\ufffd"
_UNSURE_END = re.compile(rf"[\s{_HALF_A_CHARACTER}]+\Z")


def shown(text: str, stops: Sequence[str] = ()) -> str:
    """The beginning of `text`, as it is read so far, that will be the beginning of the content, whatever follows.

    A text that begins with white space is not shown: the content of an answer with calls is stripped. One that begins
    with a bracket may be a call without any tag."""
    if not text or text[0].isspace() or _BARE_CALL.match(text):
        return ""
    return _UNSURE_END.sub("", plainly_shown(text, (*TAGS, *stops)))


def plainly_shown(text: str, stops: Sequence[str]) -> str:
    """The same for a text that is nothing but text: up to where one of `stops` begins, or may have begun."""
    whole = text.rstrip(_HALF_A_CHARACTER)  # first: behind half a character nothing looks like a beginning
    return whole[: min((_position(whole, stop) for stop in stops), default=len(whole))]


def opens_reasoning(prompt_end: str) -> bool:
    """Whether an answer behind this begins in the middle of its reasoning."""
    return prompt_end.rstrip().endswith(("<think>", "[THINK]"))


def _position(text: str, tag: str) -> int:
    """Where `tag` begins in the text, or a piece of it at the end."""
    found = text.find(tag)
    if found >= 0:
        return found
    pieces = (length for length in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:length]))
    return len(text) - next(pieces, 0)
