"""`outpace bench publish`: how long publishing holds the learner up, against one copy of the same weights in memory.

A policy of SmolLM2-135M's shape, with random weights, in the real learner. In every round, on the learner's own compute
thread, its tensors are copied once into memory that is in use already, then a little of them is changed, then they are
published. So both sides are of one process, one thread count and one moment; a busy machine slows both. Publishes into
a buffer that was never used before are shown apart: they are the first two or three of a run.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from outpace.bench.options import take_options
from outpace.config import Config
from outpace.config.loading import make_config, parse_arguments
from outpace.config.rules import resolve
from outpace.errors import BadInput
from outpace.resources import learner_threads
from outpace.runtime.scratch import Scratch, temporary_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outpace.learn.core import LearnerCore
    from outpace.learn.learner import TorchLearner

LIMIT = 1.5
"""How many copies of the weights a publish may hold the learner up for."""

SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M's, which has 30 such layers."""

CHANGED = 50
"""One weight in so many is changed by a step, as in reinforcement learning with bfloat16 weights."""

WARM_UP = 1  # rounds

PAUSE_S = 0.5
"""Between rounds, in place of the step: what is done beside training has some time for it."""

CASES: dict[str, dict[str, Any]] = {"whole": {"weights.delta": False}, "with deltas": {"weights.delta": True}}


@dataclass(frozen=True)
class Round:
    """Seconds. `held_s` is of the compute thread, `sealed_s` what came after it on another."""

    copy_s: float
    held_s: float
    sealed_s: float
    fresh: bool  # into a buffer that was never used before

    @property
    def ratio(self) -> float:
        return self.held_s / self.copy_s


@dataclass(frozen=True)
class Case:
    parameters: int
    nbytes: int  # of one snapshot
    threads: int
    delta_nbytes: int  # of the last delta; 0: there was none
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


HELP = """how long publishing holds the learner up, against one copy of the same weights in memory
  --parameters N   size of the model in millions (32 or more; 135M means the same as 135)
  --rounds N       publishes that are measured, with whole weights and again with deltas; each takes a second or so
"""


def main(words: Sequence[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(HELP)
    numbers = [re.sub(r"(?<=\d)M$", "", word) for word in words]
    options, settings = take_options(numbers, {"parameters": 135, "rounds": 15})
    _layers(options["parameters"])  # refused before anything is loaded
    cases = run(parse_arguments(settings), **options)
    print_table(cases)
    print(json.dumps({name: case.summary() for name, case in cases.items()}))
    missed = missed_bars(cases)
    for bar in missed:
        print(f"missed: {bar}")
    return 1 if missed else 0


def missed_bars(cases: dict[str, Case]) -> list[str]:
    return [
        f"publishing ({name}) holds the learner up for {case.ratio:.2f} copies of its weights, the limit is {LIMIT}"
        for name, case in cases.items()
        if not case.ratio <= LIMIT
    ]


def run(settings: dict[str, Any], parameters: int, rounds: int) -> dict[str, Case]:
    """`parameters` in millions."""
    return {
        name: asyncio.run(_measure(resolve(make_config({**settings, **own})), parameters, rounds))
        for name, own in CASES.items()
    }


async def _measure(config: Config, parameters: int, rounds: int) -> Case:
    scratch = await asyncio.to_thread(Scratch)
    try:
        with temporary_directory("publish") as journal:
            learner = await asyncio.to_thread(_learner, config, parameters, scratch.path, journal)
            try:
                return await _rounds(learner, config, rounds)
            finally:
                await learner.close()
    finally:
        await asyncio.to_thread(scratch.remove)


def _learner(config: Config, parameters: int, scratch: Path, journal: Path) -> TorchLearner:
    from outpace.learn.learner import TorchLearner
    from outpace.learn.settings import LearnerSettings

    settings = LearnerSettings(
        config=config,
        journal=journal,
        snapshots=scratch / "weights",
        incarnation="bench",
        threads=learner_threads(config),
    )
    return TorchLearner(settings, _policy(parameters))


def _policy(parameters: int) -> PreTrainedModel:
    """With as many layers as come nearest to so many millions of parameters."""
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
        raise BadInput(f"--parameters: {parameters} million are too few for this shape; use {smallest} or more")
    return layers


async def _rounds(learner: TorchLearner, config: Config, rounds: int) -> Case:
    copy = _Copy(learner._core, config.model.dtype)
    found: list[Round] = []
    buffers: set[str] = set()
    while len([each for each in found if not each.fresh]) < rounds + WARM_UP:
        copy_s = await learner._on_compute_thread(copy.seconds)
        await learner._on_compute_thread(_step, learner._core)
        started, busy_s = time.perf_counter(), (await learner.stats()).busy_s
        manifest = await learner.publish([learner._core.version - 1])
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
    """One memory copy of the tensors that are published, into memory that is there, in the dtype of publishing."""

    def __init__(self, core: LearnerCore, dtype: str) -> None:
        import torch

        from outpace.weights.layout import distinct_tensors

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
    """As far as publishing can tell."""
    import torch

    with torch.no_grad():
        for parameter in core.parameters.values():
            parameter.view(-1)[::CHANGED] += 1e-3
    core.version += 1


def print_table(cases: dict[str, Case], console: Console | None = None) -> None:
    some = next(iter(cases.values()))
    title = f"{some.parameters / 1e6:.1f}M parameters, {some.nbytes / 1e6:.0f} MB, {some.threads} threads"
    table = Table("", "one copy", "publish holds the learner", "copies", "first ones", "sealing, beside it", box=None)
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
