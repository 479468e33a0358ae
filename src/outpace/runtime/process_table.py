"""Lists the descendants of a process, including those that left its process group or lost their parent.

A child is started with a mark in its environment, which its descendants inherit. The mark of a child extends the mark
of its parent, so the mark of a run is a prefix of the marks of its components, and that of a component is a prefix of
the marks of everything that it starts. Descendants are found in three ways, because each alone misses some:

- process group and session: miss processes that left them;
- parent links: find those, but miss processes whose parent has ended;
- mark: finds those too, but misses processes executed with a new environment.

Not found: a process that left its session, lost its parent and dropped the mark.

Marks cost a scan of /proc: 50 µs of CPU time per process on a slow core. The alternatives are worse. A subreaper gets
the orphans of all its children but cannot tell whose they are, and loses them to init when it is killed itself. A
parent-death signal does not reach grandchildren. An ordinary user may not create a cgroup, nor may root in a container
that mounts the cgroup file system read-only.

A process may put anything into its environment. So a value is only compared with the marks being searched for, by their
exact lengths, and a mark is extended only if it has the format of `new_mark`.

Uses only the standard library, and little of it: the cleanup process imports this module.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

MARK_VARIABLE = "OUTPACE_PROCESS_MARK"
"""Environment variable that holds the mark."""

TOKEN = 17
"""Characters that each generation adds to the mark: 16 hexadecimal digits and a dot."""
MAX_MARK = 8 * TOKEN
"""Longer marks are not extended: a child in the ninth generation starts a new one."""

_PROC = os.path.isdir("/proc/self")
_ENDED = "ZX"
"""States of a process that has ended but is not reaped yet."""


def new_mark(parent: str | None = None) -> str:
    """Return the mark of a new child of the process with the mark `parent`; by default, of this process."""
    parent = os.environ.get(MARK_VARIABLE, "") if parent is None else parent
    return f"{parent if len(parent) < MAX_MARK and _is_mark(parent) else ''}{os.urandom(8).hex()}."


def _is_mark(text: str) -> bool:
    tokens = (text[start : start + TOKEN] for start in range(0, len(text), TOKEN))
    return all(
        len(token) == TOKEN and token[-1] == "." and set(token[:-1]) <= set("0123456789abcdef") for token in tokens
    )


class ProcessTable:
    """The live processes of this machine at one moment."""

    def __init__(self) -> None:
        self._starts: dict[int, str] = {}
        self._marks: dict[int, str] = {}  # filled only without /proc; with it, marks are read on demand
        self._members: dict[int, set[int]] = defaultdict(set)  # by the pid of the parent, group leader, session leader
        for pid, start, leaders in self._from_proc() if _PROC else self._from_ps():
            self._starts[pid] = start
            for leader in leaders:
                self._members[leader].add(pid)

    def start(self, pid: int) -> str:
        """Return the start time of a process in the system's format, empty if it does not exist or has ended."""
        return self._starts.get(pid, "")

    def find(self, trees: Mapping[str, Mapping[int, str]]) -> dict[str, set[int]]:
        """Return the pids of each tree, by its mark, without this process.

        A tree is a mark with leaders: pids and start times. A leader whose pid was reused is ignored; one that has
        ended still identifies its group and session, because their ids are not reused while they exist."""
        found = self._marked(trees)
        for mark, leaders in trees.items():
            self._add_members(found[mark], [pid for pid, start in leaders.items() if self.start(pid) in ("", start)])
            found[mark].discard(os.getpid())
        return found

    def kill(self, pids: Collection[int]) -> dict[int, str]:
        """Kill processes of this table, unless their pid was reused meanwhile. Returns their start times.

        Use these to find them in the next table: a dying process loses its environment, and so its mark, before it
        has ended."""
        for pid in pids:
            try:
                if process_start_time(pid) == self.start(pid):
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # it has ended, or belongs to another user
        return {pid: self.start(pid) for pid in pids}

    def _add_members(self, found: set[int], leaders: list[int]) -> None:
        """Add the live leaders and everything below them."""
        unseen = set(leaders)
        while unseen:
            found |= unseen & self._starts.keys()
            unseen = {pid for leader in unseen for pid in self._members.get(leader, ())} - found

    def _marked(self, marks: Collection[str]) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {mark: set() for mark in marks}
        lengths = {len(mark) for mark in marks if mark}
        for pid in self._starts:
            value = self._marks.get(pid, "") if not _PROC else _mark_of(pid)
            for length in lengths:
                if value[:length] in found:
                    found[value[:length]].add(pid)
        return found

    def _from_proc(self) -> Iterator[tuple[int, str, list[int]]]:
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            fields = _stat(pid)
            if fields and fields[0] not in _ENDED:
                yield pid, fields[19], list(map(int, fields[1:4]))

    def _from_ps(self) -> Iterator[tuple[int, str, list[int]]]:
        import subprocess

        command = ["ps", "-A", "-E", "-ww", "-o", "pid=,ppid=,pgid=,stat=,lstart=,command="]
        for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines():
            pid, parent, group, state, *start, shown = line.split(None, 9)
            if state[0] not in _ENDED:
                self._marks[int(pid)] = _value(shown, " ")
                yield int(pid), " ".join(start), [int(parent), int(group)]


def process_start_time(pid: int) -> str:
    """Return the start time of a process in the system's format, empty if it does not exist or has ended."""
    if not _PROC:
        return ProcessTable().start(pid)
    fields = _stat(pid)
    return "" if not fields or fields[0] in _ENDED else fields[19]


def _stat(pid: int) -> list[str]:
    """Return state, parent, group, session and so on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _mark_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", errors="replace") as file:
            return _value(file.read(), "\0")
    except OSError:
        return ""  # it has ended, or belongs to another user


def _value(environment: str, separator: str) -> str:
    _, _, rest = f"{separator}{environment}".partition(f"{separator}{MARK_VARIABLE}=")
    return rest.partition(separator)[0]
