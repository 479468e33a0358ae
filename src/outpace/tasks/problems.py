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
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Generic, Literal, TypeVar

from outpace.types import Task
from outpace.wording import plural

Split = Literal["train", "heldout"]
Problem = TypeVar("Problem")


def stable_hash(text: str) -> int:
    """Return a hash that is the same on every machine and in every process, unlike the built-in `hash`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def split_by_hash(key: str, heldout_one_in: int) -> Split:
    return "heldout" if stable_hash(key) % heldout_one_in == 0 else "train"


class Shuffled(Generic[Problem]):
    """A task source with every problem once, shuffled. `name` includes split and seed, and seeds the shuffle."""

    def __init__(self, name: str, problems: Sequence[Problem], as_task: Callable[[Problem], Task]) -> None:
        self._name = name
        self._problems = list(problems)
        self._as_task = as_task
        random.Random(name).shuffle(self._problems)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Task:
        return self._as_task(self.problem(index))

    def problem(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(f"{self._name}: task {index} is out of range ({plural(len(self), 'task')})")
        return self._problems[index]
