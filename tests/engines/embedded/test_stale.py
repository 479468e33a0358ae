"""Stale engines (replacements for engines that died) and loads that fail part-way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engines_support import engine_of
from outpace.engines.embedded.engine import EmbeddedEngine
from outpace.engines.embedded.llama import LlamaDecoder
from outpace.errors import ComponentFailed, CorruptData, RequestFailed
from outpace.types import Generation, Manifest, Sampling

pytestmark = pytest.mark.timeout(120)

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., list[np.ndarray]]
Logprobs = Callable[..., np.ndarray]


async def generate(engine: EmbeddedEngine, name: str, prompt: np.ndarray, pinned: int | None = None) -> Generation:
    return await engine.generate(name, prompt, Sampling(max_tokens=8, seed=3), 0, pinned)


def cut_in_half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


async def drain_commands(engine: EmbeddedEngine) -> None:
    """Return once the compute thread has received all earlier calls and run a decode step."""
    for _ in range(2):
        await engine._on_compute(lambda: None)


async def test_a_stale_engine_serves_nothing_before_its_first_load_and_then_only_loaded_weights(
    model_of: Models, prompts: Prompts, publish: Callable[..., Manifest], forced_logprobs: Logprobs
) -> None:
    base, policy = model_of("llama"), model_of("llama", seed=1)
    given = prompts(5, 7, 9)
    async with engine_of(base, stale=True) as engine:
        requests = [asyncio.create_task(generate(engine, str(i), prompt)) for i, prompt in enumerate(given)]
        await drain_commands(engine)
        stats = await engine.stats()
        assert (stats.version, stats.tokens, stats.prefill_tokens, stats.running) == (-1, 0, 0, 0)
        assert stats.waiting == len(given)
        await engine.load(publish(policy, 6), pinned=False)
        for prompt, generation in zip(given, await asyncio.gather(*requests), strict=True):
            assert set(generation.versions.tolist()) == {6}
            expected = forced_logprobs(policy, prompt, generation.tokens)
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


async def test_a_pinned_request_to_a_stale_engine_waits_until_its_version_is_pinned_again(
    model_of: Models, prompts: Prompts, publish: Callable[..., Manifest], forced_logprobs: Logprobs
) -> None:
    base, pinned = model_of("llama"), model_of("llama", seed=1)
    (prompt,) = prompts(5)
    async with engine_of(base, stale=True) as engine:
        request = asyncio.create_task(generate(engine, "x", prompt, pinned=4))
        await drain_commands(engine)
        await engine.load(publish(pinned, 4), pinned=True)
        generation = await request
        assert (await engine.stats()).version == -1, "a pinned weight set does not set the engine's version"
    assert set(generation.versions.tolist()) == {4}
    np.testing.assert_allclose(generation.logprobs, forced_logprobs(pinned, prompt, generation.tokens), atol=1e-4)


async def test_a_pinned_request_to_a_stale_engine_fails_when_the_first_load_does_not_pin_its_version(
    model_of: Models, prompts: Prompts, publish: Callable[..., Manifest]
) -> None:
    model = model_of("llama")
    async with engine_of(model, stale=True) as engine:
        request = asyncio.create_task(generate(engine, "x", prompts(5)[0], pinned=4))
        await drain_commands(engine)
        await engine.load(publish(model, 5), pinned=False)
        with pytest.raises(RequestFailed, match="version 4"):
            await request


async def test_requests_waiting_for_the_first_load_can_be_aborted(model_of: Models, prompts: Prompts) -> None:
    async with engine_of(model_of("llama"), stale=True) as engine:
        requests = [asyncio.create_task(generate(engine, f"{pin}", prompts(5)[0], pin)) for pin in (None, 4)]
        await drain_commands(engine)
        await engine.abort(["None", "4"])
        for generation in await asyncio.gather(*requests):
            assert (generation.stop, len(generation.tokens)) == ("aborted", 0)


@pytest.mark.parametrize("stale", [False, True])
async def test_a_load_that_fails_before_the_swap_leaves_the_previous_weights_in_place(
    stale: bool, model_of: Models, prompts: Prompts, publish: Callable[..., Manifest], forced_logprobs: Logprobs
) -> None:
    model = model_of("llama")
    good, cut = publish(model, 1), publish(model_of("llama", seed=1), 2)
    cut_in_half(Path(cut.path))
    (prompt,) = prompts(5)
    async with engine_of(model, stale=stale) as engine:
        with pytest.raises(CorruptData):
            await engine.load(cut, pinned=False)
        assert (await engine.stats()).version == (-1 if stale else 0)
        request = asyncio.create_task(generate(engine, "x", prompt))
        await engine.load(good, pinned=False)
        generation = await request
    np.testing.assert_allclose(generation.logprobs, forced_logprobs(model, prompt, generation.tokens), atol=1e-4)


async def test_a_swap_that_fails_half_way_ends_the_engine_instead_of_mixing_weights(
    model_of: Models, prompts: Prompts, publish: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    install = LlamaDecoder.install

    def half(decoder: LlamaDecoder, prepared: dict[str, torch.Tensor]) -> None:
        install(decoder, {name: tensor for name, tensor in prepared.items() if "1" not in name})

    async with engine_of(model_of("llama")) as engine:
        broken = asyncio.create_task(engine.broken())
        request = asyncio.create_task(
            engine.generate("x", prompts(5)[0], Sampling(max_tokens=80, seed=3), min_version=2, pinned=None)
        )
        await drain_commands(engine)
        monkeypatch.setattr(LlamaDecoder, "install", half)
        with pytest.raises(ComponentFailed, match="KeyError"):
            await engine.load(publish(model_of("llama", seed=1), 2), pinned=False)
        with pytest.raises(ComponentFailed, match="KeyError"):
            await request
        assert "KeyError" in (await broken).message
        assert (await engine.broken()).component == "engine"
