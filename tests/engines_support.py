"""Tiny random models of several model families, and a small embedded engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outpace.engines.embedded.engine import EmbeddedEngine

VOCABULARY = 61
CONTEXT = 96

_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # far from uniform, so that a wrong logit is visible
    "eos_token_id": None,
    "bos_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.3,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _gpt_neox() -> PreTrainedModel:
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, initializer_range=0.3, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_LLAMA_LIKE, tie_word_embeddings=True)),
    "llama-untied-biased-llama3-rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **_LLAMA_LIKE, tie_word_embeddings=False, attention_bias=True, head_dim=16, rope_parameters=_LLAMA3_ROPE
        )
    ),
    "llama-mlp-bias": lambda: LlamaForCausalLM(LlamaConfig(**_LLAMA_LIKE, mlp_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_LLAMA_LIKE, sliding_window=None)),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**_LLAMA_LIKE, sliding_window=7)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_LLAMA_LIKE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_LLAMA_LIKE, head_dim=16)),
    "gemma2-sliding": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_LLAMA_LIKE, head_dim=8, query_pre_attn_scalar=8, sliding_window=7, attn_implementation="eager")
    ),
    "gpt2": _gpt2,
    "gpt-neox": _gpt_neox,
}


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model with its biases and norms moved off their initial zeros and ones."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@asynccontextmanager
async def engine_of(model: PreTrainedModel, **options: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(model, **{"slots": 4, "threads": 1, **options})
    try:
        yield engine
    finally:
        await engine.close()
