"""Turn log: answers of unfinished groups, so that a group can resume after its worker or the run died.

    record, close_group ─▶ queue ─▶ writer thread ─▶ a file under the worker's name
    find ◀───────────────────────── writer thread ◀─ files of all workers, of this and earlier starts of the run

The head of an entry identifies the request, its body is the answer. A closed group is an entry too: it invalidates what
the same writer recorded for the group before. The file format is that of the journal.

Invariants
- A head identifies the request that the answer was sampled for: the episode, the request number, and a digest of prompt
  and sampling parameters. The answer is used for no other request.
- An answer is skipped if the head at its place has changed since it was indexed.
- Recording never waits for the disk. A disk error loses recorded answers and logs a warning; the run continues.
- The files of a worker hold at most as many bytes of closed groups as of open ones, plus `SPARE_BYTES`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outpace import wire
from outpace.checkpoint.entries import Entry, copied, files_of, named, packed, read_entry, remove_but, scan
from outpace.checkpoint.survey import NOBODY
from outpace.errors import CorruptData
from outpace.types import Generation, GroupOrder, Ints, Place, Sampling, Version

log = logging.getLogger(__name__)

KIND = "turns"
FILE_BYTES = 32 << 20
MAX_SCANS = 20
"""Maximum number of scans of a directory whose files are being replaced. Two are nearly always enough."""


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """Head of a recorded answer. `number` is the request number in the episode. `min_version` is the oldest version
    allowed to serve it; `oldest` and `newest` are the versions that did."""

    position: int
    group: int
    stamp: Version
    episode: int
    number: int
    asked: bytes
    oldest: Version
    newest: Version
    tokens: int


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """Head of an entry that closes a group."""

    position: int


@dataclass(frozen=True)
class TurnsFound:
    """Recorded answers of an unfinished prompt visit."""

    stamp: Version  # the highest that the visit was admitted with
    newest: Version
    answers: int


def question(prompt: Ints, sampling: Sampling) -> bytes:
    """Return a digest of the prompt and the sampling parameters, without the seed."""
    digest = hashlib.blake2b(prompt.tobytes(), digest_size=16)
    digest.update(wire.encode(msgspec.structs.replace(sampling, seed=0)))
    return digest.digest()


def packed_answer(order: GroupOrder, episode: int, number: int, asked: bytes, answer: Generation) -> list[bytes]:
    oldest, newest = version_range(answer, order.min_version)
    head = Answered(
        order.position, order.group, order.min_version, episode, number, asked, oldest, newest, len(answer.tokens)
    )
    return packed(wire.encode(head), wire.encode(answer))


def packed_closing(position: int) -> list[bytes]:
    return packed(wire.encode(Closed(position)), b"")


def version_range(answer: Generation, default: Version) -> tuple[Version, Version]:
    """Return the oldest and newest version of the tokens, or `default` for an empty answer."""
    if not len(answer.versions):
        return default, default
    return int(answer.versions.min()), int(answer.versions.max())


class Shelf:
    """Index of the recorded answers of all open positions, over all files. Keeps only heads in memory.

    Files may grow or be replaced meanwhile; `refresh` continues from where it stopped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._bytes_read: dict[str, int] = {}  # bytes read, by file
        self._inodes: dict[str, int] = {}  # detects a file replaced under the same name
        self._answers: dict[int, list[tuple[Place, Answered]]] = {}

    def refresh(self) -> None:
        for _ in range(MAX_SCANS):
            try:
                inodes = {path.name: path.stat().st_ino for path in files_of(self._directory, KIND)}
                self._forget({name for name, inode in self._inodes.items() if inodes.get(name) != inode})
                self._inodes = inodes
                for name in inodes:
                    self._read_new_entries(self._directory / name)
            except FileNotFoundError:
                continue  # replaced since the listing; its entries are in another file now
            return
        log.warning("%s: files are replaced faster than they can be read; some answers are not reused", self._directory)

    def of(self, position: int) -> list[tuple[Place, Answered]]:
        return self._answers.get(position, [])

    def positions(self) -> list[int]:
        return list(self._answers)

    def _read_new_entries(self, path: Path) -> None:
        for entry in scan(path, self._bytes_read.get(path.name, 0)):
            self._bytes_read[path.name] = entry.place.offset + entry.place.length
            self._add(path, entry)

    def _add(self, path: Path, entry: Entry) -> None:
        head = _head_of(path, entry)
        if isinstance(head, Answered):
            self._answers.setdefault(head.position, []).append((entry.place, head))
        elif head is not None:
            owner = owner_of(path.name)
            self._replace_answers(
                head.position, [known for known in self.of(head.position) if owner_of(known[0].segment) != owner]
            )

    def _replace_answers(self, position: int, answers: list[tuple[Place, Answered]]) -> None:
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


def owner_of(file: str) -> str | None:
    name = named(file, KIND)
    return name.owner if name else None


def read_answers(directory: Path, known: list[tuple[Place, Answered]]) -> Iterator[tuple[Answered, Generation]]:
    """Yield the answers that can be read and still match their heads."""
    for place, head in known:
        try:
            answer = _answer_at(directory, place, head)
        except (CorruptData, wire.WireError, OSError) as error:
            log.warning("cannot read a recorded answer of group %d; it is sampled again: %s", head.group, error)
        else:
            yield head, answer


def _answer_at(directory: Path, place: Place, head: Answered) -> Generation:
    entry = read_entry(directory / place.segment, place)
    if wire.decode(entry.head, Answered | Closed) != head:
        raise CorruptData(f"the entry at {place} has been replaced")
    return wire.decode(entry.body, Generation)


def survey_turns(directory: Path, newest: Version | None = None) -> dict[int, TurnsFound]:
    """Summarize the recorded answers of every open position, without answers that used a version after `newest`.

    Blocks on the disk."""
    index = Shelf(directory)
    index.refresh()
    heads = {position: [head for _, head in index.of(position)] for position in index.positions()}
    if newest is not None:
        heads = {position: [head for head in found if head.newest <= newest] for position, found in heads.items()}
    return {position: _summary(found) for position, found in heads.items() if found}


def prune_turns(directory: Path, newest: Version, positions: Collection[int] | None = None) -> None:
    """Delete the answers that used a version after `newest`, and those outside `positions` if given.

    Weights newer than the resumed version no longer exist, so their answers cannot be used. Call before workers start.
    A kill at any point leaves at worst some answers twice. Blocks on the disk."""
    index = Shelf(directory)
    index.refresh()
    wanted = [position for position in index.positions() if positions is None or position in positions]
    keep = [place for position in wanted for place, head in index.of(position) if head.newest <= newest]
    places = copied(directory, NOBODY, KIND, keep, FILE_BYTES)
    remove_but(directory, KIND, {place.segment for place in places})


def _summary(answers: list[Answered]) -> TurnsFound:
    return TurnsFound(
        stamp=max(head.stamp for head in answers),
        newest=max(head.newest for head in answers),
        answers=len(answers),
    )


def _head_of(path: Path, entry: Entry) -> Answered | Closed | None:
    try:
        head: Answered | Closed = wire.decode(entry.head, Answered | Closed)
    except wire.WireError as error:
        log.warning("%s: skipping the entry at byte %d: %s", path, entry.place.offset, error)
        return None
    return head
