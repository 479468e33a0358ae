"""Random numbers: the global generators that user code may use, and the noise of sampling.

`capture` and `restore` save the state of Python's and numpy's global generators as JSON, for checkpoints.

`noise` is a pure function, a counter hash: any value can be computed without the ones before it. Token i of a request
depends on (request seed, i) alone, and the request's seed on (run seed, group, episode, turn). So slot, batch
composition and process order cannot change the sampled tokens. Workers derive the seeds and do not load torch, so this
module must not import it. Shapes: B rows.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np


class State(msgspec.Struct, frozen=True):
    python: tuple[int, list[int], float | None]
    numpy: tuple[str, list[int], int, int, float]


def capture() -> bytes:
    """Return the state of Python's and numpy's global generators."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = legacy
    return msgspec.json.encode(State((version, list(words), gauss), (name, keys.tolist(), position, has_gauss, cached)))


def restore(state: bytes) -> None:
    """Restore a state that `capture` returned."""
    known = msgspec.json.decode(state, type=State)
    version, words, gauss = known.python
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = known.numpy
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
