"""Memory of a sharded learner per GPU, as outpace estimates it. Nothing is measured, and no GPU is needed.

    python benchmarks/learner_memory.py                             a table for three sizes of Qwen2.5
    python benchmarks/learner_memory.py --model.path Qwen/Qwen3-8B  for another model, which is downloaded if necessary
    python benchmarks/learner_memory.py --kl.coefficient 0.1        with other settings
    python benchmarks/learner_memory.py --learner.devices 64        for one number of GPUs

Columns, in GB: weights, gradients and optimizer state; what is gathered; activations of a full pass; the sum of these;
the sum without `learner.reshard`; the sum with `learner.offload`, and the host memory that this takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from outpace.commands.bench_options import BenchParser, run_benchmark
from outpace.config import Config
from outpace.config.load import make_config, parse_arguments
from outpace.config.validation import resolve
from outpace.errors import BadInput
from outpace.hardware.memory import GB, ModelShape, gathered_memory, learner_memory, learner_state
from outpace.models.loading import resolve_model

DEVICES = (4, 8, 16, 32)
QWEN = {
    "1.5B": ModelShape(1_543_714_304, 28, 1536, 12, 2, 128, 8960, 151_936, 32_768, 1),
    "7B": ModelShape(7_615_616_512, 28, 3584, 28, 4, 128, 18_944, 152_064, 32_768, 2),
    "32B": ModelShape(32_763_876_352, 64, 5120, 40, 8, 128, 27_648, 152_064, 32_768, 2),
}
DEFAULTS = {
    "model.dtype": "bfloat16",
    "engine.kind": "vllm",
    "engine.context": 8192,
    "learner.tokens_per_pass": 16_384,
    "learner.gradient_checkpointing": True,
}


def columns(settings: dict[str, Any], shape: ModelShape, devices: int) -> list[float]:
    """Return the columns of one row, in GB."""

    def config(**learner: bool) -> Config:
        values = {f"learner.{key}": value for key, value in learner.items()}
        return resolve(make_config({**settings, "learner.devices": devices, **values}))

    sharded = learner_memory(config(), shape, on_gpu=True)
    gathered = gathered_memory(config(), shape)
    gigabytes = [
        sharded.fixed - gathered,
        gathered,
        sharded.filled,
        sharded.most,
        learner_memory(config(reshard=False), shape, on_gpu=True).most,
        learner_memory(config(offload=True), shape, on_gpu=True).most,
        learner_state(config(), shape),
    ]
    return [count / GB for count in gigabytes]


def main(words: Sequence[str]) -> int:
    parser = BenchParser(
        prog="learner_memory.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _, given = parser.parse_known_args(words)
    settings = {**DEFAULTS, **parse_arguments(given)}
    shapes = QWEN
    if path := settings.get("model.path"):
        shape = ModelShape.read(resolve_model(path))
        if shape is None:
            raise BadInput(f"model.path: {path} lacks values that the estimate needs")
        shapes = {path: shape}
    counts = (settings["learner.devices"],) if "learner.devices" in settings else DEVICES
    table = Table("model", "GPUs", "state", "gathered", "pass", "total", "no reshard", "offload", "host")
    for name, shape in shapes.items():
        for devices in counts:
            table.add_row(name, str(devices), *(f"{value:.0f}" for value in columns(settings, shape, devices)))
    Console().print(table)
    return 0


if __name__ == "__main__":
    run_benchmark(main)
