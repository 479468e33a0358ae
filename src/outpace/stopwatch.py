"""MERGED"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Accumulates wall-clock and CPU seconds spent inside `running`.

    `core_s` is the CPU time of all threads of this process; a thread that waits for other threads or for a core does
    not count. It is capped at `threads` times the wall-clock time, so that other work in the same process is not
    counted. On an accelerator (`threads` None) CPU time means nothing, and `core_s` is wall-clock time.
    """

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self.busy_s = 0.0
        self.core_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        clock, processors = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            busy = time.perf_counter() - clock
            self.busy_s += busy
            if self._threads is None:
                self.core_s += busy
            else:
                self.core_s += min(time.process_time() - processors, busy * self._threads)
