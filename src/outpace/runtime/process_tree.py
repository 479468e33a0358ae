"""Ends a child process together with everything it started that `ProcessTable` can find.

    end_process_tree ─▶ queue of trees ─▶ one thread: scan ─▶ kill groups and all that was found ─┐
                              ▲                                                                   │
                              └─────── trees with processes left, and all new trees ◀─────────────┘

A scan visits every process on the machine. So all trees that end at the same time share each scan, in a dedicated
thread: a thousand trees take hardly longer than one and do not block other thread pools. The process group is killed by
one system call, however fast its members fork. Not reliably stopped: a process that left the group and replaces itself
with new processes faster than they can be listed.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from outpace.runtime.process_table import ProcessTable

PASSES = 100
PAUSE_S = 0.01


def end_process_tree(leader: int, mark: str) -> bool:
    """Kill the group of `leader`, its descendants and all processes with `mark`. Returns True once none is left.

    Blocks, usually for two scans of the process list. Does not reap the leader; its parent must do that.
    """
    return _tree_killer.submit(leader, mark).result()


async def end_process_tree_async(leader: int, mark: str) -> bool:
    """Same as `end_process_tree`, for an event loop. Continues in the background if the caller is cancelled."""
    return await asyncio.wrap_future(_tree_killer.submit(leader, mark))


@dataclass(eq=False)
class _ProcessTree:
    leader: int
    mark: str
    ended: Future[bool] = field(default_factory=Future)
    known: dict[int, str] = field(default_factory=dict)  # pids found so far, with start times: a pid may be reused
    passes: int = 0


class _TreeKiller:
    """Kills process trees in one background thread, which starts on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: queue.SimpleQueue[_ProcessTree] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, leader: int, mark: str) -> Future[bool]:
        """Queue a tree. The future resolves to whether all of its processes are gone."""
        tree = _ProcessTree(leader, mark)
        tree.ended.set_running_or_notify_cancel()  # it cannot be cancelled
        self._new.put(tree)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a forked process has lost the thread
                self._thread = threading.Thread(target=self._run, name="outpace-process-tree", daemon=True)
                self._thread.start()
        return tree.ended

    def _run(self) -> None:
        left: list[_ProcessTree] = []
        while True:
            if left:
                time.sleep(PAUSE_S)
            trees = self._add_new(left)
            try:
                _kill_once(trees)
            except BaseException as error:  # thread boundary: re-raised in the caller
                for tree in trees:
                    if not tree.ended.done():
                        tree.ended.set_exception(error)
            left = [tree for tree in trees if not tree.ended.done()]

    def _add_new(self, left: list[_ProcessTree]) -> list[_ProcessTree]:
        """Add the queued trees to those left. Waits for a tree if there is none."""
        trees = left or [self._new.get()]
        with suppress(queue.Empty):
            while True:
                trees.append(self._new.get_nowait())
        return trees


_tree_killer = _TreeKiller()


def _kill_once(trees: list[_ProcessTree]) -> None:
    """Kill all processes that can be found. Resolves the trees that have none, and those after their last pass."""
    table = ProcessTable()
    for tree in trees:
        if tree.passes == 0:
            tree.known = {tree.leader: table.start(tree.leader)}
    found = table.find({tree.mark: tree.known for tree in trees})
    for tree in trees:
        pids = found[tree.mark]
        if pids and tree.passes == 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(tree.leader, signal.SIGKILL)
        tree.known |= table.kill(pids)
        tree.passes += 1
        if not pids or tree.passes == PASSES:
            tree.ended.set_result(not pids)


def child_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a child process. They must be set before it loads torch, because thread pools
    cannot be resized well later."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread spinning at a barrier takes the core away from other components
        "THP_MEM_ALLOC_ENABLE": "1",  # torch puts large tensors on huge pages: fewer page faults and TLB misses
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # same imports as the parent
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # tasks that depend on set iteration order must be equal in every process
    }
