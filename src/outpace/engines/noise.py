"""Noise as a pure function of where it is used: a counter hash, so any draw can be made without the ones before.

Token i of a request draws from (request seed, i) alone, and the request's seed from (run seed, group, episode, turn):
neither slot nor batch nor process order can change what is sampled. No torch: workers, which name the seeds, do not
load it. Shapes: B rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

SEED_MASK: Final = (1 << 63) - 1
_WORD_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


def _mix(words_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    words_B = (words_B ^ (words_B >> np.uint64(30))) * np.uint64(_MIX_1)
    words_B = (words_B ^ (words_B >> np.uint64(27))) * np.uint64(_MIX_2)
    return words_B ^ (words_B >> np.uint64(31))


def _mix_int(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD_MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD_MASK
    return word ^ (word >> 31)


def noise(seed_B: NDArray[np.int64], index_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 random bits: a counter hash, so any draw can be made without the ones before."""
    key_B = _mix(seed_B.astype(np.uint64))
    word_B = _mix(key_B + (index_B.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    uniform_B: NDArray[np.float64] = (word_B >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53))
    return uniform_B


def request_seed(run_seed: int, group: int, episode: int, turn: int) -> int:
    """The 63-bit key of one request's noise stream."""
    word = _mix_int(run_seed & _WORD_MASK)
    for part in (group, episode, turn):
        word = _mix_int((word + ((part & _WORD_MASK) + 1) * _GOLDEN) & _WORD_MASK)
    return word & SEED_MASK
