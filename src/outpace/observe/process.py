"""What a process and its children hold: memory, threads, open files.

Memory is the proportional set size: a page shared by n processes counts 1/n in each, so the total over a tree counts
every page once, shared weight buffers included. Where the system does not tell it, the unique set size stands in.
"""

from __future__ import annotations

import os

import msgspec
import psutil


class TreeSample(msgspec.Struct, frozen=True):
    """A tree of processes at one moment."""

    pss: int  # bytes
    processes: int
    threads: int
    fds: int


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
