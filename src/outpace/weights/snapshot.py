"""Snapshot files: format, and reading and allocating them without torch.

    0        header: magic, incarnation, version (`VOID` while the writer copies)
    4096     first tensor; each begins at a multiple of 64 bytes

Invariants
- A reader never accepts mixed weights: the header is void while the writer copies, the reader checks it before and
  after its own copy, and every tensor has a checksum.
- Readers use plain reads, never a mapping, so a file that vanishes or shrinks is an error and not a crash.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outpace.errors import CorruptData, OutpaceError
from outpace.types import Manifest, TensorSpec, Version

VOID: Version = -1
DATA_OFFSET = 4096
ALIGNMENT = 64
CHUNK = 4 << 20
"""Bytes read and checksummed at a time: small enough to stay in the CPU cache for the checksum."""

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

_POPULATE: int = getattr(mmap, "MAP_POPULATE", 0)
"""Map all pages at once where supported: a page fault per 4 KiB would double the time of a copy."""

_HEADER = struct.Struct("<8s64sq")  # magic, incarnation, version
_MAGIC = b"outpaceW"


def pack_header(incarnation: str, version: Version) -> bytes:
    """Return the header of a snapshot."""
    return _HEADER.pack(_MAGIC, incarnation.encode(), version)


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def data_end(tensors: list[TensorSpec]) -> int:
    """Return the minimum length of the file."""
    return max((spec.offset + spec.nbytes for spec in tensors), default=DATA_OFFSET)


class SnapshotFile:
    """A snapshot file open for reading."""

    def __init__(self, manifest: Manifest, descriptor: int) -> None:
        self._manifest = manifest
        self._descriptor = descriptor

    def check_label(self) -> None:
        expected = pack_header(self._manifest.incarnation, self._manifest.version)
        found = bytearray(len(expected))
        if self._read(memoryview(found), 0) < len(expected) or found != expected:
            raise CorruptData(f"the buffer of version {self._manifest.version} now holds another snapshot")

    def read_into(self, spec: TensorSpec, target: memoryview, start: int = 0) -> None:
        """Fill `target` with the bytes of the tensor from `start`."""
        done = 0
        while done < len(target):
            count = self._read(target[done:], spec.offset + start + done)
            if count == 0:
                raise CorruptData(f"weights of version {self._manifest.version}: the file ends inside {spec.name}")
            done += count

    def chunks(self, spec: TensorSpec) -> Iterator[memoryview]:
        """Yield the bytes of the tensor in pieces, then verify the checksum.

        A piece is valid until the next iteration."""
        memory = memoryview(bytearray(min(CHUNK, spec.nbytes)))
        checksum = 0
        for start in range(0, spec.nbytes, CHUNK):
            piece = memory[: min(CHUNK, spec.nbytes - start)]
            self.read_into(spec, piece, start)
            checksum = zlib.crc32(piece, checksum)
            yield piece
        self.compare(spec, checksum)

    def _read(self, target: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._descriptor, [target], offset)
        except OSError as error:
            raise CorruptData(f"weights of version {self._manifest.version}: {error}") from error

    def compare(self, spec: TensorSpec, checksum: int) -> None:
        if checksum != spec.crc32:
            version = self._manifest.version
            raise CorruptData(f"weights of version {version}: checksum of {spec.name} does not match")


@contextmanager
def open_snapshot(manifest: Manifest) -> Iterator[SnapshotFile]:
    """Open the snapshot. Check the header on entry and again on exit, after the body has read its data."""
    _check_sizes(manifest)
    try:
        descriptor = os.open(manifest.path, os.O_RDONLY)
    except OSError as error:
        raise CorruptData(f"weights of version {manifest.version}: {error}") from None
    try:
        snapshot = SnapshotFile(manifest, descriptor)
        snapshot.check_label()
        yield snapshot
        snapshot.check_label()
    finally:
        os.close(descriptor)


def verify(manifest: Manifest) -> None:
    """Raise `CorruptData` unless the snapshot exists and every checksum matches."""
    with open_snapshot(manifest) as snapshot:
        for spec in manifest.tensors:
            for _ in snapshot.chunks(spec):
                pass


def allocate(path: Path, nbytes: int) -> mmap.mmap:
    """Create and map a file with all pages allocated, so a full file system is an error now and not a SIGBUS later.

    An existing file is replaced, not truncated: another process may have it mapped."""
    path.unlink(missing_ok=True)
    require_space(path.parent, nbytes)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | _POPULATE)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise OutpaceError(_no_space(path.parent, nbytes)) from None
        raise
    finally:
        os.close(descriptor)


def require_space(directory: Path, nbytes: int) -> None:
    if _free_bytes(directory) < nbytes:
        raise OutpaceError(_no_space(directory, nbytes))


def _no_space(directory: Path, nbytes: int) -> str:
    free = _free_bytes(directory)
    return f"weights need {nbytes / 1e6:.0f} MB in {directory}, but only {free / 1e6:.0f} MB are free"


def _free_bytes(directory: Path) -> int:
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def _check_sizes(manifest: Manifest) -> None:
    for spec in manifest.tensors:
        if spec.nbytes != math.prod(spec.shape) * ITEM_BYTES.get(spec.dtype, -1):
            raise CorruptData(f"weights of version {manifest.version}: {spec.name} cannot have {spec.nbytes} bytes")
