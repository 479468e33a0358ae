"""`outpace bench overlap`: is asynchronous training faster than synchronous, and does it learn as well?

Both modes train the same task from the same seeds on this machine, in one command: first every split of threads is
tried briefly, then each mode runs at its best one, the modes interleaved so that neither gets the quieter hour.
Compared are medians over the seeds: seconds of training, final held-out accuracy, T*/T.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from outpace.bench.options import take_options
from outpace.errors import PartFailed
from outpace.observe.summary import Summary
from outpace.resources import cores

MODES = {"synchronous": 0, "asynchronous": 2}
"""The name of a mode and its `pacing.max_lag`."""


Split = tuple[int, int]
"""Threads of the engine and of the learner."""


@dataclass(frozen=True)
class Trial:
    mode: str
    split: Split
    seed: int
    summary: Summary


def main(settings: Sequence[str]) -> int:
    options, settings = take_options(settings, {"steps": 60, "probe_steps": 8, "seeds": 3})
    result = run(options["steps"], options["probe_steps"], options["seeds"], settings)
    print_tables(result)
    return 0


def run(steps: int, probe_steps: int, seeds: int, settings: Sequence[str]) -> dict[str, Any]:
    console = Console(stderr=True)
    probes = [
        _train(mode, split, 0, probe_steps, [*settings, "--eval.count=0"], console)
        for split in _splits()
        for mode in MODES
    ]
    best = {mode: min((probe for probe in probes if probe.mode == mode), key=_seconds).split for mode in MODES}
    trials = [
        _train(mode, best[mode], seed, steps, settings, console)
        for seed in range(seeds)
        for mode in (MODES if seed % 2 == 0 else reversed(MODES))
    ]
    return {"steps": steps, "probe_steps": probe_steps, "cores": cores(), "probes": probes, "trials": trials}


def _splits() -> list[Split]:
    """Half of the cores or all of them, for either part."""
    counts = sorted({max(1, cores() // 2), cores()})
    return [(engine, learner) for engine in counts for learner in counts]


def _seconds(trial: Trial) -> float:
    return trial.summary.train_s


def _train(mode: str, split: Split, seed: int, steps: int, settings: Sequence[str], console: Console) -> Trial:
    with tempfile.TemporaryDirectory(prefix="outpace-bench-") as directory:
        run_dir = Path(directory) / "run"
        words = [
            f"--pacing.max_lag={MODES[mode]}",
            f"--engine.threads={split[0]}",
            f"--learner.threads={split[1]}",
            f"--run.seed={seed}",
            f"--run.steps={steps}",
            f"--run.dir={run_dir}",
        ]
        command = [sys.executable, "-m", "outpace.cli", "train", "--quiet", *settings, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PartFailed("outpace train", f"exit code {done.returncode}", done.stderr)
        summary = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Summary)
    accuracy = "" if summary.eval_last is None else f", held-out {summary.eval_last:.3f}"
    console.print(f"{mode}, threads {_text(split)}, seed {seed}: {steps} steps in {summary.train_s:.1f} s{accuracy}")
    return Trial(mode, split, seed, summary)


def _text(split: Split) -> str:
    return f"{split[0]}+{split[1]}"


# ----------------------------------------------------------------------------------------------------------- report


def print_tables(result: dict[str, Any], console: Console | None = None) -> None:
    console = console or Console()
    probes = Table(title=f"{result['probe_steps']} steps at every split of {result['cores']} cores")
    for column in ("mode", "threads of engine + learner", "seconds per step", "T*/T"):
        probes.add_column(column)
    for probe in result["probes"]:
        per_step = _seconds(probe) / result["probe_steps"]
        probes.add_row(probe.mode, _text(probe.split), f"{per_step:.2f}", f"{probe.summary.efficiency:.2f}")
    console.print(probes)
    console.print(_comparison(result["trials"], result["steps"]))
    console.print(verdict(result["trials"]))


def _comparison(trials: Sequence[Trial], steps: int) -> Table:
    table = Table(title=f"{steps} steps, each mode at its best split; the last rows are medians")
    for column in ("mode", "threads", "seed", "seconds", "held-out", "after", "T*/T", "lag max", "sampled tok/s"):
        table.add_column(column)
    for trial in sorted(trials, key=lambda trial: (trial.mode, trial.seed)):
        summary = trial.summary
        table.add_row(
            trial.mode, _text(trial.split), str(trial.seed), f"{summary.train_s:.1f}", f"{summary.eval_first:.3f}",
            f"{summary.eval_last:.3f}", f"{summary.efficiency:.2f}", str(summary.lag_max),
            f"{summary.tokens_sampled / summary.train_s:,.0f}",
        )  # fmt: skip
    table.add_section()
    for mode in MODES:
        row = medians(trials, mode)
        table.add_row(
            mode, "", "median", f"{row['seconds']:.1f}", "", f"{row['accuracy']:.3f}", f"{row['efficiency']:.2f}"
        )
    return table


def medians(trials: Sequence[Trial], mode: str) -> dict[str, float]:
    summaries = [trial.summary for trial in trials if trial.mode == mode]
    return {
        "seconds": statistics.median(summary.train_s for summary in summaries),
        "accuracy": statistics.median(summary.eval_last or 0.0 for summary in summaries),
        "efficiency": statistics.median(summary.efficiency or 0.0 for summary in summaries),
    }


def verdict(trials: Sequence[Trial]) -> str:
    sync, asyn = medians(trials, "synchronous"), medians(trials, "asynchronous")
    scores = [trial.summary.eval_last or 0.0 for trial in trials if trial.mode == "synchronous"]
    return (
        f"asynchronous takes {asyn['seconds'] / sync['seconds']:.2f} of the synchronous time "
        f"({sync['seconds'] / asyn['seconds']:.2f}x faster); final accuracy differs by "
        f"{asyn['accuracy'] - sync['accuracy']:+.3f}, seeds of one mode by up to {max(scores) - min(scores):.3f}"
    )
