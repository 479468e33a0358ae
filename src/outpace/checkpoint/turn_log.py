"""Recording the answers of one worker as they come, on a thread of its own.

    record, close_group ─▶ queue ─▶ thread ─▶ a file under the worker's name
    find ◀───────────────────────── thread ◀─ the files of all workers, of this start of the run and of earlier ones

Invariants
- Whoever records does not wait for the disk, and nothing that goes wrong there costs more than a line in the log.
- The files of a worker hold at most as much of closed groups as of open ones, and `SPARE_BYTES` more.
"""

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
"""Answers that wait to be written; more than that are not recorded."""
GATHER_S = 0.05
"""What comes within so short a time is written in one go: waking a thread costs more than writing."""

Recorded = list[tuple[Answered, Generation]]


class _Answer(NamedTuple):  # made on the event loop, and cheaper to make than others
    order: GroupOrder
    episode: int
    number: int
    prompt: Ints
    sampling: Sampling
    answer: Generation


@dataclass(frozen=True)
class _Closing:
    position: int


@dataclass(frozen=True)
class _Wanted:
    position: int
    found: Future[Recorded]


class _End:
    pass


_Job = _Answer | _Closing | _Wanted | _End


class TurnLog:
    """The answers of one worker, on the disk; only one log uses a name. Nothing is touched before the first job."""

    def __init__(self, directory: Path, name: str, spare_bytes: int = SPARE_BYTES) -> None:
        self._writer = _Writer(directory, name, spare_bytes)
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._overrun = False

    def record(
        self, order: GroupOrder, episode: int, number: int, prompt: Ints, sampling: Sampling, answer: Generation
    ) -> None:
        if self._jobs.qsize() < MOST_WAITING:
            self._put(_Answer(order, episode, number, prompt, sampling, answer))
        elif not self._overrun:
            self._overrun = True
            log.warning("the disk does not keep up: some answers of unfinished groups are not recorded")

    def close_group(self, position: int) -> None:
        """What was recorded of this group is of no more use."""
        if self._thread is not None:
            self._put(_Closing(position))

    def find(self, position: int) -> Recorded:
        """Everything there is of this position, also what still waits to be written. Blocks: call it off the loop."""
        found: Future[Recorded] = Future()
        self._put(_Wanted(position, found))
        self._hurry.set()
        return found.result()

    def close(self) -> None:
        """What was recorded is on its way to the disk when this returns."""
        if self._thread is not None:
            self._put(_End())
            self._hurry.set()
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
            if isinstance(job, _End):
                self._writer.leave()
                return
            self._writer.do(job)
            if self._jobs.empty():
                self._hurry.wait(GATHER_S)
                self._hurry.clear()


class _Writer:
    """The thread's side: the files of this log, and what of them is still of use."""

    def __init__(self, directory: Path, name: str, spare_bytes: int) -> None:
        self._directory = directory
        self._name = name
        self._spare = spare_bytes
        self._shelf = Shelf(directory)
        self._file: EntryFile | None = None
        self._open: dict[int, list[Place]] = {}  # what of our own is of use, by position
        self._open_bytes = 0
        self._all_bytes = 0
        self._adopted = False
        self._troubled = False

    def do(self, job: _Answer | _Closing | _Wanted) -> None:
        try:
            self._adopt()
            if isinstance(job, _Wanted):
                job.found.set_result(self._find(job.position))
            elif isinstance(job, _Closing):
                self._close_group(job.position)
            else:
                self._record(job)
                self._troubled = False
        except Exception as error:  # the boundary of the thread: recording is no reason to end a run
            self._do_without(error)
            if isinstance(job, _Wanted) and not job.found.done():
                job.found.set_result([])

    def leave(self) -> None:
        """For good. Files with nothing of use in them go."""
        self._close()
        if not self._open and self._adopted and not self._troubled:
            for path in self._files():
                path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _adopt(self) -> None:
        """A worker that died has left files under our name: they are ours to tidy up."""
        if self._adopted:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._shelf.refresh()
        self._all_bytes = sum(path.stat().st_size for path in self._files())
        self._adopted = True
        for position in self._shelf.positions():
            for place, _ in self._shelf.of(position):
                if owner_of(place.segment) == self._name:
                    self._note(position, place)

    def _record(self, job: _Answer) -> None:
        asked = question(job.prompt, job.sampling)
        place = self._append(packed_answer(job.order, job.episode, job.number, asked, job.answer))
        self._note(job.order.position, place)

    def _close_group(self, position: int) -> None:
        closed = self._open.pop(position, None)
        if closed is None:
            return
        self._open_bytes -= sum(place.length for place in closed)
        self._append(packed_closing(position))
        if self._all_bytes - self._open_bytes > self._open_bytes + self._spare:
            self._rewrite()

    def _find(self, position: int) -> Recorded:
        self._shelf.refresh()
        return list(read_answers(self._directory, self._shelf.of(position)))

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

    def _note(self, position: int, place: Place) -> None:
        self._open.setdefault(position, []).append(place)
        self._open_bytes += place.length

    def _rewrite(self) -> None:
        """What is of use moves to fresh files, and the others go. One file stays in any case: it keeps its number from
        being given again, under which another worker may remember what was there before."""
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
            self._note(position, place)
        self._all_bytes = self._open_bytes

    def _files(self) -> list[Path]:
        return [path for path in files_of(self._directory, KIND) if owner_of(path.name) == self._name]

    def _do_without(self, error: Exception) -> None:
        """One entry is lost; the next may do better. Of many in a row the first has a word in the log."""
        if not self._troubled:
            log.warning("answers of unfinished groups cannot be recorded: %s", error, exc_info=error)
        self._troubled = True


def _is_readable(directory: Path, place: Place) -> bool:
    try:
        read_entry(directory / place.segment, place)
    except (CorruptData, OSError) as error:
        log.warning("a recorded answer is lost: %s", error)
        return False
    return True
