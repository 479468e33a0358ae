"""Where a run may not write, and numbers that no file takes.

Shown elsewhere: a read-only file system and a disk that fills up while lines are written
(tests/monitoring/test_run_directory.py); a callback that raises ends the run with its own traceback
(tests/system/test_training.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from faults.watching import Settings
from outpace.cli import main
from outpace.monitoring.metrics import Meter
from outpace.monitoring.run_directory import RunLog
from support import as_arguments

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("place", ["below a file", "where nobody may write"])
def test_a_directory_that_cannot_be_written_is_refused_before_anything_starts(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "file").write_text("")
    directory = str(tmp_path / "file" / "run") if place == "below a file" else "/proc/outpace/run"
    assert main(["train", *as_arguments(settings | {"run.dir": directory})]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert said.startswith("outpace: run.dir: ")
    assert directory in said


def test_a_metric_that_is_no_number_is_left_out_and_counted(tmp_path: Path) -> None:
    meter = Meter()
    meter.add("loss/policy", math.nan)
    meter.add("grad/norm", 1.0)
    log = RunLog.claim(tmp_path / "run")
    log.start("")
    log.step(1, meter.flush())
    log.close()
    [line] = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "loss/policy" not in line
    assert line["faults/nan_metrics"] == 1
