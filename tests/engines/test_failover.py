"""Failover between real engines with the same weights: logprobs stay correct when one engine fails mid-request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedModel

from engines_support import engine_of
from outpace.engines.embedded.engine import EmbeddedEngine
from outpace.engines.fleet import EngineFleet
from outpace.errors import ComponentLost
from outpace.types import Generation, Ints, Sampling, Version

pytestmark = pytest.mark.timeout(120)

REQUESTS = 12
LENGTH = 40


class KillableEngine:
    """An engine that can be killed. Its requests are lost, with their partial output (`streams`) or without."""

    def __init__(self, engine: EmbeddedEngine, streams: bool) -> None:
        self._engine = engine
        self._streams = streams
        self._dead = False
        self.started = asyncio.Event()
        self.under_way: set[str] = set()
        self.received_prompts: list[Ints] = []

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        if self._dead:
            raise ComponentLost("killable", "closed its connection")
        self.under_way.add(request_id)
        self.received_prompts.append(token_ids)
        self.started.set()
        try:
            made = await self._engine.generate(request_id, token_ids, sampling, min_version, pinned)
        finally:
            self.under_way.discard(request_id)
        if not self._dead or made.stop != "aborted":
            return made
        if not self._streams:
            raise ComponentLost("killable", "closed its connection")
        return msgspec.structs.replace(made, stop="lost")

    async def kill(self) -> None:
        self._dead = True
        await self._engine.abort(sorted(self.under_way))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.parametrize("streams", [True, False], ids=["partial output", "no partial output"])
async def test_every_request_completes_with_correct_logprobs_after_an_engine_is_killed(
    streams: bool,
    model_of: Callable[..., PreTrainedModel],
    prompts: Callable[..., list[NDArray[np.int32]]],
    forced_logprobs: Callable[..., NDArray[np.float32]],
) -> None:
    model = model_of("llama")
    given = prompts(*range(5, 5 + REQUESTS))
    async with engine_of(model, slots=2) as one, engine_of(model, slots=2) as another:
        killable, spare = KillableEngine(one, streams), KillableEngine(another, streams)
        fleet = EngineFleet({"killable": killable, "spare": spare})
        answers = [
            asyncio.create_task(fleet.generate(f"{i}.0.0", prompt, Sampling(LENGTH, i, 0.8), 0, None))
            for i, prompt in enumerate(given)
        ]
        await killable.started.wait()
        moved = min(killable.under_way)
        assert len(await fleet.stream_tokens(moved, 3)), "the request is running"
        lost = len(killable.under_way)
        await killable.kill()
        generations = await asyncio.gather(*answers)
    assert lost > 0
    continued = [
        begun for begun in spare.received_prompts if not any(np.array_equal(begun, prompt) for prompt in given)
    ]
    assert bool(continued) == streams
    for prompt, made in zip(given, generations, strict=True):
        assert (len(made.tokens), made.stop) == (LENGTH, "length")
        assert made.logprobs == pytest.approx(forced_logprobs(model, prompt, made.tokens, 0.8), abs=1e-4)
        assert (made.versions == 0).all()
