"""MERGED"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from outpace.checkpoint.entries import EntryFile, copied, files_of, read_entry
from outpace.checkpoint.turns import (
    FILE_BYTES,
    KIND,
    Answered,
    Shelf,
    owner_of,
    packed_answer,
    packed_closing,
    question,
    read_answers,
)
from outpace.errors import CorruptData
from outpace.types import Generation, GroupOrder, Ints, Place, Sampling

log = logging.getLogger(__name__)

SPARE_BYTES = 4 << 20
MOST_WAITING = 2_000
"""Maximum number of queued jobs. When it is reached, answers are not recorded."""
GATHER_S = 0.05
"""Pause of the writer thread between batches: waking a thread costs more than writing."""

Recorded = list[tuple[Answered, Generation]]


class _RecordJob(NamedTuple):  # created on the event loop; cheaper than a dataclass
    order: GroupOrder
    episode: int
    number: int
    prompt: Ints
    sampling: Sampling
    answer: Generation


@dataclass(frozen=True)
class _CloseGroupJob:
    position: int


@dataclass(frozen=True)
class _FindJob:
    position: int
    found: Future[Recorded]


class _StopJob:
    pass


_Job = _RecordJob | _CloseGroupJob | _FindJob | _StopJob


class TurnLog:
    """Records the answers of one worker. A name must have only one log. Creates no files before the first job."""

    def __init__(self, directory: Path, name: str, spare_bytes: int = SPARE_BYTES) -> None:
        self._writer = _Writer(directory, name, spare_bytes)
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._overflowed = False

    def record(
        self, order: GroupOrder, episode: int, number: int, prompt: Ints, sampling: Sampling, answer: Generation
    ) -> None:
        if self._jobs.qsize() < MOST_WAITING:
            self._put(_RecordJob(order, episode, number, prompt, sampling, answer))
        elif not self._overflowed:
            self._overflowed = True
            log.warning("the disk is too slow: some answers of unfinished groups are not recorded")

    def close_group(self, position: int) -> None:
        """Mark the recorded answers of this group as no longer needed."""
        if self._thread is not None:
            self._put(_CloseGroupJob(position))

    def find(self, position: int) -> Recorded:
        """Return all answers of this position, including queued ones. Blocks: call it off the event loop."""
        found: Future[Recorded] = Future()
        self._put(_FindJob(position, found))
        self._wake.set()
        return found.result()

    def close(self) -> None:
        """Write everything that is queued and stop the thread. Does not wait for the disk."""
        if self._thread is not None:
            self._put(_StopJob())
            self._wake.set()
            self._thread.join()
            self._thread = None

    def _put(self, job: _Job) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="outpace-turns", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, _StopJob):
                self._writer.stop()
                return
            self._writer.run(job)
            if self._jobs.empty():
                self._wake.wait(GATHER_S)
                self._wake.clear()


class _Writer:
    """Runs on the writer thread: owns the files of this log and tracks which entries are still needed."""

    def __init__(self, directory: Path, name: str, spare_bytes: int) -> None:
        self._directory = directory
        self._name = name
        self._spare_bytes = spare_bytes
        self._index = Shelf(directory)
        self._file: EntryFile | None = None
        self._open: dict[int, list[Place]] = {}  # entries of this log that are still needed, by position
        self._open_bytes = 0
        self._all_bytes = 0
        self._took_over = False
        self._failing = False

    def run(self, job: _RecordJob | _CloseGroupJob | _FindJob) -> None:
        try:
            self._take_over_files()
            if isinstance(job, _FindJob):
                job.found.set_result(self._find(job.position))
            elif isinstance(job, _CloseGroupJob):
                self._close_group(job.position)
            else:
                self._record(job)
                self._failing = False
        except Exception as error:  # a recording error must not end the run
            self._log_failure(error)
            if isinstance(job, _FindJob) and not job.found.done():
                job.found.set_result([])

    def stop(self) -> None:
        """Close the file. Delete the files of this log if nothing in them is needed."""
        self._close()
        if not self._open and self._took_over and not self._failing:
            for path in self._files():
                path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take_over_files(self) -> None:
        """Take over files left under this name by a worker that died."""
        if self._took_over:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._index.refresh()
        self._all_bytes = sum(path.stat().st_size for path in self._files())
        self._took_over = True
        for position in self._index.positions():
            for place, _ in self._index.of(position):
                if owner_of(place.segment) == self._name:
                    self._add(position, place)

    def _record(self, job: _RecordJob) -> None:
        asked = question(job.prompt, job.sampling)
        place = self._append(packed_answer(job.order, job.episode, job.number, asked, job.answer))
        self._add(job.order.position, place)

    def _close_group(self, position: int) -> None:
        closed = self._open.pop(position, None)
        if closed is None:
            return
        self._open_bytes -= sum(place.length for place in closed)
        self._append(packed_closing(position))
        if self._all_bytes - self._open_bytes > self._open_bytes + self._spare_bytes:
            self._rewrite()

    def _find(self, position: int) -> Recorded:
        self._index.refresh()
        return list(read_answers(self._directory, self._index.of(position)))

    def _append(self, pieces: list[bytes]) -> Place:
        if self._file is None:
            self._file = EntryFile(self._directory, self._name, KIND)
        try:
            place = self._file.append(pieces)
        except OSError:
            if not self._file.undone():
                self._close()
            raise
        self._all_bytes += place.length
        return place

    def _add(self, position: int, place: Place) -> None:
        self._open.setdefault(position, []).append(place)
        self._open_bytes += place.length

    def _rewrite(self) -> None:
        """Copy the needed entries to new files and delete the others.

        One file always stays, so that its number is not reused: other workers may have indexed the old file."""
        self._close()
        before = [(position, place) for position, places in self._open.items() for place in places]
        before = [known for known in before if _is_readable(self._directory, known[1])]
        places = copied(self._directory, self._name, KIND, [place for _, place in before], FILE_BYTES)
        self._file = EntryFile(self._directory, self._name, KIND)
        keep = {self._file.path.name} | {place.segment for place in places}
        for path in self._files():
            if path.name not in keep:
                path.unlink()
        self._open, self._open_bytes = {}, 0
        for (position, _), place in zip(before, places, strict=True):
            self._add(position, place)
        self._all_bytes = self._open_bytes

    def _files(self) -> list[Path]:
        return [path for path in files_of(self._directory, KIND) if owner_of(path.name) == self._name]

    def _log_failure(self, error: Exception) -> None:
        """Log a lost entry. Of several failures in a row, only the first is logged."""
        if not self._failing:
            log.warning("cannot record answers of unfinished groups: %s", error, exc_info=error)
        self._failing = True


def _is_readable(directory: Path, place: Place) -> bool:
    try:
        read_entry(directory / place.segment, place)
    except (CorruptData, OSError) as error:
        log.warning("lost a recorded answer: %s", error)
        return False
    return True
