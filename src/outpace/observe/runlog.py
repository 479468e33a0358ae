"""The run directory: who may write it, what is in it, how it is rolled back.

Invariants
- A directory belongs to one process at a time (`run.lock`).
- `claim` changes nothing but the lock, so that a start-up check that fails afterwards costs nothing: `abandon` takes
  back what this run has made. Only `start` clears what an earlier run left, by name: foreign files are never touched.
- Every line carries its step. `roll_back(c)` leaves the logs as they were when step c was written.
- batches.jsonl books every visit of a task once: as a group that was trained, or among the `settled`. `accounted` is
  how many visits this line and those before it have booked; a checkpoint keeps that number and rolls back to it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from outpace.errors import BadInput
from outpace.observe import rollout_files
from outpace.observe.linefile import LineFile, keep_lines, read_lines, write_atomically
from outpace.observe.runlock import RunLock
from outpace.observe.summary import Summary
from outpace.types import Failure

logger = logging.getLogger(__name__)

LOCK = "run.lock"
MODEL = "model"
"""The folder of a model that the run was given as an object."""
OLD_MODEL = "model.old"
"""That of an earlier run, while it is not certain that this run will start."""
FILES = (
    *("config.toml", "tasks.json", "metrics.jsonl", "batches.jsonl", "evals.jsonl", "summary.json", "timeline.json"),
    *("fleet.json", "fleet.jsonl", "objects.json", "heldout.jsonl"),
)
LINES = ("metrics.jsonl", "batches.jsonl", "evals.jsonl")
FOLDERS = ("rollouts", "checkpoints", "journal", "logs")
ON_DEMAND = ("bad_steps", MODEL)
"""What a run leaves, and all that overwriting one removes; some of it only where there is something to put in."""


class BatchGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """One group of a trained batch, as `batches.jsonl` names it; what has its default is left out."""

    task_id: str
    epoch: int
    admitted_version: int
    lag: int
    episodes: int
    replay: bool = False  # trained before, in an earlier batch: no visit, and its lag may exceed max_lag
    task: int = -1  # its index among the tasks; -1: not noted
    reward: float | None = None  # mean over its attempts
    group: int = -1  # its number, as in rollouts/; -1: not noted


class BatchSettled(msgspec.Struct, frozen=True, omit_defaults=True):
    """A visit that ended without being trained, as `batches.jsonl` names it; what has its default is left out."""

    task: int  # its index among the tasks
    epoch: int
    outcome: str  # filtered, failed, dropped or skipped
    reason: str = ""
    task_id: str = ""  # empty: the task was never fetched
    group: int = -1  # its number, as in rollouts/; -1: there was none, or it is not noted


class RunLog:
    """Owns the run directory from `claim` to `close`."""

    def __init__(self, directory: Path, lock: RunLock, made: list[Path], resuming: bool) -> None:
        self.dir = directory
        self._lock = lock
        self._made = made  # directories this run created, outermost first
        self._resuming = resuming
        self._found = _content(directory)  # what was there before this run
        self.began = False
        self.written = {"logs"}  # folders that this run fills before `start`
        self._lines: dict[str, LineFile] = {}

    # ------------------------------------------------------------------------------------------------ start and end

    @classmethod
    def claim(cls, directory: str | Path, *, overwrite: bool = False, resume: bool = False) -> RunLog:
        """Take the directory for this process, or raise BadInput; nothing in it is changed yet."""
        path = Path(directory)
        if resume and not (path / "config.toml").is_file():
            raise BadInput(f"run.dir: there is no run in {path}")
        made = _make_directories(path)
        try:
            lock = RunLock(path / LOCK)
        except OSError as error:
            _remove_if_empty(made)
            raise BadInput(f"run.dir: cannot write to {path}: {error.strerror}") from None
        log = cls(path, lock, made, resume)
        if not resume and not overwrite and _content(path):
            log.abandon()
            raise BadInput(f"run.dir: {path} is not empty; choose another, or set run.overwrite = true")
        return log

    def replace_model(self, new: Path) -> None:
        """Put a directory in the place of `model/`. What an earlier run has there comes back with `abandon`."""
        if (self.dir / MODEL).exists():
            shutil.rmtree(self.dir / OLD_MODEL, ignore_errors=True)
            (self.dir / MODEL).rename(self.dir / OLD_MODEL)
        new.rename(self.dir / MODEL)
        self.written.add(MODEL)

    def start(self, config: str) -> None:
        """Everything was checked: write the resolved config and open the logs. A resumed run keeps what it has."""
        self.began = True
        shutil.rmtree(self.dir / OLD_MODEL, ignore_errors=True)
        if not self._resuming:
            for name in FILES:
                (self.dir / name).unlink(missing_ok=True)
            for name in {*FOLDERS, *ON_DEMAND} - self.written:
                if (self.dir / name).is_dir():
                    shutil.rmtree(self.dir / name)
        for name in FOLDERS:
            (self.dir / name).mkdir(exist_ok=True)
        write_atomically(self.dir / "config.toml", config)
        for name in LINES:
            self._lines[name] = LineFile(self.dir / name)

    def abandon(self) -> None:
        """Leave no trace, if this run has not logged a step; otherwise just close."""
        untouched = self.began and not self._resuming and not any(read_lines(self.dir / "metrics.jsonl"))
        self._close_lines()
        if not self.began:  # parts that started before the refusal may have made folders
            for name in {*FOLDERS, *ON_DEMAND} - set(self._found):
                shutil.rmtree(self.dir / name, ignore_errors=True)
            if (self.dir / OLD_MODEL).exists():
                shutil.rmtree(self.dir / MODEL, ignore_errors=True)
                (self.dir / OLD_MODEL).rename(self.dir / MODEL)
        if untouched:
            for name in FILES:
                (self.dir / name).unlink(missing_ok=True)
            for name in (*FOLDERS, *ON_DEMAND):
                shutil.rmtree(self.dir / name, ignore_errors=True)
        self._lock.release()
        _remove_if_empty(self._made)

    def close(self) -> None:
        self._close_lines()
        self._lock.release()

    def _close_lines(self) -> None:
        for lines in self._lines.values():
            lines.close()
        self._lines.clear()

    # ----------------------------------------------------------------------------------------------------- the logs

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl: finite numbers only."""
        self._lines["metrics.jsonl"].append({"step": step} | finite(metrics))

    def batch(
        self,
        step: int,
        version: int,
        groups: Iterable[BatchGroup],
        settled: Iterable[BatchSettled] = (),
        accounted: int | None = None,
        failures: Iterable[Failure] = (),
        totals: Mapping[str, float] | None = None,
    ) -> None:
        """One line of batches.jsonl: what this step was trained on, and what else came to an end since the line before.
        `version` is the one it was trained from, `accounted` the number of visits that are settled with this line,
        `failures` what failed in these groups, `totals` what the next line of metrics.jsonl will count of them."""
        record: dict[str, Any] = {"step": step, "version": version, "groups": msgspec.to_builtins(list(groups))}
        if accounted is not None:
            record |= {"settled": msgspec.to_builtins(list(settled)), "accounted": accounted}
        record |= {"totals": dict(totals)} if totals else {}
        self._lines["batches.jsonl"].append(record | _counted(failures))

    def evaluation(self, version: int, metrics: Mapping[str, float], failures: Iterable[Failure] = ()) -> None:
        """One line of evals.jsonl: what an evaluation of this version came to. Its step is the version."""
        self._lines["evals.jsonl"].append({"step": version} | finite(metrics) | _counted(failures))

    def summary(self, summary: Summary) -> None:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
        write_atomically(self.dir / "summary.json", text + "\n")

    def stall(self, reason: str, dump: str) -> Path:
        """Who waits for whom and what everybody is doing, for whoever wants to know why nothing moves."""
        path = self.dir / "logs" / "stall.txt"
        try:
            path.write_text(f"{reason}\n\n{dump}\n")
        except OSError as error:  # a full disk is no reason to end a run, nor to hide why it ends
            logger.warning("%s: %s", path, error)
        return path

    def sync(self) -> None:
        """Return when every line logged before is on the disk; OSError if one could not be written. Takes as long as
        the disk does, so not on an event loop; lines may be logged meanwhile."""
        for lines in list(self._lines.values()):
            lines.sync()

    def roll_back(self, step: int, accounted: int | None = None) -> PastRun:
        """Forget what was logged after `step`, and batches that book more than `accounted` visits; returns what
        stays."""
        seconds = self._seconds()
        self._close_lines()
        most = math.inf if accounted is None else accounted
        for name in LINES:
            keep_lines(self.dir / name, lambda record: _step_of(record) <= step and _accounted_by(record) <= most)
            if self.began:
                self._lines[name] = LineFile(self.dir / name)
        rollout_files.roll_back(self.dir, step, steps_of_settled(self.dir))
        (self.dir / "summary.json").unlink(missing_ok=True)
        return PastRun(self.dir, seconds, step)

    def _seconds(self) -> float:
        """How long the run has taken in all its starts: by its summary, or by its last step if it was killed."""
        try:
            ended = msgspec.json.decode((self.dir / "summary.json").read_bytes(), type=_Seconds).wall_s
        except (OSError, ValueError):
            ended = 0.0
        logged = (float(line.get("time/total_s", 0.0)) for line in read_lines(self.dir / "metrics.jsonl"))
        return max(ended, max(logged, default=0.0))


class _Seconds(msgspec.Struct):
    wall_s: float


@dataclass(frozen=True)
class PastRun:
    """What the logs keep of earlier starts of a run. `seconds` is how long these took, `step` their last step."""

    dir: Path
    seconds: float
    step: int = 0

    @property
    def steps(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl, one by one: a long run has many."""
        return read_lines(self.dir / "metrics.jsonl")

    @property
    def evaluations(self) -> Iterator[dict[str, Any]]:
        return read_lines(self.dir / "evals.jsonl")

    @property
    def totals(self) -> Iterator[tuple[str, float]]:
        """What was settled after the last step: in no line of metrics.jsonl yet."""
        for line in read_lines(self.dir / "batches.jsonl"):
            if line["step"] == self.step:
                yield from line.get("totals", {}).items()

    @property
    def failures(self) -> Iterator[Failure]:
        for name in ("batches.jsonl", "evals.jsonl"):
            for line in read_lines(self.dir / name):
                yield from msgspec.convert(line.get("failures", []), list[Failure])


def _counted(failures: Iterable[Failure]) -> dict[str, Any]:
    """For a line of a log: each source and reason once, nothing where nothing failed."""
    counts: Counter[tuple[str, str]] = Counter()
    for failure in failures:
        counts[failure.source, failure.reason] += failure.count
    return {"failures": [msgspec.to_builtins(Failure(*key, count)) for key, count in counts.items()]} if counts else {}


def steps_of_settled(run: Path) -> dict[int, int]:
    """By the number of a group that was not trained on, the step by the end of which it was settled."""
    return {
        settled["group"]: line["step"]
        for line in read_lines(run / "batches.jsonl")
        for settled in line.get("settled", [])
        if "group" in settled
    }


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what JSON cannot say."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _step_of(record: Mapping[str, Any]) -> float:
    step = record.get("step")
    return step if isinstance(step, int) else math.inf  # a line of no step belongs to no kept step


def _accounted_by(record: Mapping[str, Any]) -> float:
    accounted = record.get("accounted")
    return accounted if isinstance(accounted, int) else -math.inf  # nothing is said: its step alone decides


def _content(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)


def _make_directories(path: Path) -> list[Path]:
    """Create `path` and its missing parents; returns those created, outermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()][::-1]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_if_empty(missing)
        raise BadInput(f"run.dir: cannot create {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        _remove_if_empty(missing)
        raise BadInput(f"run.dir: cannot write to {path}")
    return missing


def _remove_if_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        with contextlib.suppress(OSError):  # somebody else has put something there: then it stays
            folder.rmdir()
