"""Seconds of work: by the clock, and by what the processors really did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the time spent inside `running`.

    `core_s` is processor time of this process, all its threads together: a thread that waits, for its siblings or for
    a core, does not count. It is bounded by the time that `threads` can fill, so that neighbours in the same process
    are not counted as well. On an accelerator (`threads` None) processors say nothing, and the clock stands in.
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
