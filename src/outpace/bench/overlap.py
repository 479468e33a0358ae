"""`outpace bench overlap`: is asynchronous training faster than synchronous, and does it learn as well?

Both modes train the same task from the same seeds on this machine, in one command: first every split of threads is
tried briefly, then each mode runs at its best one, the modes interleaved so that neither gets the quieter hour.
Compared are medians over the seeds: seconds of training, final held-out accuracy, T*/T. The command exits with 1 when
asynchronous training is not the faster one, or its accuracy is another than the seeds explain.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from outpace.bench.options import take_options
from outpace.errors import PartFailed
from outpace.observe.summary import Summary
from outpace.resources import cores
from outpace.runtime.scratch import temporary_directory

MODES = {"synchronous": 0, "asynchronous": 2}
"""The name of a mode and its `pacing.max_lag`."""

ACCURACY_TOLERANCE = 0.03
"""Final accuracies may differ by so much, or by as much as the synchronous seeds do among themselves."""

WIDTH = 120  # columns: the comparison needs about 100, and a pipe has 80 unless told
DASH = "-"  # nothing was measured

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
    missed = missed_bars(result["trials"])
    for bar in missed:
        print(f"missed: {bar}")
    return 1 if missed else 0


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
    with temporary_directory("bench") as directory:
        run_dir = directory / "run"
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
    console = console or Console(width=WIDTH)
    probes = Table(title=f"{result['probe_steps']} steps at every split of {result['cores']} cores")
    for column in ("mode", "threads of engine + learner", "seconds per step", "T*/T"):
        probes.add_column(column)
    for probe in result["probes"]:
        per_step = _seconds(probe) / result["probe_steps"]
        probes.add_row(probe.mode, _text(probe.split), f"{per_step:.2f}", _number(probe.summary.efficiency, 2))
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
            trial.mode, _text(trial.split), str(trial.seed), f"{summary.train_s:.1f}", _number(summary.eval_first, 3),
            _number(summary.eval_last, 3), _number(summary.efficiency, 2), str(summary.lag_max),
            f"{summary.tokens_sampled / summary.train_s:,.0f}",
        )  # fmt: skip
    table.add_section()
    for mode in MODES:
        row = medians(trials, mode)
        table.add_row(
            mode, "", "median", f"{row.seconds:.1f}", "", _number(row.accuracy, 3), _number(row.efficiency, 2)
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


# ---------------------------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True)
class Medians:
    """Over the seeds of one mode. None: a seed lacks the number."""

    seconds: float
    accuracy: float | None
    efficiency: float | None


def medians(trials: Sequence[Trial], mode: str) -> Medians:
    summaries = [trial.summary for trial in trials if trial.mode == mode]
    return Medians(
        seconds=statistics.median(summary.train_s for summary in summaries),
        accuracy=_median([summary.eval_last for summary in summaries]),
        efficiency=_median([summary.efficiency for summary in summaries]),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _accuracies(trials: Sequence[Trial]) -> tuple[float, float] | None:
    """By how much the final accuracy of asynchronous training is higher, and how far the synchronous seeds spread."""
    sync, asyn = medians(trials, "synchronous").accuracy, medians(trials, "asynchronous").accuracy
    if sync is None or asyn is None:
        return None
    scores = [trial.summary.eval_last or 0.0 for trial in trials if trial.mode == "synchronous"]
    return asyn - sync, max(scores) - min(scores)


def verdict(trials: Sequence[Trial]) -> str:
    sync, asyn = medians(trials, "synchronous").seconds, medians(trials, "asynchronous").seconds
    speed = f"asynchronous takes {asyn / sync:.2f} of the synchronous time ({sync / asyn:.2f}x faster)"
    accuracies = _accuracies(trials)
    if accuracies is None:
        return f"{speed}; accuracy was not measured"
    difference, spread = accuracies
    return f"{speed}; final accuracy differs by {difference:+.3f}, synchronous seeds by up to {spread:.3f}"


def missed_bars(trials: Sequence[Trial]) -> list[str]:
    """What asynchronous training does not live up to, in words."""
    missed = []
    sync, asyn = medians(trials, "synchronous").seconds, medians(trials, "asynchronous").seconds
    if not asyn < sync:
        missed.append(f"asynchronous training is not faster: {asyn:.1f} s, synchronous {sync:.1f} s")
    accuracies = _accuracies(trials)
    if accuracies is not None:
        difference, spread = accuracies
        allowed = max(spread, ACCURACY_TOLERANCE)
        if not abs(difference) <= allowed:
            missed.append(f"final accuracy differs by {difference:+.3f}, more than {allowed:.3f}")
    return missed
