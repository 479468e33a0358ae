"""Arithmetic: small sums and differences, asked in words. A first task for chat models.

The split of a problem is a hash of the problem alone, so that no seed moves a held-out one into training. Task
`index` depends on (split, seed, index) and nothing else.
"""

from __future__ import annotations

from functools import cache, partial

from outpace.tasks.problems import Shuffled, Split, split_by_hash
from outpace.types import Task

Problem = tuple[int, str, int]

OPERANDS = range(100)
HELDOUT_ONE_IN = 8


def arithmetic(split: Split, seed: int = 0) -> Shuffled[Problem]:
    """Every problem of a split once, in an order set by the seed."""
    return Shuffled(f"arithmetic/{split}/{seed}", _problems(split), partial(_task, split))


@cache
def _problems(split: Split) -> tuple[Problem, ...]:
    every = ((left, sign, right) for left in OPERANDS for sign in "+-" for right in OPERANDS)
    return tuple(problem for problem in every if split_by_hash(repr(problem), HELDOUT_ONE_IN) == split)


def _task(split: Split, problem: Problem) -> Task:
    left, sign, right = problem
    return Task(
        id=f"arithmetic/{split}/{left}{sign}{right}",
        prompt=f"What is {left} {sign} {right}? Answer with the number only.",
        columns={"answer": left + right if sign == "+" else left - right},
    )
