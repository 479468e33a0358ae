"""Calculator: sums that a small model cannot do in its head, and the tool that does them.

    What is 347*28+15?  ─▶  <tool_call> calculate("347*28+15") </tool_call>  ─▶  9731  ─▶  The answer is 9731.

The environment brings the tool and judges nothing: the last answer is text, which the reward `number` reads.

Invariants:
- The problems are a fixed set, drawn once from their kinds; the split of a problem is a hash of its text.
- Whatever a model asks the tool to calculate is parsed, never executed; what is no expression is refused.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

from outpace.tasks.expressions import evaluate
from outpace.tasks.problems import Shuffled, Split, split_by_hash
from outpace.types import Task

KINDS = ("{a}*{b}+{c}", "{a}*{b}-{c}", "({a}+{b})*{c}", "({a}-{b})*{c}")
"""With the ranges below no result is negative, and none has more than six digits."""
A, B, C = range(100, 1000), range(11, 100), range(11, 100)

DRAWN = 20_000
HELDOUT_ONE_IN = 8


class Sum(NamedTuple):
    expression: str
    answer: int

    def text(self) -> str:
        return f"What is {self.expression}?"


class Calculator:
    """An environment with one tool."""

    def reset(self, **columns: Any) -> None:
        """Nothing to prepare: the prompt says it all."""

    def calculate(self, expression: str) -> str:
        """Work out an expression.

        Args:
            expression: numbers joined by + - * / and parentheses, such as 12*(3+4).
        """
        value, _ = evaluate(expression)
        return str(value)


def calculator(split: Split, seed: int = 0) -> Shuffled[Sum]:
    """Every problem of a split once, in an order set by the seed."""
    return Shuffled(f"calculator/{split}/{seed}", sums(split), _task)


@cache
def sums(split: Split) -> tuple[Sum, ...]:
    rng = random.Random("calculator")
    drawn = dict.fromkeys(_draw(rng) for _ in range(DRAWN))
    return tuple(problem for problem in drawn if split_by_hash(problem.expression, HELDOUT_ONE_IN) == split)


def _draw(rng: random.Random) -> Sum:
    expression = rng.choice(KINDS).format(a=rng.choice(A), b=rng.choice(B), c=rng.choice(C))
    value, _ = evaluate(expression)
    return Sum(expression, int(value))


def _task(problem: Sum) -> Task:
    return Task(
        id=f"calculator/{problem.expression}",
        prompt=problem.text(),
        columns={"expression": problem.expression, "answer": problem.answer},
    )
