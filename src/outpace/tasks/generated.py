"""Generated tasks: arithmetic, calculator (with a tool) and guess (with an environment).

    arithmetic  What is 7 + 12?                           reward `number`
    calculator  What is 347*28+15?  ─▶  calculate(...)    reward `number`
    guess       Find a number in 4 guesses.               reward of the environment

Arithmetic expressions are evaluated by a small recursive-descent parser (`evaluate_expression`). Model-written text is
never executed. The parser limits length, depth and digits before doing any arithmetic, and raises `ValueError` outside
this grammar:

    sum     = product (("+" | "-") product)*
    product = atom (("*" | "/") atom)*
    atom    = number | "(" sum ")"
    number  = "0" | a digit 1-9 and further digits; no sign, no leading zero, ASCII only

Spaces are allowed between symbols and around the expression, and so is one trailing newline.

Invariants
- The split of a problem is a hash of the problem alone, so no seed can move a held-out problem into training.
- Task `index` depends only on (split, seed, index). The seed sets the order of the problems.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from hashlib import blake2b
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from outpace.errors import plural
from outpace.types import Task

Split = Literal["train", "heldout"]
Problem = TypeVar("Problem")


def stable_hash(text: str) -> int:
    """Return a hash that is the same on every machine and in every process, unlike the built-in `hash`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def split_by_hash(key: str, heldout_one_in: int) -> Split:
    return "heldout" if stable_hash(key) % heldout_one_in == 0 else "train"


class ShuffledTasks(Generic[Problem]):
    """A task source with every problem once, shuffled. `name` includes split and seed, and seeds the shuffle."""

    def __init__(self, name: str, problems: Sequence[Problem], as_task: Callable[[Problem], Task]) -> None:
        self._name = name
        self._problems = list(problems)
        self._as_task = as_task
        random.Random(name).shuffle(self._problems)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"{self._name}: task {index} is out of range ({plural(len(self), 'task')})")
        return self._as_task(self._problems[index])


MAX_EXPRESSION_LENGTH = 256
MAX_EXPRESSION_DEPTH = 32
MAX_NUMBER_DIGITS = 9

_SYMBOL = re.compile(r" *([0-9]+|[-+*/()])")


def evaluate_expression(expression: str) -> tuple[Fraction, list[int]]:
    """Return the exact value and the numbers in the order they are written. Raises `ValueError` outside the grammar;
    the model sees the message as a tool result."""
    parser = _ExpressionParser(_symbols(expression))
    value = parser.sum(depth=0)
    if parser.next_symbol():
        raise ValueError(f"unexpected {parser.next_symbol()!r} after a complete expression")
    return value, parser.numbers


def _symbols(expression: str) -> list[str]:
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MAX_EXPRESSION_LENGTH}")
    body = expression.removesuffix("\n").rstrip(" ")
    symbols, position = [], 0
    while position < len(body):
        match = _SYMBOL.match(body, position)
        if match is None:
            raise ValueError(f"unexpected character at {position}")
        symbols.append(match[1])
        position = match.end()
    return symbols


class _ExpressionParser:
    """Recursive-descent parser that evaluates while parsing and collects the operands in `numbers`."""

    def __init__(self, symbols: list[str]) -> None:
        self.numbers: list[int] = []
        self._symbols = symbols
        self._position = 0

    def next_symbol(self) -> str:
        """Return the next symbol, or "" at the end."""
        return self._symbols[self._position] if self._position < len(self._symbols) else ""

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.next_symbol() in ("+", "-"):
            if self._take() == "+":
                value += self._product(depth)
            else:
                value -= self._product(depth)
        return value

    def _take(self) -> str:
        symbol = self.next_symbol()
        self._position += 1
        return symbol

    def _product(self, depth: int) -> Fraction:
        value = self._atom(depth)
        while self.next_symbol() in ("*", "/"):
            if self._take() == "*":
                value *= self._atom(depth)
            else:
                value = _divide(value, self._atom(depth))
        return value

    def _atom(self, depth: int) -> Fraction:
        symbol = self._take()
        if symbol.isdigit():
            self.numbers.append(_number(symbol))
            return Fraction(self.numbers[-1])
        if symbol != "(":
            raise ValueError(f"expected a number or '(', found {symbol!r}")
        if depth == MAX_EXPRESSION_DEPTH:
            raise ValueError(f"parentheses nest deeper than {MAX_EXPRESSION_DEPTH}")
        value = self.sum(depth + 1)
        if self._take() != ")":
            raise ValueError("a parenthesis is never closed")
        return value


def _number(digits: str) -> int:
    if len(digits) > MAX_NUMBER_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, more than {MAX_NUMBER_DIGITS}")
    if digits[0] == "0" and len(digits) > 1:
        raise ValueError(f"{digits} has a leading zero")
    return int(digits)


def _divide(dividend: Fraction, divisor: Fraction) -> Fraction:
    if not divisor:
        raise ValueError("division by zero")
    return dividend / divisor


ArithmeticProblem = tuple[int, str, int]
"""Left operand, sign, right operand."""

ARITHMETIC_OPERANDS = range(100)
ARITHMETIC_HELDOUT_ONE_IN = 8


def arithmetic_tasks(split: Split, seed: int = 0) -> ShuffledTasks[ArithmeticProblem]:
    """Return sums and differences of numbers below 100: every problem of a split once, shuffled by the seed."""
    return ShuffledTasks(f"arithmetic/{split}/{seed}", _arithmetic_problems(split), partial(_arithmetic_task, split))


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


CALCULATOR_TEMPLATES = ("{a}*{b}+{c}", "{a}*{b}-{c}", "({a}+{b})*{c}", "({a}-{b})*{c}")
"""With the operand ranges below, results are never negative and have at most six digits."""
CALCULATOR_A, CALCULATOR_B, CALCULATOR_C = range(100, 1000), range(11, 100), range(11, 100)

CALCULATOR_DRAWS = 20_000
CALCULATOR_HELDOUT_ONE_IN = 8


class CalculatorProblem(NamedTuple):
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
        value, _ = evaluate_expression(expression)
        return str(value)


def calculator_tasks(split: Split, seed: int = 0) -> ShuffledTasks[CalculatorProblem]:
    """Return every problem of a split once, shuffled by the seed."""
    return ShuffledTasks(f"calculator/{split}/{seed}", calculator_problems(split), _calculator_task)


@cache
def calculator_problems(split: Split) -> tuple[CalculatorProblem, ...]:
    """Return the problems of a split, out of a fixed set that does not depend on any seed."""
    rng = random.Random("calculator")
    drawn = dict.fromkeys(_draw_calculator_problem(rng) for _ in range(CALCULATOR_DRAWS))
    return tuple(problem for problem in drawn if split_by_hash(problem.expression, CALCULATOR_HELDOUT_ONE_IN) == split)


def _draw_calculator_problem(rng: random.Random) -> CalculatorProblem:
    template = rng.choice(CALCULATOR_TEMPLATES)
    a, b, c = rng.choice(CALCULATOR_A), rng.choice(CALCULATOR_B), rng.choice(CALCULATOR_C)
    expression = template.format(a=a, b=b, c=c)
    value, _ = evaluate_expression(expression)
    return CalculatorProblem(expression, int(value))


def _calculator_task(problem: CalculatorProblem) -> Task:
    return Task(
        id=f"calculator/{problem.expression}",
        prompt=problem.text(),
        columns={"expression": problem.expression, "answer": problem.answer},
    )


GUESSES = 4
GUESS_RANGE_WIDTHS = range(10, 2**GUESSES)
GUESS_RANGE_LOWS = range(1, 86)
GUESS_HELDOUT_ONE_IN = 6


class GuessProblem(NamedTuple):
    low: int
    high: int
    secret: int

    def text(self) -> str:
        return f"I think of a number from {self.low} to {self.high}. Find it in {GUESSES} guesses."


class Guess:
    """Environment: find a hidden number in at most GUESSES guesses. The reward is 1 if it was found, else 0.

        I think of a number from 24 to 35. Find it in 4 guesses.
        ─▶ guess(29) ─▶ higher ─▶ guess(32) ─▶ lower ─▶ guess(31) ─▶ correct

    Binary search always succeeds: GUESSES is enough for the widest range.
    """

    def __init__(self) -> None:
        self._secret = 0
        self._left = 0
        self._found = False

    def reset(self, secret: int, **columns: Any) -> None:
        self._secret, self._left, self._found = secret, GUESSES, False

    def guess(self, number: int) -> str:
        """Guess the number; says higher, lower or correct.

        Args:
            number: your guess.
        """
        if self._found:
            raise ValueError("the number was found already")
        if self._left == 0:
            raise ValueError("no guesses are left")
        self._left -= 1
        self._found = number == self._secret
        return "correct" if self._found else "higher" if number < self._secret else "lower"

    def get_reward(self) -> float:
        return 1.0 if self._found else 0.0


def guess_tasks(split: Split, seed: int = 0) -> ShuffledTasks[GuessProblem]:
    """Return every problem of a split once, shuffled by the seed."""
    return ShuffledTasks(f"guess/{split}/{seed}", guess_problems(split), _guess_task)


@cache
def guess_problems(split: Split) -> tuple[GuessProblem, ...]:
    """Return one problem per range and number in it, so that the prompt does not reveal the number.

    The split is a hash of the range: a held-out range never occurs in training, with any number."""
    ranges = ((low, low + width - 1) for low in GUESS_RANGE_LOWS for width in GUESS_RANGE_WIDTHS)
    return tuple(
        GuessProblem(low, high, secret)
        for low, high in ranges
        if split_by_hash(f"{low}-{high}", GUESS_HELDOUT_ONE_IN) == split
        for secret in range(low, high + 1)
    )


def _guess_task(game: GuessProblem) -> Task:
    return Task(
        id=f"guess/{game.low}-{game.high}/{game.secret}",
        prompt=game.text(),
        columns={"low": game.low, "high": game.high, "secret": game.secret},
    )
