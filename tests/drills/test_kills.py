"""A sample of the kill drills; `make kills` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills.kills import DrillRunner, all_drills, run_all, sample_of

SAMPLE = 4
SEED = 46


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_no_kill_of_any_process_loses_repeats_or_changes_work(tmp_path: Path) -> None:
    drills = sample_of(all_drills(seed=SEED, random_kills=6), SAMPLE, SEED)
    results = list(run_all(drills, DrillRunner(tmp_path), jobs=2))
    assert {result.name: (result.faults, result.output) for result in results if result.faults} == {}
    assert len(results) == SAMPLE
