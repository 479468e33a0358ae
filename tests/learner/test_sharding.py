"""A learner sharded over processes trains like one process: gradients, weights, scores."""

from __future__ import annotations

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
from outpace.learner.batch_learner import BatchLearner
from outpace.learner.core import LearnerCore, sequence_logprobs
from outpace.learner.ranks import Ranks, RankSettings
from outpace.types import GroupRecord
from support import needs_bfloat16, resolved

pytestmark = pytest.mark.slow

LORA = {"lora.rank": 4, "lora.targets": ["q_proj", "v_proj"]}
TWO_UPDATES = {"algorithm.minibatches": 2, "policy_loss.name": "ppo"}
UNTIED = "untied"

CASES: dict[str, dict[str, Any]] = {
    **STREAMED,
    **WHOLE_BATCH,
    **{name: {"policy_loss.aggregation": name} for name in AGGREGATIONS},
    "lora": LORA,
    "lora_kl": LORA | {"kl.coefficient": 0.1},
    "shared_critic": {"advantage.name": "gae", "critic.shared": True},
    "updated_reference": {"kl.coefficient": 0.1, "kl.sync_every": 2},
    "two_updates": TWO_UPDATES,
    "checkpointing": {"learner.gradient_checkpointing": True},
    "gathered": {"learner.reshard": False},
    "small_passes": {"learner.tokens_per_pass": 40},
    UNTIED: {},
}

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
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def all_values(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([whole(tensor.detach()).flatten().double() for _, tensor in sorted(tensors.items())])


class Trained:
    """A learner after some steps, with the gradient of its first update."""

    def __init__(self, case: str, dtype: torch.dtype, ranks: Ranks | None) -> None:
        config = resolved({"learner.lr": 1e-2, **CASES[case]})
        self.core = LearnerCore(make_llama(tie_word_embeddings=case != UNTIED), config, dtype, ranks)
        self.gradients: list[Tensor] = []
        self.reports = []
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


def join(rank: int, size: int) -> Ranks:
    return Ranks(RankSettings(rank, size, "", 60.0), "cpu")


def compare_on_rank(size: int, dtype: str, rank: int) -> dict[str, Compared]:
    ranks = join(rank, size)
    found = {}
    sequences = [row.tokens for record in make_records() for row in record.rows]
    for name in CASES:
        sharded, plain = (Trained(name, DTYPES[dtype], each) for each in (ranks, None))
        scores = [np.concatenate(sequence_logprobs(each.core, sequences, 0.7)) for each in (sharded, plain)]
        found[name] = Compared(
            difference(sharded.gradients[0], plain.gradients[0]),
            difference(sharded.weights(), plain.weights()),
            float((sharded.numbers() - plain.numbers()).abs().max()),
            float(np.abs(scores[0] - scores[1]).max()),
        )
    return found


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (2, "float64"),
        *(
            pytest.param(size, dtype, marks=pytest.mark.nightly)
            for size, dtype in ((1, "float64"), (4, "float64"), (1, "float32"), (2, "float32"), (4, "float32"))
        ),
    ],
)
def test_a_sharded_learner_trains_like_one_process(size: int, dtype: str) -> None:
    """All cases in one test, because each rank is a process that takes seconds to start."""
    for result in run_ranks(partial(compare_on_rank, size, dtype), size):
        assert result.keys() == CASES.keys()
        for name, found in result.items():
            assert found.gradient <= TOLERANCES[dtype], name
            assert found.weights <= 1e-3, name
            assert found.reports <= AFTER_STEPS[dtype], name
            assert found.scores <= AFTER_STEPS[dtype], name


def bfloat16_errors(size: int, rank: int) -> tuple[float, float]:
    """Return the errors of the gradient in bfloat16, sharded and not."""
    ranks = join(rank, size)
    exact = Trained("default", torch.float64, None).gradients[0]
    sharded, plain = (Trained("default", torch.bfloat16, each).gradients[0] for each in (ranks, None))
    return difference(sharded, exact), difference(plain, exact)


@needs_bfloat16
def test_a_sharded_learner_is_as_exact_in_bfloat16_as_one_process() -> None:
    for sharded, plain in run_ranks(partial(bfloat16_errors, 2), 2):
        assert sharded < 1.2 * plain


def entries_of_order(size: int, rank: int) -> list[int]:
    """Return how many layers FSDP2 remembers after each of three scoring passes."""
    core = LearnerCore(make_llama(), resolved({"learner.lr": 1e-2}), ranks=join(rank, size))
    rows, found = [row for record in make_records() for row in record.rows], []
    for _ in range(3):
        core.score(rows)
        state = core.model.get_decoder().layers[0]._get_fsdp_state()  # type: ignore[union-attr, index, operator]
        found.append(len(state._comm_ctx.post_forward_order))
    return found


def test_passes_without_a_backward_pass_leave_nothing_behind() -> None:
    assert run_ranks(partial(entries_of_order, 2), 2) == [[0, 0, 0]] * 2
