"""Random numbers: the global generators that user code may use, and the noise of sampling.

`capture` and `restore` save the state of Python's and numpy's global generators as JSON, for checkpoints.

`noise` is a pure function, a counter hash: any value can be computed without the ones before it. Token i of a request
depends on (request seed, i) alone, and the request's seed on (run seed, group, episode, turn). So slot, batch
composition and process order cannot change the sampled tokens. Workers derive the seeds and do not load torch, so this
module must not import it. Shapes: B rows.
"""

from __future__ import annotations

import random
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray


class RngState(msgspec.Struct, frozen=True):
    python: tuple[int, list[int], float | None]
    numpy: tuple[str, list[int], int, int, float]


def capture() -> bytes:
    """Return the state of Python's and numpy's global generators."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = legacy
    return msgspec.json.encode(
        RngState((version, list(words), gauss), (name, keys.tolist(), position, has_gauss, cached))
    )


def restore(state: bytes) -> None:
    """Restore a state that `capture` returned."""
    known = msgspec.json.decode(state, type=RngState)
    version, words, gauss = known.python
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = known.numpy
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


SEED_MASK: Final = (1 << 63) - 1
_WORD_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


def _mix(words_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finalizer: every input bit affects every output bit."""
    words_B = (words_B ^ (words_B >> np.uint64(30))) * np.uint64(_MIX_1)
    words_B = (words_B ^ (words_B >> np.uint64(27))) * np.uint64(_MIX_2)
    return words_B ^ (words_B >> np.uint64(31))


def _mix_int(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD_MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD_MASK
    return word ^ (word >> 31)


def uniform_noise(seed_B: NDArray[np.int64], index_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return uniforms in [0, 1) with 53 random bits, as a counter-based hash of (seed, index).

    Token i of a request uses (request seed, i) only, so the sampled tokens do not depend on slot, batch or process
    order. Shapes: B rows."""
    key_B = _mix(seed_B.astype(np.uint64))
    word_B = _mix(key_B + (index_B.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    uniform_B: NDArray[np.float64] = (word_B >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53))
    return uniform_B


def request_seed(run_seed: int, group: int, episode: int, turn: int) -> int:
    """Return the 63-bit seed of a request's noise stream. Workers compute it without loading torch."""
    word = _mix_int(run_seed & _WORD_MASK)
    for part in (group, episode, turn):
        word = _mix_int((word + ((part & _WORD_MASK) + 1) * _GOLDEN) & _WORD_MASK)
    return word & SEED_MASK
