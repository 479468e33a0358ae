"""MERGED"""

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
"""Owner of compacted files. No worker has this name, so nothing is appended to them."""


@dataclass(frozen=True)
class Found:
    """A finished group in the journal."""

    place: Place
    kept: Kept


def survey(directory: Path) -> list[Found]:
    """Return every finished group in the journal, sorted by place. Torn or damaged entries are skipped with a warning.

    A group stored several times (its worker died before reporting, or a compaction was killed) is returned once: the
    copy with the lowest newest version, which is valid for every checkpoint that any other copy is valid for.

    Blocks on the disk: call it off the event loop, before any worker writes."""
    chosen: dict[tuple[int, int], Found] = {}
    for found in _all_groups(directory):
        key = found.kept.order.position, found.kept.order.group
        known = chosen.get(key)
        if known is None or found.kept.report.newest < known.kept.report.newest:
            chosen[key] = found
    return sorted(chosen.values(), key=lambda found: found.place)


def compact(directory: Path, keep: list[Found]) -> list[Found]:
    """Copy the groups in `keep` to new segments, then delete all others. Returns the groups at their new places.

    After a kill at any point, a survey still finds everything in `keep`, possibly some of it twice. Blocks on the disk:
    call it off the event loop, before any worker writes."""
    places = copied(directory, NOBODY, KIND, [found.place for found in keep], SEGMENT_BYTES)
    remove_but(directory, KIND, {place.segment for place in places})
    return [replace(found, place=place) for found, place in zip(keep, places, strict=True)]


def _all_groups(directory: Path) -> Iterator[Found]:
    for path in files_of(directory, KIND):
        for entry in scan(path):
            try:
                yield Found(entry.place, wire.decode(entry.head, Kept))
            except wire.WireError as error:
                log.warning("%s: skipping the entry at byte %d: %s", path, entry.place.offset, error)
