"""Workload of `outpace bench episodes`: tasks, an environment with a slow tool, and scripted completions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from outpace.bench.modelled import Pace
from outpace.config import Config
from outpace.models.loading import eos_ids, load_tokenizer
from outpace.tasks.registry import Sources
from outpace.types import Task

GROUP = 8
"""Episodes per task."""

PACE = Pace(first_token_s=0.2, tokens_per_s=100)
"""Speed of one request on a busy engine with many slots."""


@dataclass(frozen=True)
class Load:
    """The worker's load: whole groups, all running concurrently."""

    episodes: int = 2000
    turns: int = 4
    tokens: int = 64
    tool_ms: int = 1000
    pace: Pace = PACE

    @property
    def groups(self) -> int:
        return -(-self.episodes // GROUP)


class Questions:
    """Task source with practically unlimited tasks, each solved with the archive tool."""

    def __init__(self, tool_ms: int) -> None:
        self._tool_ms = tool_ms

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Task:
        text = f"How many pages has volume {index}? Look into the archive, page by page, before you answer."
        return Task(f"archive/{index}", text, {"answer": index, "tool_ms": self._tool_ms})


def questions(config: Config) -> Sources:
    """Return the task sources, for `tasks.name`."""
    return Questions(config.tasks.options.get("tool_ms", 1000)), None


class Archive:
    """Environment for `rollout.environment`. Its tool sleeps, like a tool behind a network."""

    def __init__(self) -> None:
        self._tool_s = 0.0

    async def reset(self, tool_ms: int, **columns: Any) -> str:
        self._tool_s = tool_ms / 1000
        return " The archive is open."

    async def look_up(self, volume: int, page: int) -> str:
        """Look up a page of a volume.

        Args:
            volume: its number.
            page: which page, from 0 on.
        """
        await asyncio.sleep(self._tool_s)
        return f"page {page} of volume {volume} is there; whether it is the last one is not written on it"


class Script:
    """Scripted completions: a tool call in all turns but the last, then a number, right in every other episode."""

    def __init__(self, load: Load, model: str) -> None:
        self._encode = load_tokenizer(model).encode
        self._end = eos_ids(model)[0]
        self._load = load
        self._encoded: dict[str, list[int]] = {}  # encoded once, so that the engine uses no CPU time of the worker

    def __call__(self, group: int, episode: int, turn: int) -> list[int]:
        if turn < self._load.turns - 1:
            arguments = json.dumps({"volume": group, "page": turn})
            return self._answer(f'<tool_call>{{"name": "look_up", "arguments": {arguments}}}</tool_call>')
        return self._answer(f"It has {group + episode % 2}")

    def _answer(self, text: str) -> list[int]:
        if text not in self._encoded:
            tokens = self._encode(text, add_special_tokens=False)
            padding = self._encode("so ", add_special_tokens=False) * self._load.tokens
            self._encoded[text] = [*padding[: max(0, self._load.tokens - len(tokens) - 1)], *tokens, self._end]
        return self._encoded[text]
