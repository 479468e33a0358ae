"""`python benchmarks/learner.py`: cost of off-policy corrections and old-policy choices, as a share of a learner step.

All variants train on the same rows in one process. Every round runs each variant once, in shuffled order, so that noise
hits all variants alike. The report compares medians over rounds, and the share of a step spent on the loss: everything
between the forward and the backward pass.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from outpace.commands.bench_options import run_benchmark, take_options
from outpace.config import Config
from outpace.config.load import make_config, parse_arguments
from outpace.config.validation import resolve
from outpace.types import OBSERVED, GroupRecord, Row

BASE = "no correction"
DEFAULT = "default"

VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {"algorithm.preset": "no_correction"},
    DEFAULT: {},
    "every mask": {"correction.masks": ["token", "sequence", "geometric", "veto", "opsm"]},
    "decoupled ppo, one update": {"algorithm.preset": "decoupled_ppo"},
    "two updates, rollout old policy": {"algorithm.preset": "bypass_ppo", "algorithm.minibatches": 2},
    "two updates, recomputed old policy": {"algorithm.preset": "decoupled_ppo", "algorithm.minibatches": 2},
    "m2po": {"algorithm.preset": "m2po"},
    "KL to a reference": {"kl.coefficient": 0.01},
    "entropy bonus": {"algorithm.entropy_coefficient": 0.001},
    "critic": {"algorithm.preset": "ppo"},
}

LIMIT = 0.03
"""Largest share of a step that the default corrections may cost."""


@dataclass
class Variant:
    """Seconds of whole steps, and of the loss within them."""

    name: str
    steps: list[float] = field(default_factory=list)
    loss_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.steps)

    @property
    def share(self) -> float:
        return statistics.median(loss_s / whole for loss_s, whole in zip(self.loss_seconds, self.steps, strict=True))


def main(words: Sequence[str]) -> int:
    options, settings = take_options(words, {"rounds": 15, "groups": 16, "threads": 1})
    variants = run(parse_arguments(settings), **options)
    print_table(variants)
    extra = extra_cost(variants)
    print(f"default corrections add {extra:.2%} to a step without corrections; the limit is {LIMIT:.0%}")
    return 0 if extra < LIMIT else 1


def extra_cost(variants: dict[str, Variant]) -> float:
    """Return the extra loss time of the default corrections, as a share of a step without corrections.

    Compares loss times, because whole steps vary more between rounds than this difference."""
    base, default = variants[BASE], variants[DEFAULT]
    more = statistics.median(default.loss_seconds) - statistics.median(base.loss_seconds)
    return max(0.0, more / base.median)


def run(settings: dict[str, Any], rounds: int, groups: int, threads: int) -> dict[str, Variant]:
    import torch

    torch.set_num_threads(threads)
    configs = {name: resolve(make_config({**settings, **own})) for name, own in VARIANTS.items()}
    records = make_records(next(iter(configs.values())), groups)
    trained = {name: _TimedLearner(config) for name, config in configs.items()}
    found = {name: Variant(name) for name in VARIANTS}
    for number in range(rounds + 1):
        names = list(VARIANTS)
        random.Random(number).shuffle(names)
        for name in names:
            whole, loss_s = trained[name].step(records)
            if number:  # the first round is warm-up
                found[name].steps.append(whole)
                found[name].loss_seconds.append(loss_s)
    return found


class _TimedLearner:
    """A learner of one variant, with timing."""

    def __init__(self, config: Config) -> None:
        from outpace.learner.batch_learner import BatchLearner
        from outpace.learner.core import LearnerCore
        from outpace.models.loading import load_model

        model = load_model(config.model.path, dtype="float32", device="cpu")
        self._core = LearnerCore(model, config)
        self._batch_learner = None if config.learner.stream else BatchLearner(self._core, config)
        self._loss_s = 0.0
        loss = self._core._loss
        gradient = loss.gradient

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = gradient(*arguments)
            self._loss_s += time.perf_counter() - started
            return result

        loss.gradient = timed  # type: ignore[method-assign,assignment]

    def step(self, records: list[GroupRecord]) -> tuple[float, float]:
        started, self._loss_s = time.perf_counter(), 0.0
        if self._batch_learner is None:
            self._core.accumulate([row for record in records for row in record.rows])
            self._core.step()
        else:
            self._batch_learner.add(records, replayed=False)
            self._batch_learner.train()
        return time.perf_counter() - started, self._loss_s


def make_records(config: Config, groups: int) -> list[GroupRecord]:
    """Make groups shaped like the built-in task: prompts of about 25 tokens, completions of 4 to 12."""
    noise = np.random.default_rng(0)
    records = []
    for group in range(groups):
        prompt = int(noise.integers(20, 30))
        rows = [_row(noise, prompt, episode) for episode in range(config.rollout.group_size)]
        rewards = noise.integers(0, 2, len(rows)).astype(float).tolist()
        records.append(GroupRecord(group, f"task-{group}", 0, 0, rows, rewards, [{}] * len(rows)))
    return records


def _row(noise: np.random.Generator, prompt: int, episode: int) -> Row:
    count = prompt + int(noise.integers(4, 13))
    mask = np.arange(count) >= prompt
    return Row(
        tokens=noise.integers(0, 64, count).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -noise.exponential(1.0, count), 0.0).astype(np.float32),
        versions=np.where(mask, 0, OBSERVED).astype(np.int32),
        advantages=np.where(mask, noise.choice([-0.5, 0.5]), 0.0).astype(np.float32),
        episode=episode,
    )


def print_table(variants: dict[str, Variant]) -> None:
    base = variants[BASE].median
    table = Table("variant", "step", "relative to no correction", "loss", "share of step", box=None)
    for variant in variants.values():
        table.add_row(
            variant.name,
            f"{variant.median * 1000:.1f} ms",
            f"{variant.median / base:.2f}x",
            f"{statistics.median(variant.loss_seconds) * 1000:.2f} ms",
            f"{variant.share:.2%}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    run_benchmark(main)
