"""Small models and rows for the learner's tests, also for processes that have no fixtures."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.types import OBSERVED, GroupRecord, Row

VOCABULARY = 48

SHARED = (0, 10, 19)
"""Of three rows, the second and the third begin with so many tokens of the first, some of them trained."""


def make_llama(seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,  # large enough that a leak between documents is clearly visible
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides)))


def make_row(length: int, prompt: int, seed: int = 0, version: int = 0, advantage: float = 1.0) -> Row:
    noise = np.random.default_rng([seed, length, prompt])
    mask = np.arange(length) >= prompt
    return Row(
        tokens=noise.integers(0, VOCABULARY, length).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, noise.normal(-3.0, 0.5, length), 0.0).astype(np.float32),
        versions=np.where(mask, version, OBSERVED).astype(np.int32),
        advantages=np.where(mask, advantage * noise.normal(), 0.0).astype(np.float32),
    )


def make_rows(count: int, seed: int = 0, version: int = 0) -> list[Row]:
    noise = np.random.default_rng(seed)
    lengths = noise.integers(5, 40, count)
    rows = [make_row(int(n), 3, seed=seed * 1000 + i, version=version) for i, n in enumerate(lengths)]
    for index, row in enumerate(rows):
        shared = rows[index - index % 3].tokens[: SHARED[index % 3]]
        row.tokens[: len(shared)] = shared[: len(row.tokens)]
    return rows


def make_records(groups: int = 6, rows: int = 3) -> list[GroupRecord]:
    """Return groups of rows with random rewards."""
    noise = np.random.default_rng(3)
    return [
        GroupRecord(
            group,
            f"task-{group}",
            0,
            0,
            [
                Row(row.tokens, row.mask, row.logprobs, row.versions, row.advantages, episode=episode)
                for episode, row in enumerate(make_rows(rows, seed=group))
            ],
            noise.random(rows).tolist(),
        )
        for group in range(groups)
    ]
