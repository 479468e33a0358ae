"""The sweep over learner steps: its rows and its FLOP formula."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.learner_growth import Case, make_rows, measure
from rich.console import Console


def test_rows_of_a_group_share_their_prompt_only() -> None:
    rows = make_rows(Case("groups", "1M", rows=4, row_tokens=8, group_size=2))
    first, second, third, _ = (row.tokens for row in rows)
    assert np.array_equal(first[:4], second[:4])
    assert not np.array_equal(first[4:], second[4:])
    assert not np.array_equal(first[:4], third[:4])


def test_the_prompt_of_a_group_counts_once_in_its_flop() -> None:
    alone = Case("groups", "1M", rows=8, row_tokens=64, group_size=1).flop(10**9)
    grouped = Case("groups", "1M", rows=8, row_tokens=64, group_size=8).flop(10**9)
    assert alone == pytest.approx(6e9 * 8 * 64, rel=1e-3)
    assert grouped / alone == pytest.approx((1 + 8) / 16, rel=1e-3)


@pytest.mark.slow
def test_the_smallest_model_is_measured() -> None:
    found = list(measure(["1M"], 1, {}, Console(quiet=True)))
    assert {each.case.sweep for each in found} == {"rows", "groups"}
    assert all(each.seconds > 0 and each.peak_bytes > 0 for each in found)
