"""MERGED"""

from __future__ import annotations

import math
from collections.abc import Iterable

from outpace.errors import ServerFailed, ServerFaulty, ServerRefused, one_line

NO_LOGPROB = -9999.0
"""Placeholder that servers send for a missing logprob."""

_ROUNDING_TOLERANCE = 1e-3  # half-precision softmax can yield a logprob slightly above 0
_RETRYABLE_STATUS = frozenset({408, 429})


def checked_logprobs(where: str, values: Iterable[float | None]) -> list[float]:
    """Validate logprobs: finite, present, at most 0."""
    return [_check_logprob(where, value) for value in values]


def _check_logprob(where: str, value: float | None) -> float:
    if value is None or not math.isfinite(value) or not NO_LOGPROB < value <= _ROUNDING_TOLERANCE:
        raise ServerFaulty(f"{where}: invalid token logprob {value}")
    return min(value, 0.0)


def complaint(where: str, message: object, status: int | None) -> ServerFailed:
    """The error for an error message inside a stream: rejected if the status is a client error, else faulty."""
    text = f"{where}: {'' if status is None else f'{status} '}{one_line(message)}"
    if status is not None and 400 <= status < 500 and status not in _RETRYABLE_STATUS:
        return ServerRefused(text, status)
    return ServerFaulty(text)
