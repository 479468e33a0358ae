"""MERGED"""

from __future__ import annotations

import json
from typing import Any

from outpace.errors import one_line


def as_text(value: Any) -> str:
    """Convert a tool result to text: strings verbatim, None as empty, binary data as a description, the rest as JSON.

    May run user code, but does not raise its exceptions."""
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # ignore the `__str__` of a subclass
    if isinstance(value, bytes | bytearray | memoryview):
        return _binary(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=_non_json)
    except Exception:  # cycles, invalid keys, depth, or user code that raises
        return _safe_str(value)


def bounded(text: str, limit: int) -> str:
    """Cut the text to `limit` characters with a note on the rest, and replace characters that cannot be encoded."""
    left_out = len(text) - limit
    kept = text if left_out <= 0 else f"{text[:limit]}\n[{left_out} more characters omitted]"
    return kept.encode("utf-8", "replace").decode()  # a lone surrogate would make the tokenizer fail


def described(size: int, kind: str = "binary data") -> str:
    return f"[{size} byte{'s' * (size != 1)} of {kind}]"


def told(error: BaseException) -> str:
    """Return an exception in one line: its type and message."""
    message = one_line(_safe_str(error))
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _non_json(value: Any) -> str:
    """Convert a value that JSON does not support."""
    return _binary(value) if isinstance(value, bytes | bytearray | memoryview) else _safe_str(value)


def _binary(value: bytes | bytearray | memoryview) -> str:
    return described(value.nbytes if isinstance(value, memoryview) else len(value))


def _safe_str(value: object) -> str:
    try:
        return str(value)
    except Exception:  # user-defined `__str__`
        return f"<{type(value).__name__}>"
