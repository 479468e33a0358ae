"""A real SGLang server on a GPU: logprobs, weight updates with requests in flight, and the prefix cache."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.config import Config
from outpace.config.load import make_config
from outpace.config.validation import resolve
from outpace.engines.fleet import EngineFleet
from outpace.engines.server.build import build_server_engine
from outpace.engines.server.http import HttpClient
from outpace.engines.server.launch import LaunchPlan, launch_server
from outpace.engines.server.server_engine import ServerEngine
from outpace.hardware.placement import placement_of
from outpace.models.loading import load_tokenizer
from outpace.types import Generation, Ints, Manifest, Sampling

PYTHON = os.environ.get("OUTPACE_SGLANG_PYTHON", "")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON or not torch.cuda.is_available(), reason="needs OUTPACE_SGLANG_PYTHON and a GPU"),
]

SETTINGS = {
    "model.dtype": "bfloat16",
    "engine.kind": "sglang",
    "engine.context": 1024,
    "launch.python": PYTHON,
    # The flags that 0.5.17 was tested with: no CUDA graphs, no FlashAttention, no FlashInfer.
    "launch.args": [
        "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
        "--mm-feature-transport", "cpu",
    ],
    "launch.gpu_memory": 0.3,
    "launch.start_s": 400.0,
}  # fmt: skip
ROUNDING = 0.08  # mean logprob difference of two implementations in bfloat16; 0.03 on an H200


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """Two random models of the size of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=len(load_tokenizer("starter")), hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    models: list[Any] = [LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval() for _ in range(2)]  # type: ignore
    for model in models:
        model.lm_head.weight.data.mul_(4.0)  # far from uniform, so that wrong weights are visible
    return models


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sglang(models: list[Any], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Config, str]]:
    """The config and the URL of a server with the first model."""
    directory = tmp_path_factory.mktemp("sglang")
    models[0].save_pretrained(directory / "model")
    load_tokenizer("starter").save_pretrained(directory / "model")
    config = resolve(make_config(SETTINGS | {"model.path": str(directory / "model")}), own_rewards=True)
    plan = await LaunchPlan.of(config, directory)
    started = await launch_server(plan, 0, directory / "server.log", print, gpus=placement_of(config).engines[0])
    yield config, started.server.url
    await started.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(kv: str, sglang: tuple[Config, str], tmp_path: Path) -> AsyncIterator[ServerEngine]:
    config = sglang[0].model_copy(update={"engine": sglang[0].engine.model_copy(update={"kv": kv})})
    engine = await build_server_engine(
        config, "engine-0", 0, url=sglang[1], incarnation=tmp_path.name, scratch=tmp_path, logs=tmp_path, stale=False
    )
    yield engine
    await engine.close()


class Requests:
    """Requests in flight, every second one at temperature 0.7. `answers`: of each its prompt, temperature, answer."""

    def __init__(self, engine: ServerEngine, prompts: list[Ints], tokens: int) -> None:
        self.fleet = EngineFleet({"engine-0": engine})
        self.answers = asyncio.gather(*(self._sample(number, prompt, tokens) for number, prompt in enumerate(prompts)))

    async def _sample(self, number: int, prompt: Ints, tokens: int) -> tuple[Ints, float, Generation]:
        sampling = Sampling(tokens, seed=number, temperature=0.7 if number % 2 else 1.0)
        answer = await self.fleet.generate(f"{number}.0.0", prompt, sampling, 0, None)
        return prompt, sampling.temperature, answer

    async def difference(self, model: Any, forced_logprobs: Callable[..., Any], version: int) -> float:
        """Mean difference of the logprobs of this version's tokens to those that the model computes."""
        found = [
            (answer.logprobs - forced_logprobs(model, prompt, answer.tokens, temperature))[answer.versions == version]
            for prompt, temperature, answer in await self.answers
        ]
        return float(np.abs(np.concatenate(found)).mean())


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_an_update_gives_requests_in_flight_and_later_ones_the_new_weights_and_no_old_prefix(
    kv: str, engine: ServerEngine, sglang: tuple[Config, str], models: list[Any], tmp_path: Path,
    prompts: Callable[..., list[Ints]], publish: Callable[..., Manifest], forced_logprobs: Callable[..., Any],
) -> None:  # fmt: skip
    (old, new), (cached,) = models, prompts(256)
    await engine.load(publish(old, 1), pinned=False)
    before = Requests(engine, [cached, *prompts(*[48] * 31)], 32)
    assert await before.difference(old, forced_logprobs, 1) < ROUNDING
    assert await is_cached(cached, f"{tmp_path.name}.1", sglang[1])

    update = publish(new, 2)
    across = Requests(engine, prompts(*[48] * 16, seed=1), 700)
    await asyncio.sleep(0)
    assert len(await across.fleet.stream_tokens("0.0.0", 20)), "the request is running"
    await engine.load(update, pinned=False)
    for _, _, answer in await across.answers:
        assert (answer.stop, len(answer.tokens), set(answer.versions.tolist())) == ("length", 700, {1, 2})
    if kv == "recompute":
        assert await across.difference(new, forced_logprobs, 2) < ROUNDING
    assert await is_cached(cached, f"{tmp_path.name}.1", sglang[1]) == (kv == "keep")
    assert not await is_cached(cached, f"{tmp_path.name}.2", sglang[1])

    after = Requests(engine, prompts(*[48] * 32, seed=2), 32)
    assert {version for _, _, answer in await after.answers for version in answer.versions.tolist()} == {2}
    assert await after.difference(new, forced_logprobs, 2) < ROUNDING
    assert await after.difference(old, forced_logprobs, 2) > 1.0


async def is_cached(prompt: Ints, salt: str, url: str) -> bool:
    """Whether the server has the prompt in its prefix cache under this salt. Adds it."""
    http, how = HttpClient(url), {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": prompt.tolist(), "extra_key": salt, "stream": False, "sampling_params": how}
    reply = await http.post("/generate", body, deadline_s=60)
    await http.close()
    return int(reply["meta_info"]["cached_tokens"]) > len(prompt) / 2
