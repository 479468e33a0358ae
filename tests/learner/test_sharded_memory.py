"""Memory of each rank of a sharded learner during a step: what torch allocates, by kind.

    python -m pytest tests/learner/test_sharded_memory.py -s      prints the figures in docs/benchmarks.md

`test_sharded_state.py` measures publishing by the memory of the processes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from learner.small import make_llama, make_row
from learner.worlds import World
from outpace.learner.core import LearnerCore
from outpace.learner.learner import build_snapshot_writer
from outpace.learner.sharding import shard
from outpace.models.loading import decoder_layers
from outpace.models.slices import local_part
from support import resolved

pytestmark = pytest.mark.slow

RANKS = World(4)

MODELS: dict[str, dict[str, Any]] = {
    "layers": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 128},
    "embeddings": {"vocab_size": 20_000, "hidden_size": 256, "num_hidden_layers": 4, "tie_word_embeddings": False},
}
"""Models by what their largest unit is."""


@dataclass(frozen=True)
class Peak:
    """Bytes of the tensors of one rank at the peak of a part of a step."""

    state: int  # shards of weights, gradients and optimizer state
    gathered: int  # weights
    buffers: int  # of gathering weights and summing gradients
    rest: int  # gradients of units, activations, temporary tensors

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.buffers + self.rest


@dataclass(frozen=True)
class Measured:
    shard: int  # bytes of this rank's weights
    unit: int  # bytes of the weights of the largest unit
    snapshot: int  # bytes of a published version, in shared memory
    training: Peak
    update: Peak
    publishing: Peak


def memory_of_a_step(model_name: str, world: World, rank: int) -> Measured:
    ranks = world.join(rank)
    assert ranks is not None
    config = resolved({"learner.lr": 1e-2, "learner.devices": world.size})
    model = make_llama(**MODELS[model_name])
    whole = sum(parameter.nbytes for parameter in model.parameters())
    layers = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in decoder_layers(model)]
    root = shard(model, ranks, config.learner, torch.float32)
    core = LearnerCore(root, config, ranks=ranks)
    rows = [make_row(8, 3, seed) for seed in range(world.size)]  # few activations
    with tempfile.TemporaryDirectory() as directory:
        writer = build_snapshot_writer(config, "cpu", Path(directory), "run", ranks)

        def publish() -> int:
            return writer.publish(core.version, core.weights(), []).nbytes

        def peak(part: Callable[[], Any]) -> Peak:
            with FSDPMemTracker(root, core.optimizer) as tracker:
                part()
            (found,) = tracker.get_tracker_snapshot("peak").values()
            of = {getattr(kind, "value", kind): count for kind, count in found.items()}
            state = of["Sharded Param"] + of["Sharded Grad"] + of["OptState"]
            buffers = of["All Gather"] + of["Reduce Scatter"]
            rest = of["Total"] - state - of["Unsharded Param"] - buffers
            return Peak(state, of["Unsharded Param"], buffers, rest)

        core.accumulate(rows)
        core.step()  # the optimizer has its state from now on
        snapshot = ranks.largest(publish())
        found = Measured(
            shard=sum(local_part(parameter).nbytes for parameter in core.parameters.values()),
            unit=max(*layers, whole - sum(layers)),
            snapshot=snapshot,
            training=peak(lambda: core.accumulate(rows)),
            update=peak(core.step),
            publishing=peak(publish),
        )
        writer.close()
    return found


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_holds_its_shard_the_largest_unit_with_its_gradient_and_two_buffers(model: str) -> None:
    for rank, found in enumerate(RANKS.run(partial(memory_of_a_step, model))):
        print(f"\n{model}, rank {rank}, MB: shard {found.shard / 1e6:.1f}, largest unit {found.unit / 1e6:.1f}")
        for part in ("training", "update", "publishing"):
            peak: Peak = getattr(found, part)
            kinds = (
                f"state {peak.state / 1e6:.1f}, gathered {peak.gathered / 1e6:.1f}, buffers {peak.buffers / 1e6:.1f}"
            )
            print(f"  {part}: {kinds}, rest {peak.rest / 1e6:.1f}, total {peak.total / 1e6:.1f}")
        state, activations = 4 * found.shard, 0.25 * found.unit
        assert found.training.state <= 1.01 * state
        assert found.training.gathered <= 1.01 * found.unit
        assert found.training.buffers <= 2 * found.unit
        assert found.training.total <= 1.01 * state + 4 * found.unit + activations
        assert found.update.total <= 1.01 * state
        assert found.publishing.total - found.snapshot <= 1.01 * state
