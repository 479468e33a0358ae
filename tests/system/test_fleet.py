"""Engines that join and leave an active run, as separate processes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drills.checks import accounting
from outpace.monitoring.fleet_orders import EngineStatus, current_fleet
from support import read_lines, run_command, start_command

PATIENCE_S = 120.0


def until(true: Callable[[], object], alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert alive(), "the run ended before its time"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def engines(run: Path) -> dict[str, EngineStatus]:
    return {engine.name: engine for engine in current_fleet(run).engines}


def is_one_line(text: str, *keys: str) -> bool:
    return text.startswith("outpace: ") and text.count("\n") == 1 and all(key in text for key in keys)


def steps(run: Path) -> int:
    return len(read_lines(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0


@pytest.mark.slow  # without processes: tests/controller/test_fleet_membership.py
@pytest.mark.timeout(300)
def test_an_engine_joins_serves_after_its_first_load_and_leaves_and_no_group_is_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_command(
        "train", f"--run.dir={run}", "--run.steps=5000", "--eval.count=0", "--pacing.groups_per_step=8", "--quiet"
    )
    try:
        until(lambda: steps(run) >= 2, lambda: process.poll() is None)
        listed = run_command("fleet", str(run))
        assert [engine["name"] for engine in json.loads(listed.stdout)] == ["engine-0"]
        refusal = run_command("fleet", str(run), "--add", "http://127.0.0.1:8000")
        assert (refusal.returncode, refusal.stdout) == (2, "")
        assert is_one_line(refusal.stderr, "--add", "embedded", "engine.kind"), refusal.stderr
        refusal = run_command("fleet", str(run), "--remove", "engine-0")
        assert (refusal.returncode, refusal.stdout) == (2, "")
        assert is_one_line(refusal.stderr, "--remove", "engine-0", "add "), refusal.stderr
        added = run_command("fleet", str(run), "--add", "")
        assert added.returncode == 0, added.stderr
        has_joined, is_under_way = (is_one_line(added.stderr, key) for key in ("engine-1", "outpace fleet"))
        assert has_joined or is_under_way, added.stderr
        until(lambda: "engine-1" in engines(run) and engines(run)["engine-1"].serves, lambda: process.poll() is None)
        assert engines(run)["engine-1"].version > 0, "it has the weights of the run, not those of the base model"
        assert run_command("fleet", str(run), "--remove", "engine-0").returncode == 0
        until(lambda: list(engines(run)) == ["engine-1"], lambda: process.poll() is None)
        before = steps(run)
        until(lambda: steps(run) > before + 2, lambda: process.poll() is None)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3, err
    finally:
        process.kill()
        process.communicate()
    assert accounting(run, json.loads((run / "tasks.json").read_text())["count"], None) == []
    untrained = [visit for line in read_lines(run / "batches.jsonl") for visit in line.get("settled", [])]
    assert not [visit for visit in untrained if visit["outcome"] == "failed"]


def test_orders_for_a_run_that_is_not_active_are_refused_in_one_line(tmp_path: Path) -> None:
    result = run_command("fleet", str(tmp_path), "--add", "http://127.0.0.1:1")
    assert result.returncode == 2
    assert is_one_line(result.stderr, str(tmp_path)), result.stderr
