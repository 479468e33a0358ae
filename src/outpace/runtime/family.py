"""Ending a child process together with everything it has started.

The child is started as the leader of a session and with a mark in its environment, which its descendants inherit. Three
ways lead to them, since each alone has a hole:

- the process group: all at once, however fast they fork, but a process can leave it;
- the tree of parents: also those that left the group, but a process whose parent has ended drops out of it;
- the mark: also those, wherever they are, unless they were executed with an environment of their own.

    end_family, family_ended ─▶ families to end ─▶ one thread: note the trees ─▶ kill groups and trees ─▶ look for marks
                                      ▲                                                                        │
                                      └──────────── those of whom somebody was found, and all new ones ◀───────┘

The first two ways are quick and the third is a look at every process there is. So all families that are to end at the
same moment share each look, and the looking has a thread of its own: a thousand of them take hardly longer than one,
and hold up nobody who needs a thread.

Not found is a process that left the group, lost its parent and dropped the mark. Not surely stopped is one that left
the group and goes on replacing itself by new processes faster than they can be listed.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from outpace.runtime.guardian_child import in_sessions

MARK = "OUTPACE_FAMILY"
"""The environment variable that carries the mark."""

PASSES = 100
PAUSE_S = 0.01


def end_family(leader: int, mark: str) -> bool:
    """Kill the group of `leader`, its descendants and whoever carries `mark`; True once none of them is left.

    Blocks, mostly for one look at the list of processes. The leader itself is not reaped: that is its parent's part.
    """
    return _undertaker.told(leader, mark).result()


async def family_ended(leader: int, mark: str) -> bool:
    """The same for an event loop. It goes on when whoever waits is cancelled."""
    return await asyncio.wrap_future(_undertaker.told(leader, mark))


def members(leader: int, mark: str) -> set[int]:
    """All living processes of a family, also where the leader has ended. Blocks for a look at every process."""
    below = {process.pid for process in _below(leader, _by_parent()) if _lives(process)}
    return below | in_sessions({leader}) | {process.pid for process in carriers(mark)}


def how_it_ended(status: int) -> str:
    """An exit status in words, to stand behind the name of the process."""
    if status < 0:
        with suppress(ValueError):  # a signal that Python has no name for
            return f"was killed by {signal.Signals(-status).name}"
    return f"exited with code {status}"


@dataclass(eq=False)
class _Family:
    number: int
    mark: str
    ended: Future[bool] = field(default_factory=Future)
    leader: psutil.Process | None = None  # as it was at the first look: later the number may be somebody else's
    passes: int = 0


class _Undertaker:
    """One thread, from the first time on that it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: queue.SimpleQueue[_Family] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def told(self, leader: int, mark: str) -> Future[bool]:
        family = _Family(leader, mark)
        family.ended.set_running_or_notify_cancel()  # nobody can call it off
        self._new.put(family)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a process that was forked has lost it
                self._thread = threading.Thread(target=self._work, name="outpace-family", daemon=True)
                self._thread.start()
        return family.ended

    def _work(self) -> None:
        left: list[_Family] = []
        while True:
            if left:
                time.sleep(PAUSE_S)
            families = self._with_new_ones(left)
            try:
                found = _pass(families)
            except BaseException as error:  # the boundary of the thread: raised again by whoever waits
                found = {}
                for family in families:
                    family.ended.set_exception(error)
            left = [family for family in families if not family.ended.done() and not _settled(family, found)]

    def _with_new_ones(self, left: list[_Family]) -> list[_Family]:
        """Waits for one if there is none."""
        families = left or [self._new.get()]
        with suppress(queue.Empty):
            while True:
                families.append(self._new.get_nowait())
        return families


def _settled(family: _Family, found: dict[str, list[psutil.Process]]) -> bool:
    """Whether nothing is left of it, or nothing can be done about it; whoever waits is told."""
    gone = not found[family.mark]
    if gone or family.passes == PASSES:
        family.ended.set_result(gone)
    return family.ended.done()


_undertaker = _Undertaker()


def _pass(families: list[_Family]) -> dict[str, list[psutil.Process]]:
    """Kill all that can be found; who that was, by the mark of the family."""
    for family in families:
        if family.passes == 0:
            with suppress(psutil.Error):
                family.leader = psutil.Process(family.number)
    found = _trees(families)  # before the groups are killed: whose parent has ended is in no tree
    for family in families:
        if family.passes == 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(family.number, signal.SIGKILL)
        family.passes += 1
    _kill(process for members in found.values() for process in members)
    marked = _marked({family.mark for family in families})
    _kill(process for members in marked.values() for process in members)
    return {family.mark: [*found[family.mark], *marked[family.mark]] for family in families}


def _trees(families: list[_Family]) -> dict[str, list[psutil.Process]]:
    """The descendants of every leader that is still there."""
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    leaders = {family.number: family.mark for family in families if family.leader and _lives(family.leader)}
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
        members = [child for parent in parents for child in children.get(parent, ()) if child.pid not in found]
        found |= {member.pid: member for member in members}
        parents = [member.pid for member in members]
    return list(found.values())


def _by_parent() -> dict[int, list[psutil.Process]]:
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children[process.ppid()].append(process)
    return children


def carriers(mark: str) -> list[psutil.Process]:
    """Whoever carries the mark and may be killed. Blocks for a look at every process there is."""
    return _marked({mark}).get(mark, [])


def _marked(marks: set[str]) -> dict[str, list[psutil.Process]]:
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it ended, or is somebody else's
            mark = process.environ().get(MARK)
            if mark in marks and _may_be_killed(process):
                found[str(mark)].append(process)
    return found


def _kill(members: Iterable[psutil.Process]) -> None:
    for process in members:
        with suppress(psutil.Error):
            process.kill()  # looks first whether it is still the same process


def _may_be_killed(process: psutil.Process) -> bool:
    return process.pid != os.getpid() and _lives(process)


def _lives(process: psutil.Process) -> bool:
    """A zombie has ended; whoever started it has not looked yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.is_running()
    except psutil.Error:
        return False
