"""Run directories that cannot be written, and metrics that are not finite.

Tested elsewhere: a read-only file system and a disk that fills up while lines are written
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


@pytest.mark.parametrize("location", ["below a file", "read-only"])
def test_a_run_directory_that_cannot_be_written_is_rejected_before_anything_starts(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str], location: str
) -> None:
    (tmp_path / "file").write_text("")
    directory = str(tmp_path / "file" / "run") if location == "below a file" else "/proc/outpace/run"
    assert main(["train", *as_arguments(settings | {"run.dir": directory})]) == 2
    output = capsys.readouterr().err.strip()
    assert len(output.splitlines()) == 1
    assert output.startswith("outpace: run.dir: ")
    assert directory in output


def test_a_nan_metric_is_left_out_and_counted(tmp_path: Path) -> None:
    meter = Meter()
    meter.add("loss/policy", math.nan)
    meter.add("grad_norm", 1.0)
    log = RunLog.claim(tmp_path / "run")
    log.start("")
    log.step(1, meter.flush())
    log.close()
    [line] = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "loss/policy" not in line
    assert line["faults/nan_metrics"] == 1
