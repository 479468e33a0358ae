"""The benchmark of reporting: blocks without a reporter against their neighbors with one."""

from __future__ import annotations

import json

import pytest
from benchmarks.trackers import compare, main, plan

from benchmarks import trackers as bench
from outpace.errors import BadInput


def test_blocks_without_a_reporter_are_compared_with_their_neighbors() -> None:
    kinds = ["running", "stopped", "running", "full", "running", "stopped", "running", "killed"]
    drifting = [1.1, 1.1, 1.0, 1.1, 1.3, 1.3, 9.0, 9.1, 1.5, 1.5, 1.4, 1.4, 1.7, 1.7, 2.0, 2.1]
    result = compare(drifting, kinds, block=2)
    assert result["blocks"] == 2
    assert result["ratio"] == pytest.approx((1.2 / 1.05 + 1.6 / 1.4) / 2)
    assert result["longest_step_s"] == {"running": 1.7, "stopped": 1.4, "full": 9.1, "killed": 2.1}


def test_every_third_fault_is_a_full_disk_if_there_is_a_small_one() -> None:
    assert plan(3, full=False)[1::2] == ["stopped"] * 3 + ["killed"]
    assert plan(3, full=True)[1::2] == ["stopped", "stopped", "full", "killed"]


def test_the_limit_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("STORES", raising=False)
    for slowdown, code in ((1.005, 0), (1.05, 1)):
        steps = [slowdown] * 3 + ([1.0] * 3 + [slowdown] * 3) * 2 + [1.0] * 3
        monkeypatch.setattr(bench, "measure", lambda *_, steps=steps, **__: steps)
        assert main(["--block", "3", "--rounds", "2", "--run.report_to", "tensorboard"]) == code
        assert json.loads(capsys.readouterr().out.splitlines()[0])["ratio"] == pytest.approx(slowdown)


def test_trackers_must_be_named() -> None:
    with pytest.raises(BadInput, match=r"run\.report_to"):
        main([])
