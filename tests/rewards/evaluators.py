"""Evaluators in a module that grader processes import quickly."""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

import outpace
from outpace.types import Episode, Task


@outpace.evaluator
def sampled(task: Task, episode: Episode) -> float:
    """Return the number of sampled tokens divided by the `wanted` column."""
    return float(sum(int(one.mask.sum()) for one in episode.trajectories)) / float(task.columns["wanted"])


@outpace.evaluator
async def patient(task: Task, episode: Episode) -> float | None:
    await asyncio.sleep(0)
    return None if episode.completion == "1" else 5.0


@outpace.evaluator
def picky(task: Task, episode: Episode) -> Any:
    if episode.completion == "1":
        raise ValueError("not this one")
    return 1.0


@outpace.evaluator
def unsure(task: Task, episode: Episode) -> float:
    return math.nan if episode.completion == "1" else 0.0


@outpace.evaluator
def leaves(task: Task, episode: Episode) -> float:
    if episode.completion == "1":
        os._exit(3)
    return 1.0


def count(completions: list[str]) -> list[float]:
    return [float(len(completions))] * len(completions)
