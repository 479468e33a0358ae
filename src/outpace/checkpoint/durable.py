"""MERGED"""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Fsync a file, or a directory and the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file and fsync it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
