"""A chat of several turns by a real engine: every logprob is the one of that token after exactly what precedes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.engines.embedded import EmbeddedEngine
from outpace.rollouts.client import PolicyClient


@pytest.fixture
def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.2,  # so that a token in the wrong place is loud
    )
    return LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]


async def test_logprobs_are_those_of_one_forward_over_the_whole_trajectory(
    model: Any, tokenizer: Any, make_client: Any
) -> None:
    engine = EmbeddedEngine(model, tokenizer=tokenizer, slots=2, device="cpu", threads=1)
    client: PolicyClient = make_client(engine, min_version=0, temperature=1.0, max_tokens=12)
    try:
        await client.sample("first")
        await client.sample([{"role": "tool", "content": "second"}, {"role": "user", "content": "third"}])
        client.observe("so")
        await client.sample()
    finally:
        await engine.close()
    built = client.trajectory()
    with torch.no_grad():
        logits = model(torch.from_numpy(built.tokens).long()[None], use_cache=False).logits[0]
    expected = logits[:-1].log_softmax(-1).gather(1, torch.from_numpy(built.tokens[1:]).long()[:, None])[:, 0].numpy()
    sampled = built.mask[1:]
    assert sampled.sum() >= 3
    np.testing.assert_allclose(built.logprobs[1:][sampled], expected[sampled], atol=1e-4)
