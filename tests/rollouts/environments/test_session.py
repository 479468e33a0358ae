"""What an episode may expect of an environment, in this process as in one of its own."""

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

from outpace.errors import BadInput
from outpace.rollouts.environments.session import (
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentLimits,
    EnvironmentSession,
    EnvironmentSessions,
    EnvironmentSource,
    EnvironmentTimeout,
    reset_columns,
)
from outpace.rollouts.tools.functions import ToolError, result_text
from outpace.rollouts.tools.toolbox import Toolbox, ToolLimits, ToolSet
from outpace.types import Task, ToolCall
from support import naming

FILE = Path(__file__).parent / "unruly.py"

MakeStages = Callable[..., EnvironmentSessions]

pytestmark = pytest.mark.asyncio(loop_scope="module")


def task(**columns: Any) -> Task:
    return Task("t1", "Find it.", columns)


def inventory() -> tuple[int, int, int]:
    """Children, tasks and descriptors of this process."""
    me = psutil.Process()
    return len(me.children(recursive=True)), len(asyncio.all_tasks()), me.num_fds()


@pytest_asyncio.fixture(params=["thread", "process"], scope="module", loop_scope="module")
async def make_stages(request: Any) -> AsyncIterator[MakeStages]:
    """Stages are kept for all tests of the module, as a worker keeps them for all its episodes."""
    made: dict[str, EnvironmentSessions] = {}
    before = inventory()

    def make(environment: str, **settings: Any) -> EnvironmentSessions:
        key = f"{environment} {settings}"
        if key not in made:
            origin = EnvironmentSource("rollout.environment", f"{FILE}:{environment}")
            made[key] = EnvironmentSessions({"": origin}, isolation=request.param, spare=0, **settings)
        return made[key]

    yield make
    await asyncio.gather(*(stages.close() for stages in made.values()))
    assert inventory() == before


async def test_an_episode_from_reset_to_reward(make_stages: MakeStages) -> None:
    stage = await make_stages("Guessing").open(task(secret=7))
    assert list(stage.tools) == ["guess", "state"]
    assert stage.tools["guess"]["function"]["parameters"]["required"] == ["number"]
    assert await stage.reset(reset_columns(task(secret=7, colour="red"))) == " It is below ten, says 'Find it.'."
    assert await stage.call("guess", {"number": 3}) == "wrong"
    assert await stage.reward() == 0.0
    assert await stage.call("guess", {"number": "7"}) == "right"
    assert await stage.reward() == 1.0
    await stage.close()
    await stage.close()


async def test_asynchronous_methods_share_one_loop_that_runs_on_between_calls(make_stages: MakeStages) -> None:
    stages = make_stages("Waiting")
    for _ in range(2):
        stage = await stages.open(task())
        assert await stage.reset(reset_columns(task(b=1, a=2))) is None
        assert await stage.call("look", {}) == ["a", "b", "prompt"]
        assert await stage.call("listen", {}) is True
        while await stage.call("pulse", {}) < 100:  # a plain method: nobody awaits anything in between
            await asyncio.to_thread(time.sleep, 0.002)
        with pytest.raises(ToolError, match=naming("exit", "SystemExit", "3")):
            await stage.call("exit", {})
        assert await stage.call("look", {}) == ["a", "b", "prompt"]
        assert await stage.reward() is None
        await stage.close()
    await stop_hearts()


async def test_a_reward_may_be_asynchronous_and_there_may_be_no_tools(make_stages: MakeStages) -> None:
    stage = await make_stages("AsyncJudge").open(task())
    assert await stage.reset({"note": "hello"}) == "hello!"
    assert (dict(stage.tools), await stage.reward()) == ({}, 0.5)
    await stage.close()


async def test_columns_keep_their_types_and_belong_to_one_episode(make_stages: MakeStages) -> None:
    stages, given = make_stages("Columns"), task(board=[1, 2], pair=(1, 2), nothing=None, more=3)
    for _ in range(2):
        stage = await stages.open(given)
        assert await stage.reset(reset_columns(given)) == "[1, 2] tuple None ['more', 'prompt']"
        await stage.close()
    assert given.columns["board"] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, ("guess", "number")),
        ({"number": 1, "colour": "red"}, ("guess", "colour")),
        ({"number": "seven"}, ("guess", "number", "Input should be a valid integer")),
        ({"number": -1}, ("guess", "ValueError", "numbers are not negative")),
    ],
)
async def test_a_call_that_goes_wrong_is_for_the_model_to_hear_and_the_episode_goes_on(
    make_stages: MakeStages, arguments: dict[str, Any], said: tuple[str, ...]
) -> None:
    stage = await make_stages("Guessing").open(task())
    await stage.reset({"secret": 7})
    with pytest.raises(ToolError, match=naming(*said)) as caught:
        await stage.call("guess", arguments)
    assert (caught.value.__cause__ is None) == ("ValueError" not in said)  # a wrong call never reaches the method
    assert await stage.call("guess", {"number": 7}) == "right"
    with pytest.raises(ToolError, match=naming("'get_reward'", "guess, state")):
        await stage.call("get_reward", {})
    await stage.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raise_oddly", ("SaysNothing",)),
        ("raise_as_a_tool", ("ToolError", "of mine")),
        ("be_cancelled", ("CancelledError", "of mine")),
        ("interrupt", ("KeyboardInterrupt",)),
    ],
)
async def test_whatever_a_tool_raises_is_put_into_one_line(
    make_stages: MakeStages, name: str, said: tuple[str, ...]
) -> None:
    stage = await make_stages("Faulty").open(task())
    await stage.reset({})
    with pytest.raises(ToolError, match=naming(name, *said)) as caught:
        await stage.call(name, {})
    assert "\n" not in str(caught.value)
    assert isinstance(await stage.call("fine", {}), int)
    await stage.close()


@pytest.mark.parametrize(
    ("what", "heard"),
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
async def test_the_model_hears_the_same_of_a_result(make_stages: MakeStages, what: str, heard: str) -> None:
    stage = await make_stages("Talking").open(task())
    await stage.reset({})
    assert result_text(await stage.call("give", {"what": what})) == heard
    await stage.close()


@pytest.mark.parametrize("what", ["text", "circle", "deep"])
async def test_results_that_no_wire_takes_are_still_results(make_stages: MakeStages, what: str) -> None:
    stage = await make_stages("Talking").open(task())
    await stage.reset({})
    assert result_text(await stage.call("give", {"what": what}))
    assert await stage.call("swallow", {"anything": 1}) == "int"
    await stage.close()


async def test_odd_arguments_of_a_model_arrive_or_are_refused(make_stages: MakeStages) -> None:
    stage = await make_stages("Talking").open(task())
    await stage.reset({})
    assert await stage.call("swallow", {"anything": 2**70}) == "int"
    deep: list[Any] = []
    for _ in range(800):
        deep = [deep]
    try:
        assert await stage.call("swallow", {"anything": deep}) == "list"
    except ToolError as error:
        assert "swallow" in str(error)  # noqa: PT017  # either is right, by the depth of the stack
    with pytest.raises(ToolError):
        await stage.call("swallow", {"anything": {"half a pair": "\ud800"}})
    assert await stage.call("swallow", {"anything": [1]}) == "list"
    await stage.close()


@pytest.mark.parametrize(
    ("how", "said"),
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
async def test_what_fails_outside_of_tools_fails_the_episode(
    make_stages: MakeStages, how: str, said: tuple[str, ...]
) -> None:
    stages = make_stages("Unfit")
    stage = await stages.open(task())
    with pytest.raises(EnvironmentFailed, match=naming(*said)):
        await reset_and_judge(stage, how)
    await stage.close()
    await (await stages.open(task())).close()


async def test_an_environment_that_cannot_be_made_fails_the_episode(make_stages: MakeStages) -> None:
    stages = make_stages("NeverMade")
    for _ in range(2):
        with pytest.raises(EnvironmentFailed, match=naming("OSError", "no display")):
            await stages.open(task())


async def test_what_is_no_environment_is_bad_input_wherever_it_is_found(make_stages: MakeStages) -> None:
    with pytest.raises(BadInput, match=naming("rollout.environment: ", "SaysNothing", "reset")):
        await make_stages("SaysNothing").open(task())


async def test_without_reuse_every_episode_has_an_instance_of_its_own(make_stages: MakeStages) -> None:
    stages = make_stages("Guessing")
    seen = [await one_episode(stages) for _ in range(3)]
    assert [state["guesses"] for state in seen] == [[1]] * 3
    assert len({state["pid"] for state in seen}) == 1


async def test_with_reuse_an_instance_is_reset_again(make_stages: MakeStages) -> None:
    stages = make_stages("Guessing", reuse=True, column="first")
    assert [(await one_episode(stages))["resets"] for _ in range(3)] == [1, 2, 3]


async def test_instances_are_shared_by_no_two_episodes_at_once(make_stages: MakeStages) -> None:
    stages = make_stages("Guessing", reuse=True, column="second")
    first, second = await stages.open(task()), await stages.open(task())
    for stage, secret in ((first, 1), (second, 2)):
        await stage.reset({"secret": secret})
    assert [await stage.call("guess", {"number": 1}) for stage in (first, second)] == ["right", "wrong"]
    for stage in (first, second):
        await stage.close()
    again = [await stages.open(task()) for _ in range(3)]
    resets = []
    for stage in again:
        await stage.reset({"secret": 1})
        resets.append((await stage.call("state", {}))["resets"])
        await stage.close()
    assert sorted(resets) == [1, 2, 2]


@pytest.mark.parametrize("reuse", [False, True])
async def test_an_instance_whose_call_was_lost_is_not_used_again(make_stages: MakeStages, reuse: bool) -> None:
    stages = make_stages("Faulty", reuse=reuse, limits=EnvironmentLimits(call_timeout_s=0.2))
    stage = await stages.open(task())
    await stage.reset({})
    with pytest.raises(EnvironmentTimeout, match=naming("hang_on_the_loop", "tools.timeout_s", "0.2 s")):
        await stage.call("hang_on_the_loop", {})
    await stage.close()
    stage = await stages.open(task())
    await stage.reset({})
    await stage.close()


class Busy:
    """Counts who comes while a method still runs."""

    met = 0

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
        Busy.met += self._busy

    def get_reward(self) -> float:
        Busy.met += self._busy
        return 1.0


async def test_no_method_begins_while_one_that_was_given_up_still_runs() -> None:
    stages = EnvironmentSessions(
        {"": EnvironmentSource("environment", factory=Busy)}, limits=EnvironmentLimits(call_timeout_s=0.05)
    )
    stage = await stages.open(task())
    await stage.reset({})
    box = Toolbox([ToolSet("environment", stage, ordered=True)], ToolLimits())
    with pytest.raises(EnvironmentTimeout, match=naming("work", "tools.timeout_s")):
        await box.run([ToolCall(name, name, "{}") for name in ("work", "look")], 2, lambda: math.inf)
    for method in (stage.call("look", {}), stage.reward()):
        with pytest.raises(EnvironmentDied):
            await method
    assert Busy.met == 0
    assert isinstance(stage.instance, Busy)
    stage.instance.released.set()
    await stage.close()
    await stages.close()


async def test_a_call_that_runs_out_of_time_after_it_was_given_up_complains_to_nobody() -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    stages = EnvironmentSessions(
        {"": EnvironmentSource("environment", factory=Busy)}, limits=EnvironmentLimits(call_timeout_s=0.05)
    )
    stage = await stages.open(task())
    try:
        working = asyncio.create_task(stage.call("work", {}))
        await asyncio.sleep(0)
        working.cancel()
        with pytest.raises(EnvironmentDied):  # which waits for its turn
            await stage.reward()
        assert isinstance(stage.instance, Busy)
        stage.instance.released.set()
        await stage.close()
        await stages.close()
        del working  # which knows it: a task that nobody has asked how it ended says so when it is freed
        gc.collect()
    finally:
        loop.set_exception_handler(None)
    assert complaints == []


async def test_making_and_resetting_have_limits_of_their_own(make_stages: MakeStages) -> None:
    stage = await make_stages("Faulty", limits=EnvironmentLimits(timeout_s=0.5)).open(task())
    with pytest.raises(EnvironmentTimeout, match=naming("reset", "environment.timeout_s", "0.5 s")):
        await stage.reset({"fault": "hang"})
    await stage.close()


async def test_a_call_that_is_given_up_ends_before_the_next_one_begins(make_stages: MakeStages) -> None:
    stage = await make_stages("Waiting").open(task())
    await stage.reset({})
    listening = asyncio.create_task(stage.call("listen", {}))
    await asyncio.sleep(0)
    listening.cancel()
    await asyncio.wait({listening})
    assert await stage.call("pulse", {}) >= 20
    await stage.close()
    await stop_hearts()


async def test_a_closed_house_opens_no_stage(make_stages: MakeStages) -> None:
    stages = make_stages("Guessing", column="unused")
    await stages.close()
    with pytest.raises(EnvironmentDied, match="closed"):
        await stages.open(task())


async def stop_hearts() -> None:
    """In this process nobody but the environment knows of the tasks that it has started."""
    hearts = [one for one in asyncio.all_tasks() if "_beat" in repr(one.get_coro())]
    for heart in hearts:
        heart.cancel()
    await asyncio.gather(*hearts, return_exceptions=True)


async def reset_and_judge(stage: EnvironmentSession, how: str) -> None:
    await stage.reset({"how": how})
    await stage.reward()


async def one_episode(stages: EnvironmentSessions) -> dict[str, Any]:
    stage = await stages.open(task())
    await stage.reset({"secret": 1})
    await stage.call("guess", {"number": 1})
    state: dict[str, Any] = await stage.call("state", {})
    await stage.close()
    return state
