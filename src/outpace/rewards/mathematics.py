"""The reward `math`: is the answer mathematically equal to the right one? On top of the package math-verify.

    gold, completion ─▶ parse (LaTeX, \\boxed, expressions, numbers) ─▶ equal? ─▶ 1.0 | 0.0;   no gold ─▶ None

Completions are untrusted: `9^{9^{9^9}}` is a short way to keep a computer algebra system busy for ever. math-verify
stops itself by SIGALRM, which Python hears only between two steps of its own; arithmetic on huge numbers is one step.
So the work is done in a fork of the grader process, which says how each answer is and can be killed:

    grader process ── fork ──▶ judge, one answer after the other ── "1", "0" or "?" each ──▶ grader process
                   ── silence for HARD_LIMIT_S: kill, that answer is 0.0, fork again for the rest

It needs the main thread and a process of its own; the registry sees to both.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from functools import cache
from typing import Any

from outpace.rewards.text import Completion, last_text
from outpace.runtime.lifeline import die_with_parent

SOFT_LIMIT_S = 1
"""What math-verify gives each parse and each comparison; whole seconds, since it counts in those."""
HARD_LIMIT_S = 3.5
"""One answer in all: two parses, one comparison, and half a second."""
MAX_CHARS = 20_000
"""The end of a completion that is looked at; the answer stands last."""

RIGHT, WRONG, NO_GOLD = b"1", b"0", b"?"


def math(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 for each completion whose answer equals its `answer`, else 0.0; None where `answer` cannot be read."""
    _warm_up()
    pairs = [(last_text(text)[-MAX_CHARS:], gold) for text, gold in zip(completions, answer, strict=True)]
    scores: list[float | None] = []
    while len(scores) < len(pairs):
        scores += _judged_in_fork(pairs[len(scores) :])
    return scores


@cache
def _warm_up() -> None:
    """Load the parser here, once, so that no fork has to."""
    from math_verify import parse, verify

    verify(parse("$1$"), parse("$1$"))


def _judged_in_fork(pairs: list[tuple[str, Any]]) -> list[float | None]:
    """The scores of the first pairs, at least one: all, or up to the one that took too long or broke the process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _judge(pairs, writing)
    os.close(writing)
    try:
        scores: list[float | None] = []
        while len(scores) < len(pairs):
            said = os.read(reading, 1) if select.select([reading], [], [], HARD_LIMIT_S)[0] else b""
            scores.append({RIGHT: 1.0, NO_GOLD: None}.get(said, 0.0))
            if not said:
                break
        return scores
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _judge(pairs: list[tuple[str, Any]], writing: int) -> None:
    """In the fork, which never returns; whatever goes wrong, the answer at hand stays without a verdict."""
    try:
        die_with_parent()
        for text, gold in pairs:
            os.write(writing, _verdict(text, gold))
    finally:
        os._exit(0)


def _verdict(text: str, gold: Any) -> bytes:
    from math_verify import parse, verify

    wanted = _gold(gold)
    if not wanted:
        return NO_GOLD
    given = parse(text, parsing_timeout=SOFT_LIMIT_S)
    return RIGHT if verify(wanted, given, timeout_seconds=SOFT_LIMIT_S) else WRONG


def _gold(gold: Any) -> list[Any]:
    """The right answer, parsed; one that stands alone needs no dollar signs. Empty if it cannot be read."""
    from math_verify import parse

    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return []
    text = str(gold).strip()
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    found: list[Any] = parse(marked, parsing_timeout=SOFT_LIMIT_S) if text else []
    return found
