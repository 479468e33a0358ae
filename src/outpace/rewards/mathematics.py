"""The reward `math`: is the answer mathematically equal to the right one? On top of the package math-verify.

    gold, completion ─▶ parse (LaTeX, \\boxed, expressions, numbers) ─▶ equal? ─▶ 1.0 | 0.0;   no gold ─▶ None

Completions are untrusted: `9^{9^{9^9}}` is a short way to keep a computer algebra system busy for ever. math-verify
stops itself by SIGALRM, which Python hears only between two steps of its own, and which goes by the clock whatever else
the machine does; so the work is done in forks of the grader process (`outpace.rewards.forked`).

It needs the main thread and a process of its own; the registry sees to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from outpace.rewards.forked import judged
from outpace.rewards.text import Completion, last_text

CPU_LIMIT_S = 3.0
"""One answer in all: two parses and one comparison."""
NO_LIMIT_S = 3600
"""For math-verify's own limit by the clock, which would make right answers wrong on a busy machine."""
MAX_CHARS = 20_000
"""The end of a completion that is looked at; the answer stands last."""


def math(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 for each completion whose answer equals its `answer`, else 0.0; None where `answer` cannot be read."""
    _warm_up()
    pairs = [(last_text(text)[-MAX_CHARS:], gold) for text, gold in zip(completions, answer, strict=True)]
    return judged(_verdict, pairs, CPU_LIMIT_S)


@cache
def _warm_up() -> None:
    """Load the parser here, once, so that no fork has to."""
    from math_verify import parse, verify

    verify(parse("$1$"), parse("$1$"))


def _verdict(pair: tuple[str, Any]) -> float | None:
    from math_verify import parse, verify

    text, gold = pair
    wanted = _gold(gold)
    if not wanted:
        return None
    return float(verify(wanted, parse(text, parsing_timeout=NO_LIMIT_S), timeout_seconds=NO_LIMIT_S))


def _gold(gold: Any) -> list[Any]:
    """The right answer, parsed; one that stands alone needs no dollar signs. Empty if it cannot be read."""
    from math_verify import parse

    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return []
    text = str(gold).strip()
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    found: list[Any] = parse(marked, parsing_timeout=NO_LIMIT_S) if text else []
    return found
