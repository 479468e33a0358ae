"""What a tool returned, as text for the model: never more than a bound, never binary, never an exception.

A tool may return anything, and an object of the user's may do anything when it is turned into text. What comes out of
here can be put into a chat and tokenised.
"""

from __future__ import annotations

import json
from typing import Any

from outpace.errors import one_line


def as_text(value: Any) -> str:
    """Text as it is, nothing for None, a description of binary data, JSON for the rest. May call the user's code."""
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # the characters themselves, whatever a subclass prints
    if isinstance(value, bytes | bytearray | memoryview):
        return _binary(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=_foreign)
    except Exception:  # a boundary: cycles, odd keys, depth, or whatever an object raises
        return _safe_str(value)


def bounded(text: str, limit: int) -> str:
    """The first `limit` characters, with a note of what was left out, in characters that can be encoded."""
    left_out = len(text) - limit
    kept = text if left_out <= 0 else f"{text[:limit]}\n[{left_out} more characters were left out]"
    return kept.encode("utf-8", "replace").decode()  # half a surrogate pair would stop the tokenizer


def described(size: int, kind: str = "binary data") -> str:
    return f"[{size} byte{'s' * (size != 1)} of {kind}]"


def told(error: BaseException) -> str:
    """An exception in one line: its kind, and what it says."""
    said = one_line(_safe_str(error))
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _foreign(value: Any) -> str:
    """What JSON does not know."""
    return _binary(value) if isinstance(value, bytes | bytearray | memoryview) else _safe_str(value)


def _binary(value: bytes | bytearray | memoryview) -> str:
    return described(value.nbytes if isinstance(value, memoryview) else len(value))


def _safe_str(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a boundary: the user's own `__str__`
        return f"<{type(value).__name__}>"
