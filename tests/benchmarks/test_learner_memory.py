"""The table of docs/scale.md is what the estimate says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.learner_memory import DEFAULTS, DEVICES, QWEN, columns, main

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
ROW = re.compile(r"^\| ([\d.]+B) \| (\d+) \|((?: \d+ \|)+)$", re.MULTILINE)


def test_the_table_of_memory_per_gpu_is_up_to_date() -> None:
    documented = {
        (name, int(devices)): [int(cell) for cell in re.findall(r"\d+", cells)]
        for name, devices, cells in ROW.findall(PAGE.read_text())
    }
    assert documented == {
        (name, devices): [round(value) for value in columns(DEFAULTS, shape, devices)]
        for name, shape in QWEN.items()
        for devices in DEVICES
    }


def test_the_columns_add_up() -> None:
    for shape in QWEN.values():
        state, gathered, in_pass, total, without_reshard, offloaded, host = columns(DEFAULTS, shape, 4)
        assert abs(state + gathered + in_pass - total) < 0.1
        assert without_reshard > total > offloaded
        assert abs(4 * state - host) < 0.1


def test_the_number_of_gpus_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--learner.devices", "64"])
    assert re.findall(r"^│ \S+ +│ (\d+) ", capsys.readouterr().out, re.MULTILINE) == ["64"] * len(QWEN)
