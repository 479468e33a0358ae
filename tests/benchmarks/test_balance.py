from __future__ import annotations

import pytest
from benchmarks.balance import SHARINGS, compare, lockstep, make_rows


def test_balanced_shares_keep_the_busiest_rank_nearer_to_the_mean_than_rows_in_turn() -> None:
    rows = make_rows(32, 1.2, seed=0)
    figures = {name: compare(rows, 4, sharing) for name, sharing in SHARINGS.items()}
    assert figures["balanced"][0] == min(busiest for busiest, *_ in figures.values())
    for busiest, total, by_row, by_length in figures.values():
        assert busiest >= total >= 1.0 - 1e-9
        assert min(by_row, by_length) >= 1.0 - 1e-9


def test_ranks_in_lockstep_wait_for_the_busiest_of_every_pass() -> None:
    assert lockstep([[3.0, 1.0], [2.0, 4.0], []]) == pytest.approx(7.0)
