"""Episodes: any return value or exception of a rollout becomes plain data."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import outpace
from outpace.errors import BadInput, ComponentFailed, ContextFull, RequestFailed
from outpace.monitoring.metric_table import collecting
from outpace.protocols import ModelClient
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.episode import run_episode, single_turn
from outpace.types import OBSERVED, Episode, Task
from support import naming

TASK = Task("t1", "hi")
MakeClient = Callable[..., PolicyClient]


@pytest.fixture
def client(make_engine: Any, make_client: MakeClient) -> PolicyClient:
    return make_client(make_engine(["hello<|end|>", "again<|end|>"]))


def returning(value: Any, sample: bool = True) -> Any:
    async def rollout(task: Task, client: ModelClient) -> Any:
        if sample:
            await client.sample(task.prompt)
        return value

    return rollout


def raising(error: BaseException) -> Any:
    async def rollout(task: Task, client: ModelClient) -> None:
        await client.sample(task.prompt)
        raise error

    return rollout


async def run(rollout: Any, client: PolicyClient, timeout_s: float = 60.0) -> Episode:
    return await run_episode(rollout, TASK, client, timeout_s)


async def test_the_default_rollout_samples_one_answer(client: PolicyClient) -> None:
    episode = await run(single_turn, client)
    assert (episode.completion, episode.stop, episode.error) == ("hello", "stop", None)
    assert episode.requests == ["7.0.0"]
    assert (episode.rewards, episode.reward) == ({}, 0.0)
    (trajectory,) = episode.trajectories
    assert trajectory.tokens.tolist() == client.trajectory().tokens.tolist()


@pytest.mark.parametrize("reward", [2, 0.5, True, np.float32(0.25)])
async def test_a_returned_number_is_the_reward_of_the_episode(client: PolicyClient, reward: Any) -> None:
    assert (await run(returning(reward), client)).rewards == {"rollout": float(reward)}


async def test_a_returned_trajectory_is_used_unchanged(client: PolicyClient) -> None:
    async def rollout(task: Task, client: ModelClient) -> Any:
        await client.sample(task.prompt)
        first = client.trajectory()
        await client.sample("more")
        return first

    episode = await run(rollout, client)
    assert episode.trajectories[0].mask.sum() == len("hello") + 1
    assert (episode.completion, episode.requests) == ("again", ["7.0.0", "7.0.1"])


async def test_a_returned_episode_keeps_its_fields_and_gets_its_request_ids(client: PolicyClient) -> None:
    async def rollout(task: Task, client: ModelClient) -> Episode:
        await client.sample(task.prompt)
        return Episode([client.trajectory()], completion="mine", rewards={"own": 1.0}, stop="bored")

    episode = await run(rollout, client)
    assert (episode.completion, episode.rewards, episode.stop) == ("mine", {"own": 1.0}, "bored")
    assert episode.requests == ["7.0.0"]


@pytest.mark.parametrize("odd", ["text", [1.0], {"reward": 1}, object()])
async def test_an_unsupported_return_value_fails_the_episode(client: PolicyClient, odd: Any) -> None:
    episode = await run(returning(odd), client)
    assert re.search(naming(type(odd).__name__, "Episode", "Trajectory", "None"), episode.error or "")


@pytest.mark.parametrize(
    ("name", "value", "fails"),
    [
        ("reward/mean", 1.0, True),
        ("two words", 1.0, True),
        ("score", "high", True),
        ("score", 10**400, True),
        ("turns", 1, False),
        ("env/score", math.nan, False),
    ],
)
async def test_a_metric_with_an_invalid_name_or_value_fails_the_episode(
    client: PolicyClient, name: str, value: Any, fails: bool
) -> None:
    episode = await run(returning(Episode([], metrics={name: value})), client)
    assert bool(re.search(naming(name), episode.error or "")) == fails == (episode.error is not None)


async def test_a_bad_name_in_log_metric_fails_the_episode_and_not_the_run(client: PolicyClient) -> None:
    async def rollout(task: Task, client: PolicyClient) -> float:
        await client.sample(task.prompt)
        outpace.log_metric("solved/task 7", 1)
        return 1.0

    with collecting():
        episode = await run(rollout, client)
    assert re.search(naming("solved/task 7"), episode.error or "")


async def test_extra_columns_of_a_rollout_are_recorded_as_plain_values(
    make_engine: Any, make_client: MakeClient
) -> None:
    class Bad:
        def __str__(self) -> str:
            raise KeyError("no text")

    given: list[dict[Any, Any]] = [{1: (2, 3), "\ud800": 1.5}, {"x": Bad()}]
    good, bad = [
        await run(returning(Episode([], extra=extra)), make_client(make_engine(["hello<|end|>"]))) for extra in given
    ]
    assert good.extra == {"1": "(2, 3)", "?": 1.5}
    assert re.search(naming("extra", "no text"), bad.error or "")


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
async def test_a_reward_that_is_not_finite_fails_the_episode(
    make_engine: Any, make_client: MakeClient, reward: float
) -> None:
    ways = {"rollout": reward, "reward": Episode([], reward=reward), "own": Episode([], rewards={"own": reward})}
    for name, returned in ways.items():
        episode = await run(returning(returned), make_client(make_engine(["hello<|end|>"])))
        assert re.search(naming(name, str(reward)), episode.error or "")


async def test_a_malformed_trajectory_fails_the_episode(client: PolicyClient) -> None:
    async def rollout(task: Task, client: ModelClient) -> Any:
        await client.sample(task.prompt)
        return msgspec.structs.replace(client.trajectory(), versions=np.zeros(1, np.int32))

    episode = await run(rollout, client)
    length = len(client.trajectory().tokens)
    assert f"{length}, {length}, {length}, 1" in (episode.error or "")


@pytest.mark.parametrize("in_an_episode", [False, True])
async def test_tokens_older_than_min_version_fail_the_episode(
    make_engine: Any, make_client: MakeClient, in_an_episode: bool
) -> None:
    async def rollout(task: Task, client: ModelClient) -> Any:
        await client.sample(task.prompt)
        sampled = client.trajectory()
        old = msgspec.structs.replace(sampled, versions=np.where(sampled.mask, 1, OBSERVED).astype(np.int32))
        return Episode([sampled, old]) if in_an_episode else old

    episode = await run(rollout, make_client(make_engine(["hello<|end|>"]), min_version=2))
    assert re.search(naming("version 1", "2"), episode.error or "")


@pytest.mark.parametrize("returned", [None, 1.0, "trajectory", "episode"])
async def test_the_completion_of_a_message_prompt_is_a_message(client: PolicyClient, returned: Any) -> None:
    async def rollout(task: Task, client: ModelClient) -> Any:
        await client.sample(task.prompt)
        ways = {"trajectory": client.trajectory(), "episode": Episode([client.trajectory()])}
        return ways.get(returned, returned)

    chat = Task("t1", [{"role": "user", "content": "hi"}])
    episode = await run_episode(rollout, chat, client, 60.0)
    assert episode.completion == [{"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize("returned", [None, 1.0])
async def test_a_rollout_that_samples_nothing_fails_its_episode(client: PolicyClient, returned: Any) -> None:
    episode = await run(returning(returned, sample=False), client)
    assert episode.error
    assert (episode.stop, episode.requests, episode.traceback) == ("error", [], "")


@pytest.mark.parametrize("error", [ValueError("two\nlines"), RequestFailed("no room"), SystemExit(3), StopIteration()])
async def test_an_exception_fails_the_episode(client: PolicyClient, error: BaseException) -> None:
    episode = await run(raising(error), client)
    assert episode.error is not None
    assert "\n" not in episode.error
    assert episode.stop == "error"


async def test_a_rollout_that_raises_runs_again_and_only_its_last_attempt_is_trained_on(
    make_engine: Any, make_client: MakeClient
) -> None:
    client = make_client(make_engine(["first", "second", "third"]))
    calls = 0

    async def third_time_lucky(task: Task, client: ModelClient) -> None:
        nonlocal calls
        calls += 1
        await client.sample(task.prompt)
        client.reward(float(calls), role="policy")
        if calls < 3:
            raise ValueError("no")

    assert (await run_episode(third_time_lucky, TASK, client, 60.0, retries=1)).error == "ValueError: no"
    client, calls = make_client(make_engine(["first", "second", "third"])), 0
    episode = await run_episode(third_time_lucky, TASK, client, 60.0, retries=2)
    (kept,) = episode.trajectories
    assert client.decode(kept.tokens[kept.mask].tolist()) == "third"
    assert kept.reward == 3.0
    assert client.sampled + client.abandoned == len("firstsecondthird")


async def test_tokens_of_a_failed_episode_are_still_counted(client: PolicyClient) -> None:
    episode = await run(raising(ValueError("no")), client)
    assert sum(int(trajectory.mask.sum()) for trajectory in episode.trajectories) == len("hello") + 1
    assert episode.requests == ["7.0.0"]


async def test_an_episode_over_its_time_limit_fails_and_aborts_its_request(
    make_engine: Any, make_client: MakeClient
) -> None:
    engine = make_engine([None])
    episode = await run(single_turn, make_client(engine), timeout_s=0.01)
    assert re.search(naming("rollout.timeout_s", "0.01 s"), episode.error or "")
    assert engine.aborted == ["7.0.0"]


async def test_a_timeout_raised_by_the_rollout_is_not_reported_as_the_episode_time_limit(client: PolicyClient) -> None:
    episode = await run(raising(TimeoutError("the page did not load")), client)
    assert episode.error == "TimeoutError: the page did not load"


@pytest.mark.parametrize("error", [ComponentFailed("engine-0", "died"), BadInput("tasks: no template")])
async def test_component_failures_and_bad_input_propagate_out_of_the_episode(
    make_engine: Any, make_client: MakeClient, error: Exception
) -> None:
    with pytest.raises(type(error)) as caught:
        await run(single_turn, make_client(make_engine([error])))
    assert caught.value is error


async def test_a_component_failure_propagates_out_of_a_task_group(make_engine: Any, make_client: MakeClient) -> None:
    async def rollout(task: Task, client: ModelClient) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.sample(task.prompt))

    error = ComponentFailed("engine-0", "died")
    with pytest.raises(ComponentFailed) as caught:
        await run(rollout, make_client(make_engine([error])))
    assert caught.value is error


async def test_cancelling_an_episode_aborts_its_request_and_stays_a_cancellation(
    make_engine: Any, make_client: MakeClient
) -> None:
    engine = make_engine([None])
    work = asyncio.create_task(run(single_turn, make_client(engine)))
    await engine.started.wait()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert work.cancelled()
    assert engine.aborted == ["7.0.0"]


async def test_a_request_still_running_when_the_rollout_returns_is_aborted(
    make_engine: Any, make_client: MakeClient
) -> None:
    engine = make_engine([None])

    async def rollout(task: Task, client: ModelClient) -> float:
        pending = asyncio.create_task(client.sample(task.prompt))
        await engine.started.wait()
        pending.cancel()
        return 1.0

    assert (await run(rollout, make_client(engine))).error is None
    assert engine.aborted == ["7.0.0"]


async def test_a_prompt_longer_than_the_context_stops_with_reason_context_and_no_traceback(
    make_engine: Any, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine([ContextFull("the prompt has 9 tokens, the context 8")])
    episode = await run(single_turn, make_client(engine))
    assert (episode.stop, episode.error, episode.traceback) == ("context", "the prompt has 9 tokens, the context 8", "")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("text", "engine_stop", "stop"),
    [
        ("<|end|>", "stop", "empty"),
        ("  <|end|>", "stop", "empty"),
        ("", "length", "length"),
        ("yes", "length", "length"),
    ],
)
async def test_an_empty_or_truncated_answer_is_not_an_error_and_has_its_own_stop_reason(
    make_engine: Any, make_client: MakeClient, text: str, engine_stop: Any, stop: str
) -> None:
    engine = make_engine([text])
    engine.stop = engine_stop
    episode = await run(single_turn, make_client(engine))
    assert (episode.stop, episode.error) == (stop, None)


async def test_a_reward_for_a_role_without_requests_fails_the_episode(client: PolicyClient) -> None:
    async def misspelt(task: Task, client: Any) -> None:
        await client.chat([{"role": "user", "content": "one"}], role="writer")
        client.reward(1.0, role="wrtier")

    episode = await run(misspelt, client)
    assert re.search(naming("'wrtier'", "writer"), episode.error or "")


async def test_an_episode_of_several_conversations_trains_on_all_of_them(client: PolicyClient) -> None:
    async def two(task: Task, client: Any) -> None:
        await client.chat([{"role": "user", "content": "one"}])
        await client.chat([{"role": "user", "content": "two"}], role="judge")

    episode = await run(two, client)
    assert [trajectory.role for trajectory in episode.trajectories] == ["policy", "judge"]
    assert episode.metrics == {"breaks": 0.0}
