"""A short soak test; `make soak` runs a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills.soak import soak


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_soak_run_with_faults_and_kills_learns_and_loses_no_visit(tmp_path: Path) -> None:
    record = soak(tmp_path, steps=200, apart=1.0, verbose=False)
    assert record["faults"] == [], record["output"]
    assert record["steps"] == 200
    assert record["kills"]
