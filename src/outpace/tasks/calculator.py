"""MERGED"""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

from outpace.tasks.expressions import evaluate
from outpace.tasks.problems import Shuffled, Split, split_by_hash
from outpace.types import Task

CALCULATOR_TEMPLATES = ("{a}*{b}+{c}", "{a}*{b}-{c}", "({a}+{b})*{c}", "({a}-{b})*{c}")
"""With the operand ranges below, results are never negative and have at most six digits."""
CALCULATOR_A, CALCULATOR_B, CALCULATOR_C = range(100, 1000), range(11, 100), range(11, 100)

CALCULATOR_DRAWS = 20_000
CALCULATOR_HELDOUT_ONE_IN = 8


class Sum(NamedTuple):
    expression: str
    answer: int

    def text(self) -> str:
        return f"What is {self.expression}?"


class Calculator:
    """Environment with one tool, for arithmetic that is too hard for a small model.

        What is 347*28+15?  ─▶  <tool_call> calculate("347*28+15") </tool_call>  ─▶  9731  ─▶  The answer is 9731.

    It gives no reward: the reward `number` reads the final completion. The tool parses the expression and never
    executes it; anything else raises `ValueError`.
    """

    def reset(self, **columns: Any) -> None:
        """Do nothing: the environment has no state."""

    def calculate(self, expression: str) -> str:
        """Work out an expression.

        Args:
            expression: numbers joined by + - * / and parentheses, such as 12*(3+4).
        """
        value, _ = evaluate(expression)
        return str(value)


def calculator(split: Split, seed: int = 0) -> Shuffled[Sum]:
    """Return every problem of a split once, shuffled by the seed."""
    return Shuffled(f"calculator/{split}/{seed}", sums(split), _calculator_task)


@cache
def sums(split: Split) -> tuple[Sum, ...]:
    """Return the problems of a split, out of a fixed set that does not depend on any seed."""
    rng = random.Random("calculator")
    drawn = dict.fromkeys(_draw_calculator_problem(rng) for _ in range(CALCULATOR_DRAWS))
    return tuple(problem for problem in drawn if split_by_hash(problem.expression, CALCULATOR_HELDOUT_ONE_IN) == split)


def _draw_calculator_problem(rng: random.Random) -> Sum:
    template = rng.choice(CALCULATOR_TEMPLATES)
    a, b, c = rng.choice(CALCULATOR_A), rng.choice(CALCULATOR_B), rng.choice(CALCULATOR_C)
    expression = template.format(a=a, b=b, c=c)
    value, _ = evaluate(expression)
    return Sum(expression, int(value))


def _calculator_task(problem: Sum) -> Task:
    return Task(
        id=f"calculator/{problem.expression}",
        prompt=problem.text(),
        columns={"expression": problem.expression, "answer": problem.answer},
    )
