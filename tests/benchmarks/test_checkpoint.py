from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.checkpoint import CheckpointCost, main, missed_targets, print_table
from benchmarks.learner import make_records
from rich.console import Console

from benchmarks import checkpoint as bench
from outpace.checkpoint.commit import begin, commit
from outpace.checkpoint.journal import JournalWriter
from outpace.config import Config
from outpace.errors import BadInput
from outpace.learner import state
from outpace.learner.core import LearnerCore
from outpace.models.loading import load_model
from support import kept_of, names, resolved, write_config

GOOD = CheckpointCost(
    steps=60,
    every=20,
    checkpoints=2,
    step_s=1.0,
    held_s=0.01,
    write_s=0.2,
    whole_s=0.3,
    blocking_s=0.25,
    cpu_s=100.0,
    append_cpu_s=0.5,
    read_cpu_s=0.25,
    turns_cpu_s=0.25,
)


def test_shares_are_relative_to_a_step_an_interval_and_the_processor_time() -> None:
    assert GOOD.share_of_step == pytest.approx(0.01)
    assert GOOD.share_of_interval == pytest.approx(0.0005)
    assert GOOD.journal_share == pytest.approx(0.01)
    assert missed_targets(GOOD) == []


def test_missed_targets_are_named() -> None:
    (stall,) = missed_targets(replace(GOOD, held_s=0.06))
    assert names(stall, "checkpoint 6.00% 5%")
    (journal,) = missed_targets(replace(GOOD, turns_cpu_s=2.25))
    assert names(journal, "journal 3.00% 2%")


def test_the_table_shows_both_ways_of_saving() -> None:
    output = io.StringIO()
    print_table(GOOD, Console(file=output, width=120))
    lines = output.getvalue().splitlines()
    assert any(names(line, "10.00 1.00% 5%") for line in lines)  # blocked by the copy
    assert any(names(line, "210.00 21.00%") for line in lines)  # the same save, if it blocked


def write_run(run_dir: Path, config: Config, lines: list[dict[str, Any]]) -> None:
    """Write the files that a run of this config leaves."""
    run_dir.mkdir()
    write_config(run_dir, config)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "summary.json").write_text(json.dumps({"train_s": 3.0}))
    span = {"ph": "X", "cat": "checkpoint", "name": "version 1", "dur": 500_000.0}
    (run_dir / "timeline.json").write_text(json.dumps({"traceEvents": [span]}))
    writer = JournalWriter(run_dir / "journal", "worker-0")
    for record in make_records(config, 3):
        writer.append(kept_of(record.group, size=config.rollout.group_size), record)
    writer.close()
    temporary = begin(run_dir / "checkpoints", 3)
    core = LearnerCore(load_model(config.model.path, dtype="float32", device="cpu"), config)
    state.save(core, temporary)
    commit(temporary)


def test_all_numbers_are_read_from_the_run_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {"groups/finished": 2.0, "groups/filtered": 1.0, "groups/failed": 0.0}
    costs = {"checkpoint/held_s": 0.02, "checkpoint/write_s": 0.1}
    lines = [{"step": 1} | groups, {"step": 2} | groups | costs, {"step": 3} | groups]

    def train(run_dir: Path, steps: int, settings: list[str]) -> float:
        write_run(run_dir, resolved({"checkpoint.every": 1}), lines)
        return 100.0

    monkeypatch.setattr(bench, "_train", train)
    monkeypatch.setattr(bench, "REPLAYED", 6)
    assert main(["--steps", "3"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = {"steps": 3, "every": 1, "checkpoints": 1, "step_s": 1.0, "held_s": 0.02, "write_s": 0.1, "whole_s": 0.5}
    assert {name: found[name] for name in expected} == expected
    assert all(found[name] > 0 for name in ("blocking_s", "append_cpu_s", "read_cpu_s", "turns_cpu_s"))


def test_a_run_too_short_for_a_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(run_dir: Path, steps: int, settings: list[str]) -> float:
        write_run(run_dir, resolved(), [{"step": 1}])
        return 100.0

    monkeypatch.setattr(bench, "_train", train)
    with pytest.raises(BadInput, match=r"^--steps: (?=.*\b3\b).*\b20\b"):
        main(["--steps", "3"])
