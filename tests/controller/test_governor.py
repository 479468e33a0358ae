from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.config.algorithm import GovernorConfig
from outpace.controller.pacing import Governor, GovernorState

GOOD, BAD = (0.9, 0.01), (0.2, 0.01)


def governor(max_lag: int = 4, min_lag: int = 0, patience: int = 2, state: GovernorState | None = None) -> Governor:
    return Governor(
        GovernorConfig(ess_min=0.5, kl_max=0.1, patience=patience, min_lag=min_lag), max_lag, state or GovernorState()
    )


class Run:
    """Batches of one group each, trained `delay` groups after they were admitted."""

    def __init__(self, subject: Governor, delay: int = 0) -> None:
        self.governor = subject
        self.delay = delay
        self.group = 0

    def batches(self, *fits: tuple[float, float]) -> list[int]:
        """Record these batches and return the lag after each."""
        lags = []
        for fit in fits:
            self.governor.record(*fit, oldest=self.group, next_group=self.group + 1 + self.delay)
            self.group += 1
            lags.append(self.governor.lag)
        return lags


def test_the_lag_starts_at_max_lag_and_good_batches_keep_it_there() -> None:
    assert Run(governor(max_lag=3)).batches(*[GOOD] * 5) == [3] * 5


@pytest.mark.parametrize("bad", [(0.49, 0.0), (1.0, 0.11), (math.nan, 0.0), (1.0, math.nan), (0.0, math.inf)])
def test_a_low_sample_size_a_high_kl_and_non_finite_metrics_lower_the_lag(bad: tuple[float, float]) -> None:
    assert Run(governor()).batches(bad) == [3]


def test_metrics_exactly_at_the_limits_are_good() -> None:
    assert Run(governor()).batches((0.5, 0.1)) == [4]


def test_the_lag_never_falls_below_min_lag() -> None:
    assert Run(governor(min_lag=2)).batches(*[BAD] * 4) == [3, 2, 2, 2]
    assert Run(governor(max_lag=1, min_lag=5)).batches(BAD) == [1]


def test_consecutive_good_batches_raise_the_lag_again_one_by_one() -> None:
    assert Run(governor(patience=3)).batches(BAD, BAD, *[GOOD] * 8) == [3, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_a_bad_batch_resets_the_count_of_good_batches() -> None:
    run = Run(governor(min_lag=3, patience=2))
    assert run.batches(BAD, GOOD, BAD, GOOD, GOOD) == [3, 3, 3, 3, 4]


def test_bad_batches_already_admitted_at_a_decrease_do_not_count_again() -> None:
    assert Run(governor(), delay=3).batches(*[BAD] * 8) == [3, 3, 3, 3, 2, 2, 2, 2]


def test_a_batch_with_a_single_group_admitted_before_the_decrease_does_not_count() -> None:
    subject = governor()
    assert subject.record(*BAD, oldest=0, next_group=10) == -1
    assert subject.record(*BAD, oldest=9, next_group=20) == 0
    assert subject.record(*BAD, oldest=10, next_group=30) == -1


def test_good_batches_admitted_before_a_change_do_not_count_toward_the_next_raise() -> None:
    run = Run(governor(patience=2), delay=2)
    assert run.batches(BAD, *[GOOD] * 8) == [3, 3, 3, 3, 4, 4, 4, 4, 4]
    run = Run(governor(patience=1), delay=2)
    run.batches(BAD, GOOD, GOOD, BAD)
    assert run.governor.lag == 2
    assert run.batches(*[GOOD] * 8) == [2, 2, 3, 3, 3, 4, 4, 4]


def test_a_bad_batch_admitted_before_a_raise_lowers_the_lag_at_once() -> None:
    subject = governor(patience=1)
    assert subject.record(*BAD, oldest=0, next_group=1) == -1
    assert subject.record(*GOOD, oldest=1, next_group=5) == +1
    assert subject.record(*BAD, oldest=2, next_group=6) == -1


def test_the_governor_state_restores_exactly_and_within_the_current_bounds() -> None:
    first = Run(governor(patience=3), delay=2)
    first.batches(BAD, GOOD, GOOD, BAD, GOOD, GOOD, GOOD)
    second = Run(governor(patience=3, state=first.governor.state()), delay=2)
    second.group = first.group
    fits = [GOOD, BAD, BAD, BAD, BAD, BAD, GOOD, GOOD]
    assert second.batches(*fits) == first.batches(*fits)
    assert governor(max_lag=1, state=GovernorState(lag=3)).lag == 1
    assert governor(min_lag=2, state=GovernorState(lag=0)).lag == 2


def test_a_resumed_lag_at_its_maximum_takes_the_new_max_lag_and_a_lowered_lag_stays() -> None:
    run = Run(governor(max_lag=2, patience=1))
    assert governor(max_lag=8, state=run.governor.state()).lag == 8
    assert run.batches(BAD) == [1]
    assert governor(max_lag=8, state=run.governor.state()).lag == 1
    assert run.batches(GOOD) == [2]
    assert governor(max_lag=8, state=run.governor.state()).lag == 8


def test_without_settings_the_lag_stays_fixed_and_the_state_is_empty() -> None:
    subject = Governor(None, 4, GovernorState(lag=1, good=3))
    assert subject.record(*BAD, oldest=0, next_group=1) == 0
    assert subject.lag == 4
    assert subject.state() == GovernorState()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(1, 4)), max_size=60), st.integers(1, 3))
def test_each_decrease_needs_a_bad_batch_admitted_after_the_previous_one_and_each_raise_enough_good_batches(
    batches: list[tuple[bool, int, int]], patience: int
) -> None:
    subject = governor(max_lag=5, min_lag=1, patience=patience)
    next_group = lowered = changed = 0
    since_change: list[bool] = []  # batches counted since the last change: good or not
    for good, behind, admitted in batches:
        next_group += admitted
        oldest, before = max(0, next_group - 1 - behind), subject.lag
        change = subject.record(*(GOOD if good else BAD), oldest, next_group)
        assert subject.lag == before + change
        assert 1 <= subject.lag <= 5
        if oldest < lowered:
            assert change == 0
            continue
        if not good or oldest >= changed:
            since_change.append(good)
        assert change == -1 if not good and before > 1 else change >= 0
        if change == 1:
            assert since_change[-patience:] == [True] * patience
        if change:
            changed, since_change = next_group, []
        if change < 0:
            lowered = next_group
