"""`outpace bench engine`: the embedded engine compared with transformers' `generate` on the same weights.

Loads: requests of equal length, where only the cost of a decode step counts; long-tailed lengths, where `generate`
keeps decoding finished rows while the engine refills their slots; and groups of eight short attempts, whose prompt the
engine computes once, with a short prompt and with a long one. Both sides sample from the plain softmax with the same
number of threads, run alternately and report medians.

Correctness comes first: greedy output must equal `generate`'s, except where the two best logits are closer than 1e-4,
and sampled logprobs must be within 1e-4 of a teacher-forced forward pass. The command prints every missed target and
then exits with 1.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outpace.commands.bench_options import BenchParser
from outpace.engines.embedded.engine import EmbeddedEngine
from outpace.hardware.cores import available_cores
from outpace.models.loading import load_model
from outpace.runtime.rng import request_seed
from outpace.types import Generation, Ints, Sampling

TIE = 1e-4
BATCH = 64
PROMPT_TOKENS = 16

EQUAL, LONG_TAILED, GROUPS, LONG_PROMPTS = "equal lengths", "long-tailed", "groups", "groups, long prompts"
MAX_LOGPROB_ERROR = 1e-4
MIN_RATIO = {EQUAL: 1.5, LONG_TAILED: 2.5}
"""Required speedup over `generate`, by load. Groups have none."""


@dataclass(frozen=True)
class GenerationLoad:
    """Prompts and the number of tokens to sample for each."""

    name: str
    prompts: list[Ints]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def main(words: Sequence[str]) -> int:
    """`outpace bench engine [--threads N] [--repeats N] [--model PATH]`."""
    parser = BenchParser(prog="outpace bench engine", allow_abbrev=False)
    parser.add_argument("--model", default="starter", help="model to load, as in model.path")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(words)
    result = run(options.model, threads=options.threads, repeats=options.repeats)
    print_table(result)
    missed = missed_targets(result)
    for message in missed:
        print(f"missed: {message}")
    return 1 if missed else 0


def run(
    model: str | None = None, *, threads: int = 2, repeats: int = 3, slots: int = BATCH, seed: int = 0
) -> dict[str, Any]:
    """Run the benchmark and return all results. `model` is a `model.path`; None uses a random 0.9M-parameter Llama."""
    torch.set_num_threads(threads)
    policy = _small_llama(seed) if model is None else load_model(model, device="cpu")
    assert policy.generation_config is not None
    policy.generation_config.eos_token_id = None  # lengths are part of the load: no early stop
    return asyncio.run(_measure(policy, threads=threads, repeats=repeats, slots=slots, seed=seed))


def missed_targets(result: dict[str, Any]) -> list[str]:
    """Return a message per missed target. NaN counts as missed."""
    check = result["correctness"]
    missed = []
    if check["greedy_wrong"] > 0:
        missed.append(f"{check['greedy_wrong']} greedy outputs differ from generate")
    if not check["logprob_error"] <= MAX_LOGPROB_ERROR:
        missed.append(f"logprobs differ by up to {check['logprob_error']:.1e}, more than {MAX_LOGPROB_ERROR:.0e}")
    missed += [
        f"{row['load']}: {row['ratio']:.2f} times as fast as generate, target {MIN_RATIO[row['load']]}"
        for row in result["loads"]
        if row["load"] in MIN_RATIO and not row["ratio"] >= MIN_RATIO[row["load"]]
    ]
    return missed


def print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"engine and generate: {result['parameters'] / 1e6:.2f}M parameters, "
                        f"{result['threads']} threads, medians of {result['repeats']}")  # fmt: skip
    for column in ("load", "requests", "tokens", "engine tok/s", "generate tok/s", "ratio"):
        table.add_column(column, justify="left" if column == "load" else "right")
    for row in result["loads"]:
        table.add_row(
            row["load"], str(row["requests"]), str(row["tokens"]), f"{row['engine_tokens_per_s']:,.0f}",
            f"{row['generate_tokens_per_s']:,.0f}", f"{row['ratio']:.2f}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    check = result["correctness"]
    console.print(
        f"greedy: {check['greedy_equal']} of {check['greedy_requests']} outputs equal, "
        f"{check['greedy_ties']} differ at a tie, {check['greedy_wrong']} wrong; "
        f"logprobs: largest error {check['logprob_error']:.1e}"
    )


async def _measure(policy: PreTrainedModel, *, threads: int, repeats: int, slots: int, seed: int) -> dict[str, Any]:
    engine = EmbeddedEngine(policy, slots=slots, threads=threads)
    try:
        correctness = await _correctness(engine, policy, seed)
        loads = [
            _equal_load(policy, seed),
            _long_tailed_load(policy, seed),
            _groups_load(policy, seed, GROUPS, prompt_tokens=12),  # the shape of the built-in task
            _groups_load(policy, seed, LONG_PROMPTS, prompt_tokens=192),
        ]
        rows = [await _race(engine, policy, load, repeats) for load in loads]
    finally:
        await engine.close()
    return {
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "threads": threads,
        "repeats": repeats,
        "loads": rows,
        "correctness": correctness,
    }


# ------------------------------------------------------------------------------------------------------------- loads


def _small_llama(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    return model


def _prompts(policy: PreTrainedModel, count: int, seed: int, tokens: int = PROMPT_TOKENS) -> list[Ints]:
    random = np.random.default_rng(seed)
    return [random.integers(3, policy.config.vocab_size, tokens).astype(np.int32) for _ in range(count)]


def _equal_load(policy: PreTrainedModel, seed: int) -> GenerationLoad:
    return GenerationLoad(EQUAL, _prompts(policy, BATCH, seed), [64] * BATCH)


def _long_tailed_load(policy: PreTrainedModel, seed: int) -> GenerationLoad:
    """Mostly short, few long: log-normal lengths with median 16, clipped at 256."""
    random = np.random.default_rng(seed + 1)
    lengths = np.clip(random.lognormal(np.log(16), 0.9, 8 * BATCH), 2, 256).astype(int)
    return GenerationLoad(LONG_TAILED, _prompts(policy, len(lengths), seed + 2), lengths.tolist())


def _groups_load(policy: PreTrainedModel, seed: int, name: str, prompt_tokens: int) -> GenerationLoad:
    """64 groups of 8 attempts, answers of 5 to 11 tokens."""
    attempts = 8
    prompts = [prompt for prompt in _prompts(policy, 64, seed + 4, tokens=prompt_tokens) for _ in range(attempts)]
    lengths = np.random.default_rng(seed + 5).integers(5, 12, len(prompts))
    return GenerationLoad(name, prompts, lengths.tolist())


# ------------------------------------------------------------------------------------------------------------- speed


async def _race(engine: EmbeddedEngine, policy: PreTrainedModel, load: GenerationLoad, repeats: int) -> dict[str, Any]:
    engine_s: list[float] = []
    generate_s: list[float] = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        await _through_engine(engine, load, temperature=1.0, key=f"{load.name}-{repeat}")
        between = time.perf_counter()
        await asyncio.to_thread(_through_generate, policy, load)
        if repeat:  # the first round is warm-up
            engine_s.append(between - started)
            generate_s.append(time.perf_counter() - between)
    engine_speed = load.tokens / statistics.median(engine_s)
    generate_speed = load.tokens / statistics.median(generate_s)
    return {
        "load": load.name,
        "requests": len(load.prompts),
        "tokens": load.tokens,
        "engine_tokens_per_s": engine_speed,
        "generate_tokens_per_s": generate_speed,
        "ratio": engine_speed / generate_speed,
    }


async def _through_engine(
    engine: EmbeddedEngine, load: GenerationLoad, *, temperature: float, key: str
) -> list[Generation]:
    return await asyncio.gather(
        *(
            engine.generate(
                f"{key}-{index}",
                prompt,
                Sampling(max_tokens=length, seed=request_seed(0, index, 0, 0), temperature=temperature),
                0,
                None,
            )
            for index, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True))
        )
    )


def _through_generate(policy: PreTrainedModel, load: GenerationLoad) -> None:
    """Run batches in order, each until its longest request is done. Only requested tokens count."""
    for start in range(0, len(load.prompts), BATCH):
        longest = max(load.lengths[start : start + BATCH])
        _generate(policy, load.prompts[start : start + BATCH], longest, do_sample=True)


def _generate(policy: PreTrainedModel, prompts: list[Ints], length: int, *, do_sample: bool) -> torch.Tensor:
    """Call `generate` as a user would for plain sampling."""
    tokens = torch.from_numpy(np.stack(prompts).astype(np.int64))
    options = {"do_sample": True, "top_k": 0, "temperature": 1.0} if do_sample else {"do_sample": False}
    with torch.inference_mode():
        output: torch.Tensor = policy.generate(  # type: ignore[operator]
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=length,
            pad_token_id=0,
            **options,
        )
    return output[:, tokens.shape[1] :]


# ------------------------------------------------------------------------------------------------------- correctness


async def _correctness(engine: EmbeddedEngine, policy: PreTrainedModel, seed: int) -> dict[str, Any]:
    load = GenerationLoad("check", _prompts(policy, BATCH, seed + 3), [48] * BATCH)
    sampled = await _through_engine(engine, load, temperature=1.0, key="sampled")
    greedy = await _through_engine(engine, load, temperature=0.0, key="greedy")
    expected = _generate(policy, load.prompts, 48, do_sample=False).numpy()
    equal = [bool(np.array_equal(mine.tokens, theirs)) for mine, theirs in zip(greedy, expected, strict=True)]
    ties = sum(
        _differs_at_tie(policy, prompt, mine.tokens, theirs)
        for prompt, mine, theirs, same in zip(load.prompts, greedy, expected, equal, strict=True)
        if not same
    )
    return {
        "greedy_requests": len(equal),
        "greedy_equal": sum(equal),
        "greedy_ties": ties,
        "greedy_wrong": len(equal) - sum(equal) - ties,
        "logprob_error": max(
            _logprob_error(policy, prompt, generation) for prompt, generation in zip(load.prompts, sampled, strict=True)
        ),
    }


def _logits(policy: PreTrainedModel, prompt: Ints, output: Ints) -> torch.Tensor:
    """Run a teacher-forced forward pass. Row i holds the logits from which output token i was drawn."""
    tokens = torch.from_numpy(np.concatenate((prompt, output)).astype(np.int64)).unsqueeze(0)
    with torch.inference_mode():
        logits: torch.Tensor = policy(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits


def _differs_at_tie(policy: PreTrainedModel, prompt: Ints, mine: Ints, theirs: Ints) -> bool:
    """Return whether the outputs first differ where the two best logits are within `TIE`."""
    first = int(np.argmax(mine != theirs))
    best = _logits(policy, prompt, mine)[first].topk(2).values
    return bool(best[0] - best[1] < TIE)


def _logprob_error(policy: PreTrainedModel, prompt: Ints, generation: Generation) -> float:
    logprobs = _logits(policy, prompt, generation.tokens).log_softmax(-1)
    tokens = torch.from_numpy(generation.tokens.astype(np.int64)).unsqueeze(1)
    expected = logprobs.gather(1, tokens).squeeze(1)
    return float((expected - torch.from_numpy(generation.logprobs)).abs().max())
