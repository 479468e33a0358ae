"""What one snapshot changes in another of the same layout, losslessly, in a file.

    magic, length of the header, header (msgpack: incarnation, base, version), then for each part of each tensor in the
    order of the manifest: kind and count, positions, values

Elements are compared as raw integers, so that every bit counts and no number is special. A tensor is cut into parts of
`PART` elements; each is stored in whichever form is the smallest:

    SAME      nothing
    PLACES    per block of 65536 elements how many have changed, then their places within it (2 bytes each), then values
    BITMAP    one bit per element, then values
    WHOLE     all values

Invariants
- The file is written once under a name of its own, complete before anybody hears of it; its checksum is in the `Delta`,
  and that of every tensor that comes out in the manifest.
- Memory is bounded by `PART`, whatever the size of the model.
"""

from __future__ import annotations

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
from outpace.types import Delta, Manifest, TensorSpec, Version
from outpace.weights.snapshot import CHUNK, ITEM_BYTES

PART = 1 << 22
WORTHWHILE = 0.75
"""Deltas longer than this share of the whole are not made."""

_BLOCK_BITS = 16

_MAGIC = b"outpaceD"
_LENGTH = struct.Struct("<I")
_PART = struct.Struct("<BI")  # kind, number of changed elements
_SAME, _PLACES, _BITMAP, _WHOLE = range(4)
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}

Raw = npt.NDArray[Any]
"""One-dimensional unsigned integers."""
Memory = Any
"""Whatever gives its bytes by the buffer protocol."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    incarnation: str
    base: Version
    version: Version


def write(path: Path, header: Header, old: Memory, new: Memory, tensors: list[TensorSpec]) -> Delta | None:
    """`old` and `new` are snapshots with their headers. None, and no file, where it would save too little."""
    partial = path.with_name(path.name + ".partial")
    limit = WORTHWHILE * sum(spec.nbytes for spec in tensors)
    try:
        with partial.open("wb") as file:
            nbytes, checksum = _write_all(file, _encoded(header, old, new, tensors), limit)
        if nbytes > limit:
            return None
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return Delta(header.base, str(path), nbytes, checksum)


def apply(manifest: Manifest, memory: Memory) -> None:
    """Turn the snapshot of the delta's base, which `memory` holds, into the one of `manifest`.

    Nothing has been touched yet when a damaged file raises `CorruptData`. The caller checks what has come out."""
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


def _write_all(file: BinaryIO, pieces: Iterator[Memory], limit: float) -> tuple[int, int]:
    """Bytes and checksum of what was written; it ends where the limit is passed."""
    nbytes = checksum = 0
    for piece in pieces:
        file.write(piece)
        checksum = zlib.crc32(piece, checksum)
        nbytes += memoryview(piece).nbytes
        if nbytes > limit:
            break
    return nbytes, checksum


def _encoded(header: Header, old: Memory, new: Memory, tensors: list[TensorSpec]) -> Iterator[Memory]:
    text = msgspec.msgpack.encode(header)
    yield _MAGIC + _LENGTH.pack(len(text)) + text
    for spec in tensors:
        for before, after in zip(_parts(spec, old), _parts(spec, new), strict=True):
            yield from _encode(before, after)


def _parts(spec: TensorSpec, memory: Memory) -> Iterator[Raw]:
    dtype = _UNSIGNED[ITEM_BYTES[spec.dtype]]
    elements = np.frombuffer(memory, dtype, spec.nbytes // dtype.itemsize, spec.offset)
    for start in range(0, len(elements), PART):
        yield elements[start : start + PART]


def _encode(before: Raw, after: Raw) -> list[Memory]:
    changed = before != after
    count = int(np.count_nonzero(changed))
    if count == 0:
        return [_PART.pack(_SAME, 0)]
    item = after.itemsize
    sizes = {
        _PLACES: 4 * _blocks(len(after)) + (2 + item) * count,
        _BITMAP: -(-len(after) // 8) + item * count,
        _WHOLE: item * len(after),
    }
    kind = min(sizes, key=lambda kind: sizes[kind])
    if kind == _WHOLE:
        return [_PART.pack(_WHOLE, len(after)), after]
    if kind == _BITMAP:
        return [_PART.pack(_BITMAP, count), np.packbits(changed), after[changed]]
    places = np.flatnonzero(changed)
    per_block = np.bincount(places >> _BLOCK_BITS, minlength=_blocks(len(after)))
    return [_PART.pack(_PLACES, count), per_block.astype("<u4"), places.astype("<u2"), after[places]]


def _decode(file: BinaryIO, target: Raw) -> None:
    kind, count = _PART.unpack(_exactly(file, _PART.size))
    if kind == _WHOLE:
        target[:] = _array(file, target.dtype, len(target))
    elif kind == _BITMAP:
        bits = _array(file, np.dtype("u1"), -(-len(target) // 8))
        changed = np.unpackbits(bits, count=len(target)).view(np.bool_)
        target[changed] = _array(file, target.dtype, count)
    elif kind == _PLACES:
        per_block = _array(file, np.dtype("<u4"), _blocks(len(target)))
        within = _array(file, np.dtype("<u2"), count)
        block = np.repeat(np.arange(len(per_block), dtype=np.int64), per_block)
        target[(block << _BLOCK_BITS) + within] = _array(file, target.dtype, count)
    elif kind != _SAME:
        raise ValueError(f"a part of the unknown kind {kind}")


def _blocks(elements: int) -> int:
    return -(-elements // (1 << _BLOCK_BITS))


def _check_file(file: BinaryIO, delta: Delta) -> None:
    """Before anything in it is believed."""
    size = os.fstat(file.fileno()).st_size
    if size != delta.nbytes:
        raise ValueError(f"it has {size} bytes instead of {delta.nbytes}")
    checksum = 0
    while piece := file.read(CHUNK):
        checksum = zlib.crc32(piece, checksum)
    if checksum != delta.crc32:
        raise ValueError("its checksum does not match")
    file.seek(0)


def _check_header(file: BinaryIO, manifest: Manifest) -> None:
    assert manifest.delta is not None
    if _exactly(file, len(_MAGIC)) != _MAGIC:
        raise ValueError("it is no delta")
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
    found = msgspec.msgpack.decode(_exactly(file, length), type=Header)
    if found != Header(manifest.incarnation, manifest.delta.base, manifest.version):
        raise ValueError(f"it leads from {found.base} to {found.version} of {found.incarnation}")


def _array(file: BinaryIO, dtype: np.dtype[Any], count: int) -> Raw:
    return np.frombuffer(_exactly(file, count * dtype.itemsize), dtype)


def _exactly(file: BinaryIO, nbytes: int) -> bytes:
    data = file.read(nbytes)
    if len(data) < nbytes:
        raise ValueError("it ends too early")
    return data
