"""MERGED"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from outpace.tasks.problems import Shuffled, Split, split_by_hash
from outpace.types import Task

GUESSES = 4
GUESS_RANGE_WIDTHS = range(10, 2**GUESSES)
GUESS_RANGE_LOWS = range(1, 86)
GUESS_HELDOUT_ONE_IN = 6


class Hidden(NamedTuple):
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


def guess(split: Split, seed: int = 0) -> Shuffled[Hidden]:
    """Return every problem of a split once, shuffled by the seed."""
    return Shuffled(f"guess/{split}/{seed}", games(split), _guess_task)


@cache
def games(split: Split) -> tuple[Hidden, ...]:
    """Return one problem per range and number in it, so that the prompt does not reveal the number.

    The split is a hash of the range: a held-out range never occurs in training, with any number."""
    ranges = ((low, low + width - 1) for low in GUESS_RANGE_LOWS for width in GUESS_RANGE_WIDTHS)
    return tuple(
        Hidden(low, high, secret)
        for low, high in ranges
        if split_by_hash(f"{low}-{high}", GUESS_HELDOUT_ONE_IN) == split
        for secret in range(low, high + 1)
    )


def _guess_task(game: Hidden) -> Task:
    return Task(
        id=f"guess/{game.low}-{game.high}/{game.secret}",
        prompt=game.text(),
        columns={"low": game.low, "high": game.high, "secret": game.secret},
    )
