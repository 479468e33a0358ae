"""`outpace bench end-to-end`: outpace and TRL's GRPOTrainer on the same work, and the limit of the machine.

Both systems train the same model on the same prompts, with the same reward, lengths, dtype and optimizer, one optimizer
step per batch. Each training runs in its own processes. Trainings of the two systems alternate. TRL uses the fastest
of `--trl-batches`, determined in short runs. After each training of outpace, the limit
(`outpace.commands.end_to_end.limit`) is measured with the trained model on the tasks that follow: its answers have
other lengths than before training, and more of them are equal, which the learner computes once.

    work ─▶ short TRL runs: the batch size ─▶ repeats: outpace, its limit, TRL ─▶ accuracy of saved weights ─▶ report

With `--target` both systems save weights every `--save-every` steps, and the same engine evaluates these after all
trainings. The seconds to the target count training alone, without startup and evaluation.

With `--recorded` the command exits with 1 if the ratio to TRL or to the limit is below half of the recorded one.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from outpace.checkpoint.export import export
from outpace.commands.bench_options import BenchParser, positive
from outpace.commands.end_to_end.limit import COMPONENTS, measure_limit
from outpace.commands.end_to_end.report import Comparison, print_report
from outpace.commands.end_to_end.systems import (
    OUTPACE,
    RUN,
    TRL,
    OutpaceSystem,
    TrlSystem,
    all_steps,
    evaluate,
    seconds_to,
)
from outpace.commands.end_to_end.work import Work
from outpace.config.defaults import with_values
from outpace.config.load import parse_arguments
from outpace.errors import BadInput, ComponentFailed, one_line
from outpace.hardware.machine import OtherPrograms, describe_machine
from outpace.runtime.cleanup import temporary_directory

PROBE_STEPS = 3
HELDOUT = 1024
"""Held-out tasks of an evaluation."""

LONGEST = 256
"""Longest answer with long-tailed lengths, unless set."""

RECORDED = {"samples_per_s": "samples/s relative to TRL", "limit": "relative to the limit"}
"""Ratios that `--recorded` compares, with their labels."""
MIN_OF_RECORDED = 0.5

ALIASES = {
    "model": "model.path",
    "task": "tasks.name",
    "prompts": "pacing.groups_per_step",
    "attempts": "rollout.group_size",
    "max_tokens": "rollout.max_tokens",
    "device": "run.device",
    "dtype": "model.dtype",
    "engine": "engine.kind",
}
"""Settings with a separate option, because they apply to TRL too."""


def main(words: Sequence[str]) -> int:
    options, others = parser().parse_known_args(words)
    if options.only and options.recorded:
        raise BadInput("--recorded: needs both systems; leave out --only")
    given = {ALIASES[name]: value for name, value in vars(options).items() if name in ALIASES and value is not None}
    if options.lengths == "long-tailed":
        given.setdefault("rollout.max_tokens", LONGEST)
    work = Work.of(given | parse_arguments(others), options.lengths)
    recorded = _read(options.recorded) if options.recorded else None
    comparison = Benchmark(work, options).run()
    print_report(comparison)
    found = comparison.as_json()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return compare_with(recorded, found) if recorded else 0


def _read(file: Path) -> dict[str, Any]:
    try:
        recorded: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"--recorded: cannot read {file}: {one_line(error)}") from None
    return recorded


def compare_with(recorded: dict[str, Any], found: dict[str, Any]) -> int:
    """Print both ratios beside the recorded ones. Returns 1 if a ratio is below half of its recorded value, if any."""
    pairs = {label: (found["ratios"][name], recorded["ratios"][name]) for name, label in RECORDED.items()}
    print("; ".join(f"{label} {own:.2f} (recorded: {other or 'no'})" for label, (own, other) in pairs.items()))
    return int(any(own < MIN_OF_RECORDED * other for own, other in pairs.values() if other is not None))


def parser() -> BenchParser:
    this = BenchParser(prog="outpace bench end-to-end", allow_abbrev=False,
                       epilog="Also takes settings of outpace, as --section.key value.")  # fmt: skip
    add = this.add_argument
    add("--model", help="as in model.path (default: starter)")
    add("--task", help="as in tasks.name (default: countdown)")
    add("--prompts", type=positive, help="prompts per step (default: 64)")
    add("--attempts", type=positive, help="attempts at each prompt (default: 8)")
    add("--max-tokens", type=positive, help="longest answer (default: that of the model; 256 if long-tailed)")
    add("--device", choices=("cpu", "cuda"), help="(default: cuda if there is a GPU)")
    add("--dtype", choices=("float32", "bfloat16"), help="of matrix products (default: float32)")
    add("--engine", choices=("embedded", "vllm", "sglang"), help="of outpace (default: embedded)")
    add("--lengths", choices=("equal", "long-tailed"), default="equal", help="of answers: as sampled, or drawn")
    add("--steps", type=positive, default=12, help="of each training; the first third does not count")
    add("--repeats", type=positive, default=3, help="trainings of each system")
    add("--target", type=float, metavar="ACCURACY", help="also measure the seconds to this held-out accuracy")
    add("--save-every", type=positive, default=2, metavar="STEPS", help="with --target: steps between evaluations")
    add("--trl-python", default=sys.executable, metavar="PYTHON", help="has TRL (default: this one)")
    add("--trl-vllm", action="store_true", help="TRL samples with vLLM in its own process")
    add("--trl-batches", metavar="SIZES", help="per-device batch sizes to try (default: all samples, 1/4, 1/8)")
    add("--only", choices=(OUTPACE, TRL), help="run one system alone; outpace with its limit")
    add("--recorded", type=Path, metavar="FILE", help="fail below half of the ratios in FILE, written by --json")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return this


class Benchmark:
    """Runs all parts of the benchmark one after the other."""

    def __init__(self, work: Work, options: Any) -> None:
        self._work = work
        self._options = options
        self._console = Console(stderr=True)
        self._save_every: int = options.save_every if options.target is not None else 0
        self._systems = [options.only] if options.only else [OUTPACE, TRL]
        self._comparison = Comparison(_describe(work, options), describe_machine(), target=options.target)
        if TRL in self._systems and options.trl_python == sys.executable and not importlib.util.find_spec("trl"):
            raise BadInput("--trl-python: TRL is not installed here; name a Python that has it")

    def run(self) -> Comparison:
        others = OtherPrograms()
        with temporary_directory("bench") as self._directory:
            run: dict[str, Callable[[Work], None]] = {OUTPACE: self._run_outpace, TRL: self._run_trl}
            if TRL in self._systems:
                self._comparison.trl_batch = self._find_batch()
            for repeat in range(self._options.repeats):
                for system in self._systems if repeat % 2 == 0 else reversed(self._systems):
                    run[system](self._work.seeded(repeat))
            if self._save_every:
                self._evaluate()
        self._comparison.other_cores = others.cores()
        return self._comparison

    def _run_outpace(self, work: Work) -> None:
        system = OutpaceSystem(work, self._save_every)
        with self._fresh(OUTPACE) as directory:
            found = system.run(self._options.steps, directory)
        self._comparison.runs.setdefault(OUTPACE, []).append(found)
        self._console.print(f"outpace: {found.samples_per_s:,.1f} samples/s, {found.step_s:.2f} s per step")
        self._measure_limit(work, directory / RUN)

    def _run_trl(self, work: Work) -> None:
        system = self._trl(work, self._comparison.trl_batch, self._save_every)
        with self._fresh(TRL) as directory:
            found = system.run(self._options.steps, directory)
        self._comparison.runs.setdefault(TRL, []).append(found)
        self._console.print(f"TRL: {found.samples_per_s:,.1f} samples/s, {found.step_s:.2f} s per step")

    def _measure_limit(self, work: Work, run: Path) -> None:
        """Measure the limit with the model that this run trained."""
        known = self._comparison.limits[:1]
        threads = {name: getattr(known[0], name).threads for name in COMPONENTS} if known else None
        with self._fresh("limit") as directory:
            model = export(run, directory / "model")
            trained = replace(work, config=with_values(work.config, {"model.path": str(model)}))
            limit = measure_limit(trained, directory, work.prompts * all_steps(work, self._options.steps), threads)
            shutil.rmtree(model)
        self._comparison.limits.append(limit)
        self._console.print(f"limit: {limit.samples_per_s:,.1f} samples/s")

    def _trl(self, work: Work, batch: int, save_every: int = 0) -> TrlSystem:
        return TrlSystem(work, self._options.trl_python, self._options.trl_vllm, batch, save_every)

    def _find_batch(self) -> int:
        """Return the fastest of TRL's batch sizes. Sizes that fail, for example for lack of memory, are skipped."""
        sizes, tried = _batch_sizes(self._options.trl_batches, self._work.samples), self._comparison.trl_batches
        if len(sizes) == 1:
            return sizes[0]
        error: ComponentFailed | None = None
        for size in sizes:
            try:
                with self._fresh(TRL) as directory:
                    step_s = tried[size] = self._trl(self._work, size).run(PROBE_STEPS, directory).step_s
                found = f"{step_s:.2f} s per step"
            except ComponentFailed as failed:
                tried[size], error, found = None, failed, "failed"
            self._console.print(f"TRL, batch {size} per device: {found}")
        working = {size: step_s for size, step_s in tried.items() if step_s is not None}
        if not working:
            assert error is not None
            raise error
        return min(working, key=working.__getitem__)

    def _evaluate(self) -> None:
        """Evaluate the model before training and all saved weights."""
        comparison, target = self._comparison, self._options.target
        files = [file for runs in comparison.runs.values() for run in runs for file in run.weights.values()]
        with self._fresh("accuracy") as directory:
            start, *trained = evaluate(self._work, files, HELDOUT, directory)
        if start >= target:
            raise BadInput(f"--target: the model has an accuracy of {start:.3f} before training; set more")
        accuracy = dict(zip(files, trained, strict=True))
        for system, runs in comparison.runs.items():
            curves = [{step: accuracy[file] for step, file in run.weights.items()} for run in runs]
            comparison.accuracy[system] = [{0: start, **curve} for curve in curves]
            comparison.target_s[system] = [
                seconds_to(target, start, run.clock, curve) for run, curve in zip(runs, curves, strict=True)
            ]

    @contextmanager
    def _fresh(self, name: str) -> Iterator[Path]:
        """Make a directory for one part. It stays until the benchmark ends, because saved weights are in it."""
        directory = self._directory / f"{name}-{len(list(self._directory.iterdir()))}"
        directory.mkdir()
        yield directory


def _batch_sizes(given: str | None, samples: int) -> list[int]:
    if given is None:
        return [samples // part for part in (1, 4, 8) if samples % part == 0]
    words = given.split(",")
    if not all(word.isdecimal() and int(word) and samples % int(word) == 0 for word in words):
        raise BadInput(f"--trl-batches: must be divisors of the {samples} samples of a step, such as {samples // 4}")
    return [int(word) for word in words]


def _describe(work: Work, options: Any) -> dict[str, Any]:
    config = work.config
    title = (
        f"{config.model.path} on {config.tasks.name}, {work.prompts} prompts x {work.attempts}, at most "
        f"{work.max_tokens} tokens, {work.lengths} lengths, {config.model.dtype}, {options.steps} steps, "
        f"{options.repeats} repeats"
    )
    return {
        "title": title,
        "model": config.model.path,
        "task": config.tasks.name,
        "prompts": work.prompts,
        "attempts": work.attempts,
        "max_tokens": work.max_tokens,
        "lengths": work.lengths,
        "dtype": config.model.dtype,
        "engine": config.engine.kind,
        "trl_vllm": options.trl_vllm,
        "steps": options.steps,
        "repeats": options.repeats,
    }
