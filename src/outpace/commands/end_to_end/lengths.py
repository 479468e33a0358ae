"""Long-tailed lengths: how both systems sample answers of the same lengths from an unchanged model.

The length of an answer is drawn from a log-normal distribution, seeded by prompt and attempt number, so both systems
sample the same lengths for the same prompts.

    outpace                `fixed_length`: no stop ids, and `max_tokens` is the length
    TRL, transformers      a logits processor suppresses the end-of-sequence token before the last token and forces it
                           there (`outpace.commands.end_to_end.trl_process`)
    TRL, vLLM              `min_tokens` and `max_tokens` of each request are the length

The reward is not meant to be learned. It is 1 for an even number of characters, else 0, so that attempts differ.

Rollout workers and the TRL process import this module. It uses only the standard library.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.rollouts.client import PolicyClient
    from outpace.types import Message, Task

LONGEST_OF_MEDIAN = 16
"""Longest answer as a multiple of the median."""
SIGMA = 0.9
"""Standard deviation of the logarithm: about one answer in 1,000 reaches the longest length."""


def answer_length(prompt: str | list[Message], attempt: int, longest: int) -> int:
    """Return the number of tokens of this attempt, from 1 to `longest`."""
    noise = random.Random(f"{json.dumps(prompt)}/{attempt}")
    return max(1, min(longest, round(noise.lognormvariate(math.log(longest / LONGEST_OF_MEDIAN), SIGMA))))


async def fixed_length(task: Task, client: PolicyClient) -> float:
    """Rollout of long-tailed work: sample exactly the attempt's number of tokens."""
    length = answer_length(task.prompt, client.attempt, client.max_tokens)
    return is_even(await client.sample(task.prompt, max_tokens=length, stop_ids=[]))


def is_even(text: str) -> float:
    return float(len(text) % 2 == 0)


def even_characters(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The reward of `fixed_length`, for TRL."""
    return [is_even(completion[-1]["content"]) for completion in completions]
