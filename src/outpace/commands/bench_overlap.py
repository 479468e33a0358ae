"""`outpace bench overlap`: compare default with fixed thread counts, and asynchronous with synchronous training.

Two comparisons on this machine:

    threads   default thread counts and every fixed split, in both modes, on the idle machine and beside a program that
              keeps one core busy: `--repeats` blocks of `--block` steps each
    modes     synchronous and asynchronous training with default threads, over `--seeds` seeds and `--steps` steps:
              training seconds, final held-out accuracy, T*/T

The speed of a shared machine drifts from minute to minute. Thread counts therefore change every few steps within one
run, every block with fixed threads is compared with the default blocks right before and after it, and the median of
these ratios counts. Modes alternate.

The command exits with 1 if default threads reach less than `MIN_DEFAULT_RATIO` of the best split's speed, if
asynchronous training is not faster, or if its accuracy differs by more than the seeds explain.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from outpace.commands.bench_options import take_options
from outpace.errors import BadInput, ComponentFailed
from outpace.hardware.cores import THREAD_COUNTS_FILE, ThreadCounts, available_cores
from outpace.monitoring.summary import Summary
from outpace.runtime.cleanup import memory_root, temporary_directory

MODES = {"synchronous": 0, "asynchronous": 2}
"""`pacing.max_lag` of each mode."""

LOADS = ("idle", "one core busy")

MIN_DEFAULT_RATIO = 0.95
"""Required speed of default threads, relative to the best fixed split."""

ACCURACY_TOLERANCE = 0.03
"""Allowed difference in final accuracy, unless the synchronous seeds differ by more among themselves."""

BUSY_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:  # exit with the benchmark
    for _ in range(1_000_000):
        pass
"""

WIDTH = 120  # columns; the table needs about 100, and rich assumes 80 for a pipe
DASH = "-"  # not measured
DEFAULT = "default"

WARM_UP_STEPS = 6
CHANGE_STEPS = 2
"""Steps at the start of a block that overlap a change of thread counts. They are not counted."""

Split = tuple[int, int] | None
"""Thread counts of engine and learner. None: the default, which adapts to the load."""


@dataclass(frozen=True)
class Block:
    """Consecutive steps of a run with fixed thread counts."""

    mode: str
    load: str
    split: Split
    step_s: float


@dataclass(frozen=True)
class Trial:
    mode: str
    seed: int
    summary: Summary


def main(settings: Sequence[str]) -> int:
    options, settings = take_options(settings, {"steps": 60, "block": 6, "repeats": 5, "seeds": 3})
    result = run(options["steps"], options["block"], options["repeats"], options["seeds"], settings)
    print_tables(result)
    missed = missed_targets(result["blocks"], result["trials"])
    for message in missed:
        print(f"missed: {message}")
    return 1 if missed else 0


def run(steps: int, block: int, repeats: int, seeds: int, settings: Sequence[str]) -> dict[str, Any]:
    console = Console(stderr=True)
    blocks = [
        each for load in LOADS for mode in MODES for each in _blocks(mode, load, block, repeats, settings, console)
    ]
    trials = [
        _train(mode, seed, steps, settings, console)
        for seed in range(seeds)
        for mode in (MODES if seed % 2 == 0 else reversed(MODES))
    ]
    return {"steps": steps, "block": block, "cores": available_cores(), "blocks": blocks, "trials": trials}


def _splits() -> list[tuple[int, int]]:
    """Return the fixed splits: half or all of the cores, for engine and learner."""
    counts = sorted({max(1, available_cores() // 2), available_cores()})
    return [(engine, learner) for engine in counts for learner in counts]


def _blocks(
    mode: str, load: str, block: int, repeats: int, settings: Sequence[str], console: Console
) -> Iterator[Block]:
    """Measure one run whose thread counts change every `block` steps: default, fixed, default, next fixed, …"""
    repetition = [each for split in _splits() for each in (None, split)]
    with temporary_directory("bench") as directory, _loaded(load):
        # Every group is trained and hardly changes the model, so that all steps do the same work.
        same_work = ("--eval.count=0", "--filter.uniform=false", "--learner.lr=1e-12", "--checkpoint.every=0")
        with _ActiveRun(directory / "run", [*settings, *same_work, f"--pacing.max_lag={MODES[mode]}"]) as run:
            run.wait_for_steps(WARM_UP_STEPS)
            for split in [*repetition * repeats, None]:
                run.board.fix(*(split or (0, 0)))
                times = run.wait_for_steps(block)
                step_s = statistics.fmean(times[min(len(times) - 1, CHANGE_STEPS) :])
                console.print(f"{load}, {mode}, threads {_text(split)}: {step_s:.2f} s per step")
                yield Block(mode, load, split, step_s)


class _ActiveRun:
    """`outpace train` without a step limit, stopped at the end of the context."""

    def __init__(self, directory: Path, settings: Sequence[str]) -> None:
        self._metrics = directory / "metrics.jsonl"
        words = [f"--run.dir={directory}", f"--run.steps={10**6}", *settings]
        command = [sys.executable, "-m", "outpace.cli", "train", "--quiet", *words]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate()

    @cached_property
    def board(self) -> ThreadCounts:
        """The core-sharing board that this run's processes use."""
        children = {child.pid for child in psutil.Process(self._process.pid).children(recursive=True)}
        boards = [ThreadCounts(path) for path in memory_root().glob(f"*/{THREAD_COUNTS_FILE}")]
        for board in boards:
            if board.pids() & children:
                return board
        raise BadInput("thread counts are fixed by these settings; remove the threads settings and run.device")

    def wait_for_steps(self, count: int) -> list[float]:
        """Wait for the next `count` steps and return their seconds."""
        until = self._steps + count
        while len(lines := self._lines()) < until:
            if self._process.poll() is not None:
                raise ComponentFailed(
                    "outpace train", f"exit code {self._process.returncode}", self._process.communicate()[1]
                )
            time.sleep(0.1)
        times = [json.loads(line)["time/step_s"] for line in lines[self._steps :]]
        self._steps = len(lines)
        return times

    def _lines(self) -> list[str]:
        whole = self._metrics.read_text() if self._metrics.exists() else ""
        return [line for line in whole.splitlines(keepends=True) if line.endswith("\n")]


def _train(mode: str, seed: int, steps: int, settings: Sequence[str], console: Console) -> Trial:
    with temporary_directory("bench") as directory:
        run_dir = directory / "run"
        words = [
            f"--pacing.max_lag={MODES[mode]}",
            f"--run.seed={seed}",
            f"--run.steps={steps}",
            f"--run.dir={run_dir}",
        ]
        command = [sys.executable, "-m", "outpace.cli", "train", "--quiet", *settings, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ComponentFailed("outpace train", f"exit code {done.returncode}", done.stderr)
        summary = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Summary)
    accuracy = "" if summary.eval_last is None else f", held-out {summary.eval_last:.3f}"
    console.print(f"{mode}, seed {seed}: {summary.train_s:.1f} s{accuracy}")
    return Trial(mode, seed, summary)


@contextmanager
def _loaded(load: str) -> Iterator[None]:
    """Keep one core busy during the context if `load` says so."""
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
    """Results of one load and mode, by split: median seconds per step, and median speed of the default relative to the
    split."""

    load: str
    mode: str
    step_s: dict[str, float]
    ratios: dict[str, float]

    @property
    def ratio(self) -> float:
        """Speed of the default relative to the best fixed split."""
        return min(self.ratios.values())


def threads_results(blocks: Sequence[Block]) -> list[ThreadsResult]:
    return [
        _threads_result(load, mode, [block for block in blocks if (block.load, block.mode) == (load, mode)])
        for load in LOADS
        for mode in MODES
    ]


def _threads_result(load: str, mode: str, blocks: Sequence[Block]) -> ThreadsResult:
    """`blocks` must be in the order they ran."""
    steps: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for index, block in enumerate(blocks):
        steps.setdefault(_text(block.split), []).append(block.step_s)
        if block.split:
            default_s = (blocks[index - 1].step_s + blocks[index + 1].step_s) / 2
            ratios.setdefault(_text(block.split), []).append(block.step_s / default_s)
    return ThreadsResult(load, mode, _medians(steps), _medians(ratios))


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in values.items()}


# ----------------------------------------------------------------------------------------------------------- report


def print_tables(result: dict[str, Any], console: Console | None = None) -> None:
    console = console or Console(width=WIDTH)
    results = threads_results(result["blocks"])
    title = (
        f"seconds per step (relative speed of the default) by threads of engine + learner, {result['cores']} cores, "
        f"blocks of {result['block']} steps"
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
    """Medians over the seeds of one mode. None if a seed has no value."""

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
    """Return the accuracy gain of asynchronous training and the range over the synchronous seeds, or None."""
    sync, asyn = medians(trials, "synchronous").accuracy, medians(trials, "asynchronous").accuracy
    if sync is None or asyn is None:
        return None
    scores = [trial.summary.eval_last or 0.0 for trial in trials if trial.mode == "synchronous"]
    return asyn - sync, max(scores) - min(scores)


def verdict(trials: Sequence[Trial]) -> str:
    sync, asyn = medians(trials, "synchronous").seconds, medians(trials, "asynchronous").seconds
    speed = f"asynchronous training takes {asyn / sync:.2f} of the synchronous time ({sync / asyn:.2f}x as fast)"
    accuracies = _accuracies(trials)
    if accuracies is None:
        return f"{speed}; accuracy was not measured"
    difference, seed_range = accuracies
    return f"{speed}; final accuracy differs by {difference:+.3f}, synchronous seeds by up to {seed_range:.3f}"


def missed_targets(blocks: Sequence[Block], trials: Sequence[Trial]) -> list[str]:
    """Return a message per missed target."""
    missed = [
        f"{row.load}, {row.mode}: default threads reach {row.ratio:.2f} of the best split, target {MIN_DEFAULT_RATIO}"
        for row in threads_results(blocks)
        if not row.ratio >= MIN_DEFAULT_RATIO
    ]
    sync, asyn = medians(trials, "synchronous").seconds, medians(trials, "asynchronous").seconds
    if not asyn < sync:
        missed.append(f"asynchronous training is not faster: {asyn:.1f} s, synchronous {sync:.1f} s")
    accuracies = _accuracies(trials)
    if accuracies is not None:
        difference, seed_range = accuracies
        allowed = max(seed_range, ACCURACY_TOLERANCE)
        if not abs(difference) <= allowed:
            missed.append(f"final accuracy differs by {difference:+.3f}, more than {allowed:.3f}")
    return missed
