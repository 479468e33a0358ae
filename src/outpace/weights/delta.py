"""Lossless deltas between snapshots of the same layout, and a local copy of the policy updated by deltas.

File format:

    magic, length of the header, header (msgpack: incarnation, base, version), then for each part of each tensor in the
    order of the manifest: kind and count, positions, values

Elements are compared as raw integers, so every bit counts, including those of NaN and signed zero. A tensor is split
into parts of `PART` elements; each part is stored in its smallest form:

    SAME      nothing
    INDICES   number of changes per block of 65536 elements, then indices within the block (2 bytes each), then values
    BITMAP    one bit per element, then values
    WHOLE     all values

Invariants
- A delta file is written once, under a unique name, and is complete before it is announced. Its checksum is in the
  `WeightDelta`; the checksums of the resulting tensors are in the manifest.
- `PART` bounds the memory use, whatever the size of the model.
- `LocalSnapshot` applies deltas where it can and reads the whole snapshot otherwise. Its file is an ordinary snapshot
  file, void while it changes, so its readers need not handle deltas. After a delta every checksum is compared with the
  manifest; on a mismatch the whole snapshot is read.
- A file that may be mapped is never truncated: a new file replaces it.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from outpace.errors import CorruptData
from outpace.types import Manifest, TensorSpec, Version, WeightDelta
from outpace.weights import snapshot
from outpace.weights.snapshot import CHUNK, ITEM_BYTES

PART = 1 << 22
MAX_DELTA_SHARE = 0.75
"""A delta larger than this share of the whole snapshot is not written."""

_BLOCK_BITS = 16

_MAGIC = b"outpaceD"
_LENGTH = struct.Struct("<I")
_PART = struct.Struct("<BI")  # kind, number of changed elements
_SAME, _INDICES, _BITMAP, _WHOLE = range(4)
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}

Raw = npt.NDArray[Any]
"""One-dimensional unsigned integers."""
BufferLike = Any
"""Any object with the buffer protocol."""


class DeltaHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a delta file."""

    incarnation: str
    base: Version
    version: Version


def write_delta(
    path: Path, header: DeltaHeader, old: BufferLike, new: BufferLike, tensors: list[TensorSpec]
) -> WeightDelta | None:
    """Write the delta between two snapshots, headers included. Return None, without a file, if it saves too little."""
    partial = path.with_name(path.name + ".partial")
    limit = MAX_DELTA_SHARE * sum(spec.nbytes for spec in tensors)
    try:
        with partial.open("wb") as file:
            nbytes, checksum = _write_all(file, _encoded(header, old, new, tensors), limit)
        if nbytes > limit:
            return None
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return WeightDelta(header.base, str(path), nbytes, checksum)


def apply_delta(manifest: Manifest, memory: BufferLike) -> None:
    """Update the snapshot in `memory` from the delta's base to the version of `manifest`.

    A damaged file raises `CorruptData` before anything changes. The caller verifies the result."""
    assert manifest.delta is not None
    try:
        with open(manifest.delta.path, "rb") as file:
            _check_file(file, manifest.delta)
            _check_header(file, manifest)
            for spec in manifest.tensors:
                for part in _parts(spec, memory):
                    _decode(file, part)
    except (OSError, ValueError, IndexError) as error:
        raise CorruptData(f"delta of version {manifest.version}: {error}") from None


def _write_all(file: BinaryIO, pieces: Iterator[BufferLike], limit: float) -> tuple[int, int]:
    """Write the pieces until `limit` is exceeded; return the number of bytes and the checksum."""
    nbytes = checksum = 0
    for piece in pieces:
        file.write(piece)
        checksum = zlib.crc32(piece, checksum)
        nbytes += memoryview(piece).nbytes
        if nbytes > limit:
            break
    return nbytes, checksum


def _encoded(header: DeltaHeader, old: BufferLike, new: BufferLike, tensors: list[TensorSpec]) -> Iterator[BufferLike]:
    text = msgspec.msgpack.encode(header)
    yield _MAGIC + _LENGTH.pack(len(text)) + text
    for spec in tensors:
        for before, after in zip(_parts(spec, old), _parts(spec, new), strict=True):
            yield from _encode(before, after)


def _parts(spec: TensorSpec, memory: BufferLike) -> Iterator[Raw]:
    dtype = _UNSIGNED[ITEM_BYTES[spec.dtype]]
    elements = np.frombuffer(memory, dtype, spec.nbytes // dtype.itemsize, spec.offset)
    for start in range(0, len(elements), PART):
        yield elements[start : start + PART]


def _encode(before: Raw, after: Raw) -> list[BufferLike]:
    changed = before != after
    count = int(np.count_nonzero(changed))
    if count == 0:
        return [_PART.pack(_SAME, 0)]
    item = after.itemsize
    sizes = {
        _INDICES: 4 * _blocks(len(after)) + (2 + item) * count,
        _BITMAP: -(-len(after) // 8) + item * count,
        _WHOLE: item * len(after),
    }
    kind = min(sizes, key=lambda kind: sizes[kind])
    if kind == _WHOLE:
        return [_PART.pack(_WHOLE, len(after)), after]
    if kind == _BITMAP:
        return [_PART.pack(_BITMAP, count), np.packbits(changed), after[changed]]
    indices = np.flatnonzero(changed)
    per_block = np.bincount(indices >> _BLOCK_BITS, minlength=_blocks(len(after)))
    return [_PART.pack(_INDICES, count), per_block.astype("<u4"), indices.astype("<u2"), after[indices]]


def _decode(file: BinaryIO, target: Raw) -> None:
    kind, count = _PART.unpack(_read_exactly(file, _PART.size))
    if kind == _WHOLE:
        target[:] = _array(file, target.dtype, len(target))
    elif kind == _BITMAP:
        bits = _array(file, np.dtype("u1"), -(-len(target) // 8))
        changed = np.unpackbits(bits, count=len(target)).view(np.bool_)
        target[changed] = _array(file, target.dtype, count)
    elif kind == _INDICES:
        per_block = _array(file, np.dtype("<u4"), _blocks(len(target)))
        within = _array(file, np.dtype("<u2"), count)
        block = np.repeat(np.arange(len(per_block), dtype=np.int64), per_block)
        target[(block << _BLOCK_BITS) + within] = _array(file, target.dtype, count)
    elif kind != _SAME:
        raise ValueError(f"unknown kind of part: {kind}")


def _blocks(elements: int) -> int:
    return -(-elements // (1 << _BLOCK_BITS))


def _check_file(file: BinaryIO, delta: WeightDelta) -> None:
    """Check size and checksum before reading the content."""
    size = os.fstat(file.fileno()).st_size
    if size != delta.nbytes:
        raise ValueError(f"the file has {size} bytes, expected {delta.nbytes}")
    checksum = 0
    while piece := file.read(CHUNK):
        checksum = zlib.crc32(piece, checksum)
    if checksum != delta.crc32:
        raise ValueError("the checksum does not match")
    file.seek(0)


def _check_header(file: BinaryIO, manifest: Manifest) -> None:
    assert manifest.delta is not None
    if _read_exactly(file, len(_MAGIC)) != _MAGIC:
        raise ValueError("the file is not a delta")
    (length,) = _LENGTH.unpack(_read_exactly(file, _LENGTH.size))
    found = msgspec.msgpack.decode(_read_exactly(file, length), type=DeltaHeader)
    if found != DeltaHeader(manifest.incarnation, manifest.delta.base, manifest.version):
        raise ValueError(f"the file is a delta from {found.base} to {found.version} of {found.incarnation}")


def _array(file: BinaryIO, dtype: np.dtype[Any], count: int) -> Raw:
    return np.frombuffer(_read_exactly(file, count * dtype.itemsize), dtype)


def _read_exactly(file: BinaryIO, nbytes: int) -> bytes:
    data = file.read(nbytes)
    if len(data) < nbytes:
        raise ValueError("the file is truncated")
    return data


log = logging.getLogger(__name__)


class LocalSnapshot:
    """A local copy of the policy, updated by deltas. Not thread-safe. `damaged_deltas` counts rejected deltas."""

    def __init__(self, directory: Path) -> None:
        self.damaged_deltas = 0
        self._path = directory / "local.weights"
        self._memory: mmap.mmap | None = None
        self._local: Manifest | None = None

    def update_to(self, manifest: Manifest) -> tuple[Manifest, int]:
        """Update the copy; return its manifest and the number of bytes transferred. Raises `CorruptData`."""
        local, self._local = self._local, None
        transferred = self._apply_delta(manifest, local)
        if transferred is None:
            transferred = self._read_whole(manifest)
        self._label(manifest, manifest.version)
        self._local = msgspec.structs.replace(manifest, path=str(self._path), delta=None)
        return self._local, transferred

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._memory = self._local = None

    def _apply_delta(self, manifest: Manifest, local: Manifest | None) -> int | None:
        """Apply the delta; return its size, or None if there is no delta from the local version or it is damaged."""
        if local is None or local.incarnation != manifest.incarnation or _layout(local) != _layout(manifest):
            return None
        if manifest.delta is None or manifest.delta.base != local.version:
            return None
        self._label(manifest, snapshot.VOID)
        try:
            apply_delta(manifest, self._memory)
            self._check(manifest)
        except CorruptData as error:
            self.damaged_deltas += 1
            log.warning("%s; reading the whole snapshot instead", error)
            return None
        return manifest.delta.nbytes

    def _read_whole(self, manifest: Manifest) -> int:
        with snapshot.open_snapshot(manifest) as file:
            memory = self._allocate(snapshot.data_end(manifest.tensors))
            self._label(manifest, snapshot.VOID)
            for spec in manifest.tensors:
                offset = spec.offset
                for piece in file.chunks(spec):
                    memory[offset : offset + len(piece)] = piece
                    offset += len(piece)
        return manifest.nbytes

    def _allocate(self, nbytes: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) != nbytes:
            self._memory = None
            self._memory = snapshot.allocate(self._path, nbytes)
        return self._memory

    def _label(self, manifest: Manifest, version: int) -> None:
        assert self._memory is not None
        label = snapshot.pack_header(manifest.incarnation, version)
        self._memory[: len(label)] = label

    def _check(self, manifest: Manifest) -> None:
        assert self._memory is not None
        content = memoryview(self._memory)
        for spec in manifest.tensors:
            if zlib.crc32(content[spec.offset : spec.offset + spec.nbytes]) != spec.crc32:
                raise CorruptData(f"delta of version {manifest.version}: wrong checksum of {spec.name}")


def _layout(manifest: Manifest) -> list[tuple[str, str, list[int], int]]:
    return [(spec.name, spec.dtype, spec.shape, spec.offset) for spec in manifest.tensors]
