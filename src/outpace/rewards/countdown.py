"""Built-in reward functions that need no settings: `countdown`, `number` and `math`.

    countdown   the expression uses exactly the given numbers and equals the target
    number      the last integer of the completion equals `answer`
    math        the answer is mathematically equal to `answer` (package math-verify)

        gold, completion ─▶ parse (LaTeX, \\boxed, expressions, numbers) ─▶ equal? ─▶ 1.0 | 0.0;   no gold ─▶ None

Completions are untrusted text. Any text is scored; none of these functions raises on it.

Hazard: `9^{9^{9^9}}` keeps a computer algebra system busy forever. math-verify limits itself with SIGALRM, which Python
handles only between bytecode instructions and which counts wall-clock time, so a busy machine would turn right answers
into wrong ones. `math` therefore scores in forks of the grader process (`score_in_forks`). It needs the main thread of
its own process; the registry ensures both.
"""

from collections.abc import Sequence
from typing import Any

from outpace.rewards.text import Completion, last_text
from outpace.tasks.expressions import evaluate


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
        value, used = evaluate(expression)
    except ValueError:
        return False
    return value == target and sorted(used) == sorted(numbers)
