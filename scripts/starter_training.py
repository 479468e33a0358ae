"""Supervised training of the built-in models: one small architecture, one loop, one way to store it.

Invariant: the same batches, seed, thread count and torch build give the same weights, on a CPU.
"""

import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from starter_files import make_portable
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PEAK_LR = 2e-3
WARMUP = 50
IGNORED = -100

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids [B, T] and labels [B, T], IGNORED where nothing is to be learned."""


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine that ends at a twentieth of the peak."""
    return PEAK_LR * min(1.0, step / WARMUP) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))


def train(model: LlamaForCausalLM, batches: Iterator[Batch], steps: int) -> None:
    """One batch per step, on the device where the model is."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step, (tokens_B_T, labels_B_T) in enumerate(islice(batches, steps), start=1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        logits_B_T_V = model(input_ids=tokens_B_T.to(model.device), use_cache=False).logits
        targets = labels_B_T[:, 1:].flatten().to(model.device)
        loss = cross_entropy(logits_B_T_V[:, :-1].flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            spent = time.monotonic() - started
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {spent:.0f} s", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> LlamaForCausalLM:
    """Store in bfloat16 and return what a run will load: the rounded weights, in float32."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(out)  # type: ignore[arg-type]
    tokenizer.save_pretrained(out)
    make_portable(out)
    return LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
