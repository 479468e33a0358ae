"""Batch learner: several updates per step, the proximal policy, a critic, batch-wide masks, replayed groups."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from outpace.algorithms.advantages import compute_gae
from outpace.algorithms.corrections import m2po
from outpace.algorithms.registry import NORMALIZERS, NormalizerRegistration
from outpace.config import Config
from outpace.errors import BadInput, OutpaceError
from outpace.learner import state
from outpace.learner.batch_learner import BatchLearner
from outpace.learner.core import LearnerCore
from outpace.learner.reference import CopiedReference
from outpace.types import ChunkReport, GroupRecord, Row
from support import resolved

MakeLlama = Callable[..., LlamaForCausalLM]
MakeRows = Callable[..., list[Row]]


def make(make_llama: MakeLlama, settings: dict[str, Any], seed: int = 0) -> tuple[LearnerCore, BatchLearner]:
    config: Config = resolved({"learner.lr": 1e-2, **settings})
    core = LearnerCore(make_llama(seed), config, torch.float64)
    return core, BatchLearner(core, config)


def weights_of(core: LearnerCore) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in (core.parameters | core.critic_parameters).values()])


def rows_of(records: list[GroupRecord]) -> list[Row]:
    return [row for record in records for row in record.rows]


def test_several_updates_on_one_batch_make_one_version(make_llama: MakeLlama, records: list[GroupRecord]) -> None:
    core, batch = make(
        make_llama, {"algorithm.minibatches": 3, "algorithm.epochs_per_batch": 2, "policy_loss.name": "ppo"}
    )
    updates = []
    step = core.optimizer.step
    core.optimizer.step = lambda *a: (updates.append(weights_of(core)), step(*a))[1]  # type: ignore[method-assign,func-returns-value,assignment]
    report = batch.add(records, replayed=False)
    result = batch.train()
    assert len(updates) == 6
    assert result.version == core.version == 1
    assert result.tokens == report.tokens == sum(int(row.mask.sum()) for row in rows_of(records))
    assert len({tuple(weights.tolist()) for weights in updates}) == 6


def test_the_proximal_policy_is_the_one_at_the_start_of_the_step_in_every_update(
    make_llama: MakeLlama, records: list[GroupRecord]
) -> None:
    """The proximal logprobs are computed once per step, so only later updates see ratios outside the clip range."""
    clipped = []
    for passes in (1, 4):
        _, batch = make(
            make_llama,
            {"algorithm.epochs_per_batch": passes, "policy_loss.name": "ppo", "policy_loss.old_policy": "recomputed"}
            | {"learner.lr": 0.05, "learner.stream": False},
        )
        batch.add(records, replayed=False)
        clipped.append(batch.train().metrics["clip_ratio"])
    assert clipped[0] == 0
    assert clipped[1] > 0


def test_precomputed_proximal_logprobs_equal_those_of_the_training_pass(
    make_llama: MakeLlama, records: list[GroupRecord]
) -> None:
    """A mask that rejects nothing still forces a scoring pass; its logprobs must give the same update."""
    one, streaming = make(make_llama, {"policy_loss.name": "ppo", "policy_loss.old_policy": "recomputed"})
    streaming.add(records, replayed=False)
    streaming.train()
    two, scored = make(
        make_llama,
        {"policy_loss.name": "ppo", "policy_loss.old_policy": "recomputed", "correction.masks": ["m2po"]}
        | {"correction.m2po_limit": 1e9},
    )
    scored.add(records, replayed=False)
    scored.train()
    torch.testing.assert_close(weights_of(one), weights_of(two), rtol=1e-9, atol=1e-12)


def test_the_arrival_order_of_groups_does_not_change_the_updates(
    make_llama: MakeLlama, records: list[GroupRecord]
) -> None:
    found = []
    for order in (records, records[::-1], records[3:] + records[:3]):
        core, batch = make(make_llama, {"algorithm.minibatches": 3})
        for record in order:
            batch.add([record], replayed=False)
        batch.train()
        found.append(weights_of(core))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[2], found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("minibatches", [2, 3])
def test_every_pass_distributes_the_groups_over_its_updates_in_another_way(
    make_llama: MakeLlama, records: list[GroupRecord], monkeypatch: pytest.MonkeyPatch, minibatches: int
) -> None:
    group_of = {row.tokens.tobytes(): record.group for record in records for row in record.rows}

    def groups_of_updates() -> list[list[int]]:
        core, batch = make(make_llama, {"algorithm.minibatches": minibatches, "algorithm.epochs_per_batch": 4})
        found, accumulate = [], core.accumulate

        def record_groups(rows: list[Row], *more: Any) -> ChunkReport:
            found.append(sorted({group_of[row.tokens.tobytes()] for row in rows}))
            return accumulate(rows, *more)

        monkeypatch.setattr(core, "accumulate", record_groups)
        batch.add(records, replayed=False)
        batch.train()
        return found

    updates = groups_of_updates()
    passes = [updates[first : first + minibatches] for first in range(0, len(updates), minibatches)]
    assert [sorted(chain(*each)) for each in passes] == [list(range(6))] * 4, "every group once per pass"
    assert {len(update) for update in updates} == {6 // minibatches}
    assert len({str(each) for each in passes}) > 1
    assert groups_of_updates() == updates, "the same seed distributes alike"


def test_m2po_masks_over_the_tokens_of_the_whole_batch(make_llama: MakeLlama, records: list[GroupRecord]) -> None:
    core, batch = make(make_llama, {"correction.masks": ["m2po"], "correction.m2po_limit": 0.3})
    old = np.concatenate([score["old_logp"] for score in core.score(rows_of(records))])
    sampler = np.concatenate([row.logprobs[row.mask] for row in rows_of(records)])
    expected = 1 - m2po(old - sampler, m2po_limit=0.3).mean()
    batch.add(records[:2], replayed=False)
    batch.add(records[2:], replayed=False)
    found = batch.train().metrics["offpolicy/masked"]
    assert 0 < expected < 1
    assert found == pytest.approx(expected)


def test_a_critic_learns_the_returns(make_llama: MakeLlama, records: list[GroupRecord]) -> None:
    core, batch = make(
        make_llama,
        {"advantage.name": "gae", "critic.lr": 0.05, "critic.clip": 10.0, "critic.coefficient": 1.0}
        | {"learner.lr": 1e-9},
    )
    losses = []
    for _ in range(30):
        batch.add(records, replayed=False)
        losses.append(batch.train().metrics["loss/value"])
    assert losses[-1] < losses[0] / 4
    values = np.concatenate([score["old_values"] for score in core.score(rows_of(records))])
    rewards = [reward for record in records for reward in record.rewards]
    assert values.mean() == pytest.approx(np.mean(rewards), abs=0.15)


def test_critic_advantages_are_whitened_gae(make_llama: MakeLlama, records: list[GroupRecord]) -> None:
    core, batch = make(make_llama, {"advantage.name": "gae", "advantage.gae_lambda": 0.9, "advantage.gamma": 0.8})
    assert core.critic is not None
    torch.nn.init.normal_(core.critic.weight, generator=torch.Generator().manual_seed(0))
    scores = core.score(rows_of(records))
    expected = []
    rewards = [reward for record in records for reward in record.rewards]
    for row, score, reward in zip(rows_of(records), scores, rewards, strict=True):
        at_the_end = np.zeros(int(row.mask.sum()))
        at_the_end[-1] = reward
        expected.append(compute_gae(at_the_end, score["old_values"].astype(np.float64), 0.8, 0.9)[0])
    together = np.concatenate(expected)
    together = (together - together.mean()) / (together.std() + 1e-4)
    batch.add(records, replayed=False)
    found = [example.row for group in batch.pipeline.examples(batch.collected) for example in group]
    trained = np.concatenate([row.advantages[row.mask] for row in found])
    np.testing.assert_allclose(trained, together, rtol=2e-3, atol=2e-3)


def test_only_a_shared_critic_updates_the_model_weights(make_llama: MakeLlama, records: list[GroupRecord]) -> None:
    """All rewards are equal, so the policy loss is zero and only the value loss has a gradient."""
    silent = [
        GroupRecord(record.group, record.task_id, 0, 0, record.rows, [1.0] * len(record.rewards)) for record in records
    ]
    moved = []
    for shared in (False, True):
        core, batch = make(
            make_llama, {"advantage.name": "gae", "advantage.normalizer": "batch_std", "critic.shared": shared}
        )
        assert core.critic is not None
        torch.nn.init.normal_(core.critic.weight, generator=torch.Generator().manual_seed(0))
        before = next(iter(core.parameters.values())).detach().clone()
        batch.add(silent, replayed=False)
        batch.train()
        moved.append(not torch.equal(before, next(iter(core.parameters.values()))))
    assert moved == [False, True]


def test_a_kl_penalty_in_the_reward_lowers_the_advantages_of_divergent_attempts(
    make_llama: MakeLlama, records: list[GroupRecord]
) -> None:
    core, batch = make(make_llama, {"kl.coefficient": 0.5, "kl.place": "reward"})
    assert isinstance(core.reference, CopiedReference)
    core.reference.model.load_state_dict(make_llama(seed=4).double().state_dict())
    batch.add(records, replayed=False)
    (entry, *_), examples = batch.collected, batch.pipeline.examples(batch.collected)
    costs = [
        0.5 * float((score["old_logp"].astype(np.float64) - score["reference_logp"]).sum()) for score in entry.scores
    ]
    expected = np.array(entry.record.rewards) - costs
    found = [example.row.advantages[example.row.mask] for example in examples[0]]
    assert all(np.ptp(values) == 0 for values in found)
    np.testing.assert_allclose([values[0] for values in found], expected - expected.mean(), rtol=1e-5)


def test_replayed_groups_are_trained_and_counted_separately(make_llama: MakeLlama, records: list[GroupRecord]) -> None:
    core, batch = make(make_llama, {})
    core.version = 5
    own = batch.add(records[:4], replayed=False)
    again = batch.add(records[4:], replayed=True)
    assert isinstance(own, ChunkReport)
    assert own.lag_counts == {5: own.tokens}
    assert (again.lag_counts, again.replay_lag_counts) == ({}, {5: again.tokens})
    report = batch.train()
    assert report.tokens == own.tokens + again.tokens
    assert report.metrics["lag/tokens_5"] == own.tokens


def test_replayed_tokens_do_not_count_in_the_staleness_metrics(
    make_llama: MakeLlama, records: list[GroupRecord]
) -> None:
    alone, with_replays = (make(make_llama, {"learner.lr": 1e-3})[1] for _ in range(2))
    alone.add(records[:4], replayed=False)
    with_replays.add(records[:4], replayed=False)
    with_replays.add(records[4:], replayed=True)
    expected, found = alone.train().metrics, with_replays.train().metrics
    for name in expected:
        if name.startswith(("offpolicy/", "lag/")):
            assert found[name] == pytest.approx(expected[name]), name
    assert found["entropy"] != pytest.approx(expected["entropy"], rel=1e-6)


@pytest.mark.parametrize("settings", [{"advantage.name": "gae"}, {"kl.coefficient": 0.1, "kl.sync_every": 2}])
def test_critic_and_reference_are_restored_after_a_restart(
    make_llama: MakeLlama, records: list[GroupRecord], tmp_path: Path, settings: dict[str, Any]
) -> None:
    def train(batch: BatchLearner, times: int) -> None:
        for _ in range(times):
            batch.add(records, replayed=False)
            batch.train()

    core, batch = make(make_llama, settings)
    train(batch, 3)
    state.save(core, tmp_path)
    train(batch, 2)
    resumed, again = make(make_llama, settings, seed=9)
    assert state.restore(resumed, tmp_path) == 3
    train(again, 2)
    assert torch.equal(weights_of(resumed), weights_of(core))


def test_batch_std_is_computed_over_returns_after_kl_penalties(
    make_llama: MakeLlama, records: list[GroupRecord]
) -> None:
    core, batch = make(make_llama, {"kl.coefficient": 0.5, "kl.place": "reward", "advantage.normalizer": "batch_std"})
    assert isinstance(core.reference, CopiedReference)
    core.reference.model.load_state_dict(make_llama(seed=4).double().state_dict())
    batch.add(records, replayed=False)
    entries = batch.collected
    returned = [
        reward - 0.5 * float((score["old_logp"].astype(np.float64) - score["reference_logp"]).sum())
        for entry in entries
        for reward, score in zip(entry.record.rewards, entry.scores, strict=True)
    ]
    first = np.array(returned[:3])
    expected = (first - first.mean()) / (np.std(returned, ddof=1) + 1e-4)
    found = [example.row.advantages[example.row.mask][0] for example in batch.pipeline.examples(entries)[0]]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch: batch.advantages[1:], "array"),
        (lambda batch: [*batch.advantages, np.zeros(1)], "array"),
        (lambda batch: [values[:1] for values in batch.advantages], "array"),
        (lambda batch: [0.0 for _ in batch.advantages], "array"),
        (lambda batch: [values * np.nan for values in batch.advantages], "finite"),
        (lambda batch: None, r"\b18\b"),
        (lambda batch: [["a"]] * len(batch.advantages), r"\b18\b"),
    ],
)
def test_a_normalizer_with_an_invalid_result_is_rejected_with_its_setting(
    make_llama: MakeLlama,
    records: list[GroupRecord],
    function: Callable[[Any], object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NORMALIZERS, "registered", {})
    NORMALIZERS.add("mine", NormalizerRegistration(function, {}, alias="mine"))
    _, batch = make(make_llama, {"advantage.normalizer": "mine"})
    batch.add(records, replayed=False)
    with pytest.raises(BadInput, match=rf"advantage\.normalizer: .*{message}"):
        batch.train()


def test_off_policy_metrics_come_from_the_first_update_only(make_llama: MakeLlama, records: list[GroupRecord]) -> None:
    """Later updates also measure the change made within the step, which is not a reason to lower the lag."""
    once, often = (
        make(make_llama, {"policy_loss.name": "ppo", "algorithm.epochs_per_batch": passes, "learner.stream": False})[1]
        for passes in (1, 4)
    )
    for batch in (once, often):
        batch.add(records, replayed=False)
    expected, found = once.train(), often.train()
    for name in ("ess", "kl", "kl_engine", "kl_staleness", "ratio_max", "ratio_above_2"):
        assert found.metrics[f"offpolicy/{name}"] == pytest.approx(expected.metrics[f"offpolicy/{name}"]), name
    for name in ("lag/tokens_0", "lag/mean"):
        assert found.metrics[name] == expected.metrics[name]
    assert found.tokens == expected.tokens


def test_a_step_with_one_bad_update_counts_as_one_bad_step(make_llama: MakeLlama, records: list[GroupRecord]) -> None:
    core, batch = make(make_llama, {"algorithm.minibatches": 3, "learner.max_bad_steps": 2})
    record = records[0]
    nan_rows = [
        Row(row.tokens, row.mask, row.logprobs, row.versions, row.advantages * np.float32("nan"), row.episode)
        for row in record.rows
    ]
    bad = GroupRecord(record.group, record.task_id, 0, 0, nan_rows, record.rewards)
    batch.add([bad, *records[1:]], replayed=False)
    report = batch.train()
    assert report.skipped
    assert np.isfinite([report.loss, report.grad_norm]).all(), "averaged over the updates that were applied"
    assert core.bad_steps == 1
    batch.add([bad, *records[1:]], replayed=False)
    with pytest.raises(OutpaceError, match=r"\b2\b"):
        batch.train()


def test_an_empty_batch_still_makes_a_version(make_llama: MakeLlama) -> None:
    for settings in (
        {"advantage.name": "gae"},
        {"correction.masks": ["m2po"]},
        {"advantage.normalizer": "batch_std"},
    ):
        core, batch = make(make_llama, settings)
        assert batch.train().tokens == 0
        assert core.version == 1


def test_every_update_contains_groups_that_are_not_replayed(make_llama: MakeLlama, records: list[GroupRecord]) -> None:
    """The first update measures staleness, so it needs fresh groups however many are replayed."""
    _, batch = make(make_llama, {"algorithm.minibatches": 2})
    batch.add(records[:2], replayed=False)
    batch.add(records[2:], replayed=True)
    groups = batch.pipeline.examples(batch.collected)
    for number in range(8):
        updates = list(batch._groups_per_update(groups, number))
        assert [[group[0].replayed for group in update] for update in updates] == [[False, True, True]] * 2
        assert sorted(id(group) for update in updates for group in update) == sorted(map(id, groups))
