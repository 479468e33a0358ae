"""MERGED"""

from __future__ import annotations

from functools import cache, partial

from outpace.tasks.problems import Shuffled, Split, split_by_hash
from outpace.types import Task

ArithmeticProblem = tuple[int, str, int]
"""Left operand, sign, right operand."""

ARITHMETIC_OPERANDS = range(100)
ARITHMETIC_HELDOUT_ONE_IN = 8


def arithmetic(split: Split, seed: int = 0) -> Shuffled[ArithmeticProblem]:
    """Return sums and differences of numbers below 100: every problem of a split once, shuffled by the seed."""
    return Shuffled(f"arithmetic/{split}/{seed}", _arithmetic_problems(split), partial(_arithmetic_task, split))


@cache
def _arithmetic_problems(split: Split) -> tuple[ArithmeticProblem, ...]:
    every = ((left, sign, right) for left in ARITHMETIC_OPERANDS for sign in "+-" for right in ARITHMETIC_OPERANDS)
    return tuple(problem for problem in every if split_by_hash(repr(problem), ARITHMETIC_HELDOUT_ONE_IN) == split)


def _arithmetic_task(split: Split, problem: ArithmeticProblem) -> Task:
    left, sign, right = problem
    return Task(
        id=f"arithmetic/{split}/{left}{sign}{right}",
        prompt=f"What is {left} {sign} {right}? Answer with the number only.",
        columns={"answer": left + right if sign == "+" else left - right},
    )
