"""A learner sharded over processes trains like one process: gradients, weights, scores."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.presets import AGGREGATIONS, STREAMED, WHOLE_BATCH
from learner.ranks import run_ranks
from learner.small import make_llama, make_records
from learner.worlds import GPUS, ON_GPUS, World, needs_gpu, needs_peft, needs_two_gpus
from outpace.errors import CollectiveFailed
from outpace.learner.batch_learner import BatchLearner
from outpace.learner.core import LearnerCore, sequence_logprobs
from outpace.types import GroupRecord, StepReport
from support import names, needs_bfloat16, resolved

pytestmark = pytest.mark.slow

LORA = {"lora.rank": 4, "lora.targets": ["q_proj", "v_proj"]}
UNTIED = "untied"
FULL = "full"
ADAPTERS = "adapters"
COMPILED = "compiled"
OFFLOADED = "offloaded"

CASES: dict[str, dict[str, dict[str, Any]]] = {
    FULL: {
        **STREAMED,
        **WHOLE_BATCH,
        **{name: {"policy_loss.aggregation": name} for name in AGGREGATIONS},
        "shared_critic": {"advantage.name": "gae", "critic.shared": True},
        "updated_reference": {"kl.coefficient": 0.1, "kl.sync_every": 2},
        "two_updates": {"algorithm.minibatches": 2, "policy_loss.name": "ppo"},
        "checkpointing": {"learner.gradient_checkpointing": True},
        "gathered": {"learner.reshard": False},
        "small_passes": {"learner.tokens_per_pass": 40},
        UNTIED: {},
    },
    ADAPTERS: {
        "lora": LORA,
        "lora_kl": LORA | {"kl.coefficient": 0.1},
        "lora_offload": LORA | {"kl.coefficient": 0.1, "learner.offload": True},
    },
    COMPILED: {"compiled": {"learner.compile": True}},
    OFFLOADED: {
        "default": {"learner.offload": True},
        "reference_and_critic": {"kl.coefficient": 0.1, "kl.sync_every": 2, "advantage.name": "gae"}
        | {"learner.offload": True},
    },
}
"""Settings by case, in groups."""

DTYPES = {"float64": torch.float64, "float32": torch.float32}
TOLERANCES = {"float64": 1e-6, "float32": 1e-4}
AFTER_STEPS = {"float64": 1e-3, "float32": 1e-2}
"""Tolerances of losses, norms and logprobs after steps of a large learning rate, which amplify rounding."""

STEPS = 5


@dataclass
class Compared:
    """Largest differences between a sharded and a plain learner, relative to the plain one's norms."""

    gradient: float  # of the first update
    weights: float  # after all steps
    reports: float  # of all step reports
    scores: float


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def all_values(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([whole(tensor.detach()).flatten().double() for _, tensor in sorted(tensors.items())])


class Trained:
    """A learner after some steps, with the gradient of its first update."""

    def __init__(self, world: World, rank: int, settings: dict[str, Any], dtype: torch.dtype, tied: bool) -> None:
        config = resolved({"learner.lr": 1e-2, "learner.compile": False, **settings})
        model = make_llama(tie_word_embeddings=tied)
        if config.lora.rank and dtype == torch.bfloat16:
            model = model.bfloat16()  # frozen weights stay in it
        model = world.place(model)
        self.core = LearnerCore(model, config, dtype, world.join(rank))
        self.gradients: list[Tensor] = []
        self.reports: list[StepReport] = []
        batch = None if config.learner.stream else BatchLearner(self.core, config)
        update = self.core.update

        def recording() -> None:
            gradients = {name: p.grad for name, p in self.core.parameters.items() if p.grad is not None}
            self.gradients.append(all_values(gradients))
            update()

        self.core.update = recording  # type: ignore[method-assign]
        for step in range(STEPS):
            records = [record for record in make_records() if record.group % STEPS != step]
            self._train(records, batch)

    def _train(self, records: list[GroupRecord], batch: BatchLearner | None) -> None:
        counted = 0
        for chunk in (records[:1], records[1:]):
            if batch is not None:
                report = batch.add(chunk, replayed=False)
            else:
                report = self.core.accumulate([row for record in chunk for row in record.rows])
            counted += sum(report.lag_counts.values())
            assert sum(report.lag_counts.values()) == report.tokens
        self.reports.append(self.core.step() if batch is None else batch.train())
        assert counted == self.reports[-1].tokens

    def weights(self) -> Tensor:
        return all_values(dict(self.core.parameters | self.core.critic_parameters))

    def numbers(self) -> Tensor:
        return torch.tensor(
            [[report.loss, report.grad_norm, report.tokens, *report.metrics.values()] for report in self.reports],
            dtype=torch.float64,
        )


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def compare_on_rank(group: str, dtype: str, world: World, rank: int) -> dict[str, Compared]:
    found = {}
    sequences = [row.tokens for record in make_records() for row in record.rows]
    for name, settings in CASES[group].items():
        sharded, plain = (
            Trained(each, rank, settings, DTYPES[dtype], tied=name != UNTIED) for each in (world, world.alone)
        )
        scores = [np.concatenate(sequence_logprobs(each.core, sequences, 0.7)) for each in (sharded, plain)]
        found[name] = Compared(
            difference(sharded.gradients[0], plain.gradients[0]),
            difference(sharded.weights(), plain.weights()),
            float((sharded.numbers() - plain.numbers()).abs().max()),
            float(np.abs(scores[0] - scores[1]).max()),
        )
    return found


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        (World(2), "float64"),
        *(
            pytest.param(World(size), dtype, marks=pytest.mark.nightly)
            for size, dtype in ((1, "float64"), (4, "float64"), (1, "float32"), (2, "float32"), (4, "float32"))
        ),
        *(pytest.param(GPUS, dtype, marks=needs_gpu) for dtype in DTYPES),
    ],
)
@pytest.mark.parametrize("group", [FULL, pytest.param(ADAPTERS, marks=needs_peft)])
def test_a_sharded_learner_trains_like_one_process(group: str, world: World, dtype: str) -> None:
    """All cases of a group in one test, because each rank is a process that takes seconds to start."""
    assert_same_training(group, world, dtype)


@pytest.mark.parametrize("world", [ON_GPUS])
@pytest.mark.parametrize("group", [COMPILED, OFFLOADED])
def test_a_sharded_learner_with_settings_for_gpus_trains_like_one_process(group: str, world: World) -> None:
    assert_same_training(group, world, "float32")


def assert_same_training(group: str, world: World, dtype: str) -> None:
    for result in world.run(partial(compare_on_rank, group, dtype)):
        assert result.keys() == CASES[group].keys()
        for name, found in result.items():
            assert found.gradient <= TOLERANCES[dtype], name
            assert found.weights <= 1e-3, name
            assert found.reports <= AFTER_STEPS[dtype], name
            assert found.scores <= AFTER_STEPS[dtype], name


def bfloat16_errors(settings: dict[str, Any], world: World, rank: int) -> tuple[float, float]:
    """Return the errors of the gradient in bfloat16, sharded and not."""

    def gradient(where: World, dtype: torch.dtype) -> Tensor:
        return Trained(where, rank, settings, dtype, tied=False).gradients[0]

    exact = gradient(world.alone, torch.float64)
    sharded, plain = (gradient(each, torch.bfloat16) for each in (world, world.alone))
    return difference(sharded, exact), difference(plain, exact)


@pytest.mark.parametrize("world", [pytest.param(World(2), marks=needs_bfloat16), ON_GPUS])
@pytest.mark.parametrize("settings", [{}, pytest.param(LORA, marks=needs_peft)], ids=[FULL, ADAPTERS])
def test_a_sharded_learner_is_as_exact_in_bfloat16_as_one_process(world: World, settings: dict[str, Any]) -> None:
    for sharded, plain in world.run(partial(bfloat16_errors, settings)):
        assert sharded < 1.2 * plain


def entries_of_order(world: World, rank: int) -> list[int]:
    """Return how many layers FSDP2 remembers after each of three scoring passes."""
    settings = {"learner.lr": 1e-2, "learner.compile": False}
    core = LearnerCore(make_llama(), resolved(settings), ranks=world.join(rank))
    rows, found = [row for record in make_records() for row in record.rows], []
    for _ in range(3):
        core.score(rows)
        state = core.model.get_decoder().layers[0]._get_fsdp_state()  # type: ignore[no-untyped-call]
        found.append(len(state._comm_ctx.post_forward_order))
    return found


@pytest.mark.parametrize("world", [World(2), ON_GPUS])
def test_passes_without_a_backward_pass_leave_nothing_behind(world: World) -> None:
    assert world.run(entries_of_order) == [[0, 0, 0]] * world.size


def end_in_a_pass(world: World, rank: int) -> str:
    """End the process of rank 1 in the second layer; return the error of the others."""
    ranks = world.join(rank)
    assert ranks is not None
    core = LearnerCore(make_llama(), resolved({"learner.compile": False}), ranks=ranks)
    if rank == 1:
        core.model.get_decoder().layers[1].register_forward_pre_hook(lambda *_: os._exit(7))  # type: ignore[no-untyped-call]
    rows = [row for record in make_records() for row in record.rows]
    with pytest.raises(CollectiveFailed) as raised, ranks.errors():
        core.accumulate(rows)
    return str(raised.value)


@pytest.mark.parametrize("world", [World(2), pytest.param(World(2, "cuda"), marks=needs_two_gpus)])
def test_ranks_do_not_wait_for_one_that_dies_in_the_middle_of_a_pass(world: World) -> None:
    error, ended = run_ranks(partial(end_in_a_pass, world), world.size, 60.0, world.device, may_die=True)
    assert ended is None
    if world.device == "cpu" or error is not None:  # torch also ends a process whose NCCL call is late
        assert names(error, "learner.collective_timeout_s")
