"""Tokens per second of the learner on this machine, and its share of the device's peak.

    python benchmarks/learner_speed.py [--device cuda] [--json FILE]

The model has random weights of a known shape. Rows are ragged, without a common prefix unless the case says so. A step
is forward and backward of all rows and one update; the first steps, in which layers are compiled, are left out.

The bare loop is what plain torch reaches on the same shape: compiled layers in bfloat16, padded rows of equal length,
cross-entropy in slices, no update.

FLOP of a step: 6 x parameters x tokens, plus 6 x layers x hidden size x length^2 for each row (causal attention, half
of all pairs, forward and backward). Recomputed logits and shared prefixes are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.config.load import make_config
from outpace.config.validation import resolve
from outpace.learner.core import LearnerCore
from outpace.types import Row

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 operations per second, by a part of the device's name."""

SHAPES: dict[str, dict[str, int]] = {
    "1M": {"vocab_size": 272, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
           "num_attention_heads": 4, "num_key_value_heads": 4},
    "135M": {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3},
    "0.5B": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5B": {"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2},
    "3B": {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36,
           "num_attention_heads": 16, "num_key_value_heads": 2},
}  # fmt: skip

_GROUPS = {"shape": "135M", "groups": 16, "attempts": 8, "prompt": 256, "answer": (192, 320)}
CASES: dict[str, dict[str, Any]] = {
    "135M, rows of 300 to 600": {"shape": "135M", "groups": 128, "attempts": 1, "prompt": 20, "answer": (280, 580)},
    "1.5B, rows of 1,500 to 2,600": {"shape": "1.5B", "groups": 16, "attempts": 1, "prompt": 9, "answer": (1490, 2590)},
    "135M, groups of 8, prompts of 256": {**_GROUPS},
    "the same, prompts not shared": {**_GROUPS, "shared": False},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens-per-pass", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", help="run the cases whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        if options.only is None or options.only in name:
            results[name] = measure(case, options)
            print(f"{name:36} {_describe(results[name])}", flush=True)
    if options.only is None:
        results["bare loop, 135M, 32 x 512"] = bare_loop(options)
        print(f"{'bare loop, 135M, 32 x 512':36} {_describe(results['bare loop, 135M, 32 x 512'])}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _describe(result: dict[str, Any]) -> str:
    share = f", {100 * result['of_peak']:.1f} % of peak" if result["of_peak"] else ""
    return (
        f"{result['tokens_per_s']:>10,.0f} tok/s{share}, {result['step_s']:.3f} s, "
        f"first step {result['first_s']:.1f} s, {result['memory_gb']:.1f} GB"
    )


def measure(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    model = make_model(case["shape"], options.device)
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    overrides = {"learner.tokens_per_pass": options.tokens_per_pass, "learner.lr": 1e-9, "model.dtype": dtype}
    started = time.perf_counter()
    core = LearnerCore(model, resolve(make_config(overrides)))
    rows = make_rows(case, model.config.vocab_size)
    if not case.get("shared", True):
        core._forward.min_shared = None

    def step() -> None:
        core.accumulate(rows)
        core.step()

    step()
    _wait(options.device)
    first_s = time.perf_counter() - started
    return _result(model, rows, timed(step, options), first_s)


def make_model(shape: str, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=True))


def make_rows(case: dict[str, Any], vocabulary: int) -> list[Row]:
    noise = np.random.default_rng(0)
    rows = []
    for _ in range(case["groups"]):
        prompt = noise.integers(0, vocabulary, case["prompt"])
        for _ in range(case["attempts"]):
            answer = noise.integers(0, vocabulary, int(noise.integers(*case["answer"])))
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            zeros = np.zeros(len(tokens), dtype=np.float32)
            rows.append(Row(tokens, mask, zeros - 10 * mask, np.where(mask, 0, -1).astype(np.int32), zeros + mask))
    return rows


def timed(step: Callable[[], None], options: argparse.Namespace) -> float:
    step()
    seconds = []
    for _ in range(options.repeats):
        _wait(options.device)
        started = time.perf_counter()
        step()
        _wait(options.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _result(model: LlamaForCausalLM, rows: list[Row], step_s: float, first_s: float) -> dict[str, Any]:
    lengths = np.array([len(row.tokens) - 1 for row in rows], dtype=np.float64)
    parameters, config = sum(p.numel() for p in model.parameters()), model.config
    flop = 6 * parameters * lengths.sum() + 6 * config.num_hidden_layers * config.hidden_size * (lengths**2).sum()
    on_gpu = model.device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else ""
    peak = next((rate for part, rate in PEAK_FLOPS.items() if part in name), None)
    return {
        "tokens": int(lengths.sum()),
        "tokens_per_s": lengths.sum() / step_s,
        "step_s": step_s,
        "first_s": first_s,
        "of_peak": flop / step_s / peak if peak else None,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
    }


def bare_loop(options: argparse.Namespace) -> dict[str, Any]:
    model = make_model("135M", options.device).bfloat16()
    case = {"groups": 128, "attempts": 1, "prompt": 1, "answer": (512, 513)}
    rows = make_rows(case, model.config.vocab_size)
    tokens = torch.tensor(np.stack([row.tokens for row in rows]), dtype=torch.long, device=options.device)
    decoder = torch.compile(model.model)

    def step() -> None:
        for part in tokens.split(32):  # type: ignore[no-untyped-call]
            hidden = decoder(part[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
            targets = part[:, 1:].flatten()
            leaf = hidden.detach().requires_grad_()
            for states, wanted in zip(leaf.split(4096), targets.split(4096), strict=True):
                functional.cross_entropy(model.lm_head(states).float(), wanted, reduction="sum").backward()
            hidden.backward(leaf.grad)
        model.zero_grad(set_to_none=True)

    started = time.perf_counter()
    step()
    return _result(model, rows, timed(step, options), time.perf_counter() - started)


if __name__ == "__main__":
    main()
