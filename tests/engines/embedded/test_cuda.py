"""The embedded engine on a GPU: logprobs, determinism and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outpace.engines.embedded.decode_batch import DecodeBatch
from outpace.engines.embedded.decoder import SlotCache
from outpace.engines.embedded.engine import EmbeddedEngine
from outpace.engines.embedded.load_decoder import build_decoder
from outpace.hardware.memory import ModelShape, engine_memory
from outpace.types import Generation, Sampling
from support import resolved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = [("llama", "fast"), ("qwen3", "fast"), ("gpt2", "general"), ("gemma2-sliding", "general")]


@pytest.mark.parametrize(("family", "path"), CASES)
@pytest.mark.parametrize("deterministic", [False, True])
async def test_logprobs_on_a_gpu_match_a_teacher_forced_forward_pass(
    family: str, path: str, deterministic: bool, model_of: Callable[..., PreTrainedModel],
    prompts: Callable[..., list[np.ndarray]], forced_logprobs: Callable[..., np.ndarray],
) -> None:  # fmt: skip
    model = model_of(family)
    given = prompts(3, 40, 7, 25, 1, 11, seed=1)
    on_gpu = model_of(family).cuda()
    engine = EmbeddedEngine(on_gpu, slots=4, path=path, deterministic=deterministic)  # type: ignore[arg-type]
    finished = await asyncio.gather(
        *(engine.generate(str(i), p, Sampling(max_tokens=20 + i, seed=i), 0, None) for i, p in enumerate(given))
    )
    await engine.close()
    for prompt, generation in zip(given, finished, strict=True):
        np.testing.assert_allclose(generation.logprobs, forced_logprobs(model, prompt, generation.tokens), atol=1e-3)


def test_in_deterministic_mode_results_on_a_gpu_do_not_depend_on_batch_composition(
    model_of: Callable[..., PreTrainedModel], prompts: Callable[..., list[np.ndarray]]
) -> None:
    decoder = build_decoder(model_of("llama").cuda(), 5, None, deterministic=True, path="fast")
    batch = DecodeBatch(decoder, 0, "keep", None)
    given = prompts(1, 4, 9, 17, 30, 33, 40, 12)

    def serve(chosen: list[int]) -> dict[str, Generation]:
        finished: dict[str, Generation] = {}
        for index in chosen:
            batch.submit(str(index), given[index], Sampling(max_tokens=3 + 4 * index, seed=index), 0)
        while batch.has_work:
            for done in batch.advance():
                assert isinstance(done.result, Generation)
                finished[done.id] = done.result
        return finished

    alone = {name: generation for index in range(8) for name, generation in serve([index]).items()}
    for order in np.random.default_rng(0).permuted(np.tile(np.arange(8), (5, 1)), axis=1).tolist():
        for name, generation in serve(order).items():
            assert generation.tokens.tolist() == alone[name].tokens.tolist()
            assert generation.logprobs.tobytes() == alone[name].logprobs.tobytes()


async def test_the_engine_does_not_use_cudnn_attention(model_of: Callable[..., PreTrainedModel]) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    engine = EmbeddedEngine(model_of("llama").cuda(), slots=2)
    await engine.close()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_growing_the_kv_cache_frees_the_smaller_allocation() -> None:
    torch.cuda.empty_cache()
    shapes, device = [(4, 64, 64)] * 8, torch.device("cuda")
    cache = SlotCache(shapes, 128, 1024, torch.bfloat16, device, preallocate=False)
    for length in (200, 400, 1000):
        cache.reserve(length)
    needed = 2 * len(shapes) * 128 * 4 * 1024 * 64 * 2
    assert torch.cuda.memory_reserved() < 1.2 * needed + torch.cuda.memory_allocated() - needed


SMOLLM2 = ModelShape(134_515_008, 30, 576, 9, 3, 64, 1536, 49_152, 8192)


@pytest.mark.parametrize(("slots", "context"), [(64, 1024), (512, 1024)])
def test_the_memory_estimate_of_the_engine_is_close_to_the_measured_peak_on_a_gpu(slots: int, context: int) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    shape = LlamaConfig(
        vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).to("cuda", torch.bfloat16)
    decoder = build_decoder(model, slots, context, deterministic=False, path="fast")
    batch = DecodeBatch(decoder, 0, "keep", None)
    for index in range(slots):
        prompt = np.full(context - 8, index, dtype=np.int32)
        batch.submit(str(index), prompt, Sampling(max_tokens=7, seed=index), 0)
    while batch.has_work:
        batch.advance()
    measured = torch.cuda.max_memory_allocated() - before
    settings = {"model.dtype": "bfloat16", "engine.slots": slots, "engine.context": context, "eval.count": 0}
    estimate = engine_memory(resolved(settings), SMOLLM2).most
    reserved = torch.cuda.memory_reserved() - before
    print(f"{slots} slots: estimated {estimate:,}, measured {measured:,}, reserved {reserved:,}")
    assert 0.6 * estimate < measured < 1.25 * estimate
