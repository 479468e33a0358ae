"""Kill anywhere, a sample of it; the whole set is `make kills`."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills.kills import Range, hold_all, sample_of, whole_set

SAMPLE = 4
SEED = 46


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_wherever_a_process_is_killed_nothing_is_lost_doubled_or_different(tmp_path: Path) -> None:
    drills = sample_of(whole_set(seed=SEED, random_kills=6), SAMPLE, SEED)
    results = list(hold_all(drills, Range(tmp_path), jobs=2))
    assert {result.name: (result.faults, result.said) for result in results if result.faults} == {}
    assert len(results) == SAMPLE
