"""`python benchmarks/publish.py`: how long publishing blocks the learner, relative to one in-memory copy.

Uses the real learner with a randomly initialized policy of SmolLM2-135M's shape. Every round runs on the learner's
compute thread: copy the tensors once into memory that is already mapped, change some of them, publish. Both sides are
thus measured in one process, with one thread count and at the same time; a busy machine slows both. Publishes into a
buffer that was never used before, the first two or three of a run, are reported separately.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from outpace.checkpoint.journal import read_record
from outpace.commands.bench_options import run_benchmark, take_options
from outpace.config import Config
from outpace.config.load import make_config, parse_arguments
from outpace.config.validation import resolve
from outpace.errors import BadInput
from outpace.hardware.cores import learner_threads
from outpace.runtime.cleanup import RuntimeDirectory, temporary_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outpace.learner.core import LearnerCore
    from outpace.learner.learner import LearnerHost
    from outpace.learner.torch_backend import TorchBackend

LIMIT = 1.5
"""Longest time that a publish may block the learner, in copies of the weights."""

SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""Shape of SmolLM2-135M, which has 30 such layers."""

CHANGED = 50
"""A step changes one weight in this many, as in reinforcement learning with bfloat16 weights."""

WARM_UP = 1  # rounds

PAUSE_S = 0.5
"""Pause between rounds in place of a training step, during which background work can finish."""

CASES: dict[str, dict[str, Any]] = {"whole": {"weights.delta": False}, "with deltas": {"weights.delta": True}}


@dataclass(frozen=True)
class Round:
    """Times in seconds. `held_s` is spent on the compute thread, `sealed_s` afterwards on another thread."""

    copy_s: float
    held_s: float
    sealed_s: float
    fresh: bool  # published into a buffer that was never used before

    @property
    def ratio(self) -> float:
        return self.held_s / self.copy_s


@dataclass(frozen=True)
class Case:
    parameters: int
    nbytes: int  # of one snapshot
    threads: int
    delta_nbytes: int  # of the last delta; 0 without deltas
    rounds: list[Round] = field(repr=False)

    @property
    def steady(self) -> list[Round]:
        return [each for each in self.rounds if not each.fresh]

    @property
    def first(self) -> list[Round]:
        return [each for each in self.rounds if each.fresh]

    @property
    def ratio(self) -> float:
        return statistics.median(each.ratio for each in self.steady)

    def summary(self) -> dict[str, Any]:
        medians = {name: _median(self.steady, name) for name in ("copy_s", "held_s", "sealed_s")}
        facts = {name: value for name, value in asdict(self).items() if name != "rounds"}
        first = {"first_held_s": _median(self.first, "held_s"), "first_ratio": _median(self.first, "ratio")}
        return facts | {"rounds": len(self.steady)} | medians | {"ratio": self.ratio} | first


def _median(rounds: Sequence[Round], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in rounds))


HELP = """how long publishing blocks the learner, compared with one in-memory copy of the weights
  --parameters N   model size in millions (at least 32; 135M means the same as 135)
  --rounds N       publishes to measure, once with whole weights and once with deltas; each takes about a second
"""


def main(words: Sequence[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(HELP)
    numbers = [re.sub(r"(?<=\d)M$", "", word) for word in words]
    options, settings = take_options(numbers, {"parameters": 135, "rounds": 15})
    _layers(options["parameters"])  # rejects a bad size before anything is loaded
    cases = run(parse_arguments(settings), **options)
    print_table(cases)
    print(json.dumps({name: case.summary() for name, case in cases.items()}))
    missed = missed_targets(cases)
    for message in missed:
        print(f"missed: {message}")
    return 1 if missed else 0


def missed_targets(cases: dict[str, Case]) -> list[str]:
    return [
        f"publishing ({name}) blocks the learner for {case.ratio:.2f} copies of its weights, the limit is {LIMIT}"
        for name, case in cases.items()
        if not case.ratio <= LIMIT
    ]


def run(settings: dict[str, Any], parameters: int, rounds: int) -> dict[str, Case]:
    """Run all cases. `parameters` is in millions."""
    return {
        name: asyncio.run(_measure(resolve(make_config({**settings, **own})), parameters, rounds))
        for name, own in CASES.items()
    }


async def _measure(config: Config, parameters: int, rounds: int) -> Case:
    runtime_dir = await asyncio.to_thread(RuntimeDirectory)
    try:
        with temporary_directory("publish") as journal:
            learner = await asyncio.to_thread(_learner, config, parameters, runtime_dir.path, journal)
            try:
                return await _rounds(learner, config, rounds)
            finally:
                await learner.close()
    finally:
        await asyncio.to_thread(runtime_dir.remove)


def _learner(config: Config, parameters: int, directory: Path, journal: Path) -> LearnerHost[TorchBackend]:
    from outpace.learner.backend import LearnerSettings
    from outpace.learner.learner import LearnerHost
    from outpace.learner.torch_backend import TorchBackend

    settings = LearnerSettings(
        config=config,
        read_group=partial(read_record, journal),
        snapshots=directory / "weights",
        incarnation="bench",
        threads=learner_threads(config),
    )
    return LearnerHost(settings, partial(TorchBackend, model=_policy(parameters)))


def _policy(parameters: int) -> PreTrainedModel:
    """Build a model with the number of layers that comes closest to this many million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=_layers(parameters)))  # type: ignore[no-untyped-call]


def _layers(parameters: int) -> int:
    width, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    kept = SHAPE["num_key_value_heads"] / SHAPE["num_attention_heads"]
    layer = width * width * (2 + 2 * kept) + 3 * width * inner
    embeddings = SHAPE["vocab_size"] * width
    layers: int = round((parameters * 1e6 - embeddings) / layer)
    if layers < 1:
        smallest = math.ceil((embeddings + layer) / 1e6)
        raise BadInput(f"--parameters: {parameters} million is too small for this model shape; use at least {smallest}")
    return layers


async def _rounds(learner: LearnerHost[TorchBackend], config: Config, rounds: int) -> Case:
    copy = _Copy(learner.backend, config.model.dtype)
    found: list[Round] = []
    buffers: set[str] = set()
    while len([each for each in found if not each.fresh]) < rounds + WARM_UP:
        copy_s = await learner._on_compute_thread(copy.seconds)
        await learner._on_compute_thread(_step, learner.backend)
        started, busy_s = time.perf_counter(), (await learner.stats()).busy_s
        manifest = await learner.publish([learner.backend.version - 1])
        held_s = (await learner.stats()).busy_s - busy_s
        sealed_s = time.perf_counter() - started - held_s
        found.append(Round(copy_s, held_s, sealed_s, fresh=manifest.path not in buffers))
        buffers.add(manifest.path)
        await asyncio.sleep(PAUSE_S)
    return Case(
        parameters=(await learner.stats()).parameters,
        nbytes=manifest.nbytes,
        threads=(await learner.stats()).threads,
        delta_nbytes=manifest.delta.nbytes if manifest.delta else 0,
        rounds=_without_warm_up(found),
    )


def _without_warm_up(rounds: list[Round]) -> list[Round]:
    return [each for each in rounds if each.fresh] + [each for each in rounds if not each.fresh][WARM_UP:]


class _Copy:
    """Copies the published tensors once, into memory that is already mapped, in the published dtype."""

    def __init__(self, core: LearnerCore, dtype: str) -> None:
        import torch

        from outpace.weights.shared_memory import distinct_tensors

        self._sources = list(distinct_tensors(core.model.state_dict()).values())
        self._targets = [torch.zeros_like(tensor, dtype=getattr(torch, dtype)) for tensor in self._sources]

    def seconds(self) -> float:
        import torch

        started = time.perf_counter()
        with torch.no_grad():
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(source)
        return time.perf_counter() - started


def _step(core: LearnerCore) -> None:
    """Change the weights and the version as a training step does."""
    import torch

    with torch.no_grad():
        for parameter in core.parameters.values():
            parameter.view(-1)[::CHANGED] += 1e-3
    core.version += 1


def print_table(cases: dict[str, Case], console: Console | None = None) -> None:
    some = next(iter(cases.values()))
    title = f"{some.parameters / 1e6:.1f}M parameters, {some.nbytes / 1e6:.0f} MB, {some.threads} threads"
    table = Table(
        "", "one copy", "publish blocks the learner", "copies", "first ones", "sealing (background)", box=None
    )
    for name, case in cases.items():
        table.add_row(
            name,
            f"{_median(case.steady, 'copy_s') * 1000:.1f} ms",
            f"{_median(case.steady, 'held_s') * 1000:.1f} ms",
            f"{case.ratio:.2f} (limit {LIMIT})",
            f"{_median(case.first, 'ratio'):.2f}",
            f"{_median(case.steady, 'sealed_s') * 1000:.0f} ms",
        )
    table.title, table.title_justify = title, "left"
    (console or Console(width=120)).print(table)


if __name__ == "__main__":
    run_benchmark(main)
