"""The default rollout: one prompt, one answer."""

from __future__ import annotations

from outpace.protocols import ModelClient
from outpace.types import Task


async def single_turn(task: Task, client: ModelClient) -> None:
    """Ask once; the rewards judge the answer."""
    await client.sample(task.prompt)
