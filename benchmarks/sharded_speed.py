"""A sharded learner of one process on one GPU: what FSDP2 costs, and what `learner.offload` saves.

    python benchmarks/sharded_speed.py [--only CASE] [--json FILE]

    one rank    1.5B shape: FSDP2 with one rank and without `learner.reshard`, against the plain learner. Both are in
                one process, and their steps alternate.
    offload     3B shape with `learner.offload` and gradient checkpointing, in at most --cap-gb of GPU memory

Models have random weights. Rows have 1,500 to 2,600 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from learner_speed import CASES, SHAPES, make_model, make_rows

from outpace.config.load import make_config
from outpace.config.validation import resolve
from outpace.learner.core import LearnerCore
from outpace.learner.ranks import Ranks, RankSettings
from outpace.types import Row

GB = 1e9
LONG_ROWS = CASES["1.5B, rows of 1,500 to 2,600"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", choices=["one rank", "offload"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cap-gb", type=float, default=40.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", help="another one of benchmarks/learner_speed.py")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ranks = Ranks(RankSettings(0, 1, Path(directory) / "rendezvous", 60.0), options.device)
        results: dict[str, Any] = {}
        for name, measure in (("one rank", one_rank), ("offload", offload)):
            if options.only in (None, name):
                results[name] = measure(ranks, options)
                print(name, json.dumps(results[name]), flush=True)
        ranks.close()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def one_rank(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    shape = options.shape or "1.5B"
    rows = make_rows(LONG_ROWS, SHAPES[shape]["vocab_size"])
    given = {"learner.tokens_per_pass": 65_536, "learner.reshard": False}
    learners = {"plain": learner(shape, given, options), "sharded": learner(shape, given, options, ranks)}
    for core in learners.values():
        train(core, rows)
        train(core, rows)
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for _ in range(options.steps):
        for name, core in learners.items():
            seconds[name].append(timed(lambda core=core: train(core, rows), options.device))  # type: ignore[misc]
    ratios = [sharded / plain for plain, sharded in zip(*seconds.values(), strict=True)]
    tokens = sum(len(row.tokens) for row in rows)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "tokens": tokens,
        "step_s": medians,
        "tokens_per_s": {name: tokens / each for name, each in medians.items()},
        "sharded / plain": statistics.median(ratios),
        "of each pair": ratios,
    }


def offload(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    shape = options.shape or "3B"
    rows = make_rows(LONG_ROWS, SHAPES[shape]["vocab_size"])
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(
            options.cap_gb * GB / torch.cuda.get_device_properties(0).total_memory
        )
    given = {"learner.tokens_per_pass": 32_768, "learner.offload": True, "learner.gradient_checkpointing": True}
    core = learner(shape, given, options, ranks)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
    seconds = [timed(lambda: train(core, rows), options.device) for _ in range(options.steps)]
    tokens, step_s = sum(len(row.tokens) for row in rows), statistics.median(seconds[1:])
    return {
        "parameters": sum(each.numel() for each in core.parameters.values()),
        "tokens": tokens,
        "first_s": seconds[0],
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "allocated_gb": torch.cuda.max_memory_allocated() / GB if on_gpu else 0.0,
        "reserved_gb": torch.cuda.max_memory_reserved() / GB if on_gpu else 0.0,
    }


def learner(
    shape: str,
    given: dict[str, Any],
    options: argparse.Namespace,
    ranks: Ranks | None = None,
) -> LearnerCore:
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    config = resolve(make_config({"learner.lr": 1e-9, "model.dtype": dtype, **given}))
    model = make_model(shape, options.device)
    return LearnerCore(model.cpu() if config.learner.offload else model, config, ranks=ranks)


def train(core: LearnerCore, rows: list[Row]) -> None:
    core.accumulate(rows)
    core.step()


def timed(function: Callable[[], None], device: str) -> float:
    wait(device)
    started = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - started


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
