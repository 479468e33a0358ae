"""What an earlier start of the run has left in its journal, and keeping only what is still of use.

Everything here blocks on the disk: call it off the event loop, before any worker writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from outpace import wire
from outpace.checkpoint.entries import copied, files_of, remove_but, scan
from outpace.checkpoint.journal import KIND, SEGMENT_BYTES
from outpace.types import Kept, Place

log = logging.getLogger(__name__)

NOBODY = "kept"
"""The owner of what was compacted: no worker is called so, and nobody appends to it."""


@dataclass(frozen=True)
class Found:
    """A finished group in the journal."""

    place: Place
    kept: Kept


def survey(directory: Path) -> list[Found]:
    """Every finished group, by segment and place; what is torn or damaged is passed over, with a word in the log.

    A group that is there several times (its worker died before it could report, or a compaction was killed) is found
    once: the copy whose newest token is the oldest, which fits every checkpoint that any of the others fits."""
    chosen: dict[tuple[int, int], Found] = {}
    for found in _everything(directory):
        key = found.kept.order.position, found.kept.order.group
        known = chosen.get(key)
        if known is None or found.kept.report.newest < known.kept.report.newest:
            chosen[key] = found
    return sorted(chosen.values(), key=lambda found: found.place)


def compact(directory: Path, keep: list[Found]) -> list[Found]:
    """Copy what is kept into fresh segments, then delete all others; returns what is kept at its new places.

    Whenever this is killed, everything in `keep` is still there to be surveyed, some of it perhaps twice."""
    places = copied(directory, NOBODY, KIND, [found.place for found in keep], SEGMENT_BYTES)
    remove_but(directory, KIND, {place.segment for place in places})
    return [replace(found, place=place) for found, place in zip(keep, places, strict=True)]


def _everything(directory: Path) -> Iterator[Found]:
    for path in files_of(directory, KIND):
        for entry in scan(path):
            try:
                yield Found(entry.place, wire.decode(entry.head, Kept))
            except wire.WireError as error:
                log.warning("%s: the entry at byte %d is passed over: %s", path, entry.place.offset, error)
