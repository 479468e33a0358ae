"""Dialogues of the two agent tasks, as text to learn from: with tools, right or wrong in chosen proportions.

    opening ─▶ answer ─▶ what the tool says ─▶ answer ─▶ …      only answers are ever learned

Invariants:
- Only problems of the training split are used.
- Tool results come from the environments themselves, so that nothing is learned that a run would not show.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from starter_files import ASSISTANT, END, TOOL, TOOL_TAGS
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from outpace.tasks.generated import (
    GUESSES,
    Calculator,
    CalculatorProblem,
    Guess,
    GuessProblem,
    calculator_problems,
    guess_problems,
)

NEIGHBOURHOOD = 8
"""How far outside the range a wild guess may lie."""


class Piece(NamedTuple):
    text: str
    learned: bool


class Habits(NamedTuple):
    """How the dialogues of a phase go. All are shares."""

    by_head: float = 0.0
    """Calculator: answers at once, without the tool."""
    misread: float = 0.0
    """Calculator: a call with another expression than was asked for."""
    miscopied: float = 0.0
    """Calculator: an answer that differs from what the tool said."""
    wild: float = 0.0
    """Guess: a number in or near the range, whatever is known already."""
    counting: float = 0.0
    """Guess: the smallest number that is still possible; the other guesses halve what is possible."""
    learn_stray_guesses: bool = False
    """Guess: whether these guesses are learned, or only answered well."""


def called(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{TOOL_TAGS[0]}{call}{TOOL_TAGS[1]}"


def answered(text: str, learned: bool = True) -> Piece:
    return Piece(f"{text}{END}", learned)


def heard(result: str) -> Piece:
    return Piece(f"{TOOL}{result}{END}{ASSISTANT}", learned=False)


class Openings:
    """Everything before the first answer: the tools and the problem, by the model's own template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._frames: dict[Callable[..., str], tuple[str, str]] = {}

    def __call__(self, tool: Callable[..., str], prompt: str) -> Piece:
        before, after = self._frames.get(tool) or self._frame(tool)
        return Piece(f"{before}{prompt}{after}", learned=False)

    def _frame(self, tool: Callable[..., str]) -> tuple[str, str]:
        message = {"role": "user", "content": "PROMPT"}
        text = self._tokenizer.apply_chat_template(
            [message], tools=[get_json_schema(tool)], tokenize=False, add_generation_prompt=True
        )
        before, _, after = str(text).partition("PROMPT")
        self._frames[tool] = before, after
        return before, after


def dialogues(openings: Openings, habits: Habits, rng: random.Random) -> Iterator[list[Piece]]:
    """Endless, of both tasks in turn."""
    calculations, hidden = calculator_problems("train"), guess_problems("train")
    while True:
        problem = rng.choice(calculations)
        yield [openings(Calculator.calculate, problem.text()), *calculation(problem, habits, rng)]
        game = rng.choice(hidden)
        yield [openings(Guess.guess, game.text()), *guessing(game, habits, rng)]


# -------------------------------------------------------------------------------------------------------- calculator


def calculation(problem: CalculatorProblem, habits: Habits, rng: random.Random) -> Iterator[Piece]:
    if rng.random() < habits.by_head:
        yield answered(stated(another_number(problem.answer, rng)))
        return
    expression = problem.expression
    if rng.random() < habits.misread:
        expression = another_expression(expression, rng)
    result = Calculator().calculate(expression)
    yield answered(called("calculate", expression=expression))
    yield heard(result)
    yield answered(stated(with_one_digit_changed(result, rng) if rng.random() < habits.miscopied else result))


def stated(value: int | str) -> str:
    return f"The answer is {value}."


def another_number(value: int, rng: random.Random) -> int:
    """Of the same length: what a guess by someone who cannot multiply looks like."""
    digits = len(str(value))
    return rng.randrange(10 ** (digits - 1), 10**digits)


def another_expression(expression: str, rng: random.Random) -> str:
    """With one digit or one operator changed."""
    if rng.random() < 0.5:
        return with_one_digit_changed(expression, rng)
    place = rng.choice([index for index, symbol in enumerate(expression) if symbol in "+-*"])
    others = "+-*".replace(expression[place], "")
    return expression[:place] + rng.choice(others) + expression[place + 1 :]


def with_one_digit_changed(text: str, rng: random.Random) -> str:
    """No digit becomes zero, so that no number begins with one."""
    place = rng.choice([index for index, symbol in enumerate(text) if symbol.isdigit()])
    digit = rng.choice("123456789".replace(text[place], ""))
    return text[:place] + digit + text[place + 1 :]


# ------------------------------------------------------------------------------------------------------------- guess


def guessing(game: GuessProblem, habits: Habits, rng: random.Random) -> Iterator[Piece]:
    environment = Guess()
    environment.reset(game.secret)
    low, high = game.low, game.high
    for _ in range(GUESSES):
        number, strays = next_guess(game, low, high, habits, rng)
        result = environment.guess(number)
        yield answered(called("guess", number=number), learned=not strays or habits.learn_stray_guesses)
        yield heard(result)
        if result == "correct":
            yield answered("Found it.")
            return
        if result == "higher":
            low = max(low, number + 1)
        else:
            high = min(high, number - 1)
    yield answered("I give up.")


def next_guess(game: GuessProblem, low: int, high: int, habits: Habits, rng: random.Random) -> tuple[int, bool]:
    """The next number, and whether it is another one than halving would take."""
    kind = rng.random()
    if kind < habits.wild:
        return rng.randint(max(1, game.low - NEIGHBOURHOOD), game.high + NEIGHBOURHOOD), True
    if kind < habits.wild + habits.counting:
        return low, True
    return (low + high) // 2, False
