"""Shared helpers for tests of weights."""

from __future__ import annotations

import os
from pathlib import Path


def flip(path: Path, offset: int, bit: int = 2) -> None:
    """Flip one bit of a file in place."""
    with open(path, "r+b") as file:
        (value,) = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([value ^ (1 << bit)]), offset)
