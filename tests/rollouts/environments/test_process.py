"""Environments in separate processes: real ones that hang, crash and leave children behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from outpace.errors import BadInput
from outpace.rollouts.environments.session import (
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentSession,
    EnvironmentSessions,
    EnvironmentSource,
    EnvironmentTimeout,
)
from outpace.rollouts.tools.functions import ToolError
from outpace.runtime.child_process import MAX_OUTPUT
from outpace.types import Task
from rollouts_support import environment_sessions
from runtime_support import is_gone, noted_pids, until
from support import naming

FILE = Path(__file__).parent / "unruly.py"
TASK = Task("t1", "Find it.")
MAZE = Task("t2", "Find it.", {"environment": "maze"})

pytestmark = pytest.mark.asyncio(loop_scope="module")


def source(name: str = "Faulty") -> EnvironmentSource:
    return EnvironmentSource("environment.kinds.maze", f"{FILE}:{name}")


def inventory() -> tuple[int, int, int]:
    """Children, tasks and descriptors of this process."""
    me = psutil.Process()
    return len(me.children(recursive=True)), len(asyncio.all_tasks()), me.num_fds()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions() -> AsyncIterator[EnvironmentSessions]:
    """Kept for all tests of the module, as a worker keeps them for all its episodes."""
    before = inventory()
    kept = environment_sessions({"maze": source()}, timeout_s=20.0, call_timeout_s=1.0, isolation="process")
    yield kept
    await kept.close()
    assert all(now <= then for now, then in zip(inventory(), before, strict=True))


async def opened(sessions: EnvironmentSessions, note: Path | None = None) -> EnvironmentSession:
    session = await sessions.open(MAZE)
    await session.reset({"note": str(note or "")})
    return session


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("hang", EnvironmentTimeout, ("tools.timeout_s", "1 s")),
        ("hang_in_c", EnvironmentTimeout, ("tools.timeout_s", "1 s")),
        ("leave", EnvironmentDied, ("code 3",)),
        ("crash", EnvironmentDied, ("SIGSEGV",)),
        ("kill", EnvironmentDied, ("SIGKILL",)),
        ("babble", EnvironmentDied, ()),
        ("forge", EnvironmentDied, ()),
    ],
)
async def test_a_fault_ends_only_its_own_episode_and_the_process_is_replaced(
    sessions: EnvironmentSessions, fault: str, kind: type[Exception], words: tuple[str, ...]
) -> None:
    sibling, session = await opened(sessions), await opened(sessions)
    beside, pid = await sibling.call("fine", {}), await session.call("fine", {})
    with pytest.raises(kind, match=naming("maze", fault, *words)) as caught:
        await session.call(fault, {})
    assert type(caught.value) is kind
    with pytest.raises(EnvironmentDied):
        await session.call("fine", {})
    await session.close()
    assert await sibling.call("fine", {}) == beside
    await sibling.close()
    following = await opened(sessions)
    assert await following.call("fine", {}) != pid
    await following.close()
    await asyncio.to_thread(until, lambda: is_gone(pid))


@pytest.mark.parametrize(("fault", "words"), [("leave", "code 3"), ("kill", "SIGKILL")])
async def test_a_fault_in_reset_ends_the_episode_too(sessions: EnvironmentSessions, fault: str, words: str) -> None:
    session = await sessions.open(MAZE)
    with pytest.raises(EnvironmentDied, match=naming("maze", "reset", words)):
        await session.reset({"fault": fault})
    with pytest.raises(EnvironmentDied):
        await session.reset({})
    await session.close()


async def test_an_idle_process_that_was_killed_is_replaced(sessions: EnvironmentSessions) -> None:
    session = await opened(sessions)
    pid = await session.call("fine", {})
    await session.close()
    process = psutil.Process(pid)
    process.kill()
    await asyncio.to_thread(until, lambda: not process.is_running())
    await asyncio.sleep(0.05)  # the event loop notices a moment later
    session = await opened(sessions)
    assert await session.call("fine", {}) != pid
    await session.close()


async def test_no_child_process_survives_its_environment(sessions: EnvironmentSessions, tmp_path: Path) -> None:
    note = tmp_path / "note"
    session = await opened(sessions, note)
    with pytest.raises(EnvironmentTimeout):
        await session.call("breed", {})
    await session.close()
    for pid in await noted_pids(note, 2):
        await asyncio.to_thread(until, lambda pid=pid: is_gone(pid))  # type: ignore[misc]


async def test_a_cancelled_episode_ends_its_process_at_once(tmp_path: Path) -> None:
    note = tmp_path / "note"
    sessions = environment_sessions({"": source()}, isolation="process", spare=0, call_timeout_s=600.0)
    session = await opened(sessions, note)
    hanging = asyncio.create_task(session.call("hang", {}))
    (pid,) = await noted_pids(note)
    hanging.cancel()
    await asyncio.wait({hanging})
    await session.close()
    await asyncio.to_thread(until, lambda: is_gone(pid))
    await sessions.close()


async def test_cancelling_an_episode_while_its_process_starts_leaves_no_process() -> None:
    before = inventory()
    sessions = environment_sessions({"": source()}, isolation="process", spare=0)
    for turns in range(4):
        opening = asyncio.create_task(sessions.open(TASK))
        for _ in range(turns * 5):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
    session = await sessions.open(TASK)
    assert isinstance(await session.call("fine", {}), int)
    await session.close()
    await sessions.close()
    assert all(now <= then for now, then in zip(inventory(), before, strict=True))


async def test_close_ends_running_episodes(tmp_path: Path) -> None:
    before = inventory()
    note = tmp_path / "note"
    sessions = environment_sessions({"": source()}, isolation="process", spare=0)
    session = await opened(sessions, note)
    hanging = asyncio.create_task(session.call("hang", {}))
    await noted_pids(note)
    await sessions.close()
    with pytest.raises(EnvironmentDied, match=naming("hang", "SIGKILL")):
        await hanging
    await session.close()
    assert all(now <= then for now, then in zip(inventory(), before, strict=True))


# ----------------------------------------------------------------------------------------------- isolation and limits


async def test_methods_run_on_the_main_thread_of_another_process(sessions: EnvironmentSessions) -> None:
    session = await opened(sessions)
    assert await session.call("thread", {}) is True
    assert await session.call("fine", {}) != os.getpid()
    await session.close()


async def test_a_forked_copy_of_the_environment_sends_no_reply(sessions: EnvironmentSessions) -> None:
    session = await opened(sessions)
    assert [await session.call("fork", {}) for _ in range(3)] == ["original"] * 3
    await session.close()


async def test_excessive_output_is_truncated(sessions: EnvironmentSessions, capsys: Any) -> None:
    session = await opened(sessions)
    assert await session.call("flood", {}) == "done"
    assert isinstance(await session.call("fine", {}), int)
    await session.close()
    printed = ""
    while str(MAX_OUTPUT) not in printed:  # the note that the rest is dropped
        await asyncio.to_thread(time.sleep, 0.01)
        printed += capsys.readouterr().err
    assert "environment" in printed
    assert len(printed) < 4 * MAX_OUTPUT  # the limit is per call; the whole output would be 1 MiB


async def test_memory_mb_limits_the_memory_of_the_process() -> None:
    sessions = environment_sessions({"": source()}, isolation="process", spare=0, memory_mb=1024)
    session = await opened_single(sessions)
    with pytest.raises(ToolError, match=naming("devour", "MemoryError")):
        await session.call("devour", {})
    assert isinstance(await session.call("fine", {}), int)
    await session.close()
    await sessions.close()


async def test_an_oversized_result_is_a_tool_error() -> None:
    sessions = environment_sessions({"": source("Talking")}, isolation="process", spare=0)
    session = await sessions.open(TASK)
    await session.reset({})
    with pytest.raises(ToolError, match=naming("give_too_much", "40000005", "33554432")):
        await session.call("give_too_much", {})
    await session.close()
    await sessions.close()


async def test_the_traceback_of_the_environment_process_is_kept() -> None:
    sessions = environment_sessions({"": source("Unfit")}, isolation="process", spare=0)
    session = await sessions.open(TASK)
    with pytest.raises(EnvironmentFailed) as caught:
        await session.reset({"how": "reset raises"})
    assert f'{FILE}", line ' in str(caught.value.__cause__)
    await session.close()
    await sessions.close()


# -------------------------------------------------------------------------------------------------- loading and copying


async def test_a_local_class_is_sent_to_the_process_by_value() -> None:
    greeting = "hello"

    class Local:
        def reset(self) -> str:
            return f"{greeting} from {os.getpid()}"

        def shout(self, text: str) -> str:
            """Say it aloud."""
            return text.upper()

    sessions = environment_sessions({"": EnvironmentSource("environment", factory=Local)}, isolation="process", spare=0)
    session = await sessions.open(TASK)
    observation = await session.reset({})
    assert observation is not None
    assert observation.startswith("hello from ")
    assert observation != f"hello from {os.getpid()}"
    assert await session.call("shout", {"text": "a"}) == "A"
    await session.close()
    await sessions.close()


async def test_a_column_that_cannot_be_copied_fails_the_episode_and_names_the_workaround(
    sessions: EnvironmentSessions,
) -> None:
    session = await sessions.open(MAZE)
    with pytest.raises(EnvironmentFailed, match=naming("maze", "environment.isolation", "thread", "lock")):
        await session.reset({"lock": threading.Lock()})
    await session.close()


async def test_a_class_that_fails_to_import_in_the_process_is_bad_input(tmp_path: Path) -> None:
    before = inventory()
    (tmp_path / "picky.py").write_text("raise OSError('not here')\n")
    sessions = environment_sessions(
        {"": EnvironmentSource("rollout.environment", f"{tmp_path}/picky.py:Picky")}, isolation="process", spare=0
    )
    for _ in range(2):
        with pytest.raises(BadInput, match=r"^rollout\.environment: .*picky\.py.*OSError.*not here"):
            await sessions.open(TASK)
    await sessions.close()
    assert all(now <= then for now, then in zip(inventory(), before, strict=True))


async def opened_single(sessions: EnvironmentSessions) -> EnvironmentSession:
    session = await sessions.open(TASK)
    await session.reset({})
    return session
