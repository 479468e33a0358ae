"""`python benchmarks/balance.py [--measure]`: how evenly the rows of a batch are shared among the ranks of a learner.

Groups of 8 rows share a prompt of 40 to 400 tokens. Answers are long-tailed: log-normal with a median of 600 tokens, at
most 20,000, for two widths of the tail and `--seeds` seeds. Compared are

    balanced            `outpace.learner.balance.share_rows`
    groups in turn      group i is on rank i modulo ranks
    rows in turn        row i is on rank i modulo ranks, so ranks compute the same prompts

by estimated work: the busiest rank against the mean of the balanced shares, which is how much longer than with a
perfect balance a step takes, and the work of all ranks against that of one rank with all rows. "in lockstep" is the
first figure if the ranks wait for each other after every pass, as they do when the layers are sharded: the work of the
busiest rank of every pass, with the passes of each rank in order of their rows, and with the longest pass first.

`--measure` trains on 4 shares of a smaller batch with a random Llama of 1M parameters, one after the other in this
process on one thread, and reports processor seconds per rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.commands.bench_options import BenchParser, positive, run_benchmark
from outpace.config.load import make_config
from outpace.config.validation import resolve
from outpace.learner.balance import HIDDEN_SIZE, estimated_work, share_rows
from outpace.learner.core import LearnerCore
from outpace.learner.packing import PackedBatch, pack
from outpace.types import OBSERVED, Row

GROUP = 8
TOKENS_PER_PASS = 16_384
CLUSTERS = ((8, 64), (64, 512))
"""Ranks, and groups per batch."""
SIGMAS = (0.9, 1.2)

MEASURED_RANKS = 4
MEASURED_GROUPS = 32
MEASURED_SHAPE = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 272, "max_position_embeddings": 4_096,
}  # fmt: skip

Shares = list[list[int]]
Sharing = Callable[[Sequence[Row], int, int, int], Shares]
"""Rows, ranks, tokens per pass, and the width of the model."""


def groups_in_turn(rows: Sequence[Row], ranks: int, tokens_per_pass: int, hidden_size: int) -> Shares:
    return [[index for index in range(len(rows)) if index // GROUP % ranks == rank] for rank in range(ranks)]


def rows_in_turn(rows: Sequence[Row], ranks: int, tokens_per_pass: int, hidden_size: int) -> Shares:
    return [list(range(rank, len(rows), ranks)) for rank in range(ranks)]


SHARINGS: dict[str, Sharing] = {
    "balanced": share_rows,
    "groups in turn": groups_in_turn,
    "rows in turn": rows_in_turn,
}


def main(words: Sequence[str]) -> int:
    parser = BenchParser(prog="balance.py", allow_abbrev=False)
    parser.add_argument("--seeds", type=positive, default=5)
    parser.add_argument("--measure", action="store_true", help="also measure a forward and backward of 4 shares")
    options = parser.parse_args(words)
    console = Console(width=120)
    console.print(estimates(options.seeds))
    if options.measure:
        console.print(measurements())
    return 0


def make_rows(
    groups: int, sigma: float, seed: int, median: float = 600, longest: int = 20_000, vocabulary: int = 256
) -> list[Row]:
    noise, rows = np.random.default_rng(seed), []
    for _ in range(groups):
        prompt = int(noise.integers(40, 400) * median / 600) + 1
        shared = noise.integers(0, vocabulary, prompt)
        for answer in np.minimum(noise.lognormal(np.log(median), sigma, GROUP), longest).astype(int) + 1:
            mask = np.arange(prompt + answer) >= prompt
            rows.append(
                Row(
                    tokens=np.concatenate([shared, noise.integers(0, vocabulary, answer)]).astype(np.int32),
                    mask=mask,
                    logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                    versions=np.where(mask, 0, OBSERVED).astype(np.int32),
                    advantages=np.where(mask, noise.choice([-0.5, 0.5]), 0.0).astype(np.float32),
                )
            )
    return rows


def share_of(rows: Sequence[Row], share: Sequence[int]) -> list[Row]:
    return [rows[index] for index in share]


# ---------------------------------------------------------------------------------------------------------- estimates


def estimates(seeds: int) -> Table:
    columns = ("ranks", "rows", "sigma", "rows are", "busiest, mean of seeds", "worst seed", "all ranks",
               "in lockstep", "longest pass first")  # fmt: skip
    table = _table("work relative to a perfect balance, estimated", columns)
    for ranks, groups in CLUSTERS:
        for sigma in SIGMAS:
            batches = [make_rows(groups, sigma, seed) for seed in range(seeds)]
            for name, sharing in SHARINGS.items():
                figures = np.array([compare(rows, ranks, sharing) for rows in batches])
                busiest, total, by_row, by_length = figures.mean(axis=0)
                table.add_row(
                    str(ranks), str(groups * GROUP), str(sigma), name, f"{busiest:.2f}", f"{figures[:, 0].max():.2f}",
                    f"{total:.2f}", f"{by_row:.2f}", f"{by_length:.2f}",
                )  # fmt: skip
    return table


def compare(rows: Sequence[Row], ranks: int, sharing: Sharing) -> tuple[float, float, float, float]:
    """Return the work of the busiest rank, of all ranks, and of the busiest rank of every pass in both orders."""
    ideal = estimated_work(rows, TOKENS_PER_PASS)
    shares = [share_of(rows, share) for share in sharing(rows, ranks, TOKENS_PER_PASS, HIDDEN_SIZE)]
    works = [estimated_work(share, TOKENS_PER_PASS) for share in shares]
    passes = [[pass_work(packed) for packed in pack(share, TOKENS_PER_PASS)] for share in shares]
    by_row, by_length = lockstep(passes), lockstep([sorted(each, reverse=True) for each in passes])
    return max(works) * ranks / ideal, sum(works) / ideal, by_row * ranks / ideal, by_length * ranks / ideal


def pass_work(packed: PackedBatch) -> float:
    """Return the work of a pass as `estimated_work` counts it."""
    own, context = np.diff(packed.cu_seqlens_S1), np.diff(packed.cu_context_S1)
    pairs = own * (context - own) + own * (own + 1) / 2
    return float(own.sum() + pairs.sum() / (6 * HIDDEN_SIZE))


def lockstep(passes: Sequence[Sequence[float]]) -> float:
    return sum(max(works) for works in zip_longest(*passes, fillvalue=0.0))


# -------------------------------------------------------------------------------------------------------- measurements


def measurements() -> Table:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(**MEASURED_SHAPE, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    core = LearnerCore(model, resolve(make_config({"rollout.max_tokens": 2_048})))
    rows = make_rows(MEASURED_GROUPS, SIGMAS[1], seed=0, median=60, longest=2_000)
    tokens_per_pass = core.config.learner.resolved_tokens_per_pass
    core.accumulate(rows[:GROUP])  # warm up
    table = _table(
        "processor seconds of a forward and backward", ("rows are", *map(str, range(MEASURED_RANKS)), "busiest / mean")
    )
    for name, sharing in SHARINGS.items():
        shares = sharing(rows, MEASURED_RANKS, tokens_per_pass, MEASURED_SHAPE["hidden_size"])
        seconds = [_measure(core, share_of(rows, share)) for share in shares]
        mean = sum(seconds) / len(seconds)
        table.add_row(name, *(f"{each:.2f}" for each in seconds), f"{max(seconds) / mean:.2f}")
    return table


def _measure(core: LearnerCore, rows: Sequence[Row], rounds: int = 3) -> float:
    """Return the processor seconds of the fastest round. They do not include waiting for other programs."""
    return min(_rounds(core, rows, rounds))


def _rounds(core: LearnerCore, rows: Sequence[Row], rounds: int) -> Iterator[float]:
    for _ in range(rounds):
        started = time.process_time()
        core.accumulate(rows)
        yield time.process_time() - started
        core.drop_gradients()


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "rows are" else "right")
    return table


if __name__ == "__main__":
    run_benchmark(main)
