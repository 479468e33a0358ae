"""What generated tasks have in common: a split that no seed can move, and an order that the seed sets."""

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
    """The same on every machine and in every process, which the built-in `hash` does not promise."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def split_by_hash(key: str, heldout_one_in: int) -> Split:
    return "heldout" if stable_hash(key) % heldout_one_in == 0 else "train"


class Shuffled(Generic[Problem]):
    """Every problem once, as a task, in an order set by `name`, which carries split and seed."""

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
            raise IndexError(f"{self._name} has {plural(len(self), 'task')}; there is no task {index}")
        return self._problems[index]
