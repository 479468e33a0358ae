"""Turn log: answers of unfinished groups, so that a group can resume after its worker or the run died.

    record, close_group ─▶ queue ─▶ writer thread ─▶ a file under the worker's name
    find ◀───────────────────────── writer thread ◀─ files of all workers, of this and earlier starts of the run

The head of an entry identifies the request, its body is the answer. Closing a group appends an entry too, which
invalidates the group's earlier entries by the same writer. The file format is that of the journal.

Invariants
- A head identifies the request that the answer was sampled for: the episode, the request number, and a digest of prompt
  and sampling parameters. The answer is used for no other request.
- An answer is skipped if the head at its place has changed since it was indexed.
- Recording never waits for the disk. A disk error loses recorded answers and logs a warning; the run continues.
- A process that is killed loses the answers of the last `GATHER_S`.
- The bytes of closed groups in a worker's files never exceed those of open groups by more than `SPARE_BYTES`.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from outpace.checkpoint.journal import (
    COMPACTED,
    EntryFile,
    JournalEntry,
    copy_entries,
    list_files,
    pack_entry,
    parse_file_name,
    read_entry,
    remove_other_files,
    scan_entries,
)
from outpace.errors import CorruptData
from outpace.runtime import wire
from outpace.types import Generation, GroupOrder, Ints, JournalLocation, Sampling, Version

log = logging.getLogger(__name__)

KIND = "turns"
FILE_BYTES = 32 << 20
MAX_SCANS = 20
"""Maximum number of scans of a directory whose files are being replaced. Two are nearly always enough."""


class RecordedAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """Head of a recorded answer. `number` is the request number in the episode. `min_version` is the oldest version
    allowed to serve it; `oldest` and `newest` are the versions that did."""

    position: int
    group: int
    min_version: Version
    episode: int
    number: int
    request_digest: bytes
    oldest: Version
    newest: Version
    tokens: int


class ClosedGroup(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """Head of an entry that closes a group."""

    position: int


def digest_request(prompt: Ints, sampling: Sampling) -> bytes:
    """Return a digest of the prompt and the sampling parameters, without the seed."""
    digest = hashlib.blake2b(prompt.tobytes(), digest_size=16)
    digest.update(wire.encode(msgspec.structs.replace(sampling, seed=0)))
    return digest.digest()


def pack_answer(order: GroupOrder, episode: int, number: int, request_digest: bytes, answer: Generation) -> list[bytes]:
    oldest, newest = version_range(answer, order.min_version)
    head = RecordedAnswer(
        order.position,
        order.group,
        order.min_version,
        episode,
        number,
        request_digest,
        oldest,
        newest,
        len(answer.tokens),
    )
    return pack_entry(wire.encode(head), wire.encode(answer))


def version_range(answer: Generation, default: Version) -> tuple[Version, Version]:
    """Return the oldest and newest version of the tokens, or `default` for an empty answer."""
    if not len(answer.versions):
        return default, default
    return int(answer.versions.min()), int(answer.versions.max())


class TurnIndex:
    """Index of the recorded answers of all open positions, over all files. Keeps only heads in memory.

    Files may grow or be replaced meanwhile; `refresh` continues from where it stopped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._bytes_read: dict[str, int] = {}  # bytes read, by file
        self._inodes: dict[str, int] = {}  # detects a file replaced under the same name
        self._answers: dict[int, list[tuple[JournalLocation, RecordedAnswer]]] = {}

    def refresh(self) -> None:
        for _ in range(MAX_SCANS):
            try:
                inodes = {path.name: path.stat().st_ino for path in list_files(self._directory, KIND)}
                self._forget({name for name, inode in self._inodes.items() if inodes.get(name) != inode})
                self._inodes = inodes
                for name in inodes:
                    self._read_new_entries(self._directory / name)
            except FileNotFoundError:
                continue  # replaced since the listing; its entries are in another file now
            return
        log.warning("%s: files are replaced faster than they can be read; some answers are not reused", self._directory)

    def answers_of(self, position: int) -> list[tuple[JournalLocation, RecordedAnswer]]:
        return self._answers.get(position, [])

    def positions(self) -> list[int]:
        return list(self._answers)

    def _read_new_entries(self, path: Path) -> None:
        for entry in scan_entries(path, self._bytes_read.get(path.name, 0)):
            self._bytes_read[path.name] = entry.place.offset + entry.place.length
            self._add(path, entry)

    def _add(self, path: Path, entry: JournalEntry) -> None:
        head = _head_of(path, entry)
        if isinstance(head, RecordedAnswer):
            self._answers.setdefault(head.position, []).append((entry.place, head))
        elif head is not None:
            owner = file_owner(path.name)
            self._replace_answers(
                head.position,
                [known for known in self.answers_of(head.position) if file_owner(known[0].segment) != owner],
            )

    def _replace_answers(self, position: int, answers: list[tuple[JournalLocation, RecordedAnswer]]) -> None:
        if answers:
            self._answers[position] = answers
        else:
            self._answers.pop(position, None)

    def _forget(self, gone: set[str]) -> None:
        if not gone:
            return
        for segment in gone:
            self._bytes_read.pop(segment, None)
        for position, answers in list(self._answers.items()):
            self._replace_answers(position, [known for known in answers if known[0].segment not in gone])


def file_owner(file: str) -> str | None:
    name = parse_file_name(file, KIND)
    return name.owner if name else None


def read_answers(
    directory: Path, known: list[tuple[JournalLocation, RecordedAnswer]]
) -> Iterator[tuple[RecordedAnswer, Generation]]:
    """Yield the answers that can be read and still match their heads."""
    for place, head in known:
        try:
            answer = _answer_at(directory, place, head)
        except (CorruptData, wire.WireError, OSError) as error:
            log.warning("cannot read a recorded answer of group %d; it is sampled again: %s", head.group, error)
        else:
            yield head, answer


def _answer_at(directory: Path, place: JournalLocation, head: RecordedAnswer) -> Generation:
    entry = read_entry(directory / place.segment, place)
    if wire.decode(entry.head, RecordedAnswer | ClosedGroup) != head:
        raise CorruptData(f"the entry at {place} has been replaced")
    return wire.decode(entry.body, Generation)


def survey_turns(directory: Path, newest: Version | None = None) -> dict[int, list[RecordedAnswer]]:
    """Return the heads of the recorded answers of every open position, without answers that used a version after
    `newest`. Blocks on the disk."""
    index = TurnIndex(directory)
    index.refresh()
    heads = {position: [head for _, head in index.answers_of(position)] for position in index.positions()}
    if newest is not None:
        heads = {position: [head for head in found if head.newest <= newest] for position, found in heads.items()}
    return {position: found for position, found in heads.items() if found}


def prune_turns(directory: Path, newest: Version, positions: Collection[int] | None = None) -> None:
    """Delete the answers that used a version after `newest`, and those outside `positions` if given.

    Weights newer than the resumed version no longer exist, so their answers cannot be used. Call before workers start.
    A kill at any point leaves some answers twice at worst. Blocks on the disk."""
    index = TurnIndex(directory)
    index.refresh()
    wanted = [position for position in index.positions() if positions is None or position in positions]
    keep = [place for position in wanted for place, head in index.answers_of(position) if head.newest <= newest]
    places = copy_entries(directory, COMPACTED, KIND, keep, FILE_BYTES)
    remove_other_files(directory, KIND, {place.segment for place in places})


def _head_of(path: Path, entry: JournalEntry) -> RecordedAnswer | ClosedGroup | None:
    try:
        head: RecordedAnswer | ClosedGroup = wire.decode(entry.head, RecordedAnswer | ClosedGroup)
    except wire.WireError as error:
        log.warning("%s: skipping the entry at byte %d: %s", path, entry.place.offset, error)
        return None
    return head


SPARE_BYTES = 4 << 20
MOST_WAITING = 2_000
"""Maximum number of queued jobs. When it is reached, answers are not recorded."""
GATHER_S = 0.5
"""Pause of the writer thread between batches. Answers of groups that were closed meanwhile are not written."""

Recorded = list[tuple[RecordedAnswer, Generation]]


class _Job(NamedTuple):
    """What the writer thread runs. `records`: position of the group whose answer it records. `closes`: position of the
    group that it closes."""

    run: Callable[[], None]
    records: int | None = None
    closes: int | None = None


def _without_closed(jobs: Sequence[_Job | None]) -> list[_Job | None]:
    """Drop the answers of groups that are closed later in the queue."""
    kept: list[_Job | None] = []
    closed: set[int] = set()
    for job in reversed(jobs):
        if job is not None and job.records is not None:
            if job.records in closed:
                continue
        elif job is not None and job.closes is not None:
            closed.add(job.closes)
        else:
            closed.clear()  # this job may read what was recorded before
        kept.append(job)
    return kept[::-1]


class TurnLog:
    """Records the answers of one worker. A name must have only one log. Creates no files before the first job."""

    def __init__(self, directory: Path, name: str, spare_bytes: int = SPARE_BYTES) -> None:
        self._writer = _Writer(directory, name, spare_bytes)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # None: stop
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._overflowed = False

    def record(
        self, order: GroupOrder, episode: int, number: int, prompt: Ints, sampling: Sampling, answer: Generation
    ) -> None:
        waiting = self._jobs.qsize()
        if waiting < MOST_WAITING:
            write = partial(self._writer.record, order, episode, number, prompt, sampling, answer)
            self._put(_Job(write, records=order.position))
            if waiting >= MOST_WAITING // 2:
                self._wake.set()
        elif not self._overflowed:
            self._overflowed = True
            log.warning("the disk is too slow: some answers of unfinished groups are not recorded")

    def close_group(self, position: int) -> None:
        """Mark the recorded answers of this group as no longer needed."""
        if self._thread is not None:
            self._put(_Job(partial(self._writer.close_group, position), closes=position))

    def find(self, position: int) -> Recorded:
        """Return all answers of this position, including queued ones. Blocks: call it off the event loop."""
        found: Future[Recorded] = Future()

        def find() -> None:
            try:
                found.set_result(self._writer.find(position))
            except Exception:
                found.set_result([])
                raise

        self._put(_Job(find))
        self._wake.set()
        return found.result()

    def close(self) -> None:
        """Write everything that is queued and stop the thread. Does not wait for the disk."""
        if self._thread is not None:
            self._put(None)
            self._wake.set()
            self._thread.join()
            self._thread = None

    def _put(self, job: _Job | None) -> None:
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
            jobs = [self._jobs.get()]
            self._wake.wait(GATHER_S)
            self._wake.clear()
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            for job in _without_closed(jobs):
                if job is None:
                    self._writer.stop()
                    return
                self._writer.run(job.run)


class _Writer:
    """Runs on the writer thread: owns the files of this log and tracks which entries are still needed."""

    def __init__(self, directory: Path, name: str, spare_bytes: int) -> None:
        self._directory = directory
        self._name = name
        self._spare_bytes = spare_bytes
        self._index = TurnIndex(directory)
        self._file: EntryFile | None = None
        self._open: dict[int, list[JournalLocation]] = {}  # entries of this log that are still needed, by position
        self._open_bytes = 0
        self._all_bytes = 0
        self._took_over = False
        self._failing = False

    def run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # a recording error must not end the run
            self._log_failure(error)

    def record(
        self, order: GroupOrder, episode: int, number: int, prompt: Ints, sampling: Sampling, answer: Generation
    ) -> None:
        self._take_over_files()
        place = self._append(pack_answer(order, episode, number, digest_request(prompt, sampling), answer))
        self._add(order.position, place)
        self._failing = False

    def close_group(self, position: int) -> None:
        self._take_over_files()
        closed = self._open.pop(position, None)
        if closed is None:
            return
        self._open_bytes -= sum(place.length for place in closed)
        self._append(pack_entry(wire.encode(ClosedGroup(position)), b""))
        if self._all_bytes - self._open_bytes > self._open_bytes + self._spare_bytes:
            self._rewrite()

    def find(self, position: int) -> Recorded:
        self._take_over_files()
        self._index.refresh()
        return list(read_answers(self._directory, self._index.answers_of(position)))

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
            for place, _ in self._index.answers_of(position):
                if file_owner(place.segment) == self._name:
                    self._add(position, place)

    def _append(self, pieces: list[bytes]) -> JournalLocation:
        if self._file is None:
            self._file = EntryFile(self._directory, self._name, KIND)
        try:
            place = self._file.append(pieces)
        except OSError:
            if not self._file.undo_append():
                self._close()
            raise
        self._all_bytes += place.length
        return place

    def _add(self, position: int, place: JournalLocation) -> None:
        self._open.setdefault(position, []).append(place)
        self._open_bytes += place.length

    def _rewrite(self) -> None:
        """Copy the needed entries to new files and delete the others.

        One file always stays, so that its number is not reused: other workers may have indexed the old file."""
        self._close()
        before = [(position, place) for position, places in self._open.items() for place in places]
        before = [known for known in before if _is_readable(self._directory, known[1])]
        places = copy_entries(self._directory, self._name, KIND, [place for _, place in before], FILE_BYTES)
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
        return [path for path in list_files(self._directory, KIND) if file_owner(path.name) == self._name]

    def _log_failure(self, error: Exception) -> None:
        """Log a lost entry. Of several failures in a row, only the first is logged."""
        if not self._failing:
            log.warning("cannot record answers of unfinished groups: %s", error, exc_info=error)
        self._failing = True


def _is_readable(directory: Path, place: JournalLocation) -> bool:
    try:
        read_entry(directory / place.segment, place)
    except (CorruptData, OSError) as error:
        log.warning("lost a recorded answer: %s", error)
        return False
    return True
