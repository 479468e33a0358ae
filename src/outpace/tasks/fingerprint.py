"""Whether the tasks of a resumed run are those it began with.

    rows of a file, rows in memory    every row counts
    tables of the datasets package    every id, the names of the columns, and samples
    sources that make their tasks     their number and samples

Invariants
- Two fingerprints of the same tasks have no `difference`, whatever the process and the machine: no built-in `hash`, no
  order of keys, no address and no time goes into a digest.
- A start is held up for seconds at most: of a source that takes its time, only the SURE samples are taken.
- Memory stays flat, and no more than BYTES of a file are read: of a larger one, pieces at fixed places, and the length
  of every row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from outpace.errors import BadInput, one_line
from outpace.protocols import TaskSource
from outpace.wording import plural

SURE, SAMPLES = 16, 256
PATIENCE_S = 0.5
BYTES = 2**30
PIECE = 2**20

Indices = NDArray[np.int64]


@runtime_checkable
class Digestible(Protocol):
    """A source, or rows, that can say more of its content than a few samples do."""

    def digest(self, indices: Indices, /) -> bytes:
        """Of these rows, in this order. Cheap enough for every start of a run."""
        ...


@runtime_checkable
class Picture(Protocol):
    """What image libraries give."""

    def tobytes(self) -> bytes: ...


class Sample(msgspec.Struct, frozen=True):
    """One task, as it was."""

    index: int
    id: str
    digest: str


class Fingerprint(msgspec.Struct, frozen=True):
    """JSON-able. `digest` is of all that can be had at once; how many samples there are depends on the time they took,
    so that two fingerprints are compared by `difference`."""

    count: int
    digest: str
    samples: tuple[Sample, ...]


def fingerprint(source: TaskSource) -> Fingerprint:
    """What these tasks are. A task that cannot be had now counts as such; `BadInput` about one is raised."""
    count = len(source)
    return Fingerprint(count, content(source, np.arange(count)).hex(), tuple(_samples(source, count)))


def difference(old: Fingerprint, new: Fingerprint) -> str | None:
    """What has changed, in one line; None: nothing."""
    if old.count != new.count:
        return f"{plural(new.count, 'task')} now, {old.count} before"
    before = {sample.index: sample for sample in old.samples}
    for sample in new.samples:
        was = before.get(sample.index, sample)
        if was.id != sample.id:
            return f"task {sample.index} is {one_line(sample.id, 60)!r}, it was {one_line(was.id, 60)!r}"
        if was.digest != sample.digest:
            return f"task {sample.index}, {one_line(sample.id, 60)!r}, is not what it was"
    if old.digest != new.digest:
        return f"some tasks are not what they were, though none of the {len(new.samples)} compared one by one"
    return None


# --------------------------------------------------------------------------------------------------------- for sources


def content(source: Any, indices: Indices) -> bytes:
    """The digest of some tasks or rows of a source; of one that makes them on demand, nothing."""
    if isinstance(source, Digestible):
        return source.digest(indices)
    return digest_of_values(source, indices) if isinstance(source, list | tuple) else b""


def digest_of_values(rows: Any, indices: Indices) -> bytes:
    """Of rows that are all in memory."""
    whole = blake2b(digest_size=16)
    for index in indices:
        whole.update(_encoded(rows[int(index)]))
        whole.update(b"\n")
    return whole.digest()


def digest_of_pieces(length: int, read: Callable[[int, int], bytes]) -> bytes:
    """Of `length` bytes, of which `read(start, end)` gives some; of more than BYTES, only pieces at fixed places."""
    whole = blake2b(digest_size=16)
    pieces = -(-length // PIECE)
    for number in spread(pieces, BYTES // PIECE):
        whole.update(read(number * PIECE, min(length, (number + 1) * PIECE)))
    return whole.digest()


def spread(count: int, most: int) -> Iterator[int]:
    """All of `count` places, or `most` of them, evenly from the first to the last."""
    if count <= most:
        yield from range(count)
        return
    for number in range(most):
        yield number * (count - 1) // (most - 1)


# ----------------------------------------------------------------------------------------------------------- one task


def _samples(source: TaskSource, count: int) -> Iterator[Sample]:
    sure = list(spread(count, SURE))
    further = [index for index in spread(count, SAMPLES) if index not in sure]
    deadline = time.monotonic() + PATIENCE_S
    for number, index in enumerate(sure + further):
        if number >= SURE and time.monotonic() > deadline:
            break
        yield _sample(source, index)


def _sample(source: TaskSource, index: int) -> Sample:
    try:
        task = source[index]
    except BadInput:
        raise
    # The boundary to a caller's own source, which may fail in any way: then that visit fails, not the start.
    except Exception as error:
        return Sample(index, "", type(error).__name__)
    digest = blake2b(_encoded((task.prompt, task.columns)), digest_size=8)
    return Sample(index, _printable(task.id), digest.hexdigest())


def _printable(name: str) -> str:
    """An id may hold half a character, which no file takes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _encoded(value: Any) -> bytes:
    """The same bytes for the same value, whatever the order of its keys."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain, order="deterministic")
    except (TypeError, ValueError):  # a lone surrogate, a key that is no text
        return json.dumps(_as_pairs(value)).encode()


def _as_pairs(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted(([str(key), _as_pairs(each)] for key, each in value.items()), key=lambda pair: str(pair[0]))
    if isinstance(value, list | tuple):
        return [_as_pairs(each) for each in value]
    return value if isinstance(value, str | int | float | None) else _as_pairs(_plain(value))


def _plain(value: Any) -> Any:
    """What JSON has no notion of, by its content where that can be had, else by its type: a `repr` holds addresses."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Picture):
        return value.tobytes().hex()
    return value.hex() if isinstance(value, bytes) else type(value).__qualname__
