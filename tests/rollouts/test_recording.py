"""Rollout files written by a worker: rendered prompt, turns and their boundaries, rewards, outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from outpace.checkpoint.journal import JournalWriter, read_record
from outpace.config import Config
from outpace.engines.fleet import EngineFleet
from outpace.models.chat_format import TemplateChatFormat
from outpace.monitoring.rollout_files import (
    RecordedAttempt,
    RolloutWriter,
    read_group,
    read_step,
    recorded_steps,
    untrained_groups,
)
from outpace.protocols import ModelClient
from outpace.rollouts.episode import single_turn
from outpace.rollouts.gateway.server import Gateway
from outpace.rollouts.recording import RolloutRecorder
from outpace.rollouts.tool_loop import ToolLoop
from outpace.rollouts.tools.functions import load_tools
from outpace.rollouts.tools.toolbox import FunctionTools
from outpace.rollouts.worker import RewardFunctions, RolloutWorker
from outpace.types import Episode, GroupOrder, GroupReport, Task, Trajectory
from rollouts_support import group_filter

TASKS = [Task("t0", "hi", {"answer": "yes"})]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|end|>'


def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(_text(given) == wanted) for given, wanted in zip(completions, answer, strict=True)]


def polite(completions: list[Any], **_: Any) -> list[float]:
    return [0.25] * len(completions)


def _text(completion: Any) -> str:
    return str(completion if isinstance(completion, str) else completion[-1]["content"])


def yes_or_no(episode: int, turn: int) -> str:
    return ["yes<|end|>", "no<|end|>"][episode % 2]


def add(a: int, b: int) -> int:
    """Add numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def order(group: int = 5, **changes: Any) -> GroupOrder:
    return GroupOrder(group, **({"task": 0, "epoch": 1, "min_version": 2, "size": 2} | changes))


@pytest.fixture
def make_worker(
    tokenizer: Any, make_settings: Callable[..., Config], tmp_path: Path
) -> Iterator[Callable[..., RolloutWorker]]:
    journal = JournalWriter(tmp_path / "journal", "w0")

    def make(
        engine: Any, rollout: Any = single_turn, rewards: Any = (("correct", correct),), **changes: Any
    ) -> RolloutWorker:
        def decode(tokens: Any) -> str:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

        sections = {name: value for name, value in changes.items() if name == "filter"}
        return RolloutWorker(
            make_settings(max_tokens=64, system="Be brief.").model_copy(update=sections),
            EngineFleet({"engine-0": engine}),
            TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,)),
            TASKS,
            {},
            rollout,
            RewardFunctions(list(rewards), [1.0] * len(rewards), None),
            journal,
            gateway=changes.get("gateway"),
            recorder=RolloutRecorder(RolloutWriter(tmp_path, 10**6), tmp_path / "journal", decode),
        )

    yield make
    journal.close()


MakeWorker = Callable[..., RolloutWorker]


async def trained(worker: RolloutWorker, run: Path, ordered: GroupOrder | None = None) -> list[RecordedAttempt]:
    """Run a group, record it for step 7, and return its recorded attempts."""
    report = await worker.run(ordered or order())
    assert report.place is not None, report.reason
    await worker.record_rollouts(7, [report.place])
    return list(read_step(run, 7))


def untrained(run: Path, group: int = 5) -> list[RecordedAttempt]:
    return list(read_group(run, group, untrained_groups(run)[group]))


async def test_a_trained_group_is_recorded_with_its_prompt_answers_rewards_and_advantages(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    worker = make_worker(make_engine(yes_or_no), rewards=(("correct", correct), ("polite", polite)))
    first, second = await trained(worker, tmp_path)
    assert first.prompt == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"
    assert [(turn.source, turn.text) for turn in first.trajectories[0].turns[1:]] == [("assistant", "yes<|end|>")]
    assert (first.outcome, first.reason, first.step, first.stop) == ("trained", "", 7, "stop")
    assert [(each.group, each.attempt, each.task, each.task_id, each.epoch) for each in (first, second)] == [
        (5, 0, 0, "t0", 1),
        (5, 1, 0, "t0", 1),
    ]
    assert (first.rewards, first.reward) == ({"correct": 1.0, "polite": 0.25}, 1.25)
    assert (second.rewards, second.reward) == ({"correct": 0.0, "polite": 0.25}, 0.25)
    assert (first.advantage, second.advantage) == (0.5, -0.5)
    assert (first.oldest, first.newest, second.oldest, second.newest) == (3, 3, 4, 4)


async def test_recorded_arrays_equal_those_the_learner_reads(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    worker = make_worker(make_engine(yes_or_no))
    report = await worker.run(order())
    assert report.place is not None
    await worker.record_rollouts(7, [report.place])
    rows = read_record(tmp_path / "journal", report.place).rows
    recorded = [attempt.trajectories[0] for attempt in read_step(tmp_path, 7)]
    for row, kept in zip(rows, recorded, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions", "advantages"):
            expected = getattr(row, name) if name != "advantages" else np.where(row.mask, row.advantages, 0)
            np.testing.assert_array_equal(getattr(kept, name), expected, err_msg=name)
            assert getattr(kept, name).dtype == getattr(row, name).dtype


async def test_a_group_whose_rewards_are_all_equal_is_recorded_as_filtered(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    report = await make_worker(make_engine(["yes<|end|>"])).run(order())
    attempts = untrained(tmp_path)
    assert [(each.outcome, each.reason, each.reward) for each in attempts] == [("filtered", report.reason, 1.0)] * 2
    assert attempts[0].trajectories[0].text.endswith("yes<|end|>")
    assert attempts[0].advantage is None
    assert recorded_steps(tmp_path) == []


async def test_a_group_whose_reward_raises_is_recorded_with_its_answers_and_the_error(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    def broken(**_: Any) -> list[float]:
        raise RuntimeError("no reward today")

    await make_worker(make_engine(yes_or_no), rewards=(("broken", broken),)).run(order())
    attempts = untrained(tmp_path)
    assert [each.outcome for each in attempts] == ["failed", "failed"]
    assert all("no reward today" in each.reason for each in attempts)
    assert [each.trajectories[0].turns[-1].text for each in attempts] == ["yes<|end|>", "no<|end|>"]
    assert [each.reward for each in attempts] == [None, None]


async def test_a_group_that_is_not_trained_on_reports_one_example(make_engine: Any, make_worker: MakeWorker) -> None:
    report = await make_worker(make_engine(["yes<|end|>"])).run(order())
    assert [(view.task_id, view.prompt, view.completion) for view in report.views] == [("t0", "hi", "yes")]
    assert (await make_worker(make_engine(yes_or_no)).run(order(6))).views == []


async def test_a_failed_attempt_is_recorded_with_the_trained_attempts_of_its_group(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    def first_fails(episode: int, turn: int) -> Any:
        return ValueError("boom") if episode == 0 else yes_or_no(episode, turn)

    attempts = await trained(make_worker(make_engine(first_fails)), tmp_path, order(size=3))
    assert [(each.attempt, each.outcome) for each in attempts] == [(0, "failed"), (1, "trained"), (2, "trained")]
    assert attempts[0].reason == "ValueError: boom"
    assert attempts[0].prompt == "hi", "nothing was sampled, so only the prompt of the task is known"
    assert [each.advantage for each in attempts] == [None, -0.5, 0.5]


async def test_a_truncated_and_masked_attempt_is_recorded_as_filtered(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    async def cut_off_first(task: Task, client: ModelClient) -> Episode:
        answer = await client.sample(task.prompt)
        return Episode([], stop="length" if answer == "yes" else "stop")

    masking = group_filter(truncated="mask")
    attempts = await trained(make_worker(make_engine(yes_or_no), cut_off_first, filter=masking), tmp_path)
    assert sorted(each.outcome for each in attempts) == ["filtered", "trained"]
    (left_out,) = [each for each in attempts if each.outcome == "filtered"]
    assert "filter.truncated" in left_out.reason
    assert left_out.trajectories[0].turns[-1].sampled


async def test_tool_calls_and_tool_results_are_recorded_as_separate_turns(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    def script(episode: int, turn: int) -> str:
        return CALL if turn == 0 else yes_or_no(episode, turn)

    loop = ToolLoop([FunctionTools(load_tools([add]))])
    first, _ = await trained(make_worker(make_engine(script), loop), tmp_path)
    (trajectory,) = first.trajectories
    assert [turn.source for turn in trajectory.turns] == ["prompt", "assistant", "tool", "assistant"]
    assert '"name": "add"' in first.prompt, "the prompt contains the tools, as sent to the policy"
    assert trajectory.turns[1].text == CALL
    assert trajectory.turns[2].text == "<|tool|>3<|end|><|assistant|>"
    assert [turn.sampled for turn in trajectory.turns] == [False, True, False, True]


async def test_turns_of_an_agent_behind_the_gateway_are_recorded_separately(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    async def agent(task: Task, client: ModelClient) -> None:
        endpoint = await client.endpoint()
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as openai:
            messages: list[Any] = [{"role": "user", "content": task.prompt}]
            first = await openai.chat.completions.create(model=endpoint.model, messages=messages)
            messages += [first.choices[0].message, {"role": "user", "content": "sure?"}]
            await openai.chat.completions.create(model=endpoint.model, messages=messages)

    worker = make_worker(make_engine(yes_or_no), agent, gateway=Gateway("127.0.0.1", 0, "toy"))
    first, _ = await trained(worker, tmp_path)
    await worker.close()
    (trajectory,) = first.trajectories
    assert [turn.source for turn in trajectory.turns] == ["prompt", "assistant", "user", "assistant"]
    assert trajectory.turns[2].text == "<|user|>sure?<|end|><|assistant|>"


async def test_text_appended_by_a_rollout_is_recorded_as_an_observation(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    async def observing(task: Task, client: ModelClient) -> None:
        await client.sample(task.prompt)
        client.observe("go on")
        await client.sample()

    first, _ = await trained(make_worker(make_engine(yes_or_no), observing), tmp_path)
    assert [turn.source for turn in first.trajectories[0].turns] == ["prompt", "assistant", "observation", "assistant"]


async def test_a_group_cancelled_by_the_controller_is_recorded_as_dropped_with_its_partial_attempts(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    engine = make_engine(lambda episode, turn: yes_or_no(episode, turn) if turn == 0 else None)
    second_turns = asyncio.Semaphore(0)

    async def two_turns(task: Task, client: ModelClient) -> None:
        await client.sample(task.prompt)
        second_turns.release()
        await client.sample("and now?")

    worker = make_worker(engine, two_turns)
    running = asyncio.create_task(worker.run(order()))
    for _ in range(2):
        await second_turns.acquire()
    await worker.cancel(5)
    report: GroupReport = await running
    assert report.cancelled
    assert untrained_groups(tmp_path) == {5: "dropped"}
    assert sorted(each.trajectories[0].turns[-1].text for each in untrained(tmp_path)) == ["no<|end|>", "yes<|end|>"]
    assert {each.outcome for each in untrained(tmp_path)} == {"dropped"}


async def test_groups_in_flight_when_the_worker_closes_are_not_recorded(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    engine = make_engine([None])
    worker = make_worker(engine)
    running = asyncio.create_task(worker.run(order()))
    await engine.started.wait()
    await worker.close()
    await running
    assert untrained_groups(tmp_path) == {}


async def test_a_trajectory_that_cannot_be_stored_loses_only_its_record(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    async def odd(task: Task, client: ModelClient) -> Episode:
        square = np.ones((2, 2), np.int32)
        return Episode([Trajectory(square, square > 0, square, square)], error="gave up")  # type: ignore[arg-type]

    report = await make_worker(make_engine(yes_or_no), odd).run(order())
    assert (report.outcome, report.reason) == ("failed", "gave up")
    assert [(each.outcome, each.trajectories) for each in untrained(tmp_path)] == [("failed", [])] * 2


async def test_a_failed_write_loses_the_record_and_not_the_group(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    (tmp_path / "rollouts").write_text("in the way of the folder")
    report = await make_worker(make_engine(["yes<|end|>"])).run(order())
    assert report.outcome == "filtered"


async def test_a_missing_journal_segment_loses_the_record_and_does_not_fail_the_run(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    worker = make_worker(make_engine(yes_or_no))
    report = await worker.run(order())
    assert report.place is not None
    (tmp_path / "journal" / report.place.segment).unlink()
    await worker.record_rollouts(7, [report.place])
    assert recorded_steps(tmp_path) == []
