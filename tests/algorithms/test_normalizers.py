"""Batch-wide advantage normalization: independent references, invariance to order, and constant batches."""

from __future__ import annotations

import random
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.algorithms import NORMALIZERS
from outpace.algorithms.advantages import BatchAdvantages, Doubles

VALUES = st.floats(-100, 100)
BATCHES = st.lists(st.lists(VALUES, max_size=5), max_size=6)
BATCH_NORMALIZERS = ["batch_std", "whiten_tokens", "whiten_sequences"]


def normalize(name: str, rows: list[list[float]], rewards: list[float] | None = None, **chosen: Any) -> list[Doubles]:
    signal = BatchAdvantages(
        [np.array(row, dtype=np.float64) for row in rows], np.array(rewards or [], dtype=np.float64)
    )
    result: list[Doubles] = NORMALIZERS.find(name).function(signal, **chosen)
    return result


def expect(found: list[Doubles], expected: list[list[float]]) -> None:
    assert [row.shape for row in found] == [(len(row),) for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(row, wanted, rtol=1e-9, atol=1e-8)


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def whitened(rows: list[list[float]], over: list[float], epsilon: float = 1e-4) -> list[list[float]]:
    if deviation(over) == 0:
        return [[0.0] * len(row) for row in rows]
    return [[(value - statistics.fmean(over)) / (deviation(over) + epsilon) for value in row] for row in rows]


@settings(deadline=None)
@given(BATCHES)
def test_whitening_by_token_weights_every_token_equally(rows: list[list[float]]) -> None:
    expect(normalize("whiten_tokens", rows), whitened(rows, [value for row in rows for value in row]))


@settings(deadline=None)
@given(BATCHES)
def test_whitening_by_sequence_weights_every_row_equally(rows: list[list[float]]) -> None:
    expect(normalize("whiten_sequences", rows), whitened(rows, [statistics.fmean(row) for row in rows if row]))


@settings(deadline=None)
@given(BATCHES, st.lists(VALUES, min_size=1, max_size=8))
def test_batch_std_divides_by_the_standard_deviation_of_all_rewards(
    rows: list[list[float]], rewards: list[float]
) -> None:
    scale = deviation(rewards)
    expected = [[value / (scale + 1e-4) if scale else 0.0 for value in row] for row in rows]
    expect(normalize("batch_std", rows, rewards), expected)


def test_normalizers_match_golden_values() -> None:
    rows = [[1.0, 1.0, 1.0], [-1.0]]
    expect(normalize("whiten_tokens", rows, std_epsilon=1.0), [[0.25, 0.25, 0.25], [-0.75]])
    expect(normalize("whiten_sequences", rows, std_epsilon=2.0 - 2**0.5), [[0.5, 0.5, 0.5], [-0.5]])
    expect(normalize("batch_std", rows, [1.0, 0.0, -1.0], std_epsilon=1.0), [[0.5, 0.5, 0.5], [-0.5]])


@pytest.mark.parametrize("name", BATCH_NORMALIZERS)
@settings(deadline=None)
@given(rows=BATCHES, rewards=st.lists(VALUES, min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_the_order_of_rows_does_not_change_the_result(
    name: str, rows: list[list[float]], rewards: list[float], seed: int
) -> None:
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    straight = normalize(name, rows, rewards)
    shuffled = normalize(name, [rows[i] for i in order], rewards[::-1])
    for place, i in enumerate(order):
        np.testing.assert_allclose(shuffled[place], straight[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BATCH_NORMALIZERS)
@pytest.mark.parametrize("rows", [[], [[]], [[0.1]], [[0.1] * 3, [0.1] * 4], [[-2.0]] * 7])
def test_a_constant_batch_normalizes_to_zero(name: str, rows: list[list[float]]) -> None:
    expect(normalize(name, rows, [0.1] * len(rows)), [[0.0] * len(row) for row in rows])


def test_the_normalizer_none_changes_nothing() -> None:
    expect(normalize("none", [[1.0, 2.0], []]), [[1.0, 2.0], []])
