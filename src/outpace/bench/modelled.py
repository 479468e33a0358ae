"""Engine without compute: returns scripted completions after the time a model would take.

    request ─▶ first token ─▶ decode ─▶ completion of this turn
               first_token_s  tokens / tokens_per_s

Invariants
- There is always a free slot, so the latency of a request depends on the request alone.
- Latency is a pure function of the request id and length, so the time of an episode is known in advance.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outpace.types import EngineStats, Generation, Ints, LoadReport, Manifest, Sampling, Version


@dataclass(frozen=True)
class Pace:
    """Simulated engine speed. Request times vary by up to the fraction `jitter` in both directions."""

    first_token_s: float
    tokens_per_s: float
    jitter: float = 0.5

    def seconds(self, request_id: str, tokens: int) -> float:
        """Return the latency of a request. Deterministic per request id."""
        factor = 1 + self.jitter * random.Random(request_id).uniform(-1, 1)
        return factor * (self.first_token_s + tokens / self.tokens_per_s)


class ModelledEngine:
    """Implements the methods of `outpace.protocols.Engine` that a rollout worker uses."""

    def __init__(self, script: Callable[[int, int, int], Sequence[int]], pace: Pace) -> None:
        """`script` returns the completion for a group, episode and turn."""
        self._script = script
        self._pace = pace
        self.requests = 0
        self.tokens = 0

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        group, episode, turn = map(int, request_id.split("."))
        answer = np.array(self._script(group, episode, turn), dtype=np.int32)
        await asyncio.sleep(self._pace.seconds(request_id, len(answer)))
        self.requests += 1
        self.tokens += len(answer)
        return Generation(
            tokens=answer,
            logprobs=np.full(len(answer), -0.5, dtype=np.float32),
            versions=np.full(len(answer), min_version, dtype=np.int32),
            stop="stop",
        )

    def seconds(self, group: int, episode: int, turns: int) -> float:
        """Return the total latency of an episode's requests."""
        return sum(
            self._pace.seconds(f"{group}.{episode}.{turn}", len(self._script(group, episode, turn)))
            for turn in range(turns)
        )

    async def abort(self, request_ids: list[str]) -> None:
        """Do nothing: there is no compute to stop."""

    async def peek(self, request_id: str, after: int) -> Ints:
        return np.zeros(0, dtype=np.int32)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        raise NotImplementedError("a scripted engine has no weights")

    async def release_pinned(self) -> None:
        raise NotImplementedError("a scripted engine has no weights")

    async def stats(self) -> EngineStats:
        raise NotImplementedError("a scripted engine has no statistics")
