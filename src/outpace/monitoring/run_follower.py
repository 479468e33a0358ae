"""Reads what a tracker has not received yet from a run directory, even while the run writes to it.

    metrics.jsonl ─┐
    evals.jsonl   ─┴─▶ next_records(position) ─▶ items in order, each with the position after it
    rollouts/     ───▶ next_table(position)
    starts.jsonl  ───▶ rolled_back(position): a resumed run repeats the steps after its checkpoint
    resolved.toml ───▶ read_masked_config: the settings without secrets

Invariants
- A position holds steps, not byte offsets: a resume replaces the files by shorter ones. After shortening them, every
  start of the run adds a line to starts.jsonl with the step it continues from. A position that has not seen that line
  goes back to that step, so repeated steps are sent again.
- A batch is bounded, so following a long run takes little memory.
- Uses only the standard library, like everything that the reporter imports: it runs in the trackers' environment.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

BATCH = 200
"""Records in one batch."""
MAX_TEXT = 20_000
"""Characters of a prompt or completion in a table."""
MAX_LINE = 64 * 1024
"""Bytes at the end of metrics.jsonl that hold its last line."""
TOTAL_S = "time/total_s"

KILLED = "killed"

_STEP_FILE = re.compile(r"step-(\d+)\.jsonl")


@dataclass(frozen=True)
class Position:
    """What a tracker has received."""

    new_id: str = ""  # chosen before the first start, so that a retry of a failed start does not create a second run
    run_id: str | None = None  # the tracker's name of the run; None: no start has succeeded yet
    starts: int = 0  # lines of starts.jsonl taken into account
    metrics: int = 0  # last step
    evals: int = -1  # last evaluated version
    tables: int = 0  # step of the last table
    ended: str = ""  # digest of the summary that it has; `KILLED`: ended without one; empty: not ended

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


@dataclass(frozen=True)
class Start:
    """A line of starts.jsonl."""

    step: int = 0  # step that the run continued from
    time: float = 0.0  # seconds since the epoch
    seconds: float = 0.0  # run time before this start


def time_of(step: int, seconds: float, starts: Sequence[Start]) -> float:
    """Return when a step was logged, `seconds` into the run, in seconds since the epoch: the same on every resend."""
    start = next((each for each in reversed(starts) if each.step < step), starts[0])
    return start.time + seconds - start.seconds


class LineTail:
    """Reads a JSON lines file from where the last read ended; from the start if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] = (0, 0)
        self._offset = 0

    def rewind(self) -> None:
        self._offset = 0

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of complete lines; invalid ones are left out. A record counts as read once the next one is
        requested, so a loop that breaks at a record gets it again."""
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
        self._at = 0.0  # time of the last step that was read

    def rewind(self) -> None:
        """Read all files again from their start, for a position that went back."""
        self._metrics.rewind()
        self._evals.rewind()
        self._at = 0.0

    def rolled_back(self, position: Position) -> Position:
        """Return the position with all starts of the run taken into account: moved back if the run has been continued
        from an earlier step."""
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
            ended="",
        )

    def next_records(self, position: Position) -> list[Item]:
        """Return the metrics and evaluations after the position, by step. Empty only if there are no more.

        Evaluations and tables are sent only once the metrics have reached their step, so a tracker that goes back to
        the step of the metrics loses none of them."""
        return list(self._new_records(position))

    def next_table(self, position: Position, ended: bool = False) -> Item | None:
        """Return the table that is due next. `ended`: the run writes no more."""
        for step in due_tables(self._tables(), position.tables, self._every, position.metrics, ended):
            rows = table_rows(self._run / "rollouts" / f"step-{step:06d}.jsonl")
            return Item(step, replace(position, tables=step), rows=rows)
        return None

    def _new_records(self, position: Position) -> Iterator[Item]:
        """Yield up to `BATCH` metrics, and the evaluations between them."""
        starts = self._starts()
        count = 0
        for record in self._metrics.records():
            step = _step_of(record)
            if step > position.metrics:
                if count == BATCH:
                    return
                count += 1
                for item in self._new_evaluations(position, step - 1):
                    position = item.after
                    yield item
            self._at = time_of(step, _seconds_of(record), starts)
            if step > position.metrics:
                position = replace(position, metrics=step)
                values = {name: value for name, value in _numbers(record) if not name.startswith("eval/")}
                yield Item(step, position, values, self._at)
        yield from self._new_evaluations(position, position.metrics)

    def _new_evaluations(self, position: Position, last: int) -> Iterator[Item]:
        """Yield the evaluations of versions up to `last`, with the time of the last step before them."""
        for record in self._evals.records():
            step = _step_of(record)
            if step > last:
                return
            if step > position.evals:
                position = replace(position, evals=step)
                yield Item(step, position, dict(_numbers(record)), self._at or time_of(step, 0.0, self._starts()))

    def _starts(self) -> list[Start]:
        starts = [
            Start(int(each.get("step", 0)), float(each.get("time", 0.0)), float(each.get("seconds", 0.0)))
            for each in _records(self._run / "starts.jsonl")
        ]
        return starts or [self._assumed_start()]

    def _assumed_start(self) -> Start:
        """Return the start of a run that has no starts.jsonl: its last step was logged when the file was written."""
        metrics = self._run / "metrics.jsonl"
        try:
            with open(metrics, "rb") as file:
                written = os.fstat(file.fileno()).st_mtime
                file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LINE))
                last = [record for record in map(_parse, file) if record is not None][-1:]
        except OSError:
            return Start()
        return Start(time=written - sum(_seconds_of(record) for record in last))

    def _tables(self) -> list[int]:
        try:
            names = os.listdir(self._run / "rollouts")
        except OSError:
            return []
        return sorted(int(match[1]) for name in names if (match := _STEP_FILE.fullmatch(name)))


def due_tables(recorded: list[int], sent: int, every: int, newest: int, ended: bool) -> Iterator[int]:
    """Yield the recorded steps up to `newest` whose tables are due after step `sent`, in order.

    Workers write the files after the step, not always in order. A missing one delays the next ones until the run is one
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


def table_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a table, one per recorded attempt, all with the same keys. A reward is None if the attempt
    lacks it or it is not finite. A column of `log_extra` is None if the attempt lacks it."""
    attempts = _records(file)
    rewards = dict.fromkeys(name for attempt in attempts for name in attempt.get("rewards", {}))
    rows = [_table_row(attempt, list(rewards)) for attempt in attempts]
    for column in dict.fromkeys(name for attempt in attempts for name in attempt.get("extra", {})):
        values = _same_type([attempt.get("extra", {}).get(column) for attempt in attempts])
        for row, value in zip(rows, values, strict=True):
            row.setdefault(column, value)
    return rows


def _same_type(values: list[Any]) -> list[Any]:
    """Return a column as text if its values have different types: trackers refuse it otherwise."""
    kinds = {float if type(value) is int else type(value) for value in values if value is not None}
    return values if len(kinds) <= 1 else [None if value is None else str(value) for value in values]


def _table_row(attempt: dict[str, Any], rewards: list[str]) -> dict[str, Any]:
    turns = [turn for trajectory in attempt.get("trajectories", []) for turn in trajectory.get("turns", [])]
    first = turns[:1] if turns and not turns[0].get("sampled") else []
    prompt = first[0].get("text", "") if first else attempt.get("task_prompt", "")
    completion = "".join(turn.get("text", "") for turn in turns[len(first) :])
    return {
        "step": attempt.get("step"),
        "task_id": attempt.get("task_id", ""),
        "prompt": prompt[:MAX_TEXT],
        "completion": completion[:MAX_TEXT],
        "reward": _finite(attempt.get("reward")),
        **{f"reward/{name}": _finite(attempt.get("rewards", {}).get(name)) for name in rewards},
        "advantage": _finite(attempt.get("advantage")),
        "oldest_version": attempt.get("oldest"),
        "newest_version": attempt.get("newest"),
    }


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


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


def _seconds_of(record: dict[str, Any]) -> float:
    seconds = record.get(TOTAL_S)
    return float(seconds) if isinstance(seconds, int | float) else 0.0


def _numbers(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


MASK = "***"

_SECRET = re.compile("key|token|secret|password|bearer", re.IGNORECASE)
_URL_USER = re.compile(r"(\w://)[^/@\s]+@")
_URL_QUERY = re.compile(r"(\w://[^\s?]+\?)\S+")


def read_masked_config(run: Path) -> dict[str, Any]:
    """Return the settings with secrets masked: values of `launch.env`, values of arguments in `launch.args` and
    `tools.mcp` whose names suggest a secret, and users, passwords and queries of URLs."""
    config = tomllib.loads((run / "resolved.toml").read_text())
    launch, tools = config.get("launch", {}), config.get("tools", {})
    if env := launch.get("env"):
        launch["env"] = dict.fromkeys(env, MASK)
    if arguments := launch.get("args"):
        launch["args"] = mask_arguments(arguments)
    if servers := tools.get("mcp"):
        tools["mcp"] = [" ".join(mask_arguments(server.split(" "))) for server in servers]
    masked: dict[str, Any] = _mask_urls(config)
    return masked


def mask_arguments(words: Sequence[str]) -> list[str]:
    """Mask the values of arguments whose names suggest a secret, as `--api-key X`, `--api-key=X`, `KEY=X`."""
    masked = []
    named = False  # the previous word names a secret
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = bool(_SECRET.search(name))
        masked.append(MASK if named else f"{name}={MASK}" if equals and is_secret else word)
        named = is_secret and not equals and (word.startswith("-") or word.lower() == "bearer")
    return masked


def _mask_urls(value: Any) -> Any:
    """Mask users, passwords and queries of all URLs."""
    if isinstance(value, dict):
        return {name: _mask_urls(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_mask_urls(each) for each in value]
    if isinstance(value, str):
        return _URL_QUERY.sub(rf"\1{MASK}", _URL_USER.sub(rf"\1{MASK}@", value))
    return value
