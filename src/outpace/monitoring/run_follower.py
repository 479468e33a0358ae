"""Reads what a tracker has not received yet from a run directory, also while the run writes to it.

    metrics.jsonl ─┐
    evals.jsonl   ─┼─▶ next_batch(position) ─▶ items in order, each with the position after it
    rollouts/     ─┘
    starts.jsonl  ───▶ rolled_back(position): a resumed run repeats the steps after its checkpoint

Invariants
- A position holds steps, not bytes: a resume replaces the files by shorter ones. Every start of the run adds a line
  with the step it continues from to starts.jsonl, after it has shortened the files. A position that has not seen
  that line goes back to that step, so repeated steps are sent again.
- A batch is bounded, so following a long run takes little memory.
- Uses only the standard library, as all that the reporter imports: it runs in the environment of the trackers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

BATCH = 200
"""Records in one batch."""
MAX_TEXT = 20_000
"""Characters of a prompt or completion in a table."""
TOTAL_S = "time/total_s"

_STEP_FILE = re.compile(r"step-(\d+)\.jsonl")


@dataclass(frozen=True)
class Position:
    """What a tracker has received."""

    run_id: str | None = None  # the tracker's name of the run; None: it does not know the run yet
    starts: int = 0  # lines of starts.jsonl taken into account
    metrics: int = 0  # last step
    evals: int = -1  # last evaluated version
    tables: int = 0  # step of the last table
    finished: bool = False  # has the summary

    @classmethod
    def from_json(cls, text: str) -> Position:
        values = json.loads(text)
        return cls(**{name: values[name] for name in (each.name for each in fields(cls)) if name in values})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Item:
    """One record for a tracker: metrics of a step, or the rows of a table."""

    step: int
    after: Position  # once the tracker has it
    values: dict[str, float] = field(default_factory=dict)
    at: float = 0.0  # seconds since the epoch
    rows: list[dict[str, Any]] | None = None  # None: metrics


class LineTail:
    """Reads a JSON lines file from where the last read ended; from the start if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] = (0, 0)
        self._offset = 0

    def rewind(self) -> None:
        self._offset = 0

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of complete lines; invalid ones are left out. A record counts as read when the next one is
        asked for: the one at which a loop breaks comes again."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                self._file, self._offset = (status.st_dev, status.st_ino), 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                record = _parse(line)
                if record is not None:
                    yield record
                self._offset += len(line)


class RunFollower:
    """Follows one run directory for one tracker."""

    def __init__(self, run: Path, tables_every: int) -> None:
        self._run = run
        self._every = tables_every
        self._metrics = LineTail(run / "metrics.jsonl")
        self._evals = LineTail(run / "evals.jsonl")
        self._seconds = 0.0  # of the last step that was read

    def rewind(self) -> None:
        """Read all files again from their start, for a position that went back."""
        self._metrics.rewind()
        self._evals.rewind()

    def rolled_back(self, position: Position) -> Position:
        """Return the position after the starts of the run that it does not know yet."""
        starts = _records(self._run / "starts.jsonl")
        unseen = starts[position.starts :]
        if not unseen:
            return position
        kept = min(int(start.get("step", 0)) for start in unseen)
        return replace(
            position,
            starts=len(starts),
            metrics=min(position.metrics, kept),
            evals=min(position.evals, kept),
            tables=min(position.tables, kept),
            finished=False,
        )

    def next_batch(self, position: Position, ended: bool = False) -> list[Item]:
        """Return what comes after the position: metrics and evaluations by step, then tables. Empty only if there is
        nothing more. `ended`: the run writes no more.

        Evaluations and tables wait until the metrics have reached their step: a tracker that is told to go back to the
        step of the metrics then loses none of them."""
        items: list[Item] = []
        for item in self._new_records(position):
            position = item.after
            items.append(item)
        for step in due_tables(self._tables(), position.tables, self._every, position.metrics, ended):
            if len(items) >= BATCH:
                break
            position = replace(position, tables=step)
            rows = list(table_rows(self._run / "rollouts" / f"step-{step:06d}.jsonl"))
            items.append(Item(step, position, rows=rows))
        return items

    def _new_records(self, position: Position) -> Iterator[Item]:
        """Yield up to `BATCH` metrics, and the evaluations between them."""
        began = self._began()
        count = 0
        for record in self._metrics.records():
            step = _step_of(record)
            if step > position.metrics:
                if count == BATCH:
                    return
                count += 1
                for item in self._new_evaluations(position, step - 1, began):
                    position = item.after
                    yield item
                position = replace(position, metrics=step)
                self._seconds = record.get(TOTAL_S, self._seconds)
                values = {name: value for name, value in _numbers(record) if not name.startswith("eval/")}
                yield Item(step, position, values, began + self._seconds)
            else:
                self._seconds = record.get(TOTAL_S, self._seconds)
        yield from self._new_evaluations(position, position.metrics, began)

    def _new_evaluations(self, position: Position, last: int, began: float) -> Iterator[Item]:
        """Yield the evaluations of versions up to `last`."""
        for record in self._evals.records():
            step = _step_of(record)
            if step > last:
                return
            if step > position.evals:
                position = replace(position, evals=step)
                yield Item(step, position, dict(_numbers(record)), began + self._seconds)

    def _began(self) -> float:
        """Return when the run started first: with the seconds of a record, the same time each time it is sent."""
        starts = _records(self._run / "starts.jsonl")
        return float(starts[0].get("time", 0.0)) if starts else 0.0

    def _tables(self) -> list[int]:
        try:
            names = os.listdir(self._run / "rollouts")
        except OSError:
            return []
        return sorted(int(match[1]) for name in names if (match := _STEP_FILE.fullmatch(name)))


def due_tables(recorded: list[int], sent: int, every: int, newest: int, ended: bool) -> Iterator[int]:
    """Yield the recorded steps up to `newest` whose tables are due after step `sent`, in order.

    Workers write the files after the step, not always in order: a missing one is waited for until the run is one
    interval further."""
    expected = 1 if sent == 0 else sent + every - (sent - 1) % every
    for step in recorded:
        if step <= sent or (step - 1) % every:
            continue
        if step > newest:
            return
        if step > expected and newest < step + every and not ended:
            return
        yield step
        expected = step + every


def table_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table: one per recorded attempt."""
    for attempt in _records(file):
        turns = [turn for trajectory in attempt.get("trajectories", []) for turn in trajectory.get("turns", [])]
        first = turns[:1] if turns and not turns[0].get("sampled") else []
        prompt = first[0].get("text", "") if first else attempt.get("task_prompt", "")
        completion = "".join(turn.get("text", "") for turn in turns[len(first) :])
        yield {
            "step": attempt.get("step"),
            "task_id": attempt.get("task_id", ""),
            "prompt": prompt[:MAX_TEXT],
            "completion": completion[:MAX_TEXT],
            "reward": attempt.get("reward"),
            **{f"reward/{name}": value for name, value in attempt.get("rewards", {}).items()},
            "advantage": attempt.get("advantage"),
            "oldest_version": attempt.get("oldest"),
            "newest_version": attempt.get("newest"),
        }


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    return [record for record in map(_parse, lines) if record is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and line.endswith(b"\n") else None


def _step_of(record: dict[str, Any]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else -1


def _numbers(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)
