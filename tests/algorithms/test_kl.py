from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outpace.algorithms.losses import KlEstimator, kl_penalty
from support import examples

ESTIMATORS: list[KlEstimator] = ["k1", "k2", "k3", "unbiased"]

logprob = st.floats(-2.5, 0.0, width=32)
rows = st.lists(st.tuples(logprob, logprob, logprob), max_size=20)


def evaluate(estimator: KlEstimator, table: Any, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return values and gradients for rows of (log pi, log reference, log sampler)."""
    columns = torch.tensor(table, dtype=torch.float64).reshape(len(table), 3).to(dtype).unbind(1)
    logp_N, reference_N, sampler_N = (column.clone() for column in columns)
    logp_N.requires_grad_()
    value_N = kl_penalty(estimator, logp_N, reference_N, logp_N - sampler_N)
    (gradient_N,) = torch.autograd.grad(value_N.sum(), logp_N)
    return value_N.detach(), gradient_N


def plain(estimator: KlEstimator, logp: float, reference: float, sampler: float) -> tuple[float, float]:
    """Return the value and its derivative, derived by hand."""
    d, w = logp - reference, math.exp(logp - sampler)
    k3 = math.exp(-d) - 1 + d
    return {
        "k1": (d, 1.0),
        "k2": (d**2 / 2, d),
        "k3": (k3, 1 - math.exp(-d)),
        "unbiased": (k3 * w, (1 - math.exp(-d) + k3) * w),
    }[estimator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@examples(100)
@given(table=rows)
def test_value_and_gradient_match_the_plain_formula(estimator: KlEstimator, table: list[Any]) -> None:
    found = torch.stack(evaluate(estimator, table), 1)
    expected = np.array([plain(estimator, *row) for row in table]).reshape(len(table), 2)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_extreme_distances_stay_finite(estimator: KlEstimator, dtype: torch.dtype) -> None:
    far = [-math.inf, -1e30, -1e4, 0.0]
    table = [(-1.0, x, y) for x in far for y in far] + [(x, -1.0, y) for x in far[1:] for y in far]
    for numbers in evaluate(estimator, table, dtype):
        assert numbers.isfinite().all()


def test_k3_has_no_gradient_beyond_its_bound_but_k1_and_k2_do() -> None:
    beyond = [(-5.0, -1.0, -5.0)]
    assert [x.item() for x in evaluate("k3", beyond)] == [10.0, 0.0]
    assert [x.item() for x in evaluate("k2", beyond)] == [8.0, -4.0]
    assert [x.item() for x in evaluate("k1", beyond)] == [-4.0, 1.0]


def over_vocabulary(estimator: KlEstimator, logits: Tensor, reference: Tensor, sampler: Tensor) -> Tensor:
    """Return the expected gradient in the logits when tokens are drawn from `sampler`."""
    logp_V = logits.log_softmax(0)
    penalty_V = kl_penalty(estimator, logp_V, reference.log_softmax(0), logp_V - sampler.log_softmax(0))
    return torch.autograd.grad((sampler.softmax(0) * penalty_V).sum(), logits)[0]


def test_the_expected_gradient_of_each_estimator_matches_its_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(3, 7, dtype=torch.float64, generator=generator) / 2
    logits, reference, other = draw[0].clone().requires_grad_(), draw[1], draw[2]
    p, q = logits.log_softmax(0), reference.log_softmax(0)
    (to_reference,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (from_reference,) = torch.autograd.grad((q.exp() * (q - p)).sum(), logits)
    current = logits.detach()
    torch.testing.assert_close(over_vocabulary("k1", logits, reference, current), torch.zeros_like(current))
    torch.testing.assert_close(over_vocabulary("k2", logits, reference, current), to_reference)
    torch.testing.assert_close(over_vocabulary("k3", logits, reference, current), from_reference)
    torch.testing.assert_close(over_vocabulary("unbiased", logits, reference, other), to_reference)


def test_beyond_the_k3_bound_the_unbiased_estimator_still_pulls_toward_the_reference() -> None:
    """Its gradient is w d everywhere. A gradient through w alone would push away where k3 is clamped."""
    distance = torch.tensor([-19.0, -5.0, -2.7, -2.5, 0.5, 12.0], dtype=torch.float64)
    logp = torch.full_like(distance, -3.0).requires_grad_()
    log_ratio = logp - torch.full_like(distance, -3.2)
    value = kl_penalty("unbiased", logp, logp.detach() - distance, log_ratio)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    torch.testing.assert_close(gradient, math.exp(0.2) * distance)
    assert value.max() <= 10 * math.exp(0.2) + 1e-9
