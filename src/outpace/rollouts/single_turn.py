"""MERGED"""

from __future__ import annotations

from outpace.protocols import ModelClient
from outpace.types import Task


async def single_turn(task: Task, client: ModelClient) -> None:
    """Sample one answer to the prompt of the task. The reward functions grade it."""
    await client.sample(task.prompt)
