"""The worlds that tests of a sharded learner run in: ranks on the CPU over gloo, on GPUs over NCCL, or no ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import pytest
import torch
from transformers import PreTrainedModel

from learner.ranks import run_ranks
from outpace.learner.ranks import Ranks, RankSettings
from outpace.runtime.torchrun import TorchrunProcess

Result = TypeVar("Result")


class World(NamedTuple):
    """How many ranks, and on which kind of device. On "cuda" each has a GPU of its own.

    `several_machines`: they act as if each were on a machine of its own."""

    size: int
    device: Literal["cpu", "cuda"] = "cpu"
    sharded: bool = True  # False: one process without ranks
    several_machines: bool = False

    def run(self, function: Callable[[World, int], Result]) -> list[Result]:
        """Return the results of `function(self, rank)` on all ranks."""
        call = partial(function, self)
        return run_ranks(call, self.size, device=self.device) if self.sharded else [call(0)]

    def join(self, rank: int) -> Ranks | None:
        if not self.sharded:
            return None
        torchrun = TorchrunProcess(rank, self.size, 0, 1, "localhost", 0) if self.several_machines else None
        return Ranks(RankSettings(rank, self.size, Path(), 60.0, torchrun=torchrun), self.device)

    def place(self, model: PreTrainedModel) -> PreTrainedModel:
        """Move a model to the device of this process, or leave it on the CPU if it will be sharded."""
        return model if self.sharded else model.to(self.device)  # type: ignore[arg-type]

    @property
    def alone(self) -> World:
        """One process without ranks, on the same kind of device."""
        return World(1, self.device, sharded=False)


VISIBLE_GPUS = torch.cuda.device_count()

GPUS = World(max(1, min(2, VISIBLE_GPUS)), "cuda")

needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(VISIBLE_GPUS < 1, reason="needs a CUDA device"))
needs_two_gpus = (pytest.mark.gpu, pytest.mark.skipif(VISIBLE_GPUS < 2, reason="needs two CUDA devices"))
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")

ON_GPUS = pytest.param(GPUS, marks=needs_gpu, id="gpus")
