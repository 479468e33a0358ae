"""What must hold of a run directory, whatever happened to the run. Each check returns its complaints.

Only files are read: `batches.jsonl` says which visits (epoch, task) a step has trained, and which were settled without
being trained since the step before. Together they are every visit, once.
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

OF_THE_CLOCK = (
    "time/",
    "wait/",
    "share/",
    "efficiency",
    "groups/seconds",
    "throughput/sampled_",  # of the groups that closed before the line was written
    "waste/",  # the same
    "throughput/trained_tok_s",
    "checkpoint/",  # how long one took
    "sync/",  # loads and publications that ended in this step
    "eval/",  # an evaluation that ended in this step; what it came to is compared in evals.jsonl
    "queue/",  # what was under way when the step ended
    "fleet/",
    "faults/",  # a process that was replaced, for one
    "turns/",  # answers that were used again after a death
)
"""Metrics that are seconds, rates of seconds, what happened to end or to be under way at a moment, or what a death has
cost."""


# ----------------------------------------------------------------------------------------------------------- accounting


def accounting(run: Path, tasks: int, epochs: int | None) -> list[str]:
    """Every visit is there once; steps and versions go up by one. Without `epochs` the last ones may be under way."""
    batches = lines_of(run / "batches.jsonl")
    return [
        *in_sequence(trained(batches)),
        *in_sequence(lines_of(run / "metrics.jsonl"), against=len(trained(batches))),
        *complete(batches, tasks, epochs),
        *agreed(batches, ledger_of(run), tasks),
    ]


def trained(batches: list[Line]) -> list[Line]:
    """Without lines that only settle something, which a checkpoint between two steps may need."""
    return [line for line in batches if line["groups"]]


def in_sequence(lines: list[Line], against: int | None = None) -> Iterator[str]:
    steps = [line["step"] for line in lines]
    if steps != list(range(1, len(steps) + 1)):
        yield f"steps are not consecutive: {_gaps(steps)}"
    if any(line.get("version", line["step"] - 1) != line["step"] - 1 for line in lines):
        yield "a step does not make the next version"
    if against is not None and len(steps) != against:
        yield f"{len(steps)} steps in metrics.jsonl, {against} in batches.jsonl"


def complete(batches: list[Line], tasks: int, epochs: int | None) -> Iterator[str]:
    seen = visits(batches)
    if doubled := sorted(visit for visit, times in seen.items() if times > 1):
        yield f"{len(doubled)} visits happened twice: {doubled[:5]}"
    ended = epochs if epochs is not None else max((epoch for epoch, _ in seen), default=0) - 1
    due = {(epoch, task) for epoch in range(max(0, ended)) for task in range(tasks)}
    if missing := sorted(due - set(seen)):
        yield f"{len(missing)} visits are missing: {missing[:5]}"
    if epochs is not None and (foreign := sorted(set(seen) - due)):
        yield f"{len(foreign)} visits that nobody planned: {foreign[:5]}"
    if batches and "accounted" in batches[-1] and batches[-1]["accounted"] != seen.total():
        yield f"accounted is {batches[-1]['accounted']}, the lines hold {seen.total()} visits"


def visits(batches: list[Line]) -> Counter[Visit]:
    """How often each visit ended, in one way or another; a group trained again from replay is none."""
    return Counter((entry["epoch"], entry["task"]) for line in batches for entry in _entries(line))


def outcomes(batches: list[Line]) -> Counter[str]:
    return Counter(entry.get("outcome", "trained") for line in batches for entry in _entries(line))


def agreed(batches: list[Line], ledger: Mapping[str, Any], tasks: int) -> Iterator[str]:
    """The ledger of the newest checkpoint, against the lines."""
    for complaint in ("twice", "never"):
        if ledger[complaint]:
            yield f"outpace ledger: {complaint}: {ledger[complaint][:5]}"
    if ledger["version"] != (steps := len(trained(batches))):
        yield f"outpace ledger is of version {ledger['version']}, {steps} steps were trained"
        return
    told = Counter((entry["epoch"], entry.get("outcome", "trained")) for line in batches for entry in _entries(line))
    for epoch in ledger["epochs"]:
        for outcome in ("trained", "filtered", "failed", "dropped", "skipped"):
            if epoch[outcome] != told[epoch["epoch"], outcome]:
                told_now = told[epoch["epoch"], outcome]
                yield f"epoch {epoch['epoch']}: the ledger has {epoch[outcome]} {outcome}, the lines {told_now}"


def ledger_of(run: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "outpace.cli", "ledger", str(run)]
    answer: dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=60).stdout)
    return answer


def _entries(line: Line) -> Iterator[dict[str, Any]]:
    yield from (group for group in line["groups"] if not group.get("replay"))
    yield from line.get("settled", [])


def _gaps(steps: list[int]) -> str:
    wrong = [(step, expected) for expected, step in enumerate(steps, 1) if step != expected]
    return f"{wrong[0][0]} where {wrong[0][1]} should be, {len(steps)} in all"


# ------------------------------------------------------------------------------------------------------------- equality


def equality(run: Path, reference: Path) -> list[str]:
    """Bit for bit what the uninterrupted run has: what it trained on, what that came to, and the weights at the end."""
    return [
        *_same_lines("batches.jsonl", run, reference, ()),
        *_same_lines("metrics.jsonl", run, reference, OF_THE_CLOCK),
        *_same_lines("evals.jsonl", run, reference, ()),
        *_same_weights(run, reference),
    ]


def _same_lines(name: str, run: Path, reference: Path, left_out: tuple[str, ...]) -> Iterator[str]:
    ours, theirs = lines_of(run / name), lines_of(reference / name)
    if len(ours) != len(theirs):
        yield f"{name}: {len(ours)} lines, {len(theirs)} in the reference"
    for our, their in zip(ours, theirs, strict=False):
        different = sorted(
            key for key in our.keys() | their.keys() if not key.startswith(left_out) and our.get(key) != their.get(key)
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
