"""Arithmetic: small sums and differences, asked in words. A first task for chat models.

The split of a problem is a hash of the problem alone, so that no seed moves a held-out one into training. Task
`index` depends on (split, seed, index) and nothing else.
"""

from __future__ import annotations

import random
from functools import cache
from hashlib import blake2b
from typing import Literal

from outpace.types import Task

Split = Literal["train", "heldout"]
Problem = tuple[int, str, int]

OPERANDS = range(100)
HELDOUT_ONE_IN = 8


class Arithmetic:
    """Every problem of a split once, in an order set by the seed."""

    def __init__(self, split: Split = "train", seed: int = 0) -> None:
        self.split = split
        self._problems = list(_problems(split))
        random.Random(f"arithmetic/{split}/{seed}").shuffle(self._problems)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"arithmetic has {len(self)} tasks; there is no task {index}")
        left, sign, right = self._problems[index]
        return Task(
            id=f"arithmetic/{self.split}/{left}{sign}{right}",
            prompt=f"What is {left} {sign} {right}? Answer with the number only.",
            columns={"answer": left + right if sign == "+" else left - right},
        )


@cache
def _problems(split: Split) -> tuple[Problem, ...]:
    every = ((left, sign, right) for left in OPERANDS for sign in "+-" for right in OPERANDS)
    return tuple(problem for problem in every if _is_heldout(problem) == (split == "heldout"))


def _is_heldout(problem: Problem) -> bool:
    digest = blake2b(repr(problem).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_ONE_IN == 0
