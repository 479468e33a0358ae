"""`outpace bench overlap`: are default threads as fast as the best fixed ones, and is asynchronous training faster?

Two comparisons on this machine, in one command:

    threads   default thread counts against every fixed split, in both modes, on the machine as it is and beside a
              program that keeps one core busy: `--repeats` pairs of short runs of `--probe-steps` steps
    modes     synchronous against asynchronous training with default threads, over `--seeds` seeds and `--steps` steps:
              seconds of training, final held-out accuracy, T*/T

The speed of a shared machine drifts from minute to minute. So every run with fixed threads is compared only with the
default runs shortly before and after it, and the median of these ratios counts; modes alternate. The command exits
with 1 when default threads are slower than `THREADS_BAR` of the best split, when asynchronous training is not the
faster mode, or when its accuracy differs by more than the seeds explain.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

LOADS = ("idle", "one core busy")

THREADS_BAR = 0.95
"""The speed of default threads, as a part of the best fixed split's."""

ACCURACY_TOLERANCE = 0.03
"""Final accuracies may differ by so much, or by as much as the synchronous seeds do among themselves."""

BUSY_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:  # it ends with the benchmark
    for _ in range(1_000_000):
        pass
"""

WIDTH = 120  # columns: the comparison needs about 100, and a pipe has 80 unless told
DASH = "-"  # nothing was measured
DEFAULT = "default"

Split = tuple[int, int] | None
"""Threads of the engine and of the learner; None: the default, by load."""


@dataclass(frozen=True)
class Trial:
    mode: str
    split: Split
    load: str
    seed: int
    step_s: float  # mean of the steps after the first third
    summary: Summary


def main(settings: Sequence[str]) -> int:
    options, settings = take_options(settings, {"steps": 60, "probe_steps": 10, "repeats": 3, "seeds": 3})
    result = run(options["steps"], options["probe_steps"], options["repeats"], options["seeds"], settings)
    print_tables(result)
    missed = missed_bars(result["probes"], result["trials"])
    for bar in missed:
        print(f"missed: {bar}")
    return 1 if missed else 0


def run(steps: int, probe_steps: int, repeats: int, seeds: int, settings: Sequence[str]) -> dict[str, Any]:
    console = Console(stderr=True)
    # Every group is trained, so that each step is the same work in every variant.
    same_work = [*settings, "--eval.count=0", "--filter.uniform=false"]
    probes = [
        _train(mode, split, load, repeat, probe_steps, same_work, console)
        for repeat in range(repeats)
        for load in LOADS
        for mode in MODES
        for split in _alternating(_splits())
    ]
    trials = [
        _train(mode, None, LOADS[0], seed, steps, settings, console)
        for seed in range(seeds)
        for mode in (MODES if seed % 2 == 0 else reversed(MODES))
    ]
    return {"steps": steps, "probe_steps": probe_steps, "cores": cores(), "probes": probes, "trials": trials}


def _alternating(splits: Sequence[Split]) -> list[Split]:
    """The default, then two fixed splits, the default, two more, and so on; the default at the end."""
    pairs = [splits[start : start + 2] for start in range(0, len(splits), 2)]
    return [None, *(each for pair in pairs for each in (*pair, None))]


def _splits() -> list[tuple[int, int]]:
    """Half of the cores or all of them, for engine and learner."""
    counts = sorted({max(1, cores() // 2), cores()})
    return [(engine, learner) for engine in counts for learner in counts]


def _train(
    mode: str, split: Split, load: str, seed: int, steps: int, settings: Sequence[str], console: Console
) -> Trial:
    with temporary_directory("bench") as directory:
        run_dir = directory / "run"
        words = [
            f"--pacing.max_lag={MODES[mode]}",
            *([f"--engine.threads={split[0]}", f"--learner.threads={split[1]}"] if split else []),
            f"--run.seed={seed}",
            f"--run.steps={steps}",
            f"--run.dir={run_dir}",
        ]
        command = [sys.executable, "-m", "outpace.cli", "train", "--quiet", *settings, *words]
        with _loaded(load):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PartFailed("outpace train", f"exit code {done.returncode}", done.stderr)
        summary = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Summary)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time/step_s"] for line in lines]
    step_s = statistics.fmean(times[len(times) // 3 :])
    accuracy = "" if summary.eval_last is None else f", held-out {summary.eval_last:.3f}"
    console.print(f"{load}, {mode}, threads {_text(split)}, seed {seed}: {step_s:.2f} s per step{accuracy}")
    return Trial(mode, split, load, seed, step_s, summary)


@contextmanager
def _loaded(load: str) -> Iterator[None]:
    """Beside a program that keeps one core busy, if that is the load."""
    if load == LOADS[0]:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) as busy:
        try:
            yield
        finally:
            busy.kill()


def _text(split: Split) -> str:
    return f"{split[0]}+{split[1]}" if split else DEFAULT


# ---------------------------------------------------------------------------------------------------------- threads


@dataclass(frozen=True)
class ThreadsResult:
    """One load and mode. By the name of a split: median seconds per step, and the median speed of the default as a part
    of the split's."""

    load: str
    mode: str
    step_s: dict[str, float]
    ratios: dict[str, float]

    @property
    def ratio(self) -> float:
        """The speed of the default as a part of the best fixed split's."""
        return min(self.ratios.values())


def threads_results(probes: Sequence[Trial]) -> list[ThreadsResult]:
    return [
        _threads_result(load, mode, [probe for probe in probes if (probe.load, probe.mode) == (load, mode)])
        for load in LOADS
        for mode in MODES
    ]


def _threads_result(load: str, mode: str, probes: Sequence[Trial]) -> ThreadsResult:
    """`probes` in the order in which they ran, default runs first, between and last."""
    ratios: dict[str, list[float]] = {}
    for index, probe in enumerate(probes):
        if probe.split:
            before = next(each for each in reversed(probes[:index]) if each.split is None)
            after = next(each for each in probes[index:] if each.split is None)
            default_s = (before.step_s + after.step_s) / 2
            ratios.setdefault(_text(probe.split), []).append(probe.step_s / default_s)
    step_s = {
        name: statistics.median(probe.step_s for probe in probes if _text(probe.split) == name)
        for name in (DEFAULT, *ratios)
    }
    return ThreadsResult(load, mode, step_s, {name: statistics.median(values) for name, values in ratios.items()})


# ----------------------------------------------------------------------------------------------------------- report


def print_tables(result: dict[str, Any], console: Console | None = None) -> None:
    console = console or Console(width=WIDTH)
    results = threads_results(result["probes"])
    title = (
        f"seconds per step (default's speed as a part of it) by threads of engine + learner, {result['cores']} cores, "
        f"{result['probe_steps']} steps"
    )
    threads = Table(title=title)
    for column in ("load", "mode", *results[0].step_s, "default / best"):
        threads.add_column(column)
    for row in results:
        cells = [f"{row.step_s[DEFAULT]:.2f}"]
        cells += [f"{row.step_s[name]:.2f} ({ratio:.2f})" for name, ratio in row.ratios.items()]
        threads.add_row(row.load, row.mode, *cells, f"{row.ratio:.2f}")
    console.print(threads)
    console.print(_comparison(result["trials"], result["steps"]))
    console.print(verdict(result["trials"]))


def _comparison(trials: Sequence[Trial], steps: int) -> Table:
    table = Table(title=f"{steps} steps with default threads; the last rows are medians")
    for column in ("mode", "seed", "seconds", "held-out", "after", "T*/T", "lag max", "sampled tok/s"):
        table.add_column(column)
    for trial in sorted(trials, key=lambda trial: (trial.mode, trial.seed)):
        summary = trial.summary
        table.add_row(
            trial.mode, str(trial.seed), f"{summary.train_s:.1f}", _number(summary.eval_first, 3),
            _number(summary.eval_last, 3), _number(summary.efficiency, 2), str(summary.lag_max),
            f"{summary.tokens_sampled / summary.train_s:,.0f}",
        )  # fmt: skip
    table.add_section()
    for mode in MODES:
        row = medians(trials, mode)
        table.add_row(mode, "median", f"{row.seconds:.1f}", "", _number(row.accuracy, 3), _number(row.efficiency, 2))
    return table


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


# ------------------------------------------------------------------------------------------------------------ modes


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
    """By how much the final accuracy of asynchronous training is higher, and the range of the synchronous seeds."""
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


def missed_bars(probes: Sequence[Trial], trials: Sequence[Trial]) -> list[str]:
    """What does not hold, in words."""
    missed = [
        f"{row.load}, {row.mode}: default threads reach {row.ratio:.2f} of the best split's speed, not {THREADS_BAR}"
        for row in threads_results(probes)
        if not row.ratio >= THREADS_BAR
    ]
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
