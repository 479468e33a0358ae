"""How many threads a decode step is worth.

A step of a small model is a hundred tiny products: handing each out to several threads costs more than it saves, and
takes the cores from whoever runs beside. A large model is the other way round. So the number that was asked for is a
limit, and the machine is asked.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from outpace.engines.embedded.decoder import Decoder

STEPS = 5
GAIN = 0.95
"""More threads must save at least one part in twenty, or they are better left to others."""


def fitting_threads(decoder: Decoder, most: int) -> int:
    """The number of threads, `most` at most, to step this decoder with on the calling thread. Leaves it empty."""
    if decoder.deterministic or most == 1:
        return most  # bits depend on the number, so where bits matter nobody may choose it
    best, best_s = 1, _seconds(decoder, 1)
    threads = 2
    while threads <= most:
        seconds = _seconds(decoder, threads)
        if seconds < GAIN * best_s:
            best, best_s = threads, seconds
        threads = min(2 * threads, most) if threads < most else most + 1
    for slot in range(decoder.slots):
        decoder.clear(slot)
    return best


def _seconds(decoder: Decoder, threads: int) -> float:
    """The fastest of a few steps over all slots, after one to warm up."""
    torch.set_num_threads(threads)
    zeros_B = np.zeros(decoder.slots, dtype=np.int64)
    taken = []
    for _ in range(STEPS + 1):
        started = time.perf_counter()
        decoder.step(zeros_B, zeros_B)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])
