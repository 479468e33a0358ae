"""The report and verdict of the mode comparison, on made-up runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from outpace.commands import bench_overlap
from outpace.commands.bench_overlap import Block, Trial
from outpace.monitoring.summary import Summary

RUN = Summary(
    steps=60, wall_s=130.0, train_s=123.4, seed=0, reward_first=0.1, reward_last=0.5, eval_first=0.111, eval_last=0.5,
    tokens_trained=1_000_000, tokens_sampled=1_234_567, waste_fraction=0.0, lag_max=2, efficiency=0.87, exit=0,
)  # fmt: skip


def trials_of(
    sync_s: float = 200.0,
    async_s: float = 100.0,
    sync_scores: Sequence[float] = (0.50, 0.51, 0.52),
    async_scores: Sequence[float] = (0.50, 0.51, 0.52),
    **changes: Any,
) -> list[Trial]:
    modes = {"synchronous": (sync_s, sync_scores), "asynchronous": (async_s, async_scores)}
    return [
        Trial(mode, seed, msgspec.structs.replace(RUN, train_s=seconds, **{"eval_last": score, **changes}))
        for mode, (seconds, scores) in modes.items()
        for seed, score in enumerate(scores)
    ]


def blocks_of(default_s: float = 1.0) -> list[Block]:
    """Blocks under every load, on a machine that keeps getting slower. Beside a busy core, the default takes
    `default_s` times as long as the best split."""
    return [
        Block(mode, load, split, (1 + 0.1 * at) * (default_s if split is None and load != "idle" else 1.0))
        for load in bench_overlap.LOADS
        for mode in bench_overlap.MODES
        for at, split in enumerate([None, (1, 1), None, (1, 2)] * 3 + [None])
    ]


def command(trials: list[Trial], monkeypatch: pytest.MonkeyPatch, blocks: list[Block] | None = None) -> int:
    result = {"steps": 60, "block": 6, "cores": 2, "blocks": blocks or blocks_of(), "trials": trials}
    monkeypatch.setattr(bench_overlap, "run", lambda *_: result)
    return bench_overlap.main([])


@pytest.mark.parametrize(
    "trials",
    [
        trials_of(),
        trials_of(async_scores=(0.535, 0.535, 0.535)),  # more than the seeds differ, but less than 0.03
        trials_of(sync_scores=(0.4, 0.5, 0.6), async_scores=(0.35, 0.35, 0.35)),  # within the difference between seeds
    ],
)
def test_a_faster_mode_that_learns_as_well_passes(
    trials: list[Trial], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(trials, monkeypatch) == 0
    assert "missed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        (trials_of(async_s=200.0), "missed: asynchronous training is not faster"),
        (trials_of(async_scores=(0.47, 0.47, 0.47)), "missed: final accuracy differs by -0.040"),
        (trials_of(async_scores=(0.1, 0.47, 0.9)), "missed: final accuracy differs by -0.040"),
    ],
)
def test_a_missed_target_is_named_and_fails_the_command(
    trials: list[Trial], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(trials, monkeypatch) == 1
    out = capsys.readouterr().out
    assert expected in out
    assert out.count("missed: ") == 1


def test_default_threads_slower_than_a_split_fail_the_command_naming_each_load_and_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(trials_of(), monkeypatch, blocks_of(default_s=1.2)) == 1
    missed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missed: ")]
    assert [line.split(":")[1].strip() for line in missed] == [
        "one core busy, synchronous",
        "one core busy, asynchronous",
    ]


def test_values_that_were_not_measured_are_shown_as_a_dash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = trials_of(eval_first=None, eval_last=None, efficiency=None)
    assert command(trials, monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    run = next(line for line in lines if "asynchronous" in line and "100.0" in line)
    assert [cell.strip() for cell in run.strip("│ ").split("│")][2:6] == ["100.0", "-", "-", "-"]
    assert any("accuracy was not measured" in line for line in lines)


def test_no_table_cell_is_cut_if_the_output_is_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command(trials_of(sync_s=12345.6), monkeypatch)
    out = capsys.readouterr().out
    assert "…" not in out
    heading = next(line for line in out.splitlines() if "held-out" in line)
    assert "lag max" in heading
    assert "sampled tok/s" in heading
