"""Process trees end as a whole, and trees that end at the same time share the work."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from outpace.runtime import process_table, process_tree
from runtime_support import is_gone, until

pytestmark = pytest.mark.timeout(120)

STRAY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True{more})
print(child.pid, flush=True)
time.sleep({stays})
"""

Start = Callable[..., tuple[subprocess.Popen[str], str, int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a leader; returns it with its mark and the pid of its child, which has left the process group.

    `stays`: the leader keeps running. A child that is not `marked` has its own environment.
    """
    leaders: list[subprocess.Popen[str]] = []

    def begin(stays: bool = True, marked: bool = True) -> tuple[subprocess.Popen[str], str, int]:
        mark = process_table.new_mark()
        command = [sys.executable, "-c", STRAY.format(stays=1000 if stays else 0, more="" if marked else ", env={}")]
        environment = {**os.environ, process_table.MARK_VARIABLE: mark}
        leader = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True)
        leaders.append(leader)
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        if not stays:
            leader.wait()
        return leader, mark, child

    yield begin
    for leader in leaders:
        leader.kill()
        leader.wait()
        assert leader.stdout is not None
        leader.stdout.close()


@pytest.mark.parametrize(("stays", "marked"), [(True, True), (False, True), (True, False)])
def test_processes_that_left_the_process_group_are_killed_too(stays: bool, marked: bool, start: Start) -> None:
    leader, mark, child = start(stays, marked)
    assert not is_gone(child)
    assert process_tree.end_process_tree(leader.pid, mark)
    until(lambda: is_gone(child))
    assert is_gone(leader.pid)


def test_a_process_that_got_the_pid_of_one_in_the_table_is_not_killed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, mark, child = start()
    # The environment of the child cannot be read while it is in exec.
    until(lambda: {leader.pid, child} <= process_table.ProcessTable().find({mark: {}})[mark])
    table = process_table.ProcessTable()
    with monkeypatch.context() as reused:
        reused.setattr(process_table, "process_start_time", lambda pid: "later")
        table.kill([leader.pid])
    assert leader.poll() is None
    table.kill([leader.pid, child])
    assert leader.wait(30) != 0


def test_process_trees_ended_at_the_same_moment_share_their_scans(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = [start(stays=index % 2 == 0) for index in range(12)]
    scans: list[set[str]] = []
    all_submitted = threading.Event()

    class CountingTable(process_table.ProcessTable):
        def find(self, trees: Mapping[str, Mapping[int, str]]) -> dict[str, set[int]]:
            all_submitted.wait()
            scans.append(set(trees))
            return super().find(trees)

    monkeypatch.setattr(process_tree, "ProcessTable", CountingTable)
    ended = [process_tree._tree_killer.submit(leader.pid, mark) for leader, mark, _ in trees]
    all_submitted.set()
    assert all(one.result() for one in ended)
    assert all(is_gone(child) and is_gone(leader.pid) for leader, _, child in trees)
    assert max(map(len, scans)) >= len(trees) - 1
    assert len(scans) < len(trees)


async def test_ending_a_tree_needs_no_executor_thread_and_survives_cancellation(start: Start) -> None:
    leader, mark, child = start()
    free = threading.Event()
    pool = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    busy = pool.submit(free.wait)
    waiting = asyncio.create_task(process_tree.end_process_tree_async(leader.pid, mark))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await process_tree.end_process_tree_async(leader.pid, mark)
    assert is_gone(child)
    assert not busy.done()
    free.set()


def test_a_failed_scan_raises_and_the_next_call_works(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, mark, child = start()
    with monkeypatch.context() as patched:
        patched.setattr(process_tree, "ProcessTable", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            process_tree.end_process_tree(leader.pid, mark)
    assert process_tree.end_process_tree(leader.pid, mark)
    until(lambda: is_gone(child))


def test_a_mark_extends_the_mark_of_the_parent_and_ignores_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    run = process_table.new_mark("")
    component = process_table.new_mark(run)
    monkeypatch.setenv(process_table.MARK_VARIABLE, component)
    child = process_table.new_mark()
    assert child.startswith(component)
    assert component.startswith(run)
    for foreign in ("../..", f"{run}/", run.upper(), run[:-1], run * 100):
        monkeypatch.setenv(process_table.MARK_VARIABLE, foreign)
        assert len(process_table.new_mark()) == len(run)


@pytest.mark.parametrize("foreign", ["{}", "x{}", "", "{}" * 1000])
def test_a_process_belongs_to_a_tree_only_if_its_own_mark_starts_with_that_of_the_tree(foreign: str) -> None:
    mark = process_table.new_mark("")
    environment = {
        process_table.MARK_VARIABLE: foreign.format(*[mark] * 1000),
        "OTHER": f"{process_table.MARK_VARIABLE}={mark}",
    }
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **environment}) as process:
        found = process_table.ProcessTable().find({mark: {}, process_table.new_mark(mark): {}})
        process.kill()
    assert [sorted(pids) for pids in found.values()] == [[process.pid] if foreign.startswith("{") else [], []]


def test_a_killed_process_that_lost_its_mark_but_has_not_ended_counts_as_left(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dying process loses its environment first. Here it takes two passes to die."""
    passes: list[int] = []

    class SlowDeath(process_table.ProcessTable):
        def find(self, trees: Mapping[str, Mapping[int, str]]) -> dict[str, set[int]]:
            passes.append(len(passes))
            if len(passes) == 1:
                return super().find(trees)
            (mark,) = trees
            return {mark: super().find({"lost": trees[mark]})["lost"]}

        def kill(self, pids: Collection[int]) -> dict[int, str]:
            return super().kill(pids) if len(passes) > 2 else {pid: self.start(pid) for pid in pids}

    leader, mark, child = start(stays=False)
    monkeypatch.setattr(process_tree, "ProcessTable", SlowDeath)
    assert process_tree.end_process_tree(leader.pid, mark)
    assert is_gone(child)
