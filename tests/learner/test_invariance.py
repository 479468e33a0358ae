"""A step gives the same gradient for any chunking, pass size, packing or padding, and arrival order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from learner.presets import AGGREGATIONS, STREAMED, WHOLE_BATCH
from outpace.config import Config
from outpace.learner.batch_learner import BatchLearner
from outpace.learner.core import LearnerCore
from outpace.learner.forward import ForwardOptions, PackedForward, PaddedForward
from outpace.types import GroupRecord, Row
from support import resolved

MakeLlama = Callable[..., LlamaForCausalLM]
MakeRows = Callable[..., list[Row]]
Gradient = dict[str, torch.Tensor]

DTYPES = ["float64", "float32"]


def combinations(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize with every name and every aggregation in each dtype; slow with every pair of values, nightly with
    every combination of three."""
    numbered = product(enumerate(names), enumerate(AGGREGATIONS), enumerate(DTYPES))
    marked = [
        pytest.param(name, aggregation, dtype, marks=_suite(i, j, k))
        for (i, name), (j, aggregation), (k, dtype) in numbered
    ]
    return pytest.mark.parametrize(("name", "aggregation", "dtype"), marked)


def _suite(name: int, aggregation: int, dtype: int) -> list[pytest.MarkDecorator]:
    if (name + aggregation + dtype) % 2:
        return [pytest.mark.nightly]
    return [] if (aggregation + dtype - name) % 4 == 0 else [pytest.mark.slow]


def core_of(model: LlamaForCausalLM, config: Config, dtype: str) -> LearnerCore:
    return LearnerCore(model, config, getattr(torch, dtype))


def config_of(settings: dict[str, Any], tokens_per_pass: int = 10_000) -> Config:
    return resolved({"learner.max_grad_norm": 1e9, "learner.tokens_per_pass": tokens_per_pass, **settings})


def capture_gradient(core: LearnerCore, monkeypatch: pytest.MonkeyPatch) -> Gradient:
    """Return a dict that receives the gradients at the next optimizer step."""
    found: Gradient = {}

    def keep(*_: object) -> None:
        for name, parameter in (core.parameters | core.critic_parameters).items():
            assert parameter.grad is not None
            found[name] = parameter.grad.clone()

    monkeypatch.setattr(core.optimizer, "step", keep)
    return found


def assert_same(found: Gradient, expected: Gradient, dtype: str) -> None:
    """Compare up to 1e-6 of the norm in float64 and 1e-4 in float32."""
    assert expected
    left = torch.cat([found[name].flatten().double() for name in expected])
    right = torch.cat([expected[name].flatten().double() for name in expected])
    assert right.norm() > 0
    assert (left - right).norm() / right.norm() < (1e-6 if dtype == "float64" else 1e-4)


def streaming_gradient(
    core: LearnerCore, chunks: Sequence[Sequence[Row]], monkeypatch: pytest.MonkeyPatch
) -> tuple[Gradient, dict[str, float]]:
    gradient = capture_gradient(core, monkeypatch)
    for chunk in chunks:
        core.accumulate(chunk)
    return gradient, core.step().metrics


def shuffled_chunks(items: Sequence[Any], seed: int) -> list[list[Any]]:
    """Return the items shuffled and split into a few chunks."""
    noise = np.random.default_rng(seed)
    order = noise.permutation(len(items))
    at = np.sort(noise.choice(np.arange(1, len(items)), size=min(3, len(items) - 1), replace=False))
    return [[items[index] for index in chunk] for chunk in np.split(order, at)]


@combinations(STREAMED)
def test_chunks_passes_and_arrival_order_do_not_change_the_gradient(
    make_llama: MakeLlama, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch, name: str, aggregation: str, dtype: str
) -> None:
    rows = make_rows(9)
    settings = {"policy_loss.aggregation": aggregation, **STREAMED[name]}
    expected, metrics = streaming_gradient(core_of(make_llama(), config_of(settings), dtype), [rows], monkeypatch)
    for seed, tokens_per_pass in enumerate((1, 60, 10_000)):
        core = core_of(make_llama(), config_of(settings, tokens_per_pass), dtype)
        found, others = streaming_gradient(core, shuffled_chunks(rows, seed), monkeypatch)
        assert_same(found, expected, dtype)
        assert others == pytest.approx(metrics, rel=1e-3, abs=1e-6)


@combinations(STREAMED)
def test_padded_and_packed_give_the_same_gradient(
    make_llama: MakeLlama, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch, name: str, aggregation: str, dtype: str
) -> None:
    config = config_of({"policy_loss.aggregation": aggregation, **STREAMED[name]})
    packed, padded = (core_of(make_llama(), config, dtype) for _ in range(2))
    assert isinstance(packed._forward, PackedForward)
    padded.model.set_attn_implementation("sdpa")
    entropy_gradient = config.algorithm.entropy_coefficient != 0
    padded._forward = PaddedForward(padded.model, ForwardOptions(1.0, getattr(torch, dtype), entropy_gradient))
    expected, _ = streaming_gradient(packed, [make_rows(9)], monkeypatch)
    found, _ = streaming_gradient(padded, [make_rows(9)], monkeypatch)
    assert_same(found, expected, dtype)


def records_of(make_rows: MakeRows, count: int) -> list[GroupRecord]:
    noise = np.random.default_rng(7)
    records = []
    for group in range(count):
        rows = [
            Row(row.tokens, row.mask, row.logprobs, row.versions, row.advantages, episode=episode)
            for episode, row in enumerate(make_rows(3, seed=group))
        ]
        records.append(GroupRecord(group, f"task-{group}", 0, 0, rows, noise.random(3).tolist(), [{}] * 3))
    return records


def batch_gradient(
    core: LearnerCore, config: Config, chunks: Sequence[Sequence[GroupRecord]], monkeypatch: pytest.MonkeyPatch
) -> Gradient:
    gradient = capture_gradient(core, monkeypatch)
    batch = BatchLearner(core, config)
    for chunk in chunks:
        batch.add(chunk, replayed=False)
    batch.train()
    return gradient


@combinations(WHOLE_BATCH)
def test_batch_statistics_do_not_depend_on_how_its_groups_arrived(
    make_llama: MakeLlama, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch, name: str, aggregation: str, dtype: str
) -> None:
    records = records_of(make_rows, 6)
    settings = {"policy_loss.aggregation": aggregation, **WHOLE_BATCH[name]}
    config = config_of(settings)
    expected = batch_gradient(core_of(make_llama(), config, dtype), config, [records], monkeypatch)
    for seed, tokens_per_pass in enumerate((1, 60)):
        config = config_of(settings, tokens_per_pass)
        core = core_of(make_llama(), config, dtype)
        assert_same(batch_gradient(core, config, shuffled_chunks(records, seed), monkeypatch), expected, dtype)


def test_training_on_the_whole_batch_gives_the_gradient_of_streaming(
    make_llama: MakeLlama, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = records_of(make_rows, 6)
    config = config_of({})
    expected, _ = streaming_gradient(
        core_of(make_llama(), config, "float64"), [[row for record in records for row in record.rows]], monkeypatch
    )
    found = batch_gradient(core_of(make_llama(), config, "float64"), config, shuffled_chunks(records, 3), monkeypatch)
    assert_same(found, expected, "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gae", "kl_in_reward", "m2po"])
def test_padded_and_packed_give_the_same_gradient_of_a_whole_batch(
    make_llama: MakeLlama, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    records, config = records_of(make_rows, 4), config_of(WHOLE_BATCH[name])
    packed, padded = (core_of(make_llama(), config, dtype) for _ in range(2))
    padded.model.set_attn_implementation("sdpa")
    padded._forward = PaddedForward(
        padded.model, ForwardOptions(1.0, getattr(torch, dtype), hidden=padded.critic is not None)
    )
    expected = batch_gradient(packed, config, [records], monkeypatch)
    assert_same(batch_gradient(padded, config, [records], monkeypatch), expected, dtype)


def test_several_updates_in_float32_end_at_the_same_weights_in_any_arrival_order(
    make_llama: MakeLlama, make_rows: MakeRows
) -> None:
    records = records_of(make_rows, 6)
    config = config_of({"algorithm.preset": "decoupled_ppo", "algorithm.minibatches": 3, "learner.lr": 1e-3})
    found = []
    for chunks in ([records], shuffled_chunks(records, 0), shuffled_chunks(records, 1)):
        core = core_of(make_llama(), config, "float32")
        batch = BatchLearner(core, config)
        for chunk in chunks:
            batch.add(chunk, replayed=False)
        batch.train()
        found.append(torch.cat([p.detach().flatten() for p in core.parameters.values()]))
    start = torch.cat([p.detach().flatten() for p in make_llama().parameters()])
    moved = (found[0] - start).norm()
    assert moved > 0
    for other in found[1:]:
        assert (other - found[0]).norm() / moved < 1e-3, "AdamW's first steps depend on the sign of small gradients"
