"""Environment sessions: the same behavior in this process and in a separate one."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from outpace.config.sections import ToolsConfig
from outpace.errors import BadInput
from outpace.monitoring.metric_table import collecting
from outpace.rollouts.environments.session import (
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentSession,
    EnvironmentSessions,
    EnvironmentSource,
    EnvironmentTimeout,
    reset_columns,
)
from outpace.rollouts.tools.functions import ToolError, result_text
from outpace.rollouts.tools.toolbox import Toolbox
from outpace.types import Task, ToolCall
from rollouts_support import environment_sessions
from support import naming

FILE = Path(__file__).parent / "unruly.py"

MakeSessions = Callable[..., EnvironmentSessions]

pytestmark = pytest.mark.asyncio(loop_scope="module")


def task(**columns: Any) -> Task:
    return Task("t1", "Find it.", columns)


def inventory() -> tuple[int, int, int]:
    """Children, tasks and descriptors of this process."""
    me = psutil.Process()
    return len(me.children(recursive=True)), len(asyncio.all_tasks()), me.num_fds()


@pytest_asyncio.fixture(params=["thread", "process"], scope="module", loop_scope="module")
async def make_sessions(request: Any) -> AsyncIterator[MakeSessions]:
    """Sessions are kept for all tests of the module, as a worker keeps them for all its episodes."""
    made: dict[str, EnvironmentSessions] = {}
    before = inventory()

    def make(environment: str, **settings: Any) -> EnvironmentSessions:
        key = f"{environment} {settings}"
        if key not in made:
            source = EnvironmentSource("rollout.environment", f"{FILE}:{environment}")
            made[key] = environment_sessions({"": source}, isolation=request.param, spare=0, **settings)
        return made[key]

    yield make
    await asyncio.gather(*(sessions.close() for sessions in made.values()))
    assert all(now <= then for now, then in zip(inventory(), before, strict=True))


async def test_a_session_runs_an_episode_from_reset_to_reward(make_sessions: MakeSessions) -> None:
    session = await make_sessions("Guessing").open(task(secret=7))
    assert list(session.tools) == ["guess", "state"]
    assert session.tools["guess"]["function"]["parameters"]["required"] == ["number"]
    assert await session.reset(reset_columns(task(secret=7, colour="red"))) == " It is below ten, says 'Find it.'."
    with collecting() as log:
        assert await session.call("guess", {"number": 3}) == "wrong"
        assert await session.reward() == 0.0
        assert await session.call("guess", {"number": "7"}) == "right"
        assert await session.reward() == 1.0
    assert log.take() == [("guess/number", 3, 1), ("guess/number", 7, 1)], "reported with outpace.log_metric"
    await session.close()
    await session.close()


async def test_async_methods_share_one_loop_that_keeps_running_between_calls(make_sessions: MakeSessions) -> None:
    sessions = make_sessions("Waiting")
    for _ in range(2):
        session = await sessions.open(task())
        assert await session.reset(reset_columns(task(b=1, a=2))) is None
        assert await session.call("look", {}) == ["a", "b", "prompt"]
        assert await session.call("listen", {}) is True
        while await session.call("pulse", {}) < 100:  # a sync method: nothing is awaited in between
            await asyncio.to_thread(time.sleep, 0.002)
        with pytest.raises(ToolError, match=naming("exit", "SystemExit", "3")):
            await session.call("exit", {})
        assert await session.call("look", {}) == ["a", "b", "prompt"]
        assert await session.reward() is None
        await session.close()
    await stop_heartbeats()


async def test_get_reward_can_be_async_and_tools_are_optional(make_sessions: MakeSessions) -> None:
    session = await make_sessions("AsyncJudge").open(task())
    assert await session.reset({"note": "hello"}) == "hello!"
    for note in range(2):
        with collecting() as log:
            assert (dict(session.tools), await session.reward()) == ({}, 0.5)
        assert log.take() == [("judge/notes", 1, 1)], note
    await session.close()


async def test_columns_keep_their_types_and_are_copied_for_each_episode(make_sessions: MakeSessions) -> None:
    sessions, given = make_sessions("Columns"), task(board=[1, 2], pair=(1, 2), nothing=None, more=3)
    for _ in range(2):
        session = await sessions.open(given)
        assert await session.reset(reset_columns(given)) == "[1, 2] tuple None ['more', 'prompt']"
        await session.close()
    assert given.columns["board"] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ("guess", "number")),
        ({"number": 1, "colour": "red"}, ("guess", "colour")),
        ({"number": "seven"}, ("guess", "number", "Input should be a valid integer")),
        ({"number": -1}, ("guess", "ValueError", "numbers are not negative")),
    ],
)
async def test_a_failed_call_raises_a_tool_error_and_the_episode_continues(
    make_sessions: MakeSessions, arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    session = await make_sessions("Guessing").open(task())
    await session.reset({"secret": 7})
    with pytest.raises(ToolError, match=naming(*words)) as caught:
        await session.call("guess", arguments)
    assert (caught.value.__cause__ is None) == ("ValueError" not in words)  # an invalid call never reaches the method
    assert await session.call("guess", {"number": 7}) == "right"
    with pytest.raises(ToolError, match=naming("'get_reward'", "guess, state")):
        await session.call("get_reward", {})
    await session.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raise_oddly", ("SaysNothing",)),
        ("raise_as_a_tool", ("ToolError", "of mine")),
        ("be_cancelled", ("CancelledError", "of mine")),
        ("interrupt", ("KeyboardInterrupt",)),
    ],
)
async def test_any_exception_of_a_tool_becomes_a_one_line_tool_error(
    make_sessions: MakeSessions, name: str, words: tuple[str, ...]
) -> None:
    session = await make_sessions("Faulty").open(task())
    await session.reset({})
    with pytest.raises(ToolError, match=naming(name, *words)) as caught:
        await session.call(name, {})
    assert "\n" not in str(caught.value)
    assert isinstance(await session.call("fine", {}), int)
    await session.close()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("json", '{"a": [1, 2.5, true, null]}'),
        ("none", ""),
        ("tuple", "[1, 2]"),
        ("object", '"/a/b"'),
        ("mixed", '{"where": "/a/b", "3": "{4}"}'),
        ("bytes", "[2 bytes of binary data]"),
        ("large", str(2**70)),
        ("long", "x" * 10_000_000),
    ],
)
async def test_result_text_is_the_same_in_a_thread_and_in_a_process(
    make_sessions: MakeSessions, what: str, text: str
) -> None:
    session = await make_sessions("Talking").open(task())
    await session.reset({})
    assert result_text(await session.call("give", {"what": what})) == text
    await session.close()


@pytest.mark.parametrize("what", ["text", "circle", "deep"])
async def test_results_that_cannot_be_serialized_still_become_text(make_sessions: MakeSessions, what: str) -> None:
    session = await make_sessions("Talking").open(task())
    await session.reset({})
    assert result_text(await session.call("give", {"what": what}))
    assert await session.call("swallow", {"anything": 1}) == "int"
    await session.close()


async def test_unusual_arguments_are_passed_on_or_refused(make_sessions: MakeSessions) -> None:
    session = await make_sessions("Talking").open(task())
    await session.reset({})
    assert await session.call("swallow", {"anything": 2**70}) == "int"
    deep: list[Any] = []
    for _ in range(800):
        deep = [deep]
    try:
        assert await session.call("swallow", {"anything": deep}) == "list"
    except ToolError as error:
        assert "swallow" in str(error)  # noqa: PT017  # either is right, depending on the stack depth
    with pytest.raises(ToolError):
        await session.call("swallow", {"anything": {"half a pair": "\ud800"}})
    assert await session.call("swallow", {"anything": [1]}) == "list"
    await session.close()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("reset raises", ("reset", "ValueError", "two lines")),
        ("reset exits", ("reset", "SystemExit", "3")),
        ("reset returns a dict", ("reset", "dict")),
        ("reward raises", ("get_reward", "KeyError", "'gone'")),
        ("text", ("get_reward", "'1.0'")),
        ("nan", ("get_reward", "nan")),
        ("none", ("get_reward", "None")),
        ("large", ("get_reward", "1000000")),
    ],
)
async def test_errors_outside_of_tool_calls_fail_the_episode(
    make_sessions: MakeSessions, how: str, words: tuple[str, ...]
) -> None:
    sessions = make_sessions("Unfit")
    session = await sessions.open(task())
    with pytest.raises(EnvironmentFailed, match=naming(*words)):
        await reset_and_grade(session, how)
    await session.close()
    await (await sessions.open(task())).close()


async def test_an_environment_that_cannot_be_created_fails_the_episode(make_sessions: MakeSessions) -> None:
    sessions = make_sessions("NeverMade")
    for _ in range(2):
        with pytest.raises(EnvironmentFailed, match=naming("OSError", "no display")):
            await sessions.open(task())


async def test_a_class_that_is_not_an_environment_is_bad_input(make_sessions: MakeSessions) -> None:
    with pytest.raises(BadInput, match=naming("rollout.environment: ", "SaysNothing", "reset")):
        await make_sessions("SaysNothing").open(task())


async def test_without_reuse_every_episode_has_its_own_instance(make_sessions: MakeSessions) -> None:
    sessions = make_sessions("Guessing")
    seen = [await one_episode(sessions) for _ in range(3)]
    assert [state["guesses"] for state in seen] == [[1]] * 3
    assert len({state["pid"] for state in seen}) == 1


async def test_with_reuse_an_instance_is_reset_again(make_sessions: MakeSessions) -> None:
    sessions = make_sessions("Guessing", reuse=True, column="first")
    assert [(await one_episode(sessions))["resets"] for _ in range(3)] == [1, 2, 3]


async def test_concurrent_episodes_never_share_an_instance(make_sessions: MakeSessions) -> None:
    sessions = make_sessions("Guessing", reuse=True, column="second")
    first, second = await sessions.open(task()), await sessions.open(task())
    for session, secret in ((first, 1), (second, 2)):
        await session.reset({"secret": secret})
    assert [await session.call("guess", {"number": 1}) for session in (first, second)] == ["right", "wrong"]
    for session in (first, second):
        await session.close()
    again = [await sessions.open(task()) for _ in range(3)]
    resets = []
    for session in again:
        await session.reset({"secret": 1})
        resets.append((await session.call("state", {}))["resets"])
        await session.close()
    assert sorted(resets) == [1, 2, 2]


@pytest.mark.parametrize("reuse", [False, True])
async def test_an_instance_with_a_timed_out_call_is_not_reused(make_sessions: MakeSessions, reuse: bool) -> None:
    sessions = make_sessions("Faulty", reuse=reuse, call_timeout_s=0.2)
    session = await sessions.open(task())
    await session.reset({})
    with pytest.raises(EnvironmentTimeout, match=naming("hang_on_the_loop", "tools.timeout_s", "0.2 s")):
        await session.call("hang_on_the_loop", {})
    await session.close()
    session = await sessions.open(task())
    await session.reset({})
    await session.close()


class Busy:
    """Counts the calls that start while another method still runs."""

    overlaps = 0

    def __init__(self) -> None:
        self._busy = False
        self.released = threading.Event()

    def reset(self) -> None: ...

    def work(self) -> None:
        """Take long."""
        self._busy = True
        self.released.wait()

    def look(self) -> None:
        """Look around."""
        Busy.overlaps += self._busy

    def get_reward(self) -> float:
        Busy.overlaps += self._busy
        return 1.0


async def test_no_method_starts_while_a_timed_out_method_still_runs() -> None:
    sessions = environment_sessions({"": EnvironmentSource("environment", factory=Busy)}, call_timeout_s=0.05)
    session = await sessions.open(task())
    await session.reset({})
    box = Toolbox([session], ToolsConfig())
    with pytest.raises(EnvironmentTimeout, match=naming("work", "tools.timeout_s")):
        await box.run([ToolCall(name, name, "{}") for name in ("work", "look")], 2, lambda: math.inf)
    for method in (session.call("look", {}), session.reward()):
        with pytest.raises(EnvironmentDied):
            await method
    assert Busy.overlaps == 0
    assert isinstance(session.instance, Busy)
    session.instance.released.set()
    await session.close()
    await sessions.close()


async def test_a_cancelled_call_that_times_out_later_reports_no_unhandled_exception() -> None:
    unhandled: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    sessions = environment_sessions({"": EnvironmentSource("environment", factory=Busy)}, call_timeout_s=0.05)
    session = await sessions.open(task())
    try:
        working = asyncio.create_task(session.call("work", {}))
        await asyncio.sleep(0)
        working.cancel()
        with pytest.raises(EnvironmentDied):  # it waits for the running call
            await session.reward()
        assert isinstance(session.instance, Busy)
        session.instance.released.set()
        await session.close()
        await sessions.close()
        del working  # a task whose exception was never retrieved reports it when freed
        gc.collect()
    finally:
        loop.set_exception_handler(None)
    assert unhandled == []


async def test_creation_and_reset_have_their_own_time_limit(make_sessions: MakeSessions) -> None:
    session = await make_sessions("Faulty", timeout_s=0.5).open(task())
    with pytest.raises(EnvironmentTimeout, match=naming("reset", "environment.timeout_s", "0.5 s")):
        await session.reset({"fault": "hang"})
    await session.close()


async def test_a_cancelled_call_ends_before_the_next_one_starts(make_sessions: MakeSessions) -> None:
    session = await make_sessions("Waiting").open(task())
    await session.reset({})
    listening = asyncio.create_task(session.call("listen", {}))
    await asyncio.sleep(0)
    listening.cancel()
    await asyncio.wait({listening})
    assert await session.call("pulse", {}) >= 20
    await session.close()
    await stop_heartbeats()


async def test_closed_sessions_refuse_to_open_another_one(make_sessions: MakeSessions) -> None:
    sessions = make_sessions("Guessing", column="unused")
    await sessions.close()
    with pytest.raises(EnvironmentDied, match="closed"):
        await sessions.open(task())


async def stop_heartbeats() -> None:
    """Cancel the background tasks that environments started in this process."""
    heartbeats = [one for one in asyncio.all_tasks() if "_beat" in repr(one.get_coro())]
    for heartbeat in heartbeats:
        heartbeat.cancel()
    await asyncio.gather(*heartbeats, return_exceptions=True)


async def reset_and_grade(session: EnvironmentSession, how: str) -> None:
    await session.reset({"how": how})
    await session.reward()


async def one_episode(sessions: EnvironmentSessions) -> dict[str, Any]:
    session = await sessions.open(task())
    await session.reset({"secret": 1})
    await session.call("guess", {"number": 1})
    state: dict[str, Any] = await session.call("state", {})
    await session.close()
    return state
