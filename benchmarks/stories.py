"""A task with long answers, for `outpace bench end-to-end`: stories of several hundred tokens.

    outpace bench end-to-end --task benchmarks/stories.py:stories \\
        --rewards.functions benchmarks/stories.py:distinct_words

The reward is the share of distinct words, which falls when a story repeats itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.types import Message, Task

PEOPLE = ["a sailor", "a baker", "a young doctor", "an old teacher", "two sisters", "a gardener", "a pilot", "a thief"]
PLACES = ["a small island", "a city in winter", "a mountain village", "a night train", "a market", "a desert road"]
THINGS = ["a lost letter", "a broken clock", "a strange map", "a talking bird", "a storm", "a locked door", "a secret"]
TRAIN, HELDOUT = 4096, 64


def stories(config: Any) -> tuple[Any, Any]:
    """Return the training tasks of the run's seed, and held-out tasks."""
    from outpace.types import Task  # not at the top: the TRL process imports this file too, without outpace's packages

    def tasks(count: int, seed: int) -> list[Task]:
        draw = random.Random(seed)
        chosen = [[draw.choice(words) for words in (PEOPLE, PLACES, THINGS)] for _ in range(count)]
        return [Task(f"{number}", _prompt(*words)) for number, words in enumerate(chosen)]

    return tasks(TRAIN, config.run.seed), tasks(HELDOUT, config.eval.seed)


def _prompt(person: str, place: str, thing: str) -> list[Message]:
    return [{"role": "user", "content": f"Write a story of about 250 words about {person}, {place} and {thing}."}]


def distinct_words(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return the share of words in each story that differ from all words before them."""
    words = [str(completion[-1]["content"]).lower().split() for completion in completions]
    return [len(set(each)) / len(each) if each else 0.0 for each in words]
