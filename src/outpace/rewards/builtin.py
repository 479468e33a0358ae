"""Built-in reward functions that need no settings: `countdown`, `number` and `math`.

    countdown   the expression uses exactly the given numbers and equals the target
    number      the last integer of the completion equals `answer`
    math        the answer is mathematically equal to `answer` (package math-verify)

        gold, completion ─▶ parse (LaTeX, \\boxed, expressions, numbers) ─▶ equal? ─▶ 1.0 | 0.0;   no gold ─▶ None

Completions are untrusted text. Any text is scored; none of these functions raises on it.

Hazard: `9^{9^{9^9}}` keeps a computer algebra system busy forever. math-verify limits itself with SIGALRM, which Python
handles only between bytecode instructions and which counts wall-clock time, so a busy machine would turn right answers
into wrong ones. `math` therefore scores in forks of the grader process, with a CPU limit that the kernel enforces. It
needs the main thread of its own process; the registry ensures both.

    grader process ── fork ──▶ score one answer after the other ── one number each ──▶ grader process
                   ── CPU limit reached, or no score for FORK_TIMEOUT_S: that answer scores 0.0, fork again for the rest
"""

from __future__ import annotations

import os
import re
import select
import signal
import struct
from collections.abc import Callable, Sequence
from functools import cache
from math import isnan, nan
from typing import Any, TypeVar

from outpace.runtime.die_with_parent import die_with_parent
from outpace.tasks.generated import evaluate_expression

Completion = str | list[dict[str, Any]]


def last_text(completion: Completion) -> str:
    """Return the text to score: the completion itself, or the last message of a chat.

    A message without text counts as empty. So does a tool message: an episode that ran out of turns right after a tool
    call has not answered, even if the tool result is correct."""
    if isinstance(completion, str):
        return completion
    if not completion or completion[-1].get("role") == "tool":
        return ""
    content = completion[-1].get("content")
    return content if isinstance(content, str) else ""


def countdown(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    *,
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    **columns: Any,
) -> list[float]:
    """1.0 for each completion that solves its puzzle, else 0.0."""
    return [
        1.0 if solves(last_text(completion), given, goal) else 0.0
        for completion, given, goal in zip(completions, numbers, target, strict=True)
    ]


def solves(expression: str, numbers: Sequence[int], target: int) -> bool:
    try:
        value, used = evaluate_expression(expression)
    except ValueError:
        return False
    return value == target and sorted(used) == sorted(numbers)


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


FORK_TIMEOUT_S = 25.0
"""Wall-clock time without a score after which a fork counts as blocked."""

SCORE_RECORD = struct.Struct("<d")
"""One score; NaN encodes None."""

T = TypeVar("T")


def score_in_forks(scorer: Callable[[T], float | None], answers: Sequence[T], cpu_s: float) -> list[float | None]:
    """Return `scorer(answer)` for each answer; 0.0 for one that exceeds `cpu_s` of CPU time or crashes the fork."""
    scores: list[float | None] = []
    while len(scores) < len(answers):
        scores += _score_in_one_fork(scorer, answers[len(scores) :], cpu_s)
    return scores


def _score_in_one_fork(scorer: Callable[[T], float | None], answers: Sequence[T], cpu_s: float) -> list[float | None]:
    """Score answers in one fork, up to and including the first that times out or crashes: at least one score."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run_fork(scorer, answers, cpu_s, writing)
    os.close(writing)
    try:
        scores: list[float | None] = []
        while len(scores) < len(answers):
            record = os.read(reading, SCORE_RECORD.size) if select.select([reading], [], [], FORK_TIMEOUT_S)[0] else b""
            scores.append(_decode_score(record))
            if not record:
                break
        return scores
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _decode_score(record: bytes) -> float | None:
    if len(record) < SCORE_RECORD.size:
        return 0.0
    (score,) = SCORE_RECORD.unpack(record)
    return None if isnan(score) else float(score)


def _run_fork(scorer: Callable[[T], float | None], answers: Sequence[T], cpu_s: float, writing: int) -> None:
    """Body of the fork; never returns. On any failure the current answer gets no score."""
    try:
        die_with_parent()
        for answer in answers:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # on expiry the kernel ends this process
            score = scorer(answer)
            os.write(writing, SCORE_RECORD.pack(nan if score is None else score))
    finally:
        os._exit(0)


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
    return score_in_forks(_score_pair, pairs, CPU_LIMIT_S)


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
