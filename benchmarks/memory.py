"""`python benchmarks/memory.py`: check for memory growth over a toy run of a few thousand steps, measured from outside.

Growth is the Theil-Sen slope (the median of all pairwise slopes) over block medians of the samples between two
steps, with Sen's distribution-free 95 % interval. Blocks, because neighboring samples are not independent.
The verdict depends on the interval, not on the estimate:
- flat: its upper end is below the tolerance (1 % of the level over the whole window);
- growing: its lower end is above zero, and it is not flat;
- unclear: too noisy to decide.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from outpace.commands.bench_options import run_benchmark
from outpace.errors import BadInput, ComponentFailed
from outpace.runtime.cleanup import temporary_directory

Verdict = Literal["flat", "growing", "unclear"]

TOLERANCE = 0.01
BLOCKS = 10
SAMPLE_EVERY = 20  # steps
POLL_S = 0.25
MIN_STEPS = 10 * SAMPLE_EVERY

TOY = {
    "rollout.group_size": "4",
    "rollout.max_tokens": "8",
    "pacing.groups_per_step": "2",
    "pacing.chunk_groups": "2",
    "engine.slots": "8",
    "learner.lr": "1e-9",  # the policy hardly changes, so late steps do not wait longer for trainable groups
    "eval.every": "100",
    "eval.count": "32",
    "checkpoint.every": "100",
    "run.save_rollouts": "1",
    "run.threads": "1",
}


class MemorySample(msgspec.Struct, frozen=True):
    step: int
    pss: int
    processes: int
    threads: int
    fds: int


class Growth(msgspec.Struct, frozen=True):
    """Growth of one quantity over a window of steps."""

    first_step: int
    last_step: int
    level: float  # median
    per_step: float
    low: float  # 95 % interval of per_step
    high: float
    verdict: Verdict


def growth(steps: Sequence[float], values: Sequence[float], tolerance: float = TOLERANCE) -> Growth:
    """Return slope, interval and verdict. Needs at least four samples."""
    if len(steps) < 4:
        raise ValueError(f"{len(steps)} samples are too few to estimate a slope")
    xs, ys = _block_medians(steps, values)
    level = statistics.median(values)
    per_step, low, high = _theil_sen(xs, ys)
    allowed = tolerance * level / max(max(steps) - min(steps), 1)
    verdict: Verdict = "flat" if high <= allowed else "growing" if low > 0 else "unclear"
    return Growth(int(min(steps)), int(max(steps)), level, per_step, low, high, verdict)


def analyze(samples: Sequence[MemorySample], start: int = 1000, end: int = 2000) -> dict[str, Any]:
    """Return the report for steps `start` to `end`. `flat` is true only if nothing grows."""
    window = [sample for sample in samples if start <= sample.step <= end]
    if len(window) < 4:
        raise ValueError(f"{len(window)} samples between steps {start} and {end} are too few to estimate a slope")
    steps = [float(sample.step) for sample in window]
    memory = growth(steps, [float(sample.pss) for sample in window])
    counts = {
        name: _count_change([getattr(sample, name) for sample in window]) for name in ("processes", "threads", "fds")
    }
    steady = all(last <= first for first, last in counts.values())
    return {
        "flat": memory.verdict == "flat" and steady,
        "pss": msgspec.to_builtins(memory),
        "counts": {name: {"first": first, "last": last} for name, (first, last) in counts.items()},
        "samples": len(window),
    }


def main(settings: Sequence[str]) -> int:
    """`python benchmarks/memory.py [--steps N] [--section.key value …]`: exit code 0 if memory is flat."""
    parser = argparse.ArgumentParser(prog="python benchmarks/memory.py", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=2000)
    arguments, rest = parser.parse_known_args(settings)
    if arguments.steps < MIN_STEPS:
        raise BadInput(f"--steps: {arguments.steps} steps are too few to estimate a slope; use at least {MIN_STEPS}")
    return 0 if run(arguments.steps, rest)["flat"] else 1


def run(steps: int = 2000, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Train a toy model in a child process, sample its process tree, print and return the report."""
    with temporary_directory("memory") as folder:
        run_dir = folder / "run"
        toy = TOY | {"run.dir": str(run_dir), "run.steps": str(steps)}
        flags = [*(f"--{key}={value}" for key, value in toy.items()), *settings]
        with (folder / "output.txt").open("w+") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "outpace.cli", "train", *flags], stdout=output, stderr=subprocess.STDOUT
            )
            try:
                samples = _sample_memory(child, run_dir / "metrics.jsonl")
            finally:
                _end(child)
            if child.returncode:
                output.seek(0)
                raise ComponentFailed("memory benchmark", f"the run ended with code {child.returncode}", output.read())
    result = analyze(samples, steps // 2, steps)
    result["series"] = [msgspec.to_builtins(sample) for sample in samples]
    print_table(result)
    return result


def print_table(result: dict[str, Any], console: Console | None = None) -> None:
    memory = result["pss"]
    table = Table(title=f"memory, steps {memory['first_step']} to {memory['last_step']}", title_justify="left")
    for heading in ("quantity", "level", "growth per 1,000 steps", "95 % interval", "verdict"):
        table.add_column(heading)
    mib = 1 / (1 << 20)
    interval = f"{memory['low'] * 1000 * mib:+.2f} … {memory['high'] * 1000 * mib:+.2f} MiB"
    table.add_row(
        "PSS",
        f"{memory['level'] * mib:.1f} MiB",
        f"{memory['per_step'] * 1000 * mib:+.2f} MiB",
        interval,
        memory["verdict"],
    )
    for name, change in result["counts"].items():
        verdict = "steady" if change["last"] <= change["first"] else "growing"
        table.add_row(name, f"{change['first']:g}", f"{change['last'] - change['first']:+g} in all", "", verdict)
    (console or Console()).print(table)


# ------------------------------------------------------------------------------------------------------------- sampling


def sample_tree(root: psutil.Process, step: int) -> MemorySample:
    """Measure a process and its descendants. Processes that end meanwhile are left out; raises `psutil.NoSuchProcess`
    if the root is gone.

    Memory is the proportional set size: a page shared by n processes counts 1/n in each, so the sum counts every page
    once, shared weight buffers included. Where the system does not report it, the unique set size is used."""
    pss = processes = threads = fds = 0
    for process in (root, *root.children(recursive=True)):
        try:
            with process.oneshot():
                memory = process.memory_full_info()
                thread_count, fd_count = process.num_threads(), process.num_fds()
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            if process is root:
                raise
            continue
        pss += getattr(memory, "pss", 0) or memory.uss
        processes, threads, fds = processes + 1, threads + thread_count, fds + fd_count
    return MemorySample(step, pss, processes, threads, fds)


def _sample_memory(child: subprocess.Popen[bytes], metrics: Path) -> list[MemorySample]:
    root = psutil.Process(child.pid)
    tail = StepTail(metrics)
    samples: list[MemorySample] = []
    next_step = SAMPLE_EVERY
    while child.poll() is None:
        step = tail.newest()
        if step >= next_step:
            next_step = step - step % SAMPLE_EVERY + SAMPLE_EVERY
            try:
                samples.append(sample_tree(root, step))
            except psutil.NoSuchProcess:
                break  # it has just exited
        time.sleep(POLL_S)
    return samples


class StepTail:
    """Follows the newest step in a growing metrics.jsonl. Reads each byte once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._step = 0

    def newest(self) -> int:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._step = json.loads(line)["step"]
        return self._step


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(timeout=30)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


# ----------------------------------------------------------------------------------------------------------- statistics


def _block_medians(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    blocks = min(BLOCKS, len(steps))
    edges = [round(index * len(steps) / blocks) for index in range(blocks + 1)]
    spans = [slice(begin, end) for begin, end in itertools.pairwise(edges)]
    return [statistics.median(steps[span]) for span in spans], [statistics.median(values[span]) for span in spans]


def _theil_sen(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Return the median pairwise slope and Sen's 95 % interval, from the variance of Kendall's S."""
    points = list(zip(xs, ys, strict=True))
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2) if x2 > x1)
    n = len(points)
    reach = 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(math.floor((len(slopes) - reach) / 2), 0)
    high = min(math.ceil((len(slopes) + reach) / 2), len(slopes) - 1)
    return statistics.median(slopes), slopes[low], slopes[high]


def _count_change(counts: Sequence[int]) -> tuple[float, float]:
    """Return the medians of the first and last third, so that a short-lived thread or file does not count as a leak."""
    third = max(len(counts) // 3, 1)
    return statistics.median(counts[:third]), statistics.median(counts[-third:])


if __name__ == "__main__":
    run_benchmark(main)
