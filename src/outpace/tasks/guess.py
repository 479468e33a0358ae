"""Guess: find a hidden number by asking, in as many guesses as halving the range needs.

    I think of a number from 24 to 35. Find it in 4 guesses.
    ─▶ guess(29) ─▶ higher ─▶ guess(32) ─▶ lower ─▶ guess(31) ─▶ correct

Invariants:
- Nothing in the prompt tells the number: a range is a problem once for each number in it.
- The split is a hash of the range, so a held-out range was never played in training, whatever the number.
- Halving always finds the number: GUESSES guesses are enough for the widest range.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from outpace.tasks.problems import Shuffled, Split, split_by_hash
from outpace.types import Task

GUESSES = 4
WIDTHS = range(10, 2**GUESSES)
LOWS = range(1, 86)
HELDOUT_ONE_IN = 6


class Hidden(NamedTuple):
    low: int
    high: int
    secret: int

    def text(self) -> str:
        return f"I think of a number from {self.low} to {self.high}. Find it in {GUESSES} guesses."


class Guess:
    """One game. Its reward is 1 for a number that was found, else 0."""

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


def guess(split: Split, seed: int = 0) -> Shuffled[Hidden]:
    """Every problem of a split once, in an order set by the seed."""
    return Shuffled(f"guess/{split}/{seed}", games(split), _task)


@cache
def games(split: Split) -> tuple[Hidden, ...]:
    ranges = ((low, low + width - 1) for low in LOWS for width in WIDTHS)
    return tuple(
        Hidden(low, high, secret)
        for low, high in ranges
        if split_by_hash(f"{low}-{high}", HELDOUT_ONE_IN) == split
        for secret in range(low, high + 1)
    )


def _task(game: Hidden) -> Task:
    return Task(
        id=f"guess/{game.low}-{game.high}/{game.secret}",
        prompt=game.text(),
        columns={"low": game.low, "high": game.high, "secret": game.secret},
    )
