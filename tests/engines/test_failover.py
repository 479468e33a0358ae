"""Real engines with the same weights, one of which fails in the middle: answers stay what the policy would say."""

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


class Mortal:
    """An engine that can be killed: what it has is lost, with the partial output (`streams`) or without."""

    def __init__(self, engine: EmbeddedEngine, streams: bool) -> None:
        self._engine = engine
        self._streams = streams
        self._dead = False
        self.asked = asyncio.Event()
        self.under_way: set[str] = set()
        self.begun: list[Ints] = []

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        if self._dead:
            raise ComponentLost("mortal", "closed its connection")
        self.under_way.add(request_id)
        self.begun.append(token_ids)
        self.asked.set()
        try:
            made = await self._engine.generate(request_id, token_ids, sampling, min_version, pinned)
        finally:
            self.under_way.discard(request_id)
        if not self._dead or made.stop != "aborted":
            return made
        if not self._streams:
            raise ComponentLost("mortal", "closed its connection")
        return msgspec.structs.replace(made, stop="lost")

    async def kill(self) -> None:
        self._dead = True
        await self._engine.abort(sorted(self.under_way))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.parametrize("streams", [True, False], ids=["partial output", "nothing left"])
async def test_every_request_completes_and_keeps_its_logprobs(
    streams: bool,
    model_of: Callable[..., PreTrainedModel],
    prompts: Callable[..., list[NDArray[np.int32]]],
    forced_logprobs: Callable[..., NDArray[np.float32]],
) -> None:
    model = model_of("llama")
    asked = prompts(*range(5, 5 + REQUESTS))
    async with engine_of(model, slots=2) as one, engine_of(model, slots=2) as another:
        mortal, spare = Mortal(one, streams), Mortal(another, streams)
        fleet = EngineFleet({"mortal": mortal, "spare": spare})
        answers = [
            asyncio.create_task(fleet.generate(f"{i}.0.0", prompt, Sampling(LENGTH, i, 0.8), 0, None))
            for i, prompt in enumerate(asked)
        ]
        await mortal.asked.wait()
        moved = min(mortal.under_way)
        assert len(await fleet.stream_tokens(moved, 3)), "it is in the middle of it"
        lost = len(mortal.under_way)
        await mortal.kill()
        generations = await asyncio.gather(*answers)
    assert fleet.moves >= lost > 0
    gone_on_with = [begun for begun in spare.begun if not any(np.array_equal(begun, prompt) for prompt in asked)]
    assert bool(gone_on_with) == streams
    for prompt, made in zip(asked, generations, strict=True):
        assert (len(made.tokens), made.stop) == (LENGTH, "length")
        assert made.logprobs == pytest.approx(forced_logprobs(model, prompt, made.tokens, 0.8), abs=1e-4)
        assert (made.versions == 0).all()
