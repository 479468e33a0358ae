"""A tiny model, one-line tasks, and the reward functions and environment for them.

Runs refer to this code as `…/toy.py:share`, so it runs where code of a user runs: in graders and environments.
Some tasks fail by design, so that every drill includes every outcome of a visit: one in six is filtered, one in eight
fails in its reward, one in eleven has a prompt longer than the context.
"""

from __future__ import annotations

import io
import json
import os
import random
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

WANTED = frozenset("0123456789abcdefghijklmnopqrstuvwxyz")
CONTEXT = 64
TOO_LONG = "x" * CONTEXT
HANG_S = 30.0
"""Longer than any timeout that a drill sets."""

FAULTS_EVERY = "DRILL_FAULTS_EVERY"
"""Environment variable: one in this many calls of user code fails."""
FAULTS_SEED = "DRILL_FAULTS_SEED"


# ------------------------------------------------------------------------------------------------------ model and tasks


def write_model(directory: Path) -> Path:
    """Write a model with architecture and tokenizer of the starter model, a fraction of its size and random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from outpace.models.loading import load_tokenizer

    tokenizer = load_tokenizer("starter")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=(len(tokenizer) + 15) // 16 * 16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with redirect_stderr(io.StringIO()):  # progress bars
        LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_tasks(file: Path, count: int, with_failures: bool = True) -> Path:
    with file.open("w") as lines:
        for number in range(count):
            manner = manner_of(number) if with_failures else "plain"
            prompt = TOO_LONG if manner == "long" else f"say {number}"
            lines.write(json.dumps({"id": f"t{number}", "prompt": prompt, "manner": manner}) + "\n")
    return file


def manner_of(number: int) -> str:
    if number % 6 == 4:
        return "alike"
    if number % 8 == 3:
        return "raises"
    return "long" if number % 11 == 7 else "plain"


# -------------------------------------------------------------------------------------------------------------- rewards


def share(prompts: list[str], completions: list[str], manner: list[str], **columns: Any) -> list[float]:
    """Return the share of wanted characters if the task is a plain one."""
    if manner[0] == "raises":
        raise RuntimeError("this task has no answer")
    if manner[0] == "alike":
        return [0.5] * len(completions)
    return [share_of(text) for text in completions]


def share_of(text: str) -> float:
    return sum(letter in WANTED for letter in text) / max(1, len(text))


def faulty_share(prompts: list[Any], completions: list[list[dict[str, str]]], **columns: Any) -> Any:
    """`share_of`, with occasional faults of every kind that a reward function can have."""
    answers = [messages[-1]["content"] if messages else "" for messages in completions]
    rewards = [share_of(text) for text in answers]
    match pick_fault(6, str(prompts[0]), *answers):
        case 0:
            raise RuntimeError("this reward has a bad day")
        case 1:
            return [float("nan")] * len(rewards)
        case 2:
            return [None] * len(rewards)
        case 3:
            return rewards[1:]
        case 4:
            os._exit(3)
        case 5:
            time.sleep(HANG_S)
    return rewards


class FaultyEnvironment:
    """An environment that only exists to fail."""

    def reset(self, id: str = "", **columns: Any) -> None:
        match pick_fault(3, id, str(time.time_ns())):
            case 0:
                raise RuntimeError("this room is closed")
            case 1:
                os._exit(3)
            case 2:
                time.sleep(HANG_S)


def pick_fault(kinds: int, *keys: str) -> int | None:
    """Return which of `kinds` faults this call has; None (nearly always) for no fault."""
    every = int(os.environ.get(FAULTS_EVERY, "0"))
    draw = random.Random("/".join([os.environ.get(FAULTS_SEED, ""), *keys]))
    return draw.randrange(kinds) if every and draw.randrange(every) == 0 else None
