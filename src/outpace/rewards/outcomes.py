"""MERGED"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outpace.errors import RewardFailed, one_line
from outpace.wording import plural, with_article

Scores = list[float | None]


def checked(name: str, returned: Any, count: int, first: int = 0) -> Scores:
    """Convert a reward function's return value to one finite float or None per completion, or raise `RewardFailed`.

    Runs user code: iteration and conversion to float. `first` is the index of the first sample, for messages."""
    if isinstance(returned, str | bytes | Mapping):
        raise RewardFailed(
            f"reward {name} returned {with_article(type(returned).__name__)}, not a list of {plural(count, 'number')}"
        )
    try:
        values = list(returned)
    except TypeError:
        raise RewardFailed(
            f"reward {name} returned {one_line(repr(returned), 60)}, not a list of {plural(count, 'number')}"
        ) from None
    if len(values) != count:
        raise RewardFailed(f"reward {name} returned {plural(len(values), 'value')} for {plural(count, 'sample')}")
    return [_number(name, value, sample) for sample, value in enumerate(values, first)]


def _number(name: str, value: Any, sample: int) -> float | None:
    if value is None:
        return None
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        score = math.nan
    if not math.isfinite(score):
        shown = one_line(repr(value), 60)
        raise RewardFailed(f"reward {name} returned {shown} for sample {sample}, not a finite number or None")
    return score
