"""What every kind of server's answer is checked for, whichever words it comes in."""

from __future__ import annotations

import math
from collections.abc import Iterable

from outpace.errors import ServerFailed, ServerFaulty, ServerRefused, one_line

NO_LOGPROB = -9999.0
"""What servers write where they have none."""

_ROUNDING = 1e-3  # a sum over the vocabulary in half precision may come out above one
_BUSY = frozenset({408, 429})


def checked_logprobs(where: str, values: Iterable[float | None]) -> list[float]:
    """Logprobs that one can train on."""
    return [_checked(where, value) for value in values]


def _checked(where: str, value: float | None) -> float:
    if value is None or not math.isfinite(value) or not NO_LOGPROB < value <= _ROUNDING:
        raise ServerFaulty(f"{where}: the logprob of a token is {value}")
    return min(value, 0.0)


def complaint(where: str, message: object, status: int | None) -> ServerFailed:
    """An error that arrived inside an answer: the status says whose fault it is."""
    text = f"{where}: {'' if status is None else f'{status} '}{one_line(message)}"
    if status is not None and 400 <= status < 500 and status not in _BUSY:
        return ServerRefused(text, status)
    return ServerFaulty(text)
