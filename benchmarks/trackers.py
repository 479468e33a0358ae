"""`python benchmarks/trackers.py --run.report_to tensorboard,mlflow`: what trackers, and their failures, cost a run.

One run, in blocks of `--block` steps: reporter running, fault, running, fault, …, running. The faults take turns:

    stopped   the reporter and everything it started is stopped (SIGSTOP), as if every tracker blocked
    full      the disk of the stores is full, if the variable STORES names a small file system that holds them
    killed    the reporter is killed; only in the last block, because a run does not start it again

Each block with the reporter stopped is compared with the blocks right before and after it, because the speed of a
shared machine drifts: their ratio is the cost of reporting. A reporter that continues also sends the steps that it
missed, so the cost is overestimated. The longest step of each kind of block shows what a fault does to the run.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from outpace.commands.bench_options import run_benchmark, take_options
from outpace.config.load import make_config, parse_arguments
from outpace.errors import BadInput, ComponentFailed
from outpace.monitoring.line_file import read_lines
from outpace.runtime.cleanup import temporary_directory

LIMIT = 1.01
"""Longest a step may take with a reporter, relative to a step without."""

WARM_UP = 5  # steps
POLL_S = 0.05
RUNNING, STOPPED, FULL, KILLED = "running", "stopped", "full", "killed"


def main(words: Sequence[str]) -> int:
    options, settings = take_options(words, {"block": 10, "rounds": 10})
    store = os.environ.get("STORES")
    if not make_config(parse_arguments(settings)).run.report_to:
        raise BadInput("run.report_to: name the trackers to measure, such as --run.report_to tensorboard")
    kinds = plan(options["rounds"], store is not None)
    with temporary_directory("trackers") as folder:
        seconds = measure(folder / "run", settings, kinds, options["block"], Path(store or folder))
    result = compare(seconds, kinds, options["block"])
    print(json.dumps(result))
    if result["ratio"] <= LIMIT:
        return 0
    print(f"missed: a step takes {result['ratio']:.3f} times as long with a reporter, the limit is {LIMIT}")
    return 1


def plan(rounds: int, full: bool) -> list[str]:
    """Return the kind of every block."""
    kinds = [RUNNING]
    for number in range(rounds):
        kinds += [FULL if full and number % 3 == 2 else STOPPED, RUNNING]
    return [*kinds, KILLED]


def measure(run: Path, settings: Sequence[str], kinds: Sequence[str], block: int, store: Path) -> list[float]:
    """Train through all blocks. Returns the seconds of every step after the warm-up."""
    steps = WARM_UP + block * len(kinds)
    # Without the filter every step is the same work: a policy that solves most tasks would sample ever more groups.
    fixed = ["--eval.count=0", "--filter.uniform=false"]
    command = [sys.executable, "-m", "outpace.cli", "train", "--quiet", *fixed, *settings, f"--run.dir={run}"]
    filling = store / "filling"
    with subprocess.Popen([*command, f"--run.steps={steps}"], stdout=subprocess.DEVNULL) as process:
        reached = 0
        while process.poll() is None:
            time.sleep(POLL_S)
            lines = sum(1 for _ in read_lines(run / "metrics.jsonl"))
            while lines >= WARM_UP + reached * block and reached < len(kinds):
                _end(kinds[reached - 1] if reached else RUNNING, process.pid, filling)
                _begin(kinds[reached], process.pid, filling)
                reached += 1
    filling.unlink(missing_ok=True)
    if process.returncode:
        raise ComponentFailed("trackers", f"the run failed with exit code {process.returncode}")
    return [line["time/step_s"] for line in read_lines(run / "metrics.jsonl")][WARM_UP:]


def _begin(kind: str, run: int, filling: Path) -> None:
    if kind == FULL:
        with suppress(OSError), filling.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    elif kind in (STOPPED, KILLED):
        _signal_reporter(run, signal.SIGSTOP if kind == STOPPED else signal.SIGKILL)


def _end(kind: str, run: int, filling: Path) -> None:
    if kind == STOPPED:
        _signal_reporter(run, signal.SIGCONT)
    elif kind == FULL:
        filling.unlink()


def _signal_reporter(run: int, number: signal.Signals) -> None:
    for child in psutil.Process(run).children():
        with suppress(psutil.NoSuchProcess):
            if any("outpace.monitoring.reporter" in word for word in child.cmdline()):
                for process in (child, *child.children(recursive=True)):
                    process.send_signal(number)


def compare(seconds: Sequence[float], kinds: Sequence[str], block: int) -> dict[str, Any]:
    """Return the cost of reporting and the longest step of each kind of block."""
    blocks = [seconds[block * at : block * (at + 1)] for at in range(len(kinds))]
    means = [statistics.fmean(each) for each in blocks]
    ratios = [
        statistics.fmean((means[at - 1], means[at + 1])) / means[at]
        for at in range(1, len(kinds) - 1)
        if kinds[at] == STOPPED
    ]
    of_kind = {
        kind: sorted(step for each, found in zip(blocks, kinds, strict=True) if found == kind for step in each)
        for kind in dict.fromkeys(kinds)
    }
    return {
        "blocks": len(ratios),
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
        "median_step_s": {kind: statistics.median(steps) for kind, steps in of_kind.items()},
        "longest_step_s": {kind: steps[-1] for kind, steps in of_kind.items()},
    }


if __name__ == "__main__":
    run_benchmark(main)
