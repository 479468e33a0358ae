"""What a process and its children hold: memory, threads, open files.

Memory is the proportional set size: a page shared by n processes counts 1/n in each, so the total over a tree counts
every page once, shared weight buffers included. Where the system does not tell it, the unique set size stands in.
"""

from __future__ import annotations

import logging
import os
import threading

import msgspec
import psutil

logger = logging.getLogger(__name__)


class TreeSample(msgspec.Struct, frozen=True):
    """A tree of processes at one moment."""

    pss: int  # bytes
    processes: int
    threads: int
    fds: int

    def metrics(self) -> dict[str, float]:
        return {
            "fleet/pss_bytes": float(self.pss),
            "fleet/processes": float(self.processes),
            "fleet/threads": float(self.threads),
            "fleet/fds": float(self.fds),
        }


class ProcessTree:
    """A process and all its descendants, whoever they are at the moment of asking."""

    def __init__(self, pid: int | None = None) -> None:
        self._root = psutil.Process(os.getpid() if pid is None else pid)

    def sample(self) -> TreeSample:
        """Costs a few milliseconds per process. A process that ends meanwhile is left out; without the root,
        `psutil.NoSuchProcess`."""
        members = [self._root, *self._root.children(recursive=True)]
        pss = processes = threads = fds = 0
        for process in members:
            try:
                with process.oneshot():
                    memory = process.memory_full_info()
                    thread_count, fd_count = process.num_threads(), process.num_fds()
            except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                if process is self._root:
                    raise
                continue
            pss += getattr(memory, "pss", 0) or memory.uss
            processes, threads, fds = processes + 1, threads + thread_count, fds + fd_count
        return TreeSample(pss=pss, processes=processes, threads=threads, fds=fds)


class ProcessSampler:
    """Samples a tree every so often on a thread of its own; `latest` is the newest sample."""

    def __init__(self, tree: ProcessTree, every_s: float = 5.0) -> None:
        self.latest: TreeSample | None = None
        self._tree = tree
        self._every_s = every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outpace-process-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self.latest = self._tree.sample()
            except psutil.Error as error:  # nothing of the run depends on these numbers
                logger.warning("no more process samples: %s", error)
                return
            self._closed.wait(self._every_s)
