from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms import dense, reference
from algorithms.reference import MASK_CASES, POLICY_LOSS_CASES, WEIGHT_CASES, Pass, Token, lay_out, masks_of, passes
from outpace.algorithms import MASKS, POLICY_LOSSES
from outpace.algorithms.corrections import correction_weights, keep_mask, m2po
from outpace.algorithms.losses import Tokens, aggregation_weights
from outpace.algorithms.registry import Aggregation, ConfiguredFunction, MaskRegistration
from outpace.config.algorithm import function_parameters
from outpace.errors import BadInput
from support import examples

log_ratios = st.lists(st.sampled_from([0.0, 0.25, -0.25, 0.5]) | st.floats(-3, 3), max_size=30)


def log_rho(tokens: Tokens) -> Tensor:
    return tokens.old_logp_N - tokens.sampler_logp_N


def with_ratios(sequences: list[list[float]], advantage: float = 1.0) -> Tokens:
    """Tokens with these ratios of old policy to sampler."""
    return lay_out([[Token(-1.0, math.log(x), 0.0, advantage) for x in sequence] for sequence in sequences])


def kept(tokens: Tokens, name: str, **knobs: float) -> list[bool]:
    return [bool(x) for x in keep_mask(tokens, log_rho(tokens), masks_of({name: knobs}))]


def test_every_mask_has_the_settings_and_defaults_of_the_config() -> None:
    assert {name: dict(registration.parameters) for name, registration in MASKS.built_in.items()} == {
        "token": {"token_low": 0.5, "token_high": 5.0},
        "sequence": {"sequence_low": 0.5, "sequence_high": 2.0},
        "geometric": {"geometric_low": 0.99, "geometric_high": 1.01},
        "veto": {"veto_below": 1e-4},
        "opsm": {"opsm_delta": 0.1},
        "m2po": {"m2po_limit": 0.04},
    }
    settings = {key for registration in MASKS.built_in.values() for key in registration.parameters}
    assert settings | {"cap", "floor"} == set(function_parameters("correction"))


def test_only_m2po_needs_the_whole_batch() -> None:
    assert [name for name, registration in MASKS.built_in.items() if registration.scope == "batch"] == ["m2po"]


def test_a_mask_that_does_not_decide_about_every_token_is_refused() -> None:
    tokens = with_ratios([[1.0, 2.0]])
    for returned in (torch.ones(1).bool(), True):
        careless = ConfiguredFunction(MaskRegistration(lambda tokens, log_rho_N, r=returned: r, {}, alias="mine"), {})
        with pytest.raises(BadInput, match=r"^correction\.masks: mine"):
            keep_mask(tokens, log_rho(tokens), [careless])


@pytest.mark.parametrize("knobs", WEIGHT_CASES)
@examples(50)
@given(sequences=passes)
def test_weights_match_the_token_by_token_reference(knobs: dict[str, Any], sequences: Pass) -> None:
    tokens = lay_out(sequences)
    expected_N = reference.by_sequence(reference.weights, sequences, **knobs)
    np.testing.assert_allclose(correction_weights(tokens, log_rho(tokens), **knobs), expected_N, rtol=1e-12)


@pytest.mark.parametrize(("name", "knobs"), MASK_CASES)
@examples(50)
@given(sequences=passes)
def test_masks_match_the_token_by_token_reference(name: str, knobs: dict[str, float], sequences: Pass) -> None:
    expected_N = reference.by_sequence(getattr(reference, name), sequences, **knobs)
    assert kept(lay_out(sequences), name, **knobs) == [bool(x) for x in expected_N]


@examples(100)
@given(passes)
def test_several_masks_keep_the_intersection(sequences: Pass) -> None:
    tokens = lay_out(sequences)
    single = [kept(tokens, name, **knobs) for name, knobs in MASK_CASES]
    together = keep_mask(tokens, log_rho(tokens), masks_of(dict(MASK_CASES)))
    assert together.tolist() == [all(column) for column in zip(*single, strict=True)]
    assert keep_mask(tokens, log_rho(tokens), []).tolist() == [True] * len(together)


PRODUCTS: list[tuple[dict[str, Any], dict[str, dict[str, float]]]] = [
    *((knobs, {}) for knobs in WEIGHT_CASES),
    *(({"level": "none", "floor": 0.0, "cap": None}, {name: knobs}) for name, knobs in MASK_CASES),
    ({"level": "token", "floor": 0.0, "cap": 1.7}, {"geometric": dict(MASK_CASES)["geometric"]}),
]
AGGREGATIONS: list[Aggregation] = ["token_mean", "seq_mean_token_mean"]


@pytest.mark.parametrize(("name", "knobs"), POLICY_LOSS_CASES)
@examples(15)
@given(sequences=passes)
def test_gradients_of_every_corrected_policy_loss_match_autograd_of_the_plain_product(
    name: str, knobs: dict[str, Any], sequences: Pass
) -> None:
    for weighting, masks in PRODUCTS:
        for aggregation in AGGREGATIONS:
            tokens, padded = lay_out(sequences), dense.pad(sequences)
            factor_N = correction_weights(tokens, log_rho(tokens), **weighting) * keep_mask(
                tokens, log_rho(tokens), masks_of(masks)
            )
            loss_N = POLICY_LOSSES.built_in[name].function(tokens, **knobs) * factor_N
            (gradient_N,) = torch.autograd.grad(
                (loss_N * aggregation_weights(aggregation, tokens)).sum(), tokens.logp_N
            )

            plain = dense.POLICY_LOSSES[name](padded, **knobs) * dense.weights(padded, **weighting) * padded.real_S_T
            for mask, bounds in masks.items():
                plain = plain * dense.MASKS[mask](padded, **bounds)
            if aggregation == "seq_mean_token_mean":
                plain = plain / padded.real_S_T.sum(1, keepdim=True).clamp(min=1)
            np.testing.assert_allclose(gradient_N, dense.gradient(plain.sum(), padded), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, _ in MASK_CASES])
@examples(100)
@given(sequences=passes)
def test_masks_do_not_depend_on_the_order_or_splitting_of_sequences(name: str, sequences: Pass) -> None:
    knobs = dict(MASK_CASES)[name]
    whole = kept(lay_out(sequences), name, **knobs)
    separate = [kept(lay_out([sequence]), name, **knobs) for sequence in sequences]
    reversed_order = kept(lay_out(sequences[::-1]), name, **knobs)
    assert whole == [x for each in separate for x in each]
    assert reversed_order == [x for each in separate[::-1] for x in each]


def test_bounds_are_inclusive() -> None:
    tokens = with_ratios([[0.5], [5.0], [0.499], [5.001]])
    assert kept(tokens, "token") == [True, True, False, False]
    tokens = with_ratios([[2.0, 1.0], [0.5], [1.5, 1.5]])
    assert kept(tokens, "sequence") == [True, True, True, False, False]
    assert kept(with_ratios([[1.01], [0.99], [1.011]]), "geometric") == [True, True, False]
    assert kept(with_ratios([[1e-4, 3.0], [0.99e-4, 3.0]]), "veto") == [True, True, False, False]
    tokens = lay_out([[Token(-1.5, -1, -1, -1.0)]])
    assert kept(tokens, "opsm", opsm_delta=0.5) == [True]
    assert kept(tokens, "opsm", opsm_delta=0.499) == [False]


def test_a_lower_bound_of_zero_rejects_no_small_ratio() -> None:
    assert kept(with_ratios([[1e-300, 6.0]]), "token", token_low=0.0) == [True, False]


def test_opsm_uses_the_current_policy_and_the_advantage_of_each_token() -> None:
    sequence = [Token(-2.0, -1.0, -1.0, advantage) for advantage in (-1.0, 0.0, 1.0)]
    assert kept(lay_out([sequence]), "opsm") == [False, True, True]


def test_corrections_carry_no_gradient_even_when_their_ratio_does() -> None:
    tokens = lay_out([[Token(-1.2, -1.0, -1.0, 1.0)]])
    log_ratio_N = tokens.logp_N - tokens.sampler_logp_N
    assert log_ratio_N.requires_grad
    for level in ("none", "token", "sequence"):
        assert not correction_weights(tokens, log_ratio_N, level, cap=2.0).requires_grad  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_give_finite_weights_and_are_rejected(dtype: torch.dtype) -> None:
    extreme = [-math.inf, -1e30, -1e4, 1e4, 1e30, math.inf]
    sequences = [[Token(-1.0, x, 0.0, -1.0)] for x in extreme] + [[Token(-1.0, x, 0.0, -1.0) for x in extreme]]
    tokens = lay_out(sequences, dtype)
    for level in ("token", "sequence"):
        weights_N = correction_weights(tokens, log_rho(tokens), level, cap=0)  # type: ignore[arg-type]
        assert weights_N.dtype == dtype
        assert weights_N.isfinite().all()
    assert kept(tokens, "token") == [False] * 12
    assert kept(tokens, "sequence")[:6] == [False] * 6
    assert kept(tokens, "geometric")[:6] == [False] * 6
    assert kept(tokens, "veto") == [False] * 3 + [True] * 3 + [False] * 6


def test_empty_passes_give_empty_weights_and_masks() -> None:
    for sequences in ([], [[]], [[], []]):
        tokens = lay_out(sequences)
        assert correction_weights(tokens, log_rho(tokens), "sequence", cap=2.0).shape == (0,)
        assert keep_mask(tokens, log_rho(tokens), masks_of(dict(MASK_CASES))).shape == (0,)
    assert m2po(np.zeros(0)).shape == (0,)


@examples(100)
@given(log_ratios, st.sampled_from([0.01, 0.04, 0.3]))
def test_m2po_matches_removing_the_largest_values_one_by_one(values: list[float], limit: float) -> None:
    assert m2po(np.array(values), m2po_limit=limit).tolist() == reference.m2po(values, limit)


@examples(100)
@given(log_ratios.filter(len), st.randoms())
def test_m2po_does_not_depend_on_the_order_of_tokens_and_keeps_at_least_one(values: list[float], random: Any) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    kept_N = m2po(np.array(values))
    assert m2po(np.array(values)[order]).tolist() == kept_N[order].tolist()
    assert kept_N.any()


def test_m2po_rejects_equal_ratios_together_whatever_their_sign() -> None:
    assert m2po(np.array([0.1, 0.5, -0.5, 0.1])).tolist() == [True, False, False, True]
    assert m2po(np.array([-0.5, 0.5])).tolist() == [True, True]  # the smallest values are always kept
    assert m2po(np.array([0.1, -np.inf, np.inf])).tolist() == [True, False, False]


def test_m2po_requires_a_mean_strictly_below_its_limit() -> None:
    assert m2po(np.array([0.0, 0.5]), m2po_limit=0.125).tolist() == [True, False]
    assert m2po(np.array([0.0, 0.5]), m2po_limit=0.126).tolist() == [True, True]
