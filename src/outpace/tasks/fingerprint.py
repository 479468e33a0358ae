"""Task fingerprints: detect whether the tasks of a resumed run have changed.

    source                            what the fingerprint covers
    rows of a file, rows in memory    every row
    tables of the datasets package    every id, the column names, and sampled tasks
    sources that generate tasks       the number of tasks, and sampled tasks

Invariants
- Two fingerprints of the same tasks have no `difference`, across processes and machines: digests do not depend on the
  built-in `hash`, key order, memory addresses or time.
- A fingerprint delays startup by seconds at most: from a slow source, only MIN_SAMPLES tasks are sampled.
- Memory stays flat, and at most MAX_BYTES of a file are read: from a larger file, chunks at fixed positions, and the
  length of every row.
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

from outpace.errors import BadInput, one_line, plural
from outpace.protocols import TaskSource
from outpace.types import Message, Task

MIN_SAMPLES, MAX_SAMPLES = 16, 256
SAMPLING_TIMEOUT_S = 0.5
MAX_BYTES = 2**30
CHUNK_BYTES = 2**20

Indices = NDArray[np.int64]


@runtime_checkable
class Digestible(Protocol):
    """A source, or rows, with a cheap digest of its content."""

    def digest(self, indices: Indices, /) -> bytes:
        """Return a digest of these rows, in this order. Cheap enough for every start of a run."""
        ...


@runtime_checkable
class ImageLike(Protocol):
    """An image object, such as a PIL image."""

    def tobytes(self) -> bytes: ...


class TaskSample(msgspec.Struct, frozen=True):
    """Id and content digest of one sampled task."""

    index: int
    id: str
    digest: str


class TaskContent(msgspec.Struct, frozen=True):
    """Content that the digest of a task without episodes covers. Digests in checkpoints depend on the field order."""

    id: str
    prompt: str | list[Message]
    columns: dict[str, Any]


class Fingerprint(msgspec.Struct, frozen=True):
    """JSON-serializable. Compare with `difference`, not with `==`: the number of samples depends on how long they took.

    `digest` covers all content that can be read cheaply."""

    count: int
    digest: str
    samples: tuple[TaskSample, ...]


def fingerprint(source: TaskSource) -> Fingerprint:
    """Return the fingerprint of the tasks. A sampled task that fails to load is recorded by its exception type, except
    `BadInput`, which is raised."""
    count = len(source)
    return Fingerprint(count, content_digest(source, np.arange(count)).hex(), tuple(_samples(source, count)))


def difference(old: Fingerprint, new: Fingerprint) -> str | None:
    """Return in one line what changed, or None if nothing did."""
    if old.count != new.count:
        return f"{plural(new.count, 'task')} now, {old.count} before"
    before = {sample.index: sample for sample in old.samples}
    for sample in new.samples:
        was = before.get(sample.index, sample)
        if was.id != sample.id:
            return f"task {sample.index} is {one_line(sample.id, 60)!r}, it was {one_line(was.id, 60)!r}"
        if was.digest != sample.digest:
            return f"task {sample.index}, {one_line(sample.id, 60)!r}, has changed"
    if old.digest != new.digest:
        return f"some tasks have changed, but none of the {len(new.samples)} sampled ones"
    return None


# ------------------------------------------------------------------------------------------------------------- digests


def content_digest(source: Any, indices: Indices) -> bytes:
    """Return the digest of some tasks or rows of a source; b"" for a source that generates them on demand."""
    if isinstance(source, Digestible):
        return source.digest(indices)
    return digest_rows(source, indices) if isinstance(source, list | tuple) else b""


def digest_rows(rows: Any, indices: Indices) -> bytes:
    """Return the digest of rows in memory."""
    whole = blake2b(digest_size=16)
    for index in indices:
        row = rows[int(index)]
        if isinstance(row, Task) and not row.episodes:
            row = TaskContent(row.id, row.prompt, row.columns)
        whole.update(_encoded(row))
        whole.update(b"\n")
    return whole.digest()


def digest_bytes(length: int, read: Callable[[int, int], bytes]) -> bytes:
    """Return the digest of `length` bytes, read with `read(start, end)`. Beyond MAX_BYTES, only chunks at fixed
    positions are read."""
    whole = blake2b(digest_size=16)
    pieces = -(-length // CHUNK_BYTES)
    for number in sample_indices(pieces, MAX_BYTES // CHUNK_BYTES):
        whole.update(read(number * CHUNK_BYTES, min(length, (number + 1) * CHUNK_BYTES)))
    return whole.digest()


def sample_indices(count: int, most: int) -> Iterator[int]:
    """Yield all of `count` indices, or `most` of them, evenly spaced from the first to the last."""
    if count <= most:
        yield from range(count)
        return
    for number in range(most):
        yield number * (count - 1) // (most - 1)


# ------------------------------------------------------------------------------------------------------------- samples


def _samples(source: TaskSource, count: int) -> Iterator[TaskSample]:
    required = list(sample_indices(count, MIN_SAMPLES))
    further = [index for index in sample_indices(count, MAX_SAMPLES) if index not in required]
    deadline = time.monotonic() + SAMPLING_TIMEOUT_S
    for number, index in enumerate(required + further):
        if number >= MIN_SAMPLES and time.monotonic() > deadline:
            break
        yield _sample(source, index)


def _sample(source: TaskSource, index: int) -> TaskSample:
    try:
        task = source[index]
    except BadInput:
        raise
    # A user's task source may raise anything. The later visit of the task fails, but not the start of the run.
    except Exception as error:
        return TaskSample(index, "", type(error).__name__)
    digest = blake2b(_encoded((task.prompt, task.columns)), digest_size=8)
    return TaskSample(index, _printable(task.id), digest.hexdigest())


def _printable(name: str) -> str:
    """Escape lone surrogates, which an id may contain but a file cannot."""
    return name.encode("utf-8", "backslashreplace").decode()


def _encoded(value: Any) -> bytes:
    """Encode a value to bytes, independent of key order."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain, order="deterministic")
    except (TypeError, ValueError):  # a lone surrogate, or a key that is not text
        return json.dumps(_as_pairs(value)).encode()


def _as_pairs(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted(([str(key), _as_pairs(each)] for key, each in value.items()), key=lambda pair: str(pair[0]))
    if isinstance(value, list | tuple):
        return [_as_pairs(each) for each in value]
    return value if isinstance(value, str | int | float | None) else _as_pairs(_plain(value))


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot encode: by content if possible, else by type name (a `repr` holds addresses)."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, ImageLike):
        return value.tobytes().hex()
    return value.hex() if isinstance(value, bytes) else type(value).__qualname__
