"""Golden values of every formula to six decimal places, for one group of two sequences with three and two tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.reference import masks_of
from outpace.algorithms import losses
from outpace.algorithms.corrections import correction_weights, keep_mask, m2po, opsm, staleness_sums
from outpace.algorithms.losses import Tokens, aggregation_weights, loss_denominator
from outpace.algorithms.registry import Aggregation
from outpace.learner.metrics import read_scalars


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


CURRENT = doubles(-0.5, -1.0, -2.0, -0.3, -1.5)
PROXIMAL = doubles(-0.6, -1.0, -1.7, -0.3, -1.2)
SAMPLER = doubles(-0.7, -0.9, -2.9, -0.35, -1.0)
REFERENCE = doubles(-0.8, -1.1, -1.9, -0.5, -1.4)
ADVANTAGES = doubles(1, 1, 1, -1, -1)

PROX = Tokens(CURRENT, PROXIMAL, SAMPLER, ADVANTAGES, torch.tensor([0, 0, 0, 1, 1]), 2)
ROLLOUT = Tokens(CURRENT, SAMPLER, SAMPLER, ADVANTAGES, torch.tensor([0, 0, 0, 1, 1]), 2)
LOG_RHO = PROXIMAL - SAMPLER


def golden(expected: float | list[float]) -> object:
    return pytest.approx(expected, abs=6e-7)


def aggregate(loss_N: Tensor, aggregation: Aggregation = "token_mean") -> float:
    below = loss_denominator(aggregation, tokens=5, sequences=2, max_completion_tokens=4)
    return (loss_N * aggregation_weights(aggregation, PROX)).sum().item() / below


def ppo() -> Tensor:
    return losses.ppo(PROX, clip_low=0.2, clip_high=0.28)


def test_ratios_match_golden_values() -> None:
    assert PROX.ratio_N.tolist() == golden([1.105171, 1.0, 0.740818, 1.0, 0.740818])
    assert ROLLOUT.ratio_N.tolist() == golden([1.221403, 0.904837, 2.459603, 1.051271, 0.606531])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", -0.209198),
        ("seq_mean_token_mean", -0.024332),
        ("dr_grpo", -0.130749),
        ("seq_mean_token_sum", -0.522995),
    ],
)
def test_ppo_matches_golden_values_under_every_aggregation(aggregation: Aggregation, expected: float) -> None:
    assert ppo().tolist() == golden([-1.105171, -1.0, -0.740818, 1.0, 0.8])
    assert aggregate(ppo(), aggregation) == golden(expected)


def test_a_dual_clip_of_three_changes_nothing_here() -> None:
    assert torch.equal(losses.ppo(PROX, clip_low=0.2, clip_high=0.28, dual_clip=3.0), ppo())


def test_the_other_policy_losses_relative_to_the_proximal_policy_match_golden_values() -> None:
    gspo_N = losses.gspo(PROX)
    assert gspo_N.tolist() == golden([-0.935507] * 3 + [0.9997] * 2)
    assert aggregate(gspo_N, "seq_mean_token_mean") == golden(0.032097)
    assert aggregate(losses.cispo(PROX)) == golden(0.324599)
    assert aggregate(losses.sapo(PROX), "seq_mean_token_mean") == golden(-0.086573)
    assert losses.gmpo(PROX).tolist() == golden([-0.935507] * 3 + [0.860708] * 2)
    assert (losses.vespo(PROX) / losses.reinforce(PROX)).tolist() == golden([1.154662] * 3 + [0.682743] * 2)


def test_policy_losses_relative_to_the_sampler_match_golden_values() -> None:
    assert aggregate(losses.truncated_is(ROLLOUT, cap=1.2)) == golden(0.535932)
    assert aggregate(losses.truncated_is(ROLLOUT, cap=5.0)) == golden(1.041914)
    assert aggregate(losses.dppo(ROLLOUT, ratio_penalty=1e-3)) == golden(-0.585386)


def test_truncated_weights_match_golden_values() -> None:
    raw_N = correction_weights(PROX, LOG_RHO, "token", cap=0)
    assert raw_N.tolist() == golden([1.105171, 0.904837, 3.320117, 1.051271, 0.818731])
    assert aggregate(ppo() * correction_weights(PROX, LOG_RHO, "token", cap=2.0)) == golden(-0.380324)
    by_sequence_N = correction_weights(PROX, LOG_RHO, "sequence", cap=0)
    assert by_sequence_N.tolist() == golden([3.320117] * 3 + [0.860708] * 2)


def test_rejected_tokens_stay_in_the_denominator() -> None:
    kept_N = keep_mask(PROX, LOG_RHO, masks_of({"token": {"token_low": 0.5, "token_high": 2.0}}))
    assert aggregate(ppo() * correction_weights(PROX, LOG_RHO, "token", cap=0) * kept_N) == golden(-0.083997)


@pytest.mark.parametrize(
    ("low", "high", "kept"), [(0.927, 1.4919, [1, 1]), (0.9278, 1.4919, [1, 0]), (0.927, 1.4918, [0, 1])]
)
def test_the_geometric_means_are_1_491825_and_0_927743(low: float, high: float, kept: list[int]) -> None:
    kept_N = keep_mask(PROX, LOG_RHO, masks_of({"geometric": {"geometric_low": low, "geometric_high": high}}))
    assert kept_N.tolist() == [kept[0]] * 3 + [kept[1]] * 2


@pytest.mark.parametrize(("delta", "second"), [(0.1, False), (0.224, False), (0.226, True)])
def test_off_policy_sequence_masking_drops_the_second_sequence_at_0_225(delta: float, second: bool) -> None:
    assert opsm(PROX, LOG_RHO, opsm_delta=delta).tolist() == [True] * 3 + [second] * 2


def test_m2po_drops_only_the_third_token() -> None:
    assert m2po(LOG_RHO.numpy(), m2po_limit=0.04).tolist() == [True, True, False, True, True]
    assert m2po(LOG_RHO.numpy(), m2po_limit=0.3006).tolist() == [True] * 5
    assert m2po(LOG_RHO.numpy(), m2po_limit=0.0156).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.08), ("k2", 0.016), ("k3", 0.014946), ("unbiased", 0.015268)]
)
def test_reference_kl_matches_golden_values(estimator: losses.KlEstimator, expected: float) -> None:
    found_N = losses.kl_penalty(estimator, CURRENT, REFERENCE, PROX.log_ratio_N)
    assert aggregate(found_N) == golden(expected)


def test_sampler_mismatch_matches_golden_values() -> None:
    kept_N, fresh_N = torch.ones(5).bool(), torch.tensor([1, 0, 0, 1, 0]).bool()
    sums, maxima = map(read_scalars, staleness_sums(CURRENT, SAMPLER, ADVANTAGES, -ADVANTAGES, kept_N, fresh_N))
    w = np.array([1.221403, 0.904837, 2.459603, 1.051271, 0.606531])
    assert sums["weight"] == pytest.approx(w.sum(), abs=3e-6)
    assert sums["weight_sq"] == pytest.approx((w**2).sum(), abs=2e-5)
    assert sums["kl"] == pytest.approx((w - 1).sum() - 0.55, abs=3e-6)  # log w sums to 0.55
    assert sums["kl_fresh"] == pytest.approx(math.exp(0.2) + math.exp(0.05) - 2.25)
    assert maxima["ratio"] == golden(2.459603)
