"""The countdown grader: does an expression use exactly the given numbers and equal the target?

Completions are untrusted text. Whatever a model writes is graded 0.0 or 1.0 and never raises: what the parser of
`outpace.tasks.expressions` refuses solves nothing.
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
