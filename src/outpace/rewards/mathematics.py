"""MERGED"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from outpace.rewards.forked import judged
from outpace.rewards.text import Completion, last_text

CPU_LIMIT_S = 3.0
"""CPU time per completion: two parses and one comparison."""
NO_TIMEOUT_S = 3600
"""Disables math-verify's own wall-clock timeout, which would score right answers as wrong on a busy machine."""
MAX_CHARS = 20_000
"""Only the end of a completion is parsed; the answer comes last."""


def math(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 for each completion whose answer equals its `answer`, else 0.0; None if `answer` cannot be parsed."""
    _warm_up()
    pairs = [(last_text(text)[-MAX_CHARS:], gold) for text, gold in zip(completions, answer, strict=True)]
    return judged(_score_pair, pairs, CPU_LIMIT_S)


@cache
def _warm_up() -> None:
    """Load the parser once here, so that the forks inherit it."""
    from math_verify import parse, verify

    verify(parse("$1$"), parse("$1$"))


def _score_pair(pair: tuple[str, Any]) -> float | None:
    from math_verify import parse, verify

    text, gold = pair
    expected = _parse_gold(gold)
    if not expected:
        return None
    return float(verify(expected, parse(text, parsing_timeout=NO_TIMEOUT_S), timeout_seconds=NO_TIMEOUT_S))


def _parse_gold(gold: Any) -> list[Any]:
    """Parse the gold answer, adding dollar signs to a bare expression. Empty if it cannot be parsed."""
    from math_verify import parse

    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return []
    text = str(gold).strip()
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    found: list[Any] = parse(marked, parsing_timeout=NO_TIMEOUT_S) if text else []
    return found
