"""MERGED"""

from __future__ import annotations

import os

import msgspec
import psutil


class TreeSample(msgspec.Struct, frozen=True):
    """Resources of a process tree at one moment."""

    pss: int  # bytes; proportional set size
    processes: int
    threads: int
    fds: int


class ProcessTree:
    """A process and its current descendants."""

    def __init__(self, pid: int | None = None) -> None:
        self._root = psutil.Process(os.getpid() if pid is None else pid)

    def sample(self) -> TreeSample:
        """Measure the tree, at a few milliseconds per process. Processes that end meanwhile are left out; raises
        `psutil.NoSuchProcess` if the root is gone."""
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
