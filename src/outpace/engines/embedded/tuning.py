"""MERGED"""

from __future__ import annotations

import time

import numpy as np
import torch

from outpace.engines.embedded.decoder import Decoder

TIMED_STEPS = 5
MAX_TIME_RATIO = 0.95
"""More threads must cut the step time by at least 5 percent."""


def fitting_threads(decoder: Decoder, max_threads: int) -> int:
    """Return the fastest thread count up to `max_threads` for this decoder, on the calling thread. Clears its slots."""
    if decoder.deterministic or max_threads == 1:
        return max_threads  # the thread count changes results bit by bit, so do not choose it
    best, best_s = 1, _seconds(decoder, 1)
    threads = 2
    while threads <= max_threads:
        seconds = _seconds(decoder, threads)
        if seconds < MAX_TIME_RATIO * best_s:
            best, best_s = threads, seconds
        threads = min(2 * threads, max_threads) if threads < max_threads else max_threads + 1
    for slot in range(decoder.slots):
        decoder.clear(slot)
    return best


def _seconds(decoder: Decoder, threads: int) -> float:
    """Return the time of the fastest of a few steps over all slots, after a warm-up step."""
    torch.set_num_threads(threads)
    zeros_B = np.zeros(decoder.slots, dtype=np.int64)
    durations = []
    for _ in range(TIMED_STEPS + 1):
        started = time.perf_counter()
        decoder.step(zeros_B, zeros_B)
        durations.append(time.perf_counter() - started)
    return min(durations[1:])
