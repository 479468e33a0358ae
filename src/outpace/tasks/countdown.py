"""Countdown: reach a target from a few digits, using each exactly once.

A puzzle is three or four numbers from 1 to 9, in descending order, and a small positive target. An answer may
use + - * / and parentheses, in any order; the puzzles are those that also have a plain solution, which joins
the numbers as given by a few operators. That keeps them within reach of a very small model.

Invariants:
- Every puzzle has a solution, because the space is what plain solutions reach.
- The split of a puzzle is a hash of the puzzle alone, so no seed can move a held-out puzzle into training.
- Puzzle `index` depends on (split, seed, index) and on nothing else: tasks are made on demand and no order
  is stored. Any `distinct` consecutive indices are all different puzzles.
"""

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations_with_replacement, product
from math import gcd
from typing import NamedTuple

from outpace.tasks.problems import Split, split_by_hash, stable_hash
from outpace.types import Task

PLAIN_OPERATORS = {3: "+-*", 4: "+-"}
"""What a plain solution uses, by how many numbers there are."""

NUMBERS = range(1, 10)
TARGETS = range(1, 41)
HELDOUT_ONE_IN = 3


class Puzzle(NamedTuple):
    numbers: tuple[int, ...]
    """In descending order, so that equal puzzles compare equal."""
    target: int

    def text(self) -> str:
        return f"{' '.join(map(str, self.numbers))}={self.target}"


def puzzle_hash(puzzle: Puzzle) -> int:
    return stable_hash(puzzle.text())


def split_of(puzzle: Puzzle) -> Split:
    return split_by_hash(puzzle.text(), HELDOUT_ONE_IN)


class Countdown:
    """A sized, indexable source of tasks; iteration works through `__getitem__`.

    `size` None means every puzzle of the split once. A larger training set repeats puzzles under new ids;
    a larger held-out set is refused, since a repeated puzzle would count twice in a score.
    """

    def __init__(self, split: Split = "train", seed: int = 0, size: int | None = None) -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f"countdown has the splits 'train' and 'heldout', not {split!r}")
        self.split = split
        self.seed = seed
        self.distinct = len(_puzzles(split))
        self._size = self.distinct if size is None else size
        if self._size < 1:
            raise ValueError(f"countdown needs a size of at least 1, not {size}")
        if split == "heldout" and self._size > self.distinct:
            raise ValueError(f"countdown has {self.distinct} held-out puzzles, {size} were asked for")
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
            raise IndexError(f"countdown task {index} is outside 0..{self._size - 1}")
        return _puzzles(self.split)[(self._start + index * self._stride) % self.distinct]


def _walk(split: Split, seed: int, length: int) -> tuple[int, int]:
    """Where to start and how far to step; a stride coprime to the length visits every place once."""
    rng = random.Random(f"countdown/{split}/{seed}")
    start, stride = rng.randrange(length), rng.randrange(1, length)
    while gcd(stride, length) != 1:
        stride = rng.randrange(1, length)
    return start, stride


@cache
def _puzzles(split: Split) -> tuple[Puzzle, ...]:
    """Ordered by hash, so that a walk of any stride meets the puzzles in no recognisable order."""
    return tuple(sorted((puzzle for puzzle in _all_puzzles() if split_of(puzzle) == split), key=puzzle_hash))


def _all_puzzles() -> Iterator[Puzzle]:
    for count, operators in PLAIN_OPERATORS.items():
        for numbers in combinations_with_replacement(reversed(NUMBERS), count):
            for target in sorted({value for _, value in plain_expressions(numbers, operators)}):
                if target in TARGETS:
                    yield Puzzle(numbers, target)


def plain_expressions(numbers: tuple[int, ...], operators: str) -> Iterator[tuple[str, int]]:
    """Every expression without parentheses over the numbers in this order, with its value."""
    for chosen in product(operators, repeat=len(numbers) - 1):
        text, total, term = str(numbers[0]), 0, numbers[0]
        for operator, number in zip(chosen, numbers[1:], strict=True):
            text += f"{operator}{number}"
            if operator == "*":
                term *= number
            else:
                total, term = total + term, number if operator == "+" else -number
        yield text, total + term
