"""MERGED"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from outpace.rewards.text import Completion, last_text

INTEGER = re.compile(r"(?<![0-9])(?<![0-9]\.)[-−]?[0-9]{1,30}(?![0-9]|\.[0-9])")
"""A sign belongs to the number unless a digit precedes it (`5-3`). Digits of a decimal fraction do not match."""


def number(completions: Sequence[Completion], *, answer: Sequence[int], **columns: Any) -> list[float]:
    """1.0 for each completion whose last integer equals its `answer`, else 0.0."""
    return [
        1.0 if last_integer(last_text(completion)) == int(expected) else 0.0
        for completion, expected in zip(completions, answer, strict=True)
    ]


def last_integer(text: str) -> int | None:
    found = INTEGER.findall(text)
    return int(found[-1].replace("−", "-")) if found else None
