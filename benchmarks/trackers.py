"""`python benchmarks/trackers.py --run.report_to tensorboard,mlflow`: what reporting to trackers costs a run.

One run. Its reporter, with everything that it started, is stopped and continued every `--block` steps. Each block with
the reporter is compared with the blocks right before and after it, because the speed of a shared machine drifts. A
reporter that is continued also sends the steps of the block in which it was stopped, so its cost is overestimated. The
stopped reporter shows what a blocked tracker does to the steps: the longest step of either kind is printed too.
"""

from __future__ import annotations

import itertools
import json
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


def main(words: Sequence[str]) -> int:
    options, settings = take_options(words, {"block": 10, "rounds": 10})
    if not make_config(parse_arguments(settings)).run.report_to:
        raise BadInput("run.report_to: name the trackers to measure, such as --run.report_to tensorboard")
    with temporary_directory("trackers") as folder:
        seconds = measure(folder / "run", settings, **options)
    result = compare(seconds, options["block"])
    print(json.dumps(result))
    if result["ratio"] <= LIMIT:
        return 0
    print(f"missed: a step takes {result['ratio']:.3f} times as long with a reporter, the limit is {LIMIT}")
    return 1


def measure(run: Path, settings: Sequence[str], block: int, rounds: int) -> list[float]:
    """Train, with the reporter stopped in every other block. Returns the seconds of every step after the warm-up."""
    steps = WARM_UP + block * (2 * rounds + 1)
    command = [sys.executable, "-m", "outpace.cli", "train", "--quiet", *settings, f"--run.dir={run}", "--eval.count=0"]
    with subprocess.Popen([*command, f"--run.steps={steps}"], stdout=subprocess.DEVNULL) as process:
        reached = 0
        while process.poll() is None:
            time.sleep(POLL_S)
            lines = sum(1 for _ in read_lines(run / "metrics.jsonl"))
            if lines >= WARM_UP and (lines - WARM_UP) // block + 1 != reached:
                reached = (lines - WARM_UP) // block + 1
                _signal_reporter(process.pid, signal.SIGSTOP if reached % 2 else signal.SIGCONT)
    if process.returncode:
        raise ComponentFailed("trackers", f"the run failed with exit code {process.returncode}")
    return [line["time/step_s"] for line in read_lines(run / "metrics.jsonl")][WARM_UP:]


def _signal_reporter(run: int, number: signal.Signals) -> None:
    for child in psutil.Process(run).children():
        with suppress(psutil.NoSuchProcess):
            if any("outpace.monitoring.reporter" in word for word in child.cmdline()):
                for process in (child, *child.children(recursive=True)):
                    process.send_signal(number)


def compare(seconds: Sequence[float], block: int) -> dict[str, Any]:
    """Compare blocks with the reporter, the second, fourth and so on, with their neighbors."""
    blocks = [seconds[first : first + block] for first in range(0, len(seconds) - block + 1, block)]
    means = [statistics.fmean(each) for each in blocks]
    ratios = [means[at] / statistics.fmean((means[at - 1], means[at + 1])) for at in range(1, len(means) - 1, 2)]
    without, reported = (list(itertools.chain.from_iterable(blocks[start::2])) for start in (0, 1))
    return {
        "blocks": len(ratios),
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
        "step_s": statistics.median(without),
        "longest_step_s": {"reporter running": max(reported), "reporter stopped": max(without)},
    }


if __name__ == "__main__":
    run_benchmark(main)
