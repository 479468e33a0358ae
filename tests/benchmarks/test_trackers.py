"""The benchmark of reporting: blocks with a reporter against their neighbors without."""

from __future__ import annotations

import json

import pytest
from benchmarks.trackers import compare, main

from benchmarks import trackers as bench
from outpace.errors import BadInput


def test_blocks_with_a_reporter_are_compared_with_their_neighbors() -> None:
    drifting = [1.0, 1.0, 1.2, 1.2, 1.2, 1.2, 1.54, 1.54, 1.6, 1.6]  # the second and fourth block have a reporter
    result = compare(drifting, block=2)
    assert result["blocks"] == 2
    assert result["ratio"] == pytest.approx((1.2 / 1.1 + 1.54 / 1.4) / 2)
    assert result["longest_step_s"] == {"reporter running": 1.54, "reporter stopped": 1.6}


def test_the_limit_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for slowdown, code in ((1.005, 0), (1.05, 1)):
        steps = ([1.0] * 3 + [slowdown] * 3) * 2 + [1.0] * 3
        monkeypatch.setattr(bench, "measure", lambda *_, steps=steps, **__: steps)
        assert main(["--block", "3", "--rounds", "2", "--run.report_to", "tensorboard"]) == code
        assert json.loads(capsys.readouterr().out.splitlines()[0])["ratio"] == pytest.approx(slowdown)


def test_trackers_must_be_named() -> None:
    with pytest.raises(BadInput, match=r"run\.report_to"):
        main([])
