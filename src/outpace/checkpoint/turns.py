"""Answers of groups that are not finished yet: what lets a group go on where it was when its worker or the run died.

The head of an entry says whose answer it is and what was asked, its body is the answer. That a group is closed is an
entry too: what its writer has recorded of it before is of no more use.

Invariants
- A head says what is needed to use an answer for nothing but the request that it was sampled for: the episode, the
  number of the request in it, and a digest of the tokens and the sampling that were asked with.
- What is read is what was found: an answer whose head is not the one that was found at its place is passed over.
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
MOST_LOOKS = 20
"""At a directory whose files are being replaced; two are nearly always enough."""


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """One answer. `number` tells the requests of an episode apart; `stamp` is the oldest version that might have served
    it, `oldest` and `newest` are those that did."""

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
    position: int


@dataclass(frozen=True)
class TurnsFound:
    """What there is of a visit that was not finished."""

    stamp: Version  # the highest that it was admitted with
    newest: Version
    answers: int


def question(prompt: Ints, sampling: Sampling) -> bytes:
    """What was asked, as a digest: the tokens before the answer, and all that shapes it but the noise."""
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
    """Of its tokens; an answer without any takes the version it was asked of."""
    if not len(answer.versions):
        return default, default
    return int(answer.versions.min()), int(answer.versions.max())


class Shelf:
    """Where the answers of every position that is not closed lie, over all files. Only heads are kept in memory.

    Files may be growing and replaced by others meanwhile: `refresh` reads on from where it was."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, int] = {}  # how far, by file
        self._inodes: dict[str, int] = {}  # a file of another one is another file, whatever its name
        self._answers: dict[int, list[tuple[Place, Answered]]] = {}

    def refresh(self) -> None:
        for _ in range(MOST_LOOKS):
            try:
                inodes = {path.name: path.stat().st_ino for path in files_of(self._directory, KIND)}
                self._forget({name for name, inode in self._inodes.items() if inodes.get(name) != inode})
                self._inodes = inodes
                for name in inodes:
                    self._read_on(self._directory / name)
            except FileNotFoundError:
                continue  # replaced since we looked: what it held is in another file by now
            return
        log.warning("%s: files go faster than they can be read; some recorded answers are not found", self._directory)

    def of(self, position: int) -> list[tuple[Place, Answered]]:
        return self._answers.get(position, [])

    def positions(self) -> list[int]:
        return list(self._answers)

    def _read_on(self, path: Path) -> None:
        for entry in scan(path, self._read.get(path.name, 0)):
            self._read[path.name] = entry.place.offset + entry.place.length
            self._note(path, entry)

    def _note(self, path: Path, entry: Entry) -> None:
        head = _head_of(path, entry)
        if isinstance(head, Answered):
            self._answers.setdefault(head.position, []).append((entry.place, head))
        elif head is not None:
            owner = owner_of(path.name)
            self._keep(
                head.position, [known for known in self.of(head.position) if owner_of(known[0].segment) != owner]
            )

    def _keep(self, position: int, answers: list[tuple[Place, Answered]]) -> None:
        if answers:
            self._answers[position] = answers
        else:
            self._answers.pop(position, None)

    def _forget(self, gone: set[str]) -> None:
        if not gone:
            return
        for segment in gone:
            self._read.pop(segment, None)
        for position, answers in list(self._answers.items()):
            self._keep(position, [known for known in answers if known[0].segment not in gone])


def owner_of(file: str) -> str | None:
    name = named(file, KIND)
    return name.owner if name else None


def read_answers(directory: Path, known: list[tuple[Place, Answered]]) -> Iterator[tuple[Answered, Generation]]:
    """Those that can be read, as they were recorded."""
    for place, head in known:
        try:
            answer = _answer_at(directory, place, head)
        except (CorruptData, wire.WireError, OSError) as error:
            log.warning("a recorded answer of group %d is asked for again: %s", head.group, error)
        else:
            yield head, answer


def _answer_at(directory: Path, place: Place, head: Answered) -> Generation:
    entry = read_entry(directory / place.segment, place)
    if wire.decode(entry.head, Answered | Closed) != head:
        raise CorruptData(f"{place} holds another entry by now")
    return wire.decode(entry.body, Generation)


def survey_turns(directory: Path, newest: Version | None = None) -> dict[int, TurnsFound]:
    """What there is of every position that was under way, or of it what no version after `newest` had a part in.

    Blocks on the disk."""
    shelf = Shelf(directory)
    shelf.refresh()
    heads = {position: [head for _, head in shelf.of(position)] for position in shelf.positions()}
    if newest is not None:
        heads = {position: [head for head in some if head.newest <= newest] for position, some in heads.items()}
    return {position: _summary(some) for position, some in heads.items() if some}


def prune_turns(directory: Path, newest: Version, positions: Collection[int] | None = None) -> None:
    """Before workers start: keep the answers that no version after `newest` had a part in, of `positions` or of all.

    Weights after the version that a run is resumed from are gone, and with them any meaning of what they sampled.
    A kill at any moment leaves at worst some answers twice. Blocks on the disk."""
    shelf = Shelf(directory)
    shelf.refresh()
    wanted = shelf.positions() if positions is None else [each for each in shelf.positions() if each in positions]
    keep = [place for position in wanted for place, head in shelf.of(position) if head.newest <= newest]
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
        log.warning("%s: the entry at byte %d is passed over: %s", path, entry.place.offset, error)
        return None
    return head
