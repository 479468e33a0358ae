"""Child processes: their environment, and killing one together with everything it started.

The child is started as a session leader with a mark in its environment, which its descendants inherit. Descendants are
found in three ways, because each alone misses some:

- process group: kills all members at once, however fast they fork, but a process can leave the group;
- parent links: also find processes that left the group, but not those whose parent has ended;
- mark: also finds those, unless they were executed with a new environment.

    end_process_tree ─▶ queue of trees ─▶ one thread: list descendants ─▶ kill groups and descendants ─▶ find marks
                              ▲                                                                            │
                              └─────────── trees with processes left, and all new trees ◀──────────────────┘

The first two ways are fast; the third scans every process on the machine. So all trees that end at the same time share
each scan, in a dedicated thread: a thousand trees take hardly longer than one and do not block other thread pools.

Not found: a process that left the group, lost its parent and dropped the mark. Not reliably stopped: a process that
left the group and replaces itself with new processes faster than they can be listed.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from outpace.runtime.cleanup_process import pids_in_sessions

TREE_MARK_VARIABLE = "OUTPACE_FAMILY"
"""Environment variable that holds the mark."""

PASSES = 100
PAUSE_S = 0.01


def end_process_tree(leader: int, mark: str) -> bool:
    """Kill the group of `leader`, its descendants and all processes with `mark`. Returns True once none is left.

    Blocks, usually for one scan of the process list. Does not reap the leader; its parent must do that.
    """
    return _tree_killer.submit(leader, mark).result()


async def end_process_tree_async(leader: int, mark: str) -> bool:
    """Same as `end_process_tree`, for an event loop. Continues in the background if the caller is cancelled."""
    return await asyncio.wrap_future(_tree_killer.submit(leader, mark))


def process_tree_pids(leader: int, mark: str) -> set[int]:
    """Return the pids of all live processes of a tree, even if the leader has ended. Blocks for a scan of all
    processes."""
    below = {process.pid for process in _below(leader, _by_parent()) if _lives(process)}
    return below | pids_in_sessions({leader}) | {process.pid for process in marked_processes(mark)}


def describe_exit(status: int) -> str:
    """Describe an exit status in words that follow the name of the process."""
    if status < 0:
        with suppress(ValueError):  # a signal without a name in Python
            return f"was killed by {signal.Signals(-status).name}"
    return f"exited with code {status}"


@dataclass(eq=False)
class _ProcessTree:
    leader_pid: int
    mark: str
    ended: Future[bool] = field(default_factory=Future)
    leader: psutil.Process | None = None  # looked up in the first pass: later the pid may have been reused
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
                found = _pass(trees)
            except BaseException as error:  # thread boundary: re-raised in the caller
                found = {}
                for tree in trees:
                    tree.ended.set_exception(error)
            left = [tree for tree in trees if not tree.ended.done() and not _finished(tree, found)]

    def _add_new(self, left: list[_ProcessTree]) -> list[_ProcessTree]:
        """Add the queued trees to those left. Waits for a tree if there is none."""
        trees = left or [self._new.get()]
        with suppress(queue.Empty):
            while True:
                trees.append(self._new.get_nowait())
        return trees


def _finished(tree: _ProcessTree, found: dict[str, list[psutil.Process]]) -> bool:
    """Resolve the tree's future if no process is left or the last pass is over. Returns whether it is resolved."""
    gone = not found[tree.mark]
    if gone or tree.passes == PASSES:
        tree.ended.set_result(gone)
    return tree.ended.done()


_tree_killer = _TreeKiller()


def _pass(trees: list[_ProcessTree]) -> dict[str, list[psutil.Process]]:
    """Kill all processes that can be found. Returns them by the mark of their tree."""
    for tree in trees:
        if tree.passes == 0:
            with suppress(psutil.Error):
                tree.leader = psutil.Process(tree.leader_pid)
    found = _descendants(trees)  # before the groups are killed, because orphans have no parent link
    for tree in trees:
        if tree.passes == 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(tree.leader_pid, signal.SIGKILL)
        tree.passes += 1
    _kill(process for processes in found.values() for process in processes)
    marked = _marked({tree.mark for tree in trees})
    _kill(process for processes in marked.values() for process in processes)
    return {tree.mark: [*found[tree.mark], *marked[tree.mark]] for tree in trees}


def _descendants(trees: list[_ProcessTree]) -> dict[str, list[psutil.Process]]:
    """Return the descendants of every live leader, by mark."""
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    leaders = {tree.leader_pid: tree.mark for tree in trees if tree.leader and _lives(tree.leader)}
    if not leaders:
        return found
    children = _by_parent()
    for leader, mark in leaders.items():
        found[mark] += filter(_may_be_killed, _below(leader, children))
    return found


def _below(leader: int, children: dict[int, list[psutil.Process]]) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    parents = [leader]
    while parents:
        level = [child for parent in parents for child in children.get(parent, ()) if child.pid not in found]
        found |= {process.pid: process for process in level}
        parents = [process.pid for process in level]
    return list(found.values())


def _by_parent() -> dict[int, list[psutil.Process]]:
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children[process.ppid()].append(process)
    return children


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the live processes with this mark, except this one. Blocks for a scan of all processes."""
    return _marked({mark}).get(mark, [])


def _marked(marks: set[str]) -> dict[str, list[psutil.Process]]:
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it ended, or belongs to another user
            mark = process.environ().get(TREE_MARK_VARIABLE)
            if mark in marks and _may_be_killed(process):
                found[str(mark)].append(process)
    return found


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()  # psutil first checks that the pid was not reused


def _may_be_killed(process: psutil.Process) -> bool:
    return process.pid != os.getpid() and _lives(process)


def _lives(process: psutil.Process) -> bool:
    """Return whether a process is alive. A zombie has ended and only waits to be reaped."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.is_running()
    except psutil.Error:
        return False


def child_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a child process. They must be set before it loads torch, because thread pools
    cannot be resized well later."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread spinning at a barrier takes the core away from other components
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # same imports as the parent
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # tasks that depend on set iteration order must be equal in every process
    }
