"""Checks of a run directory that must pass whatever happened to the run. Each check returns its complaints.

Only files are read. `batches.jsonl` lists the visits (epoch, task) that each step trained and those finalized without
being trained since the previous step. Together they are every visit exactly once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drills.following import lines_of

Line = dict[str, Any]
Visit = tuple[int, int]  # epoch, task

TIMING_METRICS = (
    "time/",
    "idle/",
    "share/",
    "efficiency",
    "groups/seconds",
    "episode/seconds/",
    "throughput/sampled_",  # of groups that closed before the line was written
    "waste/",  # the same
    "throughput/trained_tok_s",
    "checkpoint/",  # how long one took
    "sync/",  # loads and publications that ended in this step
    "eval/",  # an evaluation that ended in this step; its result is compared in evals.jsonl
    "queue/",  # work in progress when the step ended
    "reroll/waiting",  # the same
    "reroll/dropped",
    "fleet/",
    "faults/",  # such as restarted processes
    "turns/",  # completions that were reused after a death
)
"""Metrics that depend on timing or on deaths: durations, rates, counts of what was in progress or ended at a moment."""


# ----------------------------------------------------------------------------------------------------------- accounting


def accounting(run: Path, tasks: int, epochs: int | None) -> list[str]:
    """Every visit is recorded once; steps and versions increase by one. Without `epochs` the last may be incomplete."""
    batches = lines_of(run / "batches.jsonl")
    return [
        *in_sequence(trained(batches)),
        *in_sequence(lines_of(run / "metrics.jsonl"), expected=len(trained(batches))),
        *complete(batches, tasks, epochs),
        *ledger_differences(batches, ledger_of(run), tasks),
    ]


def trained(batches: list[Line]) -> list[Line]:
    """Leave out lines that only finalize visits, which a checkpoint between two steps may write."""
    return [line for line in batches if line["groups"]]


def in_sequence(lines: list[Line], expected: int | None = None) -> Iterator[str]:
    steps = [line["step"] for line in lines]
    if steps != list(range(1, len(steps) + 1)):
        yield f"steps are not consecutive: {_gaps(steps)}"
    if any(line.get("version", line["step"] - 1) != line["step"] - 1 for line in lines):
        yield "a step does not make the next version"
    if expected is not None and len(steps) != expected:
        yield f"{len(steps)} steps in metrics.jsonl, {expected} in batches.jsonl"


def complete(batches: list[Line], tasks: int, epochs: int | None) -> Iterator[str]:
    seen = visits(batches)
    if doubled := sorted(visit for visit, times in seen.items() if times > 1):
        yield f"{len(doubled)} visits happened twice: {doubled[:5]}"
    ended = epochs if epochs is not None else max((epoch for epoch, _ in seen), default=0) - 1
    due = {(epoch, task) for epoch in range(max(0, ended)) for task in range(tasks)}
    if missing := sorted(due - set(seen)):
        yield f"{len(missing)} visits are missing: {missing[:5]}"
    if epochs is not None and (foreign := sorted(set(seen) - due)):
        yield f"{len(foreign)} visits that were not planned: {foreign[:5]}"
    if batches and "accounted" in batches[-1] and batches[-1]["accounted"] != seen.total():
        yield f"accounted is {batches[-1]['accounted']}, the lines hold {seen.total()} visits"


def visits(batches: list[Line]) -> Counter[Visit]:
    """Count how often each visit ended in any way; replayed groups do not count."""
    return Counter((entry["epoch"], entry["task"]) for line in batches for entry in _entries(line))


def outcomes(batches: list[Line]) -> Counter[str]:
    return Counter(entry.get("outcome", "trained") for line in batches for entry in _entries(line))


def ledger_differences(batches: list[Line], ledger: Mapping[str, Any], tasks: int) -> Iterator[str]:
    """Compare the ledger of the newest checkpoint with the lines."""
    for complaint in ("twice", "never"):
        if ledger[complaint]:
            yield f"outpace ledger: {complaint}: {ledger[complaint][:5]}"
    if ledger["version"] != (steps := len(trained(batches))):
        yield f"outpace ledger is of version {ledger['version']}, {steps} steps were trained"
        return
    recorded = Counter(
        (entry["epoch"], entry.get("outcome", "trained")) for line in batches for entry in _entries(line)
    )
    for epoch in ledger["epochs"]:
        for outcome in ("trained", "filtered", "failed", "dropped", "skipped"):
            if epoch[outcome] != recorded[epoch["epoch"], outcome]:
                in_lines = recorded[epoch["epoch"], outcome]
                yield f"epoch {epoch['epoch']}: the ledger has {epoch[outcome]} {outcome}, the lines {in_lines}"


def ledger_of(run: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "outpace.cli", "ledger", str(run)]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    return answer


def _entries(line: Line) -> Iterator[dict[str, Any]]:
    yield from (group for group in line["groups"] if not group.get("replay"))
    yield from line.get("settled", [])


def _gaps(steps: list[int]) -> str:
    wrong = [(step, expected) for expected, step in enumerate(steps, 1) if step != expected]
    return f"{wrong[0][0]} where {wrong[0][1]} should be, {len(steps)} in all"


# ------------------------------------------------------------------------------------------------------------- equality


def equality(run: Path, reference: Path) -> list[str]:
    """Compare bit for bit with the uninterrupted run: training groups, metrics, evaluations and final weights."""
    return [
        *_same_lines("batches.jsonl", run, reference, ()),
        *_same_lines("metrics.jsonl", run, reference, TIMING_METRICS),
        *_same_lines("evals.jsonl", run, reference, ()),
        *_same_weights(run, reference),
    ]


def _same_lines(name: str, run: Path, reference: Path, ignored: tuple[str, ...]) -> Iterator[str]:
    ours, theirs = lines_of(run / name), lines_of(reference / name)
    if len(ours) != len(theirs):
        yield f"{name}: {len(ours)} lines, {len(theirs)} in the reference"
    for our, their in zip(ours, theirs, strict=False):
        different = sorted(
            key for key in our.keys() | their.keys() if not key.startswith(ignored) and our.get(key) != their.get(key)
        )
        if different:
            key = different[0]
            yield f"{name}: step {our['step']}: {key} is {_short(our.get(key))}, not {_short(their.get(key))}" + (
                f"; so are {', '.join(different[1:4])}" if different[1:] else ""
            )
            return


def _same_weights(run: Path, reference: Path) -> Iterator[str]:
    ours, theirs = _newest(run), _newest(reference)
    if ours is None or theirs is None or ours.name != theirs.name:
        yield f"the newest checkpoint is {ours and ours.name}, not {theirs and theirs.name}"
        return
    for theirs_file in sorted(theirs.rglob("model.safetensors")):
        ours_file = ours / theirs_file.relative_to(theirs)
        if not ours_file.exists() or ours_file.read_bytes() != theirs_file.read_bytes():
            yield f"{ours.name}/{theirs_file.relative_to(theirs)} differs"


def _newest(run: Path) -> Path | None:
    found = sorted((run / "checkpoints").glob("step-*"))
    return found[-1] if found else None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 120 else text[:117] + "..."
