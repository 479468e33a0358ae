"""The file that a snapshot is: its header, where its tensors lie, and how it is read without torch.

    0        header: magic, incarnation, version (`VOID` while somebody writes)
    4096     the first tensor; each begins at a multiple of 64 bytes

Invariants
- A reader never takes mixed weights for whole ones: the header is void while the writer copies, the reader checks it
  before and after its own copy, and every tensor has a checksum.
- Readers use plain reads, never a mapping: a file that vanishes or shrinks is then an error, not a crash.
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
"""Bytes that are read and checked at once: they are still in the processor's cache for the second of the two."""

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
"""Where the system has it, the mapping is complete at once: a page fault for each 4 KiB would double a copy's time."""

_HEADER = struct.Struct("<8s64sq")  # magic, incarnation, version
_MAGIC = b"outpaceW"


def label(incarnation: str, version: Version) -> bytes:
    """The header of a snapshot."""
    return _HEADER.pack(_MAGIC, incarnation.encode(), version)


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def end_of(tensors: list[TensorSpec]) -> int:
    """How long the file is at least."""
    return max((spec.offset + spec.nbytes for spec in tensors), default=DATA_OFFSET)


class SnapshotFile:
    """A snapshot that is open for reading, as `manifest` describes it."""

    def __init__(self, manifest: Manifest, descriptor: int) -> None:
        self._manifest = manifest
        self._descriptor = descriptor

    def check_label(self) -> None:
        wanted = label(self._manifest.incarnation, self._manifest.version)
        found = bytearray(len(wanted))
        if self._read(memoryview(found), 0) < len(wanted) or found != wanted:
            raise CorruptData(f"the buffer of version {self._manifest.version} holds another snapshot by now")

    def read_into(self, spec: TensorSpec, target: memoryview, start: int = 0) -> None:
        """Fill `target` with the tensor's bytes from `start` on."""
        done = 0
        while done < len(target):
            count = self._read(target[done:], spec.offset + start + done)
            if count == 0:
                raise CorruptData(f"weights of version {self._manifest.version}: the file ends inside {spec.name}")
            done += count

    def chunks(self, spec: TensorSpec) -> Iterator[memoryview]:
        """The tensor's bytes, piece by piece. At its end the checksum is compared.

        Each piece is valid until the next one is asked for."""
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
def opened(manifest: Manifest) -> Iterator[SnapshotFile]:
    """The snapshot, which was there before the body ran and is still there when it has run."""
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
    """Raises `CorruptData` unless the snapshot is there, and is whole."""
    with opened(manifest) as snapshot:
        for spec in manifest.tensors:
            for _ in snapshot.chunks(spec):
                pass


def allocate(path: Path, nbytes: int) -> mmap.mmap:
    """A mapped file whose every page exists: a full file system is an error now and not a SIGBUS later.

    One that was there before is replaced and not shortened, for the sake of those who have it mapped."""
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
    return f"weights need {nbytes / 1e6:.0f} MB more in {directory}, where {free / 1e6:.0f} MB are free"


def _free_bytes(directory: Path) -> int:
    place = os.statvfs(directory)
    return place.f_bavail * place.f_frsize


def _check_sizes(manifest: Manifest) -> None:
    for spec in manifest.tensors:
        if spec.nbytes != math.prod(spec.shape) * ITEM_BYTES.get(spec.dtype, -1):
            raise CorruptData(f"weights of version {manifest.version}: {spec.name} cannot have {spec.nbytes} bytes")
