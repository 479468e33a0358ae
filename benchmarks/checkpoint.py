"""`python benchmarks/checkpoint.py`: cost of checkpoints and the journal.

One run of the built-in task, with checkpoints at the default interval, gives the time that saving blocks the learner
and the time spent in the background. The CPU time of the journal is measured by replaying that run's records one by
one, as its worker and learner did, and compared with the CPU time of all processes of the run. Every share is thus of
one run on one machine, and a busy machine slows both sides.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from outpace.checkpoint import journal
from outpace.checkpoint.commit import newest_complete
from outpace.checkpoint.journal import survey_journal
from outpace.checkpoint.turn_log import TurnLog
from outpace.commands.bench_options import run_benchmark, take_options
from outpace.config import Config
from outpace.config.validation import resolve
from outpace.errors import BadInput, ComponentFailed
from outpace.monitoring.line_file import read_lines
from outpace.rollouts.requests import RecordedTurns
from outpace.run.plan import load_run_config
from outpace.runtime.cleanup import temporary_directory
from outpace.types import FinishedGroup, Generation, GroupRecord, Row, Sampling

STALL_LIMIT = 0.05
"""Largest share of a mean step that a checkpoint may block the learner."""

JOURNAL_LIMIT = 0.02
"""Largest share of a run's CPU time that the journal may take."""

REPLAYED = 1000  # groups, at least
BURST = 200  # groups whose turns are logged per log: a log drops turns if too many are pending
ROUNDS = 5

Finished = tuple[FinishedGroup, GroupRecord]


@dataclass(frozen=True)
class CheckpointCost:
    """Times in seconds, as means over the checkpoints of the run."""

    steps: int
    every: int
    checkpoints: int
    step_s: float
    held_s: float  # the copy blocks the learner thread
    write_s: float  # learner files, in the background
    whole_s: float  # from the call to the commit, in the background
    blocking_s: float  # a save that blocks until the files are on disk, with no run beside it
    cpu_s: float  # all processes of the run
    append_cpu_s: float
    read_cpu_s: float
    turns_cpu_s: float

    @property
    def share_of_step(self) -> float:
        return self.held_s / self.step_s

    @property
    def share_of_interval(self) -> float:
        return self.share_of_step / self.every

    @property
    def journal_share(self) -> float:
        return (self.append_cpu_s + self.read_cpu_s + self.turns_cpu_s) / self.cpu_s


def main(words: Sequence[str]) -> int:
    options, settings = take_options(words, {"steps": 60})
    result = run(options["steps"], settings)
    print_table(result)
    shares = {name: getattr(result, name) for name in ("share_of_step", "share_of_interval", "journal_share")}
    print(json.dumps(asdict(result) | shares))
    missed = missed_targets(result)
    for message in missed:
        print(f"missed: {message}")
    return 1 if missed else 0


def missed_targets(result: CheckpointCost) -> list[str]:
    shares = {
        "a checkpoint blocks the learner for {} of a step": (result.share_of_step, STALL_LIMIT),
        "the journal takes {} of the CPU time": (result.journal_share, JOURNAL_LIMIT),
    }
    return [
        f"{words.format(f'{share:.2%}')}, the limit is {limit:.0%}"
        for words, (share, limit) in shares.items()
        if not share < limit
    ]


def run(steps: int, settings: Sequence[str] = ()) -> CheckpointCost:
    with temporary_directory("checkpoint") as directory:
        run_dir = directory / "run"
        cpu_s = _train(run_dir, steps, settings)
        return _analyze(run_dir, steps, cpu_s)


def _train(run_dir: Path, steps: int, settings: Sequence[str]) -> float:
    """Run training. Returns the CPU seconds of its whole process tree."""
    words = [*settings, f"--run.steps={steps}", f"--run.dir={run_dir}"]
    before = _children_cpu_s()
    command = [sys.executable, "-m", "outpace.cli", "train", "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ComponentFailed("outpace train", f"exit code {done.returncode}", done.stderr)
    return _children_cpu_s() - before


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# --------------------------------------------------------------------------------------------------------------- run


def _analyze(run_dir: Path, steps: int, cpu_s: float) -> CheckpointCost:
    config = resolve(load_run_config(run_dir, []))
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    held = [line["checkpoint/held_s"] for line in lines if "checkpoint/held_s" in line]
    written = [line["checkpoint/write_s"] for line in lines if "checkpoint/write_s" in line]
    if not held or not written:
        raise BadInput(
            f"--steps: {steps} steps have no checkpoint before the last; one is written every {config.checkpoint.every}"
        )
    append_s, read_s, turns_s = _journal_cost(run_dir, config, lines)
    return CheckpointCost(
        steps=steps,
        every=config.checkpoint.every,
        checkpoints=len(held),
        step_s=json.loads((run_dir / "summary.json").read_text())["train_s"] / steps,
        held_s=statistics.mean(held),
        write_s=statistics.mean(written),
        whole_s=statistics.mean(_spans(run_dir)),
        blocking_s=_blocking_save(run_dir, config),
        cpu_s=cpu_s,
        append_cpu_s=append_s,
        read_cpu_s=read_s,
        turns_cpu_s=turns_s,
    )


def _spans(run_dir: Path) -> list[float]:
    events = json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    return [event["dur"] / 1e6 for event in events if event.get("cat") == "checkpoint"]


def _blocking_save(run_dir: Path, config: Config) -> float:
    """Return the median time to save the run's last state to the same file system."""
    from outpace.learner import state
    from outpace.learner.core import LearnerCore
    from outpace.models.loading import load_model

    checkpoint = newest_complete(run_dir / "checkpoints")
    assert checkpoint is not None, "a successful run has one"
    core = LearnerCore(load_model(config.model.path, dtype="float32", device="cpu"), config)
    state.restore(core, checkpoint)
    seconds = []
    for number in range(ROUNDS):
        target = run_dir / f"blocking-{number}"
        target.mkdir()
        started = time.perf_counter()
        state.save(core, target)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


# ----------------------------------------------------------------------------------------------------------- journal


def _journal_cost(run_dir: Path, config: Config, lines: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the CPU seconds of the run's appends, of the learner's reads and of logging turns."""
    found = survey_journal(run_dir / "journal")
    if not found:
        raise BadInput(f"{run_dir / 'journal'} contains no groups to replay")
    finished = sum(line["groups/finished"] for line in lines)
    rolled_out = finished + sum(line["groups/filtered"] + line["groups/failed"] for line in lines)
    places = [journal.place_of(each) for each in found]
    groups = [
        (each, journal.read_record(run_dir / "journal", place)) for each, place in zip(found, places, strict=True)
    ]
    replayed = list(itertools.islice(itertools.cycle(groups), max(REPLAYED, len(groups))))
    per_group = 1 / len(replayed)
    appends = _cpu_s(lambda: asyncio.run(_append(run_dir / "replayed", replayed)))
    reads = _cpu_s(lambda: [journal.read_record(run_dir / "journal", place) for place in places]) / len(places)
    turns = _cpu_s(lambda: _log_turns(run_dir / "replayed", replayed)) if config.checkpoint.turns else 0.0
    return finished * appends * per_group, finished * reads, rolled_out * turns * per_group


def _cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds of `work`, including all threads of this process."""
    before = time.process_time()
    work()
    return time.process_time() - before


async def _append(directory: Path, groups: Sequence[Finished]) -> None:
    """Append groups one by one in a thread, like a worker."""
    writer = journal.JournalWriter(directory, "bench")
    for kept, record in groups:
        await asyncio.to_thread(writer.append, kept, record)
    writer.close()


def _log_turns(directory: Path, groups: Sequence[Finished]) -> None:
    for start in range(0, len(groups), BURST):
        log = TurnLog(directory / str(start), "bench")  # own directory: a log reads other logs in its directory
        for kept, record in groups[start : start + BURST]:
            turns = RecordedTurns(log, kept.order)
            for row in record.rows:
                turns.record(row.episode % kept.order.size, 0, *_exchange(row))
            turns.close()
        log.close()


def _exchange(row: Row) -> tuple[Any, Sampling, Generation]:
    """Return the prompt, the sampling parameters and the completion of a row."""
    start = int(np.argmax(row.mask)) if row.mask.any() else len(row.tokens)
    completion = Generation(row.tokens[start:], row.logprobs[start:], row.versions[start:], "stop")
    return row.tokens[:start], Sampling(max_tokens=64, seed=1), completion


# ------------------------------------------------------------------------------------------------------------ report


def print_table(result: CheckpointCost, console: Console | None = None) -> None:
    table = Table(title=f"{result.steps} steps, a checkpoint every {result.every}", title_justify="left", box=None)
    for heading in ("", "each", "share"):
        table.add_column(heading)
    in_run_s = result.held_s + result.write_s
    rows = [
        ("mean step", result.step_s, ""),
        ("learner blocked by copy", result.held_s, f"{result.share_of_step:.2%} of a step (limit {STALL_LIMIT:.0%})"),
        ("", None, f"{result.share_of_interval:.3%} of a checkpoint interval"),
        ("write learner files, in the background", result.write_s, ""),
        ("until commit, in the background", result.whole_s, ""),
        ("blocking save: copy and files of this run", in_run_s, f"{in_run_s / result.step_s:.2%} of a step"),
        ("blocking save, measured alone", result.blocking_s, f"{result.blocking_s / result.step_s:.2%} of a step"),
    ]
    for name, seconds, share in rows:
        table.add_row(name, "" if seconds is None else f"{seconds * 1000:.2f} ms", share)
    console = console or Console(width=120)
    console.print(table)
    parts = {"appending": result.append_cpu_s, "reading": result.read_cpu_s, "logging turns": result.turns_cpu_s}
    words = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
    share = f"{result.journal_share:.2%} of {result.cpu_s:.1f} CPU seconds (limit {JOURNAL_LIMIT:.0%})"
    console.print(f"journal: {share}: {words}")


if __name__ == "__main__":
    run_benchmark(main)
