"""The random state of a process that user code may draw from: Python's and numpy's global generators, as JSON."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np


class State(msgspec.Struct, frozen=True):
    python: tuple[int, list[int], float | None]
    numpy: tuple[str, list[int], int, int, float]


def capture() -> bytes:
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = legacy
    return msgspec.json.encode(State((version, list(words), gauss), (name, keys.tolist(), position, has_gauss, cached)))


def restore(state: bytes) -> None:
    known = msgspec.json.decode(state, type=State)
    version, words, gauss = known.python
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = known.numpy
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
