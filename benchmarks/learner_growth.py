"""`python benchmarks/learner_growth.py`: how the cost of a learner step grows with rows, groups and models.

Three sweeps with random weights and tokens, half of each row a prompt and half an answer:

    rows     128 to 8,192 tokens per row, no shared prompts, about `TOKENS` tokens per step, for every model
    groups   1 to 64 rows that share their prompt, 64 rows of 1,024 tokens (128 on a CPU)
    models   are those of the first sweep: Llama shapes from 1M to 1.5B parameters

Reported are seconds per step (forward, backward, optimizer; the fastest of `--rounds`), tokens per second, peak memory
and, on a GPU, the share of its bfloat16 peak. FLOP of a step are those that it needs at least, with the prompt of a
group computed once: 6 x parameters x tokens, plus attention, 12 x layers x width x pairs of tokens (a token and one
that it attends to). Parameters include the output head and, where it is not tied to it, not the embedding.

On a CPU, a case that is expected to take more than a minute is left out.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.commands.bench_options import BenchParser, positive, run_benchmark
from outpace.config.load import make_config, parse_arguments
from outpace.config.validation import resolve
from outpace.learner.core import LearnerCore
from outpace.models.loading import set_up_device
from outpace.types import OBSERVED, Row

TOKENS = {"cpu": 4_096, "cuda": 65_536}
"""Tokens per step in the first sweep. A row is never split, so the longest rows may exceed it."""

ROW_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
GROUP_SIZES = (1, 2, 4, 8, 16, 32, 64)
GROUP_ROWS = 64
GROUP_ROW_TOKENS = {"cpu": 128, "cuda": 1024}

CPU_LIMIT_S = 60.0
WARM_UP = 1

SHAPES: dict[str, dict[str, Any]] = {
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 4, "vocab_size": 272},
    "10M": {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 6, "num_attention_heads": 5,
            "num_key_value_heads": 5, "vocab_size": 4_096},
    "135M": {"hidden_size": 576, "intermediate_size": 1_536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49_152},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4_864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151_936},
    "1.5B": {"hidden_size": 1_536, "intermediate_size": 8_960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151_936},
}  # fmt: skip
"""Llama shapes with tied embeddings; those from 135M on are those of SmolLM2 and Qwen2.5."""

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 peak, by a part of the device's name."""


@dataclass(frozen=True)
class Case:
    """One step: `rows` rows of `row_tokens` tokens, in groups of `group_size` that share the first half."""

    sweep: Literal["rows", "groups"]
    shape: str
    rows: int
    row_tokens: int
    group_size: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens

    def flop(self, parameters: int) -> float:
        shape, groups = SHAPES[self.shape], self.rows // self.group_size
        prompt = self.row_tokens // 2
        answer = self.row_tokens - prompt
        computed = groups * (prompt + self.group_size * answer)
        pairs = groups * (prompt**2 / 2 + self.group_size * (answer * prompt + answer**2 / 2))
        return 6.0 * parameters * computed + 12.0 * shape["num_hidden_layers"] * shape["hidden_size"] * pairs


@dataclass(frozen=True)
class Growth:
    """A measured case."""

    case: Case
    parameters: int
    seconds: float
    peak_bytes: int
    peak_share: float | None  # of the device's peak; None: unknown

    @property
    def tokens_per_s(self) -> float:
        return self.case.tokens / self.seconds


def main(words: Sequence[str]) -> int:
    parser = BenchParser(prog="learner_growth.py", allow_abbrev=False,
                         epilog="Also takes settings of outpace, as --section.key value.")  # fmt: skip
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of these models")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options, settings = parser.parse_known_args(words)
    shapes = options.shapes.split(",")
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        parser.error(f"--shapes: {unknown[0]} is not one of {', '.join(SHAPES)}")
    found = list(measure(shapes, options.rounds, parse_arguments(settings), Console(stderr=True)))
    print_tables(found)
    if options.json:
        options.json.write_text(json.dumps([_as_json(each) for each in found], indent=1) + "\n")
    return 0


def cases(shapes: Sequence[str], device: str) -> Iterator[Case]:
    """Yield all cases, those of one model together. Groups are swept with the largest model up to 135M."""
    small = [shape for shape in shapes if shape in ("1M", "10M", "135M")]
    grouped = (small[-1] if device == "cuda" else small[0]) if small else shapes[0]
    for shape in shapes:
        for length in ROW_TOKENS:
            yield Case("rows", shape, max(1, TOKENS[device] // length), length)
        if shape == grouped:
            for size in GROUP_SIZES:
                yield Case("groups", shape, GROUP_ROWS, GROUP_ROW_TOKENS[device], size)


def measure(shapes: Sequence[str], rounds: int, settings: dict[str, Any], console: Console) -> Iterator[Growth]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"model.dtype": "bfloat16"} if device == "cuda" else {}
    config = resolve(make_config({"rollout.max_tokens": max(ROW_TOKENS), **dtype, **settings}))
    set_up_device(device)
    speed, name, core = 0.0, "", None
    for case in cases(shapes, device):
        parameters = parameter_count(case.shape)
        expected_s = case.flop(parameters) * (rounds + WARM_UP) / speed if speed else 0.0
        if device == "cpu" and expected_s > CPU_LIMIT_S:
            console.print(f"{_label(case)}: left out, about {expected_s:,.0f} s")
            continue
        if case.shape != name:
            name, core = case.shape, None
            _free(device)
            torch.compiler.reset()  # models share the code of their layers, and torch limits its compiled versions
            core = LearnerCore(_model(case.shape, device), config)
        assert core is not None
        try:
            seconds, peak = _step(core, case, rounds, device)
        except torch.OutOfMemoryError:
            console.print(f"{_label(case)}: out of memory")
            core.drop_gradients()
            _free(device)
            continue
        speed = max(speed, case.flop(parameters) / seconds)
        limit = _device_peak(device)
        growth = Growth(case, parameters, seconds, peak, case.flop(parameters) / seconds / limit if limit else None)
        console.print(f"{_label(case)}: {seconds:.3f} s, {growth.tokens_per_s:,.0f} tok/s")
        yield growth


def parameter_count(shape: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _llama(shape).parameters())


def _llama(shape: str) -> LlamaForCausalLM:
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=max(ROW_TOKENS), tie_word_embeddings=True)
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def _model(shape: str, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        return _llama(shape)


def _step(core: LearnerCore, case: Case, rounds: int, device: str) -> tuple[float, int]:
    """Return the seconds of the fastest round and the peak memory in bytes."""
    rows, best = make_rows(case), float("inf")
    _reset_peak(device)
    for number in range(rounds + WARM_UP):
        started = time.perf_counter()
        core.accumulate(rows)
        core.step()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP:
            best = min(best, time.perf_counter() - started)
    return best, _peak_bytes(device)


def make_rows(case: Case) -> list[Row]:
    noise, prompt = np.random.default_rng(0), case.row_tokens // 2
    vocabulary, answer = SHAPES[case.shape]["vocab_size"], case.row_tokens - case.row_tokens // 2
    mask = np.arange(case.row_tokens) >= prompt
    rows = []
    for _ in range(case.rows // case.group_size):
        shared = noise.integers(0, vocabulary, prompt)
        for episode in range(case.group_size):
            tokens = np.concatenate((shared, noise.integers(0, vocabulary, answer))).astype(np.int32)
            rows.append(
                Row(
                    tokens=tokens,
                    mask=mask,
                    logprobs=np.where(mask, -noise.exponential(1.0, case.row_tokens), 0.0).astype(np.float32),
                    versions=np.where(mask, 0, OBSERVED).astype(np.int32),
                    advantages=np.where(mask, noise.choice([-0.5, 0.5]), 0.0).astype(np.float32),
                    episode=episode,
                )
            )
    return rows


# ------------------------------------------------------------------------------------------------------------- device


def _device_peak(device: str) -> float | None:
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def _peak_bytes(device: str) -> int:
    """Return the peak of allocated GPU memory, or of this process's resident memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


# ------------------------------------------------------------------------------------------------------------- report


def _label(case: Case) -> str:
    return f"{case.shape}, {case.rows} rows of {case.row_tokens}, groups of {case.group_size}"


def _as_json(growth: Growth) -> dict[str, Any]:
    figures = {name: value for name, value in asdict(growth).items() if name != "case"}
    return {**asdict(growth.case), **figures, "tokens_per_s": growth.tokens_per_s}


def print_tables(found: Sequence[Growth]) -> None:
    console = Console(width=120)
    for sweep, title in (("rows", "rows of growing length"), ("groups", "groups that share a prompt")):
        table = Table(title=title, title_justify="left")
        for column in ("model", "rows", "tokens per row", "group", "s per step", "tok/s", "peak GB", "of peak FLOP/s"):
            table.add_column(column, justify="left" if column == "model" else "right")
        for each in found:
            if (case := each.case).sweep == sweep:
                share = "" if each.peak_share is None else f"{each.peak_share:.1%}"
                table.add_row(
                    case.shape, str(case.rows), f"{case.row_tokens:,}", str(case.group_size), f"{each.seconds:.3f}",
                    f"{each.tokens_per_s:,.0f}", f"{each.peak_bytes / 1e9:.2f}", share,
                )  # fmt: skip
        console.print(table)


if __name__ == "__main__":
    run_benchmark(main)
