"""The gradient of the assembled loss, compared with autograd of the plain formulas through the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outpace.algorithms import POLICY_LOSSES
from outpace.errors import BadInput
from outpace.learner.core import LearnerCore
from outpace.learner.loss import interpolation_weights
from outpace.learner.packing import pack
from outpace.learner.reference import CopiedReference
from outpace.types import Row
from support import resolved

MakeLlama = Callable[..., LlamaForCausalLM]
MakeRows = Callable[..., list[Row]]
Gradient = dict[str, Tensor]


def core_of(model: LlamaForCausalLM, settings: dict[str, Any]) -> LearnerCore:
    config = resolved({"learner.max_grad_norm": 1e9, **settings})
    return LearnerCore(model, config, torch.float64)


def gradient_of(core: LearnerCore, rows: list[Row]) -> Gradient:
    """Return the accumulated gradient of one step over these rows, before normalization."""
    core.accumulate(rows)
    return {name: p.grad.clone() for name, p in core.parameters.items() if p.grad is not None}


def logits_of(model: LlamaForCausalLM, row: Row) -> Tensor:
    """Return the logits that predict each trained token of one row, through the model's own forward."""
    model.set_attn_implementation("sdpa")
    logits: Tensor = model(torch.from_numpy(row.tokens).long()[None], use_cache=False).logits[0, :-1]
    return logits[torch.from_numpy(row.mask[1:])]


def logp_of(logits: Tensor, row: Row) -> Tensor:
    targets = torch.from_numpy(row.tokens[row.mask]).long()
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)


def column(row: Row, name: str) -> Tensor:
    return torch.from_numpy(getattr(row, name)[row.mask]).double()


def assert_same(found: Gradient, model: LlamaForCausalLM) -> None:
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert expected.keys() == found.keys()
    left, right = (torch.cat([gradient.flatten() for gradient in each.values()]) for each in (found, expected))
    assert (left - right).norm() < 1e-6 * right.norm()


@pytest.fixture
def model(make_llama: MakeLlama) -> LlamaForCausalLM:
    return make_llama(initializer_range=0.2).double().eval()


@pytest.mark.parametrize("anchor", ["recomputed", "rollout", "interpolated"])
def test_the_ratio_of_a_clipped_policy_loss_is_relative_to_the_old_policy(
    make_llama: MakeLlama, make_rows: MakeRows, model: LlamaForCausalLM, anchor: str
) -> None:
    rows = make_rows(6)
    core = core_of(
        make_llama(initializer_range=0.2),
        {"policy_loss.name": "ppo", "policy_loss.old_policy": anchor, "correction.weight": "none"},
    )
    core.version = 3
    found = gradient_of(core, rows)
    for row in rows:
        logp, sampler = logp_of(logits_of(model, row), row), column(row, "logprobs")
        current = logp.detach()
        share = 3 / 4  # the step goes from version 3 to 4, and these tokens are of version 0
        old = {"recomputed": current, "rollout": sampler, "interpolated": sampler + share * (current - sampler)}[anchor]
        ratio, advantages = (logp - old).exp(), column(row, "advantages")
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss.sum().backward()  # type: ignore[no-untyped-call]
    assert_same(found, model)


def test_importance_weights_and_masks_multiply_the_policy_loss(
    make_llama: MakeLlama, make_rows: MakeRows, model: LlamaForCausalLM
) -> None:
    rows = make_rows(8)
    settings = {
        "policy_loss.name": "ppo",
        "policy_loss.old_policy": "recomputed",
        "correction.weight": "token",
        "correction.cap": 1.5,
        "correction.masks": ["token", "geometric"],
        "correction.token_low": 0.2,
        "correction.token_high": 3.0,
        "correction.geometric_low": 0.25,
        "correction.geometric_high": 4.0,
    }
    core = core_of(make_llama(initializer_range=0.2), settings)
    found = gradient_of(core, rows)
    rejected, tokens = 0, 0
    for row in rows:
        logp, sampler = logp_of(logits_of(model, row), row), column(row, "logprobs")
        rho = (logp.detach() - sampler).exp()
        keep = (rho >= 0.2) & (rho <= 3.0)
        if not 0.25 <= float(rho.log().mean().exp()) <= 4.0:
            keep[:] = False
        (-rho.clamp(max=1.5) * keep * column(row, "advantages") * logp).sum().backward()  # type: ignore[no-untyped-call]
        rejected += int((~keep).sum())
        tokens += len(keep)
    assert 0 < rejected < tokens, "the masks must reject some tokens in this test"
    assert_same(found, model)
    metrics = core.step().metrics
    assert metrics["offpolicy/masked"] == pytest.approx(rejected / tokens)


@pytest.mark.parametrize("name", list(POLICY_LOSSES.built_in))
def test_every_policy_loss_trains_through_the_model(make_llama: MakeLlama, make_rows: MakeRows, name: str) -> None:
    core = core_of(make_llama(), {"policy_loss.name": name, "algorithm.allow_unbounded": True})
    core.accumulate(make_rows(5))
    report = core.step()
    assert np.isfinite(report.loss)
    assert report.grad_norm > 0


@pytest.mark.parametrize("estimator", ["k3", "unbiased"])
def test_the_loss_includes_reference_kl_and_entropy(
    make_llama: MakeLlama, make_rows: MakeRows, model: LlamaForCausalLM, estimator: str
) -> None:
    rows = make_rows(5)
    settings = {"kl.coefficient": 0.3, "kl.estimator": estimator, "algorithm.entropy_coefficient": 0.2}
    core = core_of(make_llama(initializer_range=0.2), {**settings, "policy_loss.cap": 2.0, "correction.masks": []})
    assert isinstance(core.reference, CopiedReference)
    other = make_llama(seed=5, initializer_range=0.2).double().eval()
    core.reference.model.load_state_dict(other.state_dict())
    found = gradient_of(core, rows)
    divergence = []
    for row in rows:
        logits = logits_of(model, row)
        logp, sampler = logp_of(logits, row), column(row, "logprobs")
        with torch.no_grad():
            reference = logp_of(logits_of(other, row), row)
        weight = (logp.detach() - sampler).exp().clamp(max=2.0)
        k3 = (reference - logp).exp() - 1 - (reference - logp)
        probs = logits.log_softmax(-1)
        entropy = -(probs.exp() * probs).sum(-1)
        kept = k3 < 10  # beyond the bound a token has no gradient
        kl = k3.clamp(max=10.0)
        if estimator == "unbiased":  # its gradient is ratio * distance
            ratio = (logp.detach() - sampler).exp()
            kl = ratio * kl.detach() + ratio * (logp - reference).detach() * (logp - logp.detach())
        loss = -weight * column(row, "advantages") * logp + 0.3 * kl - 0.2 * entropy
        assert kept.any()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        divergence.append(kl.detach())
    assert_same(found, model)
    assert core.step().metrics["kl"] == pytest.approx(float(torch.cat(divergence).mean()))


def test_the_reference_is_fixed_unless_it_is_synced(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    fixed = core_of(make_llama(), {"kl.coefficient": 0.1})
    synced = core_of(make_llama(), {"kl.coefficient": 0.1, "kl.sync_every": 2})
    kept: list[list[bool]] = []
    for core in (fixed, synced):
        assert core.reference is not None
        seen = []
        for _ in range(4):
            core.accumulate(make_rows(3))
            core.step()
            theirs, own = next(core.reference.model.parameters()), next(iter(core.parameters.values()))
            seen.append(torch.equal(theirs, own))
        kept.append(seen)
    assert kept == [[False] * 4, [False, True, False, True]]


def test_an_extreme_log_ratio_keeps_the_step_finite(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    for value in (-1e4, 1e4, -1e30):
        rows = [
            Row(row.tokens, row.mask, np.full_like(row.logprobs, value), row.versions, row.advantages)
            for row in make_rows(3)
        ]
        for settings in (
            {},
            {"policy_loss.name": "ppo", "correction.weight": "sequence"},
            {"kl.coefficient": 1.0, "kl.estimator": "unbiased"},
            {"correction.masks": ["token", "sequence", "geometric", "veto", "opsm"]},
        ):
            core = core_of(make_llama(), settings)
            core.accumulate(rows)
            report = core.step()
            assert not report.skipped, (value, settings)
            assert all(np.isfinite(number) for number in report.metrics.values())


def test_sampler_mismatch_is_split_into_engine_and_staleness_contributions(
    make_llama: MakeLlama, make_row: Callable[..., Row]
) -> None:
    """The engine mismatch is measured on fresh tokens; the last value is reused while there are none."""
    core = core_of(make_llama(), {})
    core.version = 2
    fresh, stale = make_row(12, 3, seed=1, version=2), make_row(15, 3, seed=2, version=0)
    core.accumulate([fresh])
    alone = core.step().metrics
    assert alone["offpolicy/kl_engine"] == pytest.approx(alone["offpolicy/kl"])
    assert alone["offpolicy/kl_staleness"] == pytest.approx(0.0, abs=1e-12)
    core.accumulate([stale])
    later = core.step().metrics
    assert later["offpolicy/kl_engine"] == alone["offpolicy/kl_engine"]
    assert later["offpolicy/kl"] > later["offpolicy/kl_engine"], "the two contributions must differ in this test"
    assert later["offpolicy/kl_staleness"] == pytest.approx(later["offpolicy/kl"] - alone["offpolicy/kl"])


def test_the_approximate_old_policy_interpolates_log_linearly_by_version() -> None:
    versions = np.array([3, 5, 4, 0], dtype=np.int32)
    assert interpolation_weights(versions, 5).tolist() == pytest.approx([2 / 3, 0.0, 0.5, 5 / 6])


def replace_policy_loss(monkeypatch: pytest.MonkeyPatch, core: LearnerCore, function: Callable[[Any], object]) -> None:
    registration = replace(core._loss._policy_loss.registration, function=lambda tokens, **_: function(tokens))
    monkeypatch.setattr(core._loss, "_policy_loss", replace(core._loss._policy_loss, registration=registration))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tokens: (-tokens.logp_N).mean(), r"\(\).*\b\d+\b"),
        (lambda tokens: -tokens.logp_N[:, None], r"\(\d+, 1\)"),
        (lambda tokens: -tokens.logp_N[1:], r"\(\d+,\).*\b\d+\b"),
        (lambda tokens: 0.5, r"\bfloat\b"),
        (lambda tokens: None, r"\bNoneType\b"),
        (lambda tokens: -tokens.logp_N.detach(), r"gradient.*tokens\.logp_N"),
    ],
)
def test_a_policy_loss_without_one_differentiable_value_per_token_is_rejected(
    make_llama: MakeLlama,
    make_rows: MakeRows,
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[[Any], object],
    message: str,
) -> None:
    core = core_of(make_llama(), {})
    replace_policy_loss(monkeypatch, core, function)
    with pytest.raises(BadInput, match=rf"^policy_loss\.name: .*{message}"):
        core.accumulate(make_rows(3))
    assert core.step().tokens == 0


def test_later_updates_keep_the_old_policy_of_the_step(
    make_llama: MakeLlama, make_rows: MakeRows, model: LlamaForCausalLM
) -> None:
    """PPO with token weights and sequence means, after the policy has moved within the step."""
    rows = make_rows(6)
    settings = {"policy_loss.name": "ppo", "policy_loss.old_policy": "recomputed"}
    settings |= {"policy_loss.aggregation": "seq_mean_token_mean"}
    core = core_of(make_llama(initializer_range=0.2), settings)
    noise = np.random.default_rng(0)
    scores = [score["old_logp"] for score in core.score(rows)]
    olds = [(logp + noise.normal(0, 0.3, len(logp))).astype(np.float32) for logp in scores]
    core.accumulate(rows, [{"old_logp": old} for old in olds])
    found = {name: p.grad.clone() for name, p in core.parameters.items() if p.grad is not None}
    clipped = 0
    for row, values in zip(rows, olds, strict=True):
        old = torch.from_numpy(values).double()
        logp, sampler = logp_of(logits_of(model, row), row), column(row, "logprobs")
        ratio, advantages = (logp - old).exp(), column(row, "advantages")
        weight = (old - sampler).exp().clamp(max=2.0)
        loss = -weight * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        clipped += int(((ratio > 1.2) & (advantages > 0)).sum() + ((ratio < 0.8) & (advantages < 0)).sum())
        loss.mean().backward()  # type: ignore[no-untyped-call]
    assert clipped > 0
    assert_same(found, model)


def test_a_policy_loss_without_a_ratio_uses_importance_weights_of_the_current_policy_in_every_update(
    make_llama: MakeLlama, make_rows: MakeRows, model: LlamaForCausalLM
) -> None:
    rows = make_rows(4)
    core = core_of(make_llama(initializer_range=0.2), {"policy_loss.name": "reinforce", "correction.cap": 5.0})
    core.accumulate(rows, [{"old_logp": np.full(int(row.mask.sum()), -9.0, dtype=np.float32)} for row in rows])
    found = {name: p.grad.clone() for name, p in core.parameters.items() if p.grad is not None}
    for row in rows:
        logp, sampler = logp_of(logits_of(model, row), row), column(row, "logprobs")
        weight = (logp.detach() - sampler).exp().clamp(max=5.0)
        (-weight * column(row, "advantages") * logp).sum().backward()  # type: ignore[no-untyped-call]
    assert_same(found, model)


def test_values_are_clipped_around_the_old_values_and_the_larger_error_counts(
    make_llama: MakeLlama, make_rows: MakeRows
) -> None:
    (row,) = make_rows(1)
    core = core_of(make_llama(), {"advantage.name": "gae", "critic.clip": 0.2, "critic.coefficient": 0.5})
    assert core.critic is not None
    torch.nn.init.normal_(core.critic.weight, generator=torch.Generator().manual_seed(1))
    (score,) = core.score([row])
    values = torch.from_numpy(score["old_values"]).double()
    old, returns = values + 0.7, values + torch.linspace(-1, 2, len(values), dtype=torch.float64)
    extras = {"old_logp": score["old_logp"], "old_values": old.numpy(), "returns": returns.numpy()}
    core.accumulate([row], [extras])
    leaf = values.clone().requires_grad_()
    near = old + (leaf - old).clamp(-0.2, 0.2)
    loss = 0.25 * torch.maximum((leaf - returns) ** 2, (near - returns) ** 2)
    (expected,) = torch.autograd.grad(loss.sum(), leaf)
    assert core.critic.bias.grad is not None
    assert 0 < int((expected == 0).sum()) < len(expected), "some values are clipped, and some are not"
    assert float(core.critic.bias.grad) == pytest.approx(float(expected.sum()), rel=1e-6)


def test_approximate_old_logprobs_match_golden_values(make_llama: MakeLlama) -> None:
    """Tokens of version 3 in the step from 5 to 6: weight 2/3 on the current policy."""
    core = core_of(make_llama(), {"policy_loss.name": "ppo", "policy_loss.old_policy": "interpolated"})
    current = torch.tensor([-0.5, -1.0, -2.0, -0.3, -1.5], dtype=torch.float64)
    sampler = torch.tensor([-0.7, -0.9, -2.9, -0.35, -1.0], dtype=torch.float64)
    row = Row(np.zeros(6, np.int32), np.arange(6) > 0, np.zeros(6, np.float32), np.full(6, 3, np.int32), np.ones(6))
    (packed,) = pack([row], 100)
    found = core._loss._old_logp(packed, current, sampler, 5)
    expected = torch.tensor([-0.566667, -0.966667, -2.3, -0.316667, -1.333333], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
