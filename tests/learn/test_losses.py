from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.learn.losses import effective_sample_size, mismatch, truncated_importance

# Two sequences of one group, of three and two tokens.
LOGP = torch.tensor([-0.5, -1.0, -2.0, -0.3, -1.5], dtype=torch.float64)
SAMPLER = torch.tensor([-0.7, -0.9, -2.9, -0.35, -1.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)

logprob = st.floats(-30.0, 0.0, width=32)
tokens = st.lists(st.tuples(logprob, logprob, st.floats(-5, 5, width=32)), min_size=1, max_size=40)


@pytest.mark.parametrize(("cap", "expected"), [(1.2, 0.535932), (5.0, 1.041914)])
def test_the_golden_token_mean_is_reproduced(cap: float, expected: float) -> None:
    assert truncated_importance(LOGP, SAMPLER, ADVANTAGES, cap).mean().item() == pytest.approx(expected, abs=1e-6)


@given(tokens, st.floats(0.5, 10.0))
def test_loss_and_gradient_match_a_float64_reference(rows: list[tuple[float, float, float]], cap: float) -> None:
    logp, sampler, advantages = (torch.tensor(column) for column in zip(*rows, strict=True))
    logp.requires_grad_()
    loss = truncated_importance(logp, sampler, advantages, cap)
    loss.sum().backward()

    table = np.array(rows, dtype=np.float64)
    weights = np.minimum(np.exp(np.clip(table[:, 0] - table[:, 1], -20, 20)), cap)
    np.testing.assert_allclose(loss.detach(), -weights * table[:, 2] * table[:, 0], rtol=2e-4, atol=1e-6)
    assert logp.grad is not None
    np.testing.assert_allclose(logp.grad, -weights * table[:, 2], rtol=2e-4, atol=1e-6)


@given(tokens)
def test_diagnostics_match_a_float64_reference(rows: list[tuple[float, float, float]]) -> None:
    logp, sampler, _ = (torch.tensor(column) for column in zip(*rows, strict=True))
    sums, largest = mismatch(logp, sampler, cap=2.0)

    table = np.array(rows, dtype=np.float64)
    log_ratio = np.clip(table[:, 0] - table[:, 1], -20, 20)
    weights = np.exp(log_ratio)
    assert sums["weight"] == pytest.approx(weights.sum(), rel=1e-4)
    assert sums["weight_sq"] == pytest.approx((weights**2).sum(), rel=1e-4)
    assert sums["kl"] == pytest.approx((weights - 1 - log_ratio).sum(), rel=1e-4, abs=1e-4)
    assert largest == pytest.approx(weights.max(), rel=1e-4)
    assert sums["kl"] >= -1e-9


@pytest.mark.parametrize(("logp", "sampler"), [(0.0, -1e4), (-1e4, 0.0), (-80.0, -80.0), (0.0, -float("inf"))])
def test_extreme_log_ratios_stay_finite(logp: float, sampler: float) -> None:
    current = torch.tensor([logp], requires_grad=True)
    loss = truncated_importance(current, torch.tensor([sampler]), torch.tensor([1.0]), cap=2.0).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    sums, largest = mismatch(current, torch.tensor([sampler]), cap=2.0)
    assert current.grad is not None
    assert np.isfinite([loss.item(), current.grad.item(), largest, *sums.values()]).all()


def test_no_tokens_give_zero_and_not_nan() -> None:
    empty = torch.zeros(0)
    assert truncated_importance(empty, empty, empty, cap=2.0).sum().item() == 0.0
    sums, largest = mismatch(empty, empty, cap=2.0)
    assert (set(sums.values()), largest) == ({0.0}, 0.0)
    assert effective_sample_size(sums, 0) == 1.0


def test_truncated_weights_are_counted() -> None:
    sums, largest = mismatch(LOGP, SAMPLER, cap=1.2)
    assert sums["truncated"] == 2  # 1.221 and 2.460
    assert largest == pytest.approx(2.459603, abs=1e-6)


def test_the_effective_sample_size_is_one_on_policy_and_falls_with_spread() -> None:
    sums, _ = mismatch(LOGP, LOGP, cap=2.0)
    assert effective_sample_size(sums, 5) == pytest.approx(1.0)
    sums, _ = mismatch(LOGP, SAMPLER, cap=2.0)
    weights = np.exp(LOGP.numpy() - SAMPLER.numpy())
    assert effective_sample_size(sums, 5) == pytest.approx(weights.sum() ** 2 / (5 * (weights**2).sum()))
