from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.algorithms.corrections import RATIO_BINS, RATIO_EDGES, effective_sample_size, staleness_sums
from outpace.learner.metrics import read_scalars
from support import examples

Row = tuple[float, float, float, float, bool, bool]

logprob = st.floats(-30.0, 0.0, width=32)
sign = st.sampled_from([0.0, 1.0, -2.0])
rows = st.lists(st.tuples(logprob, logprob, sign, sign, st.booleans(), st.booleans()), max_size=20)


def measure(table: list[Row], dtype: torch.dtype = torch.float64) -> tuple[dict[str, float], dict[str, float]]:
    """Measure rows of (log pi, log sampler, advantage, coefficient, kept, fresh)."""
    columns = torch.tensor(table, dtype=torch.float64).reshape(len(table), 6).unbind(1)
    numbers = [column.to(dtype) for column in columns[:4]]
    sums, maxima = staleness_sums(numbers[0].requires_grad_(), *numbers[1:], columns[4].bool(), columns[5].bool())
    return read_scalars(sums), read_scalars(maxima)


def plain(table: list[Row]) -> dict[str, float]:
    counts: Counter[str] = Counter(dict.fromkeys(RATIO_BINS, 0))
    totals = dict.fromkeys(("weight", "weight_sq", "kl", "kl_fresh"), 0.0)
    for logp, sampler, advantage, coefficient, kept, fresh in table:
        log_w = max(-20.0, min(20.0, logp - sampler))
        w = math.exp(log_w)
        totals["weight"] += w
        totals["weight_sq"] += w * w
        totals["kl"] += w - 1 - log_w
        totals["kl_fresh"] += (w - 1 - log_w) * fresh
        counts["tokens_fresh"] += fresh
        counts["masked"] += not kept
        for side, on_it in (("positive", advantage > 0), ("negative", advantage < 0)):
            counts[f"tokens_{side}"] += on_it
            counts[f"masked_{side}"] += on_it and not kept
            counts[f"clipped_{side}"] += on_it and kept and coefficient * advantage >= 0
        counts[RATIO_BINS[sum(w >= edge for edge in RATIO_EDGES)]] += 1
    return totals | {name: float(count) for name, count in counts.items()}


@examples(100)
@given(rows)
def test_sums_match_the_token_by_token_reference(table: list[Row]) -> None:
    sums, maxima = measure(table)
    expected = dict.fromkeys(sums, 0.0) | plain(table)
    assert sums == pytest.approx(expected, rel=1e-9, abs=1e-6)
    largest = max((math.exp(max(-20.0, min(20.0, row[0] - row[1]))) for row in table), default=0.0)
    assert maxima == pytest.approx({"ratio": largest})


@examples(100)
@given(rows, rows)
def test_sums_add_up_over_passes(first: list[Row], second: list[Row]) -> None:
    whole, of_first, of_second = (measure(table)[0] for table in (first + second, first, second))
    assert whole == pytest.approx({name: of_first[name] + of_second[name] for name in whole}, rel=1e-9, abs=1e-6)


@examples(100)
@given(rows)
def test_every_token_falls_into_exactly_one_histogram_bin(table: list[Row]) -> None:
    sums, _ = measure(table)
    assert sum(sums[name] for name in RATIO_BINS) == len(table)


def test_histogram_bins_are_named_by_their_edges() -> None:
    assert RATIO_BINS[0] == "ratio_below_0.5"
    assert RATIO_BINS[3] == "ratio_0.95_1.05"
    assert RATIO_BINS[-1] == "ratio_above_2"
    sums, _ = measure([(math.log(x), 0.0, 1.0, 1.0, True, True) for x in (0.1, 1.0, 1.04, 3.0)])
    assert {name: sums[name] for name in RATIO_BINS if sums[name]} == {
        "ratio_below_0.5": 1,
        "ratio_0.95_1.05": 2,
        "ratio_above_2": 1,
    }


def test_a_rejected_token_is_masked_and_not_clipped() -> None:
    sums, _ = measure([(-1.0, -1.0, 1.0, 0.0, False, True), (-1.0, -1.0, -1.0, 0.0, True, True)])
    assert [sums[name] for name in ("masked_positive", "clipped_positive")] == [1, 0]
    assert [sums[name] for name in ("masked_negative", "clipped_negative")] == [0, 1]


@pytest.mark.parametrize("sampler", [-1e30, -math.inf, -1e4, -1.0])
@pytest.mark.parametrize("logp", [-1e30, -1e4, 0.0])
def test_extreme_log_ratios_stay_finite(logp: float, sampler: float) -> None:
    sums, maxima = measure([(logp, sampler, 1.0, 1.0, True, False)] * 3, torch.float32)
    assert all(math.isfinite(x) for x in [*sums.values(), *maxima.values()])
    assert sums["kl"] >= 0
    assert 0 <= effective_sample_size(sums, 3) <= 1 + 1e-12


def test_the_effective_sample_size_is_1_for_equal_weights_and_one_token_for_a_dominant_weight() -> None:
    def size(log_weights: list[float]) -> float:
        table: list[Any] = [(x, 0.0, 1.0, 1.0, True, True) for x in log_weights]
        return effective_sample_size(measure(table)[0], len(table))

    assert size([0.3, 0.3, 0.3]) == pytest.approx(1.0)
    assert size([0.0, -20.0, -20.0, -20.0]) == pytest.approx(0.25, rel=1e-6)
    assert size([]) == 1.0
