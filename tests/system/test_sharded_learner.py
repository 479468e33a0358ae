"""Whole runs with a learner sharded over several processes on the CPU."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import outpace as api
from faults.watching import every_task_once, steps_of, visits_of
from outpace.commands.logprob_check import measure
from support import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COUNTDOWN = {"pacing.max_lag": 2, "run.steps": 12, "eval.count": 256}


def train(directory: Path, settings: dict[str, Any], resume: bool = False) -> api.Summary:
    return api.Trainer(config={"run.dir": str(directory), **settings}, quiet=True).train(resume=resume)


def test_a_sharded_learner_learns_asynchronously(tmp_path: Path) -> None:
    summary = train(tmp_path / "run", COUNTDOWN | {"learner.devices": 2})
    assert summary.eval_last is not None
    assert summary.eval_first is not None
    assert summary.eval_last > summary.eval_first + 0.2
    assert summary.lag_max is not None
    assert 0 < summary.lag_max <= 2


def test_a_run_resumes_with_other_numbers_of_learner_processes(settings: dict[str, Any], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    epoch = {key: value for key, value in settings.items() if key != "run.dir"} | {"eval.holdout": 0.0}
    for steps, devices in ((2, 2), (4, 1), (6, 3)):
        train(directory, epoch | {"run.steps": steps, "learner.devices": devices}, resume=steps > 2)
    assert steps_of(directory) == [1, 2, 3, 4, 5, 6]
    assert visits_of(directory) == every_task_once(epochs=1)
    lines = read_lines(directory / "metrics.jsonl")
    assert all(line["throughput/trained_tokens"] > 0 for line in lines)


@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=pytest.mark.nightly)])
def test_engines_have_the_weights_that_four_ranks_publish(tmp_path: Path, lora: int) -> None:
    train(tmp_path / "run", COUNTDOWN | {"run.steps": 2, "eval.count": 0, "lora.rank": lora})
    found = measure(tmp_path / "run", ["--learner.devices=4"])
    assert [result.agrees for result in found.values()] == [True]
    assert all(result.mean < 1e-4 for result in found.values())


@pytest.mark.nightly
def test_two_learner_processes_learn_the_demo_like_one(tmp_path: Path) -> None:
    demo = tomllib.loads((Path(__file__).parents[2] / "examples" / "demo.toml").read_text())
    ends = []
    for devices in (1, 2):
        settings = {**demo, "run.dir": str(tmp_path / str(devices)), "learner.devices": devices}
        summary = api.Trainer(config=settings, quiet=True).train()
        assert summary.eval_last is not None
        ends.append(summary.eval_last)
    assert ends[1] == pytest.approx(ends[0], abs=0.05)  # seeds differ by 0.01
