"""Countdown: combine a few digits, each used exactly once, into an expression with a given value.

A puzzle is three or four numbers from 1 to 9, in descending order, and a small positive target. An answer may use
+ - * / and parentheses, with the numbers in any order. Every puzzle also has a plain solution, which joins the numbers
in the given order without parentheses; this keeps the puzzles within reach of a very small model.

Invariants
- Every puzzle has a solution, because puzzles are generated from plain expressions.
- The split of a puzzle is a hash of the puzzle alone, so no seed can move a held-out puzzle into training.
- Puzzle `index` depends only on (split, seed, index): tasks are created on demand and no order is stored. Any
  `distinct` consecutive indices are different puzzles.
"""

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations_with_replacement, product
from math import gcd
from typing import NamedTuple

from outpace.tasks.generated import Split, split_by_hash, stable_hash
from outpace.types import Task

PLAIN_OPERATORS = {3: "+-*", 4: "+-"}
"""Operators of a plain solution, by the number of operands."""

NUMBERS = range(1, 10)
TARGETS = range(1, 41)
HELDOUT_ONE_IN = 3


class Puzzle(NamedTuple):
    numbers: tuple[int, ...]
    """In descending order, so that equal puzzles compare equal."""
    target: int

    def text(self) -> str:
        return f"{' '.join(map(str, self.numbers))}={self.target}"


def puzzle_split(puzzle: Puzzle) -> Split:
    return split_by_hash(puzzle.text(), HELDOUT_ONE_IN)


class Countdown:
    """A sized, indexable task source; iteration works through `__getitem__`.

    By default it has every puzzle of the split once. A larger training `size` repeats puzzles under new ids. A larger
    held-out `size` raises `ValueError`, because a repeated puzzle would count twice in the score.
    """

    def __init__(self, split: Split = "train", seed: int = 0, size: int | None = None) -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f"countdown: unknown split {split!r}; use 'train' or 'heldout'")
        self.split = split
        self.seed = seed
        self.distinct = len(_puzzles(split))
        self._size = self.distinct if size is None else size
        if self._size < 1:
            raise ValueError(f"countdown: size is {size}; use at least 1")
        if split == "heldout" and self._size > self.distinct:
            raise ValueError(f"countdown: size {size} exceeds the {self.distinct} held-out puzzles; lower it")
        self._start, self._stride = _walk(split, seed, self.distinct)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        puzzle = self.puzzle(index)
        return Task(
            id=f"countdown/{self.split}/{self.seed}/{index}",
            prompt=puzzle.text(),
            columns={"numbers": list(puzzle.numbers), "target": puzzle.target},
        )

    def puzzle(self, index: int) -> Puzzle:
        if not 0 <= index < self._size:
            raise IndexError(f"countdown: task {index} is out of range 0..{self._size - 1}")
        return _puzzles(self.split)[(self._start + index * self._stride) % self.distinct]


def _walk(split: Split, seed: int, length: int) -> tuple[int, int]:
    """Return a random start and stride. A stride coprime to the length visits every index once."""
    rng = random.Random(f"countdown/{split}/{seed}")
    start, stride = rng.randrange(length), rng.randrange(1, length)
    while gcd(stride, length) != 1:
        stride = rng.randrange(1, length)
    return start, stride


@cache
def _puzzles(split: Split) -> tuple[Puzzle, ...]:
    """Return the puzzles of a split, sorted by hash so that every stride visits them in an arbitrary order."""
    puzzles = (puzzle for puzzle in _all_puzzles() if puzzle_split(puzzle) == split)
    return tuple(sorted(puzzles, key=lambda puzzle: stable_hash(puzzle.text())))


def _all_puzzles() -> Iterator[Puzzle]:
    for count, operators in PLAIN_OPERATORS.items():
        for numbers in combinations_with_replacement(reversed(NUMBERS), count):
            for target in sorted({value for _, value in plain_expressions(numbers, operators)}):
                if target in TARGETS:
                    yield Puzzle(numbers, target)


def plain_expressions(numbers: tuple[int, ...], operators: str) -> Iterator[tuple[str, int]]:
    """Yield every expression without parentheses over the numbers in this order, with its value."""
    for chosen in product(operators, repeat=len(numbers) - 1):
        text, total, term = str(numbers[0]), 0, numbers[0]
        for operator, number in zip(chosen, numbers[1:], strict=True):
            text += f"{operator}{number}"
            if operator == "*":
                term *= number
            else:
                total, term = total + term, number if operator == "+" else -number
        yield text, total + term
