"""Advantage estimators: golden values, independent references in plain arithmetic, and the degenerate cases."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outpace.algorithms import ADVANTAGES, NORMALIZERS, advantages
from outpace.algorithms.advantages import Doubles, GroupReturns, is_uniform, sample_std

RETURNS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12)
SEVERAL_RETURNS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)
NEED_PEERS = [name for name, registration in ADVANTAGES.built_in.items() if getattr(registration, "needs_peers", False)]


def returns_of(returns: list[float], lengths: list[float] | None = None, **rest: Any) -> GroupReturns:
    return GroupReturns(np.array(returns, dtype=np.float64), np.array(lengths or [1.0] * len(returns)), **rest)


def estimate(name: str, group: GroupReturns, **chosen: Any) -> Doubles:
    result: Doubles = ADVANTAGES.find(name).function(group, **chosen)
    return result


# -------------------------------------------------------------------------------------------------------- golden values


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("none", 1.0, 0.0),
        ("dr_grpo", 0.5, -0.5),
        ("grpo", 0.707007, -0.707007),
        ("rloo", 1.0, -1.0),
        ("reinforce_pp", 1.0, 0.0),
        ("reinforce_pp_baseline", 0.5, -0.5),
        ("maxrl", 1.0, -1.0),
        ("pass_at_k", 1.0, 0.0),
        ("gdpo", 0.707007, -0.707007),
        ("gae", 1.0, 0.0),
    ],
)
def test_one_right_and_one_wrong_attempt_match_golden_values(name: str, first: float, second: float) -> None:
    assert estimate(name, returns_of([1.0, 0.0])).tolist() == pytest.approx([first, second], abs=3e-6)


def test_the_baseline_of_opo_is_weighted_by_length() -> None:
    assert estimate("opo", returns_of([1.0, 0.0], [3.0, 2.0])).tolist() == pytest.approx([0.4, -0.6])


# ----------------------------------------------------------------------------------------------------------- references


@settings(deadline=None)
@given(SEVERAL_RETURNS)
def test_grpo_divides_by_the_sample_standard_deviation(values: list[float]) -> None:
    middle, deviation = statistics.fmean(values), statistics.stdev(values)
    expected = [(value - middle) / (deviation + 1e-4) for value in values]
    np.testing.assert_allclose(estimate("grpo", returns_of(values)), expected, rtol=1e-9, atol=1e-8)


@settings(deadline=None)
@given(SEVERAL_RETURNS)
def test_rloo_compares_with_the_mean_of_the_others(values: list[float]) -> None:
    expected = [value - statistics.fmean(values[:i] + values[i + 1 :]) for i, value in enumerate(values)]
    np.testing.assert_allclose(estimate("rloo", returns_of(values)), expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(SEVERAL_RETURNS)
def test_dr_grpo_and_reinforce_pp_baseline_subtract_the_mean(values: list[float]) -> None:
    expected = [value - statistics.fmean(values) for value in values]
    np.testing.assert_allclose(estimate("dr_grpo", returns_of(values)), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(
        estimate("reinforce_pp_baseline", returns_of(values)), estimate("dr_grpo", returns_of(values))
    )


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_maxrl_divides_by_the_mean(values: list[float]) -> None:
    middle = statistics.fmean(values)
    expected = [(value - middle) / (middle + 1e-6) for value in values]
    np.testing.assert_allclose(estimate("maxrl", returns_of(values)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("values", [[0.0, 0.0], [-1.0, 0.0], [1.0, -1.0], [-3.0, 1.0]])
def test_maxrl_gives_zero_advantages_where_the_mean_is_not_positive(values: list[float]) -> None:
    assert estimate("maxrl", returns_of(values)).tolist() == [0.0, 0.0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 500)), min_size=2, max_size=12))
def test_opo_subtracts_the_length_weighted_mean_return(attempts: list[tuple[float, int]]) -> None:
    values, lengths = [value for value, _ in attempts], [float(length) for _, length in attempts]
    assume(sum(lengths) > 0)
    tokens = [value for value, length in attempts for _ in range(length)]
    expected = [value - statistics.fmean(tokens) for value in values]
    np.testing.assert_allclose(estimate("opo", returns_of(values, lengths)), expected, rtol=1e-9, atol=1e-8)


def test_opo_of_attempts_without_tokens_subtracts_the_plain_mean() -> None:
    assert estimate("opo", returns_of([1.0, 0.0, 0.5], [0.0, 0.0, 0.0])).tolist() == [0.5, -0.5, 0.0]


# ----------------------------------------------------------------------------------------------------------------- gdpo


def test_gdpo_normalizes_each_reward_function_separately_before_weighting() -> None:
    parts = {"right": np.array([1.0, 0.0, 0.0]), "length": np.array([100.0, 300.0, 200.0])}
    weighted = returns_of([0.0] * 3, parts=parts, weights={"right": 2.0})
    right, length = (estimate("grpo", returns_of(list(values))) for values in parts.values())
    np.testing.assert_allclose(estimate("gdpo", weighted), 2 * right + length, rtol=1e-12)


def test_gdpo_distinguishes_attempts_whose_rewards_have_the_same_sum() -> None:
    parts = {"a": np.array([1.0, 0.0, 0.0]), "b": np.array([0.0, 1.0, 1.0])}
    apart = estimate("gdpo", returns_of([1.0, 1.0, 1.0], parts=parts, weights={"b": 2.0}))
    assert apart[0] < 0 < apart[1] == apart[2]


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(-100, 100)), min_size=1, max_size=8))
def test_gdpo_skips_a_reward_for_attempts_to_which_it_does_not_apply(values: list[float | None]) -> None:
    column = np.array([math.nan if value is None else value for value in values])
    found = estimate("gdpo", returns_of([0.0] * len(values), parts={"some": column}))
    applied = [value for value in values if value is not None]
    expected = iter(estimate("grpo", returns_of(applied)).tolist() if len(applied) > 1 else [0.0] * len(applied))
    np.testing.assert_allclose(found, [0.0 if value is None else next(expected) for value in values], rtol=1e-12)


# ------------------------------------------------------------------------------------------------------------ pass at k


def by_enumeration(values: list[float], k: int) -> list[float]:
    """Return, for each i, the mean of max(S) - max(S without i) over all subsets S of size k that contain i."""
    leads: list[list[float]] = [[] for _ in values]
    for chosen in itertools.combinations(range(len(values)), k):
        for i in chosen:
            rest = max(values[j] for j in chosen if j != i)
            leads[i].append(max(values[j] for j in chosen) - rest)
    return [statistics.fmean(lead) for lead in leads]


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10) | st.sampled_from([0.0, 1.0]), min_size=2, max_size=7), st.integers(2, 7))
def test_pass_at_k_is_the_mean_lead_over_all_subsets(values: list[float], k: int) -> None:
    k = min(k, len(values))
    np.testing.assert_allclose(
        estimate("pass_at_k", returns_of(values), k=k), by_enumeration(values, k), rtol=1e-9, atol=1e-12
    )


@settings(deadline=None)
@given(SEVERAL_RETURNS, st.integers(0, 3))
def test_with_k_of_at_least_the_group_size_only_the_best_attempt_gets_its_lead(values: list[float], more: int) -> None:
    best = max(range(len(values)), key=lambda i: values[i])
    first, second = sorted(values)[-1], sorted(values)[-2]
    expected = [first - second if i == best else 0.0 for i in range(len(values))]
    for k in (None, len(values) + more):
        assert estimate("pass_at_k", returns_of(values), k=k).tolist() == pytest.approx(expected)


@settings(deadline=None)
@given(SEVERAL_RETURNS)
def test_pass_at_one_is_rloo(values: list[float]) -> None:
    np.testing.assert_array_equal(estimate("pass_at_k", returns_of(values), k=1), estimate("rloo", returns_of(values)))


@settings(deadline=None)
@given(st.floats(0.1, 0.9), st.integers(2, 4), st.integers(0, 2))
def test_the_expected_pass_at_k_gradient_is_the_derivative_of_pass_at_k(success_rate: float, k: int, more: int) -> None:
    """For attempts that succeed with probability p, pass@k = 1 - (1 - p)^k. In expectation over all outcomes of a
    group, the mean of advantage times score is its derivative divided by k."""
    size = k + more
    expected = (1 - success_rate) ** (k - 1)
    found = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        probability = math.prod(success_rate if won else 1 - success_rate for won in outcome)
        scores = np.array([1 / success_rate if won else -1 / (1 - success_rate) for won in outcome])
        found += probability * float((estimate("pass_at_k", returns_of(list(outcome)), k=k) * scores).mean())
    assert found == pytest.approx(expected, rel=1e-9)


# ----------------------------------------------------------------------------------------------------- degenerate cases


@pytest.mark.parametrize("name", list(ADVANTAGES.built_in))
def test_no_attempts_give_no_advantages(name: str) -> None:
    assert estimate(name, returns_of([])).shape == (0,)


@pytest.mark.parametrize("name", NEED_PEERS)
@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
def test_a_lone_attempt_or_equal_returns_get_exactly_zero_advantage(name: str, size: int) -> None:
    for value in (0.1, -2.5, 0.0, 1e12):
        equal = returns_of([value] * size, [float(i + 1) for i in range(size)])
        assert estimate(name, equal).tolist() == [0.0] * size


@pytest.mark.parametrize("name", list(ADVANTAGES.built_in))
@settings(deadline=None)
@given(values=st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=6))
def test_advantages_are_always_finite_and_the_returns_are_not_modified(name: str, values: list[float]) -> None:
    group = returns_of(values)
    found = estimate(name, group)
    assert found.shape == (len(values),)
    assert np.isfinite(found).all()
    assert group.returns_G.tolist() == values


@pytest.mark.parametrize(
    "name", [name for name, registration in ADVANTAGES.built_in.items() if getattr(registration, "additive", 0)]
)
@settings(deadline=None)
@given(values=SEVERAL_RETURNS)
def test_an_additive_estimator_subtracts_a_baseline_from_the_return(name: str, values: list[float]) -> None:
    """The baseline is equal for all attempts or independent of the attempt's own return; token credit relies on it."""
    first = estimate(name, returns_of(values)) - np.array(values)
    if name == "rloo":
        moved = [values[0] + 7.0, *values[1:]]
        second = estimate(name, returns_of(moved)) - np.array(moved)
        assert first[0] == pytest.approx(second[0], abs=1e-9)
    else:
        np.testing.assert_allclose(first, first[0], atol=1e-9)


def test_every_estimator_declares_an_existing_normalizer() -> None:
    wanted = {
        name: registration.normalizer
        for name, registration in ADVANTAGES.built_in.items()
        if hasattr(registration, "normalizer")
    }
    assert set(wanted.values()) <= set(NORMALIZERS.built_in)
    assert {name for name, normalizer in wanted.items() if normalizer != "none"} == {
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gdpo",
        "gae",
    }


# -------------------------------------------------------------------------------------------- sample standard deviation


@settings(deadline=None)
@given(SEVERAL_RETURNS)
def test_sample_std_is_the_sample_standard_deviation_in_any_order(values: list[float]) -> None:
    found = sample_std(np.array(values))
    assert found == pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-12)
    assert found == sample_std(np.array(values[::-1]))


def test_sample_std_of_huge_and_tiny_values_neither_overflows_nor_vanishes() -> None:
    assert sample_std(np.array([1e200, -1e200])) == pytest.approx(math.sqrt(2) * 1e200)
    assert sample_std(np.array([1e-200, -1e-200])) == pytest.approx(math.sqrt(2) * 1e-200)
    assert sample_std(np.array([3.0])) == sample_std(np.zeros(0)) == 0.0


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_rewards_that_are_equal_up_to_rounding_are_uniform(size: int) -> None:
    rounded = [float(np.float32(0.1))] * (size - 1) + [0.1]
    assert is_uniform(rounded, tolerance=1e-6)
    assert not is_uniform(rounded, tolerance=0.0)


def test_one_different_reward_makes_a_group_non_uniform() -> None:
    assert not is_uniform([0.0] * 7 + [1.0], tolerance=1e-6)
    assert is_uniform([], tolerance=0.0)


def test_each_registered_estimator_is_the_function_of_that_name() -> None:
    for name, registration in ADVANTAGES.built_in.items():
        assert registration.function is getattr(advantages, name)
