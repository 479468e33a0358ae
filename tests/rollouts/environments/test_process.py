"""Environments in processes of their own: real ones, which hang, crash and leave children behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from outpace.errors import BadInput
from outpace.rollouts.environments.session import (
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentLimits,
    EnvironmentSession,
    EnvironmentSessions,
    EnvironmentSource,
    EnvironmentTimeout,
)
from outpace.rollouts.tools.functions import ToolError
from outpace.runtime.user_code import MAX_OUTPUT
from outpace.types import Task
from support import naming

FILE = Path(__file__).parent / "unruly.py"
TASK = Task("t1", "Find it.")
MAZE = Task("t2", "Find it.", {"environment": "maze"})

pytestmark = pytest.mark.asyncio(loop_scope="module")


def origin(name: str = "Faulty") -> EnvironmentSource:
    return EnvironmentSource("environment.kinds.maze", f"{FILE}:{name}")


def inventory() -> tuple[int, int, int]:
    """Children, tasks and descriptors of this process."""
    me = psutil.Process()
    return len(me.children(recursive=True)), len(asyncio.all_tasks()), me.num_fds()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(holds: Callable[[], bool]) -> None:
    def wait() -> None:
        while not holds():
            time.sleep(0.002)

    await asyncio.to_thread(wait)


async def noted(note: Path, count: int = 1) -> list[int]:
    """The process ids in a note, once there are so many."""

    def written() -> list[str]:
        return note.read_text().splitlines() if note.exists() else []

    await until(lambda: len(written()) >= count)
    return [int(line) for line in written()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages() -> AsyncIterator[EnvironmentSessions]:
    """Kept for all tests of the module, as a worker keeps it for all its episodes."""
    before = inventory()
    kept = EnvironmentSessions(
        {"maze": origin()}, limits=EnvironmentLimits(timeout_s=20.0, call_timeout_s=1.0), isolation="process"
    )
    yield kept
    await kept.close()
    assert inventory() == before


async def opened(stages: EnvironmentSessions, note: Path | None = None) -> EnvironmentSession:
    stage = await stages.open(MAZE)
    await stage.reset({"note": str(note or "")})
    return stage


# -------------------------------------------------------------------------------------------------- ends of a process


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
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
async def test_a_fault_ends_its_own_episode_only_and_the_process_is_replaced(
    stages: EnvironmentSessions, fault: str, kind: type[Exception], said: tuple[str, ...]
) -> None:
    sibling, stage = await opened(stages), await opened(stages)
    beside, pid = await sibling.call("fine", {}), await stage.call("fine", {})
    with pytest.raises(kind, match=naming("maze", fault, *said)) as caught:
        await stage.call(fault, {})
    assert type(caught.value) is kind
    with pytest.raises(EnvironmentDied):
        await stage.call("fine", {})
    await stage.close()
    assert await sibling.call("fine", {}) == beside
    await sibling.close()
    following = await opened(stages)
    assert await following.call("fine", {}) != pid
    await following.close()
    await until(lambda: is_gone(pid))


@pytest.mark.parametrize(("fault", "said"), [("leave", "code 3"), ("kill", "SIGKILL")])
async def test_a_fault_in_reset_is_no_different(stages: EnvironmentSessions, fault: str, said: str) -> None:
    stage = await stages.open(MAZE)
    with pytest.raises(EnvironmentDied, match=naming("maze", "reset", said)):
        await stage.reset({"fault": fault})
    with pytest.raises(EnvironmentDied):
        await stage.reset({})
    await stage.close()


async def test_an_idle_process_that_was_killed_is_replaced(stages: EnvironmentSessions) -> None:
    stage = await opened(stages)
    pid = await stage.call("fine", {})
    await stage.close()
    process = psutil.Process(pid)
    process.kill()
    await until(lambda: not process.is_running())
    await asyncio.sleep(0.05)  # the loop hears of it a moment later
    stage = await opened(stages)
    assert await stage.call("fine", {}) != pid
    await stage.close()


async def test_no_descendant_survives_its_environment(stages: EnvironmentSessions, tmp_path: Path) -> None:
    note = tmp_path / "note"
    stage = await opened(stages, note)
    with pytest.raises(EnvironmentTimeout):
        await stage.call("breed", {})
    await stage.close()
    for pid in await noted(note, 2):
        await until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]


async def test_a_cancelled_episode_ends_its_process_at_once(tmp_path: Path) -> None:
    note = tmp_path / "note"
    stages = EnvironmentSessions(
        {"": origin()}, isolation="process", spare=0, limits=EnvironmentLimits(call_timeout_s=600.0)
    )
    stage = await opened(stages, note)
    hanging = asyncio.create_task(stage.call("hang", {}))
    (pid,) = await noted(note)
    hanging.cancel()
    await asyncio.wait({hanging})
    await stage.close()
    await until(lambda: is_gone(pid))
    await stages.close()


async def test_an_episode_that_is_cancelled_while_its_process_starts_leaves_none() -> None:
    before = inventory()
    stages = EnvironmentSessions({"": origin()}, isolation="process", spare=0)
    for turns in range(4):
        opening = asyncio.create_task(stages.open(TASK))
        for _ in range(turns * 5):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
    stage = await stages.open(TASK)
    assert isinstance(await stage.call("fine", {}), int)
    await stage.close()
    await stages.close()
    assert inventory() == before


async def test_closing_ends_episodes_under_way(tmp_path: Path) -> None:
    before = inventory()
    note = tmp_path / "note"
    stages = EnvironmentSessions({"": origin()}, isolation="process", spare=0)
    stage = await opened(stages, note)
    hanging = asyncio.create_task(stage.call("hang", {}))
    await noted(note)
    await stages.close()
    with pytest.raises(EnvironmentDied, match=naming("hang", "SIGKILL")):
        await hanging
    await stage.close()
    assert inventory() == before


# ----------------------------------------------------------------------------------------- what it may do and survive


async def test_methods_run_on_the_main_thread_of_another_process(stages: EnvironmentSessions) -> None:
    stage = await opened(stages)
    assert await stage.call("thread", {}) is True
    assert await stage.call("fine", {}) != os.getpid()
    await stage.close()


async def test_a_copy_that_the_environment_forked_does_not_answer(stages: EnvironmentSessions) -> None:
    stage = await opened(stages)
    assert [await stage.call("fork", {}) for _ in range(3)] == ["original"] * 3
    await stage.close()


async def test_a_flood_of_output_is_cut_off(stages: EnvironmentSessions, capsys: Any) -> None:
    stage = await opened(stages)
    assert await stage.call("flood", {}) == "done"
    assert isinstance(await stage.call("fine", {}), int)
    await stage.close()
    printed = ""
    while str(MAX_OUTPUT) not in printed:  # the note that the rest is dropped
        await asyncio.to_thread(time.sleep, 0.01)
        printed += capsys.readouterr().err
    assert "environment" in printed
    assert len(printed) < 4 * MAX_OUTPUT  # each call may print so much; all of it would be 1 MiB


async def test_memory_has_a_limit_if_one_is_set() -> None:
    stages = EnvironmentSessions({"": origin()}, isolation="process", spare=0, memory_mb=1024)
    stage = await opened_only(stages)
    with pytest.raises(ToolError, match=naming("devour", "MemoryError")):
        await stage.call("devour", {})
    assert isinstance(await stage.call("fine", {}), int)
    await stage.close()
    await stages.close()


async def test_a_result_beyond_all_measure_is_an_error_to_hear() -> None:
    stages = EnvironmentSessions({"": origin("Talking")}, isolation="process", spare=0)
    stage = await stages.open(TASK)
    await stage.reset({})
    with pytest.raises(ToolError, match=naming("give_too_much", "40000005", "33554432")):
        await stage.call("give_too_much", {})
    await stage.close()
    await stages.close()


async def test_the_traceback_of_the_other_process_is_kept_for_people() -> None:
    stages = EnvironmentSessions({"": origin("Unfit")}, isolation="process", spare=0)
    stage = await stages.open(TASK)
    with pytest.raises(EnvironmentFailed) as caught:
        await stage.reset({"how": "reset raises"})
    assert f'{FILE}", line ' in str(caught.value.__cause__)
    await stage.close()
    await stages.close()


# --------------------------------------------------------------------------------------------------- ways of travelling


async def test_a_class_of_a_python_caller_goes_by_value() -> None:
    greeting = "hello"

    class Local:
        def reset(self) -> str:
            return f"{greeting} from {os.getpid()}"

        def shout(self, text: str) -> str:
            """Say it aloud."""
            return text.upper()

    stages = EnvironmentSessions({"": EnvironmentSource("environment", factory=Local)}, isolation="process", spare=0)
    stage = await stages.open(TASK)
    said = await stage.reset({})
    assert said is not None
    assert said.startswith("hello from ")
    assert said != f"hello from {os.getpid()}"
    assert await stage.call("shout", {"text": "a"}) == "A"
    await stage.close()
    await stages.close()


async def test_a_column_that_cannot_be_copied_fails_the_episode_with_the_way_out(stages: EnvironmentSessions) -> None:
    stage = await stages.open(MAZE)
    with pytest.raises(EnvironmentFailed, match=naming("maze", "environment.isolation", "thread", "lock")):
        await stage.reset({"lock": threading.Lock()})
    await stage.close()


async def test_a_class_that_cannot_be_imported_there_is_bad_input(tmp_path: Path) -> None:
    before = inventory()
    (tmp_path / "picky.py").write_text("raise OSError('not here')\n")
    stages = EnvironmentSessions(
        {"": EnvironmentSource("rollout.environment", f"{tmp_path}/picky.py:Picky")}, isolation="process", spare=0
    )
    for _ in range(2):
        with pytest.raises(BadInput, match=r"^rollout\.environment: .*picky\.py.*OSError.*not here"):
            await stages.open(TASK)
    await stages.close()
    assert inventory() == before


async def opened_only(stages: EnvironmentSessions) -> EnvironmentSession:
    stage = await stages.open(TASK)
    await stage.reset({})
    return stage
