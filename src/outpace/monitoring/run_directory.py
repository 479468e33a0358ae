"""The run directory: locking, log files, rollback.

    run.lock         held while a run is active; contains the pid of its process
    config.toml      what the user set
    resolved.toml    every setting, and the format of the directory
    metrics.jsonl    one record per step
    batches.jsonl    one record per batch: the groups trained, and the prompt visits finalized without training
    evals.jsonl      one record per evaluation
    summary.json     results, written at the end
    starts.jsonl     one record per start: the step that it continues from, when, and the seconds of earlier starts
    rollouts/, checkpoints/, journal/, logs/

Invariants
- Only one process at a time uses a directory (`run.lock`, a kernel lock that a killed process releases).
- `claim` creates nothing but the directory and its lock, so that a failed startup check has no effect: `abandon`
  undoes it. Only `start` removes the files of an earlier run, and only by known names: other files are never touched.
- Every record carries its step. `roll_back(c)` restores the logs to their state when step c was written.
- batches.jsonl records every prompt visit exactly once: as a trained group, or under `settled`. `accounted` is the
  number of visits recorded up to and including this record; a checkpoint stores it and rolls back to it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from outpace.config.load import CONFIG_FILE, EMPTY_RESOLVED, RESOLVED_FILE, read_resolved
from outpace.errors import BadInput
from outpace.monitoring import rollout_files
from outpace.monitoring.line_file import LineFile, filter_lines, read_lines, write_atomically
from outpace.monitoring.summary import Summary
from outpace.runtime.remote import INVITATION_FILE
from outpace.runtime.torchrun import resume_command
from outpace.types import Aggregate, Failure

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class RunLock:
    """Exclusive lock on a run directory, held from construction to `release`.

    It is a kernel lock (`flock`): a killed run releases it immediately, and a reused pid cannot be mistaken for the
    holder. The pid in the file is only for messages, and for file systems without locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _acquire(path)

    def release(self) -> None:
        """Remove the lock file and release the lock. Idempotent."""
        if self._fd < 0:
            return
        self.path.unlink(missing_ok=True)  # while still locked, so that a new holder's file is never removed
        os.close(self._fd)
        self._fd = -1


def is_lock_held(path: Path) -> bool:
    """Return whether an active run holds the lock. Takes a shared lock only momentarily."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        holder = _holder(fd)
        if holder is None or not psutil.pid_exists(holder):
            return False
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        return error.errno in _NO_LOCKS  # no lock support: rely on the pid
    finally:
        os.close(fd)


def _acquire(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd, path)
            if _is_still_at(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the holder removed the file between our open and our lock


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use_error(fd, path) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        holder = _holder(fd)
        if holder is not None and holder != os.getpid() and psutil.pid_exists(holder):
            raise _in_use_error(fd, path) from None


def _in_use_error(fd: int, path: Path) -> BadInput:
    holder = _holder(fd)
    user = "another run" if holder is None else f"process {holder}"
    return BadInput(f"run.dir: {path.parent} is in use by {user}; wait until it ends, or choose another directory")


def _holder(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdecimal() else None


def _is_still_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
OLD_CONFIG_FILE = "config_0_1.toml"
"""The config of a run that was converted by `outpace migrate`, as outpace 0.1 wrote it."""
MODEL_FOLDER = "model"
"""Folder of a model that was passed as an object."""
OLD_MODEL_FOLDER = "model.old"
"""Model folder of an earlier run, kept until this run has started."""
FILES = (
    *(CONFIG_FILE, RESOLVED_FILE, "tasks.json", "metrics.jsonl", "batches.jsonl", "evals.jsonl", "summary.json"),
    *("timeline.json", "fleet.json", "fleet.jsonl", "objects.json", "heldout.jsonl", OLD_CONFIG_FILE, "starts.jsonl"),
    INVITATION_FILE,
)
LINE_FILES = ("metrics.jsonl", "batches.jsonl", "evals.jsonl")
FOLDERS = ("rollouts", "checkpoints", "journal", "logs")
WEIGHTS_FOLDER = "weights"
"""Folder of weight snapshots, if the learner runs on several machines. Exists only while the run is active."""
OPTIONAL_FOLDERS = ("bad_steps", MODEL_FOLDER, "trackers", WEIGHTS_FOLDER)
"""Folders that exist only in some runs. FILES, FOLDERS and OPTIONAL_FOLDERS are all that a run writes, and all that
overwriting it removes."""


class BatchGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """A trained group in `batches.jsonl`. Fields with default values are omitted."""

    task_id: str
    epoch: int
    admitted_version: int
    lag: int
    episodes: int
    replay: bool = False  # trained in an earlier batch too: not a prompt visit, and its lag may exceed max_lag
    task: int = -1  # index of the task; -1: not recorded
    reward: float | None = None  # mean over the attempts
    group: int = -1  # group number, as in rollouts/; -1: not recorded
    reroll: int = 0  # n: the n-th re-roll of the visit


class UntrainedVisit(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt visit finalized without training, under `settled` in `batches.jsonl`. Fields with default values are
    omitted."""

    task: int  # index of the task
    epoch: int
    outcome: str  # filtered, failed, dropped or skipped
    reason: str = ""
    task_id: str = ""  # empty: the task was never fetched
    group: int = -1  # group number, as in rollouts/; -1: there was no group, or it is not recorded
    reroll: int = 0  # n: the n-th re-roll of the visit


class RunLog:
    """Owns the run directory from `claim` to `close`."""

    def __init__(self, directory: Path, lock: RunLock, created: list[Path], resuming: bool) -> None:
        self.dir = directory
        self._lock = lock
        self._created = created  # directories this run created, outermost first
        self._resuming = resuming
        self._initial_content = _content(directory)
        self.began = False
        self.written = {"logs", WEIGHTS_FOLDER}  # folders that this run fills before `start`
        self._lines: dict[str, LineFile] = {}

    # ------------------------------------------------------------------------------------------------ start and end

    @classmethod
    def claim(cls, directory: str | Path, *, overwrite: bool = False, resume: bool = False) -> RunLog:
        """Lock the directory for this process, or raise BadInput. Existing content is not changed yet."""
        path = Path(directory)
        if resume:
            read_resolved(path)
        created = _make_directories(path)
        try:
            lock = RunLock(path / LOCK_FILE)
        except OSError as error:
            _remove_if_empty(created)
            raise BadInput(f"run.dir: cannot write to {path}: {error.strerror}") from None
        log = cls(path, lock, created, resume)
        if not resume and not overwrite and _content(path):
            log.abandon()
            remedy = "choose another directory, or replace it with run.overwrite = true"
            if (path / RESOLVED_FILE).exists():
                remedy = f"continue its run with {resume_command(path)} or, from Python, train(resume=True), {remedy}"
            raise BadInput(f"run.dir: {path} is not empty; {remedy}")
        return log

    def replace_model(self, new: Path) -> None:
        """Move a directory to `model/`. `abandon` restores the model of an earlier run."""
        if (self.dir / MODEL_FOLDER).exists():
            shutil.rmtree(self.dir / OLD_MODEL_FOLDER, ignore_errors=True)
            (self.dir / MODEL_FOLDER).rename(self.dir / OLD_MODEL_FOLDER)
        new.rename(self.dir / MODEL_FOLDER)
        self.written.add(MODEL_FOLDER)

    def start(self, settings: str = "", resolved: str = EMPTY_RESOLVED) -> None:
        """Write the config and open the logs, after all checks have passed. Removes the files of an earlier run unless
        resuming."""
        self.began = True
        shutil.rmtree(self.dir / OLD_MODEL_FOLDER, ignore_errors=True)
        if not self._resuming:
            for name in FILES:
                (self.dir / name).unlink(missing_ok=True)
            for name in {*FOLDERS, *OPTIONAL_FOLDERS} - self.written:
                if (self.dir / name).is_dir():
                    shutil.rmtree(self.dir / name)
        for name in FOLDERS:
            (self.dir / name).mkdir(exist_ok=True)
        write_atomically(self.dir / RESOLVED_FILE, resolved)
        write_atomically(self.dir / CONFIG_FILE, settings)  # last: its presence makes this a run directory
        for name in LINE_FILES:
            self._lines[name] = LineFile(self.dir / name)
        if not self._resuming:
            self._record_start(0, 0.0)

    def abandon(self) -> None:
        """Remove everything this run has created if it has not logged a step; otherwise just close."""
        is_unused = self.began and not self._resuming and not any(read_lines(self.dir / "metrics.jsonl"))
        self._close_lines()
        if not self.began:  # components started before the failed check may have created folders
            for name in {*FOLDERS, *OPTIONAL_FOLDERS} - set(self._initial_content):
                shutil.rmtree(self.dir / name, ignore_errors=True)
            if (self.dir / OLD_MODEL_FOLDER).exists():
                shutil.rmtree(self.dir / MODEL_FOLDER, ignore_errors=True)
                (self.dir / OLD_MODEL_FOLDER).rename(self.dir / MODEL_FOLDER)
        if is_unused:
            for name in FILES:
                (self.dir / name).unlink(missing_ok=True)
            for name in (*FOLDERS, *OPTIONAL_FOLDERS):
                shutil.rmtree(self.dir / name, ignore_errors=True)
        self._lock.release()
        _remove_if_empty(self._created)

    def close(self) -> None:
        self._close_lines()
        self._lock.release()

    def _close_lines(self) -> None:
        for lines in self._lines.values():
            lines.close()
        self._lines.clear()

    # ------------------------------------------------------------------------------------------------ logs

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a record to metrics.jsonl, with finite numbers only."""
        self._lines["metrics.jsonl"].append({"step": step} | _finite(metrics))

    def batch(
        self,
        step: int,
        version: int,
        groups: Iterable[BatchGroup],
        settled: Iterable[UntrainedVisit] = (),
        accounted: int | None = None,
        failures: Iterable[Failure] = (),
        totals: Mapping[str, Aggregate] | None = None,
    ) -> None:
        """Append a record to batches.jsonl: the groups this step trained, and the prompt visits finalized without
        training since the previous record.

        `version`: the version before the step. `accounted`: number of visits finalized up to and including this record.
        `failures`: failures in these groups. `totals`: what they will add to the next record of metrics.jsonl."""
        record: dict[str, Any] = {"step": step, "version": version, "groups": msgspec.to_builtins(list(groups))}
        if accounted is not None:
            record |= {"settled": msgspec.to_builtins(list(settled)), "accounted": accounted}
        record |= {"totals": msgspec.to_builtins(dict(totals))} if totals else {}
        self._lines["batches.jsonl"].append(record | _counted(failures))

    def evaluation(self, version: int, metrics: Mapping[str, float], failures: Iterable[Failure] = ()) -> None:
        """Append the result of an evaluation to evals.jsonl. The version is the step of the record."""
        self._lines["evals.jsonl"].append({"step": version} | _finite(metrics) | _counted(failures))

    def summary(self, summary: Summary) -> None:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
        write_atomically(self.dir / "summary.json", text + "\n")

    def stall(self, reason: str, dump: str) -> Path:
        """Write diagnostics of a stalled run to logs/stall.txt and return its path."""
        path = self.dir / "logs" / "stall.txt"
        try:
            path.write_text(f"{reason}\n\n{dump}\n")
        except OSError as error:  # a full disk must neither end the run nor hide why it ends
            logger.warning("%s: %s", path, error)
        return path

    def sync(self) -> None:
        """Fsync all records logged so far. Raises OSError if one could not be written. Blocking: do not call it on an
        event loop. Records may be logged concurrently."""
        for lines in list(self._lines.values()):
            lines.sync()

    def roll_back(self, step: int, accounted: int | None = None) -> PastRun:
        """Remove records after `step`, and batches that record more than `accounted` visits. Returns what remains."""
        seconds = self._seconds()
        self._close_lines()
        limit = math.inf if accounted is None else accounted
        for name in LINE_FILES:
            filter_lines(self.dir / name, lambda record: _step_of(record) <= step and _accounted_by(record) <= limit)
            if self.began:
                self._lines[name] = LineFile(self.dir / name)
        rollout_files.roll_back(self.dir, step, rollout_files.steps_of_untrained_groups(self.dir))
        (self.dir / "summary.json").unlink(missing_ok=True)
        self._record_start(step, seconds)  # last: a follower that sees it then reads the shortened files
        return PastRun(self.dir, seconds, step)

    def _record_start(self, step: int, seconds: float) -> None:
        """Append to starts.jsonl. Raises OSError on failure: followers of the run would miss a rollback."""
        starts = LineFile(self.dir / "starts.jsonl")
        try:
            starts.append({"step": step, "time": round(time.time(), 3), "seconds": round(seconds, 3)})
            starts.sync()
        finally:
            starts.close()

    def _seconds(self) -> float:
        """Return the wall-clock time over all starts of the run, from its summary or, if it was killed, its last
        step."""
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
    """Log records of earlier starts of a run. `seconds` is their wall-clock time, `step` their last step."""

    dir: Path
    seconds: float
    step: int = 0

    @property
    def steps(self) -> Iterator[dict[str, Any]]:
        """Records of metrics.jsonl, read lazily: a long run has many."""
        return read_lines(self.dir / "metrics.jsonl")

    @property
    def evaluations(self) -> Iterator[dict[str, Any]]:
        return read_lines(self.dir / "evals.jsonl")

    @property
    def totals(self) -> Iterator[dict[str, Aggregate]]:
        """Metrics of visits finalized after the last step, which no record of metrics.jsonl contains yet."""
        for line in read_lines(self.dir / "batches.jsonl"):
            if line["step"] == self.step:
                totals = msgspec.convert(line.get("totals", {}), dict[str, Aggregate | float])
                yield {  # outpace 0.1 wrote plain sums
                    name: Aggregate("sum", 1.0, total) if isinstance(total, float) else total
                    for name, total in totals.items()
                }

    @property
    def failures(self) -> Iterator[Failure]:
        for name in ("batches.jsonl", "evals.jsonl"):
            for line in read_lines(self.dir / name):
                yield from msgspec.convert(line.get("failures", []), list[Failure])


def _counted(failures: Iterable[Failure]) -> dict[str, Any]:
    """Build the `failures` field of a record, with a count per source and reason; empty if nothing failed."""
    counts: Counter[tuple[str, str]] = Counter()
    for failure in failures:
        counts[failure.source, failure.reason] += failure.count
    return {"failures": [msgspec.to_builtins(Failure(*key, count)) for key, count in counts.items()]} if counts else {}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Drop values that JSON cannot represent."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _step_of(record: Mapping[str, Any]) -> float:
    step = record.get("step")
    return step if isinstance(step, int) else math.inf  # a record without a step is removed


def _accounted_by(record: Mapping[str, Any]) -> float:
    accounted = record.get("accounted")
    return accounted if isinstance(accounted, int) else -math.inf  # not recorded: only the step decides


def _content(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name != LOCK_FILE)


def _make_directories(path: Path) -> list[Path]:
    """Create `path` and its missing parents. Returns the created directories, outermost first."""
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
        with contextlib.suppress(OSError):  # not empty: something else put files there
            folder.rmdir()
