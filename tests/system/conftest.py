"""A tiny policy, toy rewards and tasks: everything is real except for the size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

REWARD = '''
def vowels(prompts, completions, **columns):
    """The share of vowels and digits, which differs between the samples of any policy."""
    return [sum(letter in "aeiou0123456789" for letter in text.lower()) / (1 + len(text)) for text in completions]


def broken(prompts, completions, **columns):
    raise RuntimeError("no reward today")


def odd_only(prompts, completions, **columns):
    """No attempt at a task with an even number is ever solved."""
    odd = [int(prompt.rstrip().split()[-1]) % 2 for prompt in prompts]
    return [number * (0.1 + share) for number, share in zip(odd, vowels(prompts, completions))]


def always(prompts, completions, **columns):
    return [1.0] * len(completions)
'''


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starter's architecture and tokenizer with a tenth of its size and random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from outpace.models.loading import load_tokenizer

    directory = tmp_path_factory.mktemp("toy")
    tokenizer = load_tokenizer("starter")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=(len(tokenizer) + 15) // 16 * 16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "toy_rewards.py"
    file.write_text(REWARD)
    return file


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"id": f"t{number}", "prompt": f"say {number}"}) + "\n" for number in range(24)))
    return file


@pytest.fixture
def settings(toy_model: Path, rewards: Path, tasks: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings of a run that takes seconds."""
    return {
        "model.path": str(toy_model),
        "tasks.path": str(tasks),
        "rewards.functions": [f"{rewards}:vowels"],
        "rollout.group_size": 4,
        "rollout.max_tokens": 8,
        "pacing.groups_per_step": 4,
        "pacing.chunk_groups": 2,
        "engine.slots": 16,
        "learner.lr": 1e-3,
        "filter.uniform": False,
        "eval.count": 0,
        "run.dir": str(tmp_path / "run"),
        "run.steps": 3,
        "run.stall_s": 60.0,
    }
