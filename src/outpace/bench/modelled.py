"""An engine that computes nothing: scripted answers, each after the time that a model would take for it.

    request ─▶ first token ─▶ one token after the other ─▶ the answer of its turn
               first_token_s   tokens / tokens_per_s

Invariants
- There is always a free slot, so what a request takes depends on the request alone.
- How long that is, is a pure function of the request id: what the requests of an episode take is known beforehand.
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
    """How fast the engine seems to be. The times of single requests are spread by up to `spread`, both ways."""

    first_token_s: float
    tokens_per_s: float
    spread: float = 0.5

    def seconds(self, request_id: str, tokens: int) -> float:
        """The same for a request whenever it is asked."""
        around = 1 + self.spread * random.Random(request_id).uniform(-1, 1)
        return around * (self.first_token_s + tokens / self.tokens_per_s)


class ModelledEngine:
    """Implements `outpace.protocols.Engine`, as far as a rollout worker uses it."""

    def __init__(self, script: Callable[[int, int, int], Sequence[int]], pace: Pace) -> None:
        """`script` has the answer to a request by group, episode and turn."""
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
        """What all requests of an episode take."""
        return sum(
            self._pace.seconds(f"{group}.{episode}.{turn}", len(self._script(group, episode, turn)))
            for turn in range(turns)
        )

    async def abort(self, request_ids: list[str]) -> None:
        """Nothing is computed that could be stopped."""

    async def peek(self, request_id: str, after: int) -> Ints:
        return np.zeros(0, dtype=np.int32)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        raise NotImplementedError("a modelled engine has no weights")

    async def release_pinned(self) -> None:
        raise NotImplementedError("a modelled engine has no weights")

    async def stats(self) -> EngineStats:
        raise NotImplementedError("a modelled engine computes nothing")
