"""The worker: from a group order to a journaled group and its report."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

import outpace
from outpace.checkpoint import journal
from outpace.config import Config
from outpace.config.algorithm import AdvantageConfig
from outpace.config.sections import EvalConfig, RewardsConfig
from outpace.engines.fleet import EngineFleet
from outpace.errors import ComponentFailed
from outpace.models.chat_format import TemplateChatFormat
from outpace.monitoring.metrics import result
from outpace.protocols import ModelClient
from outpace.rewards.grading import GraderPool
from outpace.rewards.registry import isolated_sources
from outpace.rollouts.episode import single_turn
from outpace.rollouts.group_scoring import SWAPPED
from outpace.rollouts.worker import RewardFunctions, RolloutWorker
from outpace.types import (
    Episode,
    FinishedGroup,
    FleetMember,
    GroupOrder,
    GroupRecord,
    GroupReport,
    JournalLocation,
    Task,
    Trajectory,
)
from rollouts_support import RecordingJournal
from support import naming

CHAT = [{"role": "user", "content": "hi"}]
TASKS = [Task("t0", "hi", {"answer": "yes"}), Task("t1", "ho", {"answer": "no"}), Task("t2", CHAT, {"answer": "yes"})]
HELDOUT = [Task("h0", "hey", {"answer": "yes"})]
HARD = [Task("hard0", "hmm", {"answer": "no"})]
ANSWERS = ["yes<|end|>", "no<|end|>"]


def correct(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    return [float(given == wanted) for given, wanted in zip(completions, answer, strict=True)]


def by_episode(episode: int, turn: int) -> str:
    return ANSWERS[episode % 2]


def results(report: GroupReport) -> dict[str, float | None]:
    return {name: result(aggregate) for name, aggregate in report.measured.items()}


def order(group: int = 0, **changes: Any) -> GroupOrder:
    values = {"task": 0, "epoch": 1, "min_version": 2, "size": 2} | changes
    return GroupOrder(group, **values)


@pytest.fixture
def memory_journal() -> RecordingJournal:
    return RecordingJournal()


@pytest.fixture
def make_worker(
    tokenizer: Any, make_settings: Callable[..., Config], memory_journal: RecordingJournal
) -> Callable[..., RolloutWorker]:
    def make(
        *engines: Any,
        rollout: Any = single_turn,
        rewards: Any = (("correct", correct),),
        weights: Any = None,
        writer: Any = memory_journal,
        advantage: str = "dr_grpo",
        pool: GraderPool | None = None,
        overlong: RewardsConfig | None = None,
        evaluation: EvalConfig | None = None,
        evaluation_rollout: Any = None,
    ) -> RolloutWorker:
        sections: dict[str, Any] = {"advantage": AdvantageConfig(name=advantage)}
        sections |= {"rewards": overlong} if overlong else {}
        sections |= {"eval": evaluation} if evaluation else {}
        config = make_settings(max_tokens=6).model_copy(update=sections)
        chat_format = TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,))
        reward_functions = RewardFunctions(list(rewards), weights or [1.0] * len(rewards), pool)
        fleet = EngineFleet({f"engine-{number}": engine for number, engine in enumerate(engines)})
        heldout = {"": HELDOUT, "hard": HARD}
        return RolloutWorker(
            config, fleet, chat_format, TASKS, heldout, rollout, reward_functions, writer,
            evaluation_rollout=evaluation_rollout,
        )  # fmt: skip

    return make


MakeWorker = Callable[..., RolloutWorker]


async def test_a_group_is_journaled_before_its_report_is_returned(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    worker = make_worker(make_engine(by_episode), writer=journal.JournalWriter(tmp_path, "w"))
    report = await worker.run(order(5))
    assert (report.group, report.task_id, report.outcome, report.reason) == (5, "t0", "finished", "")
    assert report.place is not None
    record = journal.read_record(tmp_path, report.place)
    assert (record.group, record.task_id, record.epoch, record.admitted) == (5, "t0", 1, 2)
    assert record.rewards == report.rewards == [1.0, 0.0]
    assert [row.advantages[-1] for row in record.rows] == [0.5, -0.5]
    await worker.close()


async def test_a_group_that_cannot_be_journaled_is_not_reported(make_engine: Any, make_worker: MakeWorker) -> None:
    class FullDisk(RecordingJournal):
        def append(self, kept: FinishedGroup, record: GroupRecord) -> JournalLocation:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        await make_worker(make_engine(by_episode), writer=FullDisk()).run(order())


async def test_the_report_holds_the_groups_counts_versions_and_mean_rewards(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    engine = make_engine(by_episode)
    engine.stop = "length"
    report = await make_worker(engine).run(order())
    assert (report.episodes, report.failed_episodes, report.truncated) == (2, 0, 2)
    assert report.tokens_sampled == len("yes") + len("no") + 2
    assert (report.oldest, report.newest) == (3, 4)
    assert report.reward_parts == {"correct": 0.5}
    assert report.seconds >= 0


async def test_a_failed_episode_does_not_affect_the_rest_of_its_group(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    def answers(episode: int, turn: int) -> Any:
        return ValueError("boom") if episode == 1 else ANSWERS[episode // 2]

    report = await make_worker(make_engine(answers)).run(order(size=3))
    assert (report.outcome, report.episodes, report.failed_episodes) == ("finished", 2, 1)
    assert report.rewards == [1.0, 0.0]
    assert len(memory_journal.records[0].rows) == 2


@pytest.mark.parametrize(
    "broken", [lambda completions: 1 / 0, lambda completions: [1.0], lambda completions: ["x"] * len(completions)]
)
async def test_a_failing_reward_function_fails_the_group_without_raising(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal, broken: Any
) -> None:
    report = await make_worker(make_engine(by_episode), rewards=[("broken", broken)]).run(order())
    assert report.outcome == "failed"
    assert "broken" in report.reason
    assert [(failure.source, failure.count) for failure in report.failures] == [("reward broken", 2)]
    assert "0" not in report.failures[0].reason, "the reason must be the same for every group: no sample index"
    assert (report.place, memory_journal.records) == (None, [])
    assert report.tokens_sampled == len("yes") + len("no") + 2


async def test_an_episode_for_which_every_reward_is_none_is_left_out(make_engine: Any, make_worker: MakeWorker) -> None:
    def picky(completions: list[str]) -> list[float | None]:
        return [None, 1.0, 0.0]

    report = await make_worker(make_engine(by_episode), rewards=[("picky", picky)]).run(order(size=3))
    assert (report.outcome, report.episodes, report.rewards) == ("finished", 2, [1.0, 0.0])


async def test_a_group_with_equal_rewards_is_filtered_and_not_journaled(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    report = await make_worker(make_engine(["yes", "yes"])).run(order())
    assert (report.outcome, report.place) == ("filtered", None)
    assert re.search(naming("reward", "1"), report.reason)
    assert memory_journal.records == []


async def test_reward_functions_get_prompts_and_columns_once_per_completion(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    seen: dict[str, Any] = {}

    def look(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.0, 1.0]

    await make_worker(make_engine(by_episode), rewards=[("look", look)]).run(order(task=1))
    assert seen == {"prompts": ["ho", "ho"], "completions": ["yes", "no"], "answer": ["no", "no"]}


async def test_reward_functions_get_messages_when_the_prompt_is_messages(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    seen: dict[str, Any] = {}

    def look(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return [0.0, 1.0]

    await make_worker(make_engine(by_episode), rewards=[("look", look)]).run(order(task=2))
    assert seen["prompts"] == [CHAT, CHAT]
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in ("yes", "no")]


async def test_the_rollouts_own_reward_is_added_to_those_of_the_reward_functions(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    async def rollout(task: Task, client: ModelClient) -> float:
        return float(len(await client.sample(task.prompt)))

    report = await make_worker(make_engine(by_episode), rollout=rollout).run(order())
    assert report.rewards == [4.0, 2.0]
    assert report.reward_parts == {"correct": 0.5, "rollout": 2.5}


async def test_the_reward_set_on_a_returned_episode_is_used(make_engine: Any, make_worker: MakeWorker) -> None:
    async def rollout(task: Task, client: ModelClient) -> Episode:
        answer = await client.sample(task.prompt)
        return Episode([client.trajectory()], reward=float(answer == "yes"))

    report = await make_worker(make_engine(by_episode), rollout=rollout, rewards=()).run(order())
    assert (report.outcome, report.rewards) == ("finished", [1.0, 0.0])


async def test_the_journal_keeps_the_per_function_rewards_of_every_surviving_episode(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    def picky(completions: list[str]) -> list[float | None]:
        return [None if text == "yes" else 2.0 for text in completions]

    def answers(episode: int, turn: int) -> Any:
        return ValueError("boom") if episode == 1 else ANSWERS[episode // 2]

    rewards = [("correct", correct), ("picky", picky)]
    report = await make_worker(make_engine(answers), rewards=rewards, weights=[3.0, 0.5]).run(order(size=3))
    (record,) = memory_journal.records
    assert record.rewards == report.rewards == [3.0, 1.0]
    assert record.parts == [{"correct": 1.0}, {"correct": 0.0, "picky": 2.0}]
    assert [row.episode for row in record.rows] == [0, 1]


async def test_reward_weights_reach_an_advantage_estimator_that_uses_per_function_rewards(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    def wrong(completions: list[str]) -> list[float]:
        return [float(text == "no") for text in completions]

    rewards = [("correct", correct), ("wrong", wrong)]
    worker = make_worker(make_engine(by_episode), rewards=rewards, weights=[3.0, 1.0], advantage="gdpo")
    await worker.run(order())
    assert [float(row.advantages[-1]) for row in memory_journal.records[0].rows] == pytest.approx(
        [2 * 0.707007, -2 * 0.707007], abs=1e-5
    )


async def test_the_overlong_penalty_applies_in_training_and_not_in_evaluation(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    """With the end token `yes` has four tokens and `no` three: they use 2 and 1 tokens of the buffer of 4 below 6."""
    rewards = RewardsConfig(overlong_buffer=4, overlong_penalty=2.0)
    worker = make_worker(make_engine(by_episode), overlong=rewards)
    report = await worker.run(order())
    assert report.rewards == [1.0 - 1.0, 0.0 - 0.5]
    assert report.reward_parts == {"correct": 0.5, "overlong": -0.75}
    assert memory_journal.records[0].parts == [{"correct": 1.0, "overlong": -1.0}, {"correct": 0.0, "overlong": -0.5}]
    evaluated = await worker.run(order(1, size=1, heldout=True))
    assert (evaluated.rewards, evaluated.reward_parts) == ([1.0], {"correct": 1.0})


async def test_trajectory_rewards_suffice_when_no_reward_function_applies(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    """An episode counts as graded if its trajectories have rewards."""

    async def rollout(task: Task, client: ModelClient) -> Trajectory:
        answer = await client.sample(task.prompt)
        return msgspec.structs.replace(client.trajectory(), reward=float(answer == "yes"))

    silent = [("silent", lambda completions: [None] * len(completions))]
    report = await make_worker(make_engine(by_episode), rollout=rollout, rewards=silent).run(order())
    assert (report.outcome, report.rewards) == ("finished", [1.0, 0.0])
    assert [(row.reward, float(row.advantages[-1])) for row in memory_journal.records[0].rows] == [
        (1.0, 0.5),
        (0.0, -0.5),
    ]


async def test_episode_metrics_are_averaged_over_the_episodes_that_have_them(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    async def rollout(task: Task, client: ModelClient) -> Episode:
        answer = await client.sample(task.prompt)
        metrics = {"letters": float(len(answer))} | ({"right": 1.0} if answer == "yes" else {})
        return Episode([client.trajectory()], metrics=metrics)

    report = await make_worker(make_engine(by_episode), rollout=rollout).run(order())
    measured = results(report)
    assert (measured["episode/letters"], measured["episode/right"], measured[SWAPPED]) == (2.5, 1.0, 0.0)


def logging_reward(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda text: log_metric("answer/length", len(text)), completions))
    log_metric("answer/yes", completions.count("yes"), len(completions))
    log_metric("answer/odd", float("nan"))
    log_extra("length", [len(text) for text in completions])
    return [float(text == "yes") for text in completions]


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_what_rewards_evaluators_and_rollouts_report_is_aggregated_by_its_rule(
    make_engine: Any, make_worker: MakeWorker, own_metrics: None, isolation: Any
) -> None:
    outpace.metric("answer/length", rule="max")
    outpace.metric("answer/yes", rule="ratio")
    outpace.metric("answer/odd", rule="sum")
    outpace.metric("answer/graded", rule="sum")
    outpace.metric("episode/prompts", rule="p50")

    async def rollout(task: Task, client: ModelClient) -> None:
        await client.sample(task.prompt)
        await asyncio.to_thread(client.log_metric, "episode/prompts", len(task.prompt))

    @outpace.evaluator
    def counting(task: Task, episode: Episode) -> float:
        outpace.log_metric("answer/graded", 1)
        return 0.0

    rewards = [("logging_reward", logging_reward), ("counting", counting)]
    pool = GraderPool(isolated_sources(rewards, isolation)) if isolation == "process" else None
    worker = make_worker(make_engine(by_episode), rollout=rollout, rewards=rewards, pool=pool)
    measured = results(await worker.run(order()))
    await worker.close()
    assert measured["answer/length"] == 3
    assert measured["answer/yes"] == 0.5
    assert measured["answer/graded"] == 2
    assert measured["episode/prompts"] == 2
    assert measured["faults/nan_metrics"] == 1
    assert "answer/odd" not in measured


async def test_a_group_measures_each_reward_the_time_of_its_episodes_and_whether_all_or_none_solved_the_task(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    def style(completions: list[str]) -> list[float]:
        return [0.5 if text == "yes" else 1.0 for text in completions]

    async def solve_shares(*answers: str, weights: list[float], rewards: Any) -> tuple[float, float]:
        engine = make_engine(lambda episode, turn: answers[episode])
        measured = results(await make_worker(engine, rewards=rewards, weights=weights).run(order()))
        assert (
            0 <= measured["episode/seconds/p50"] <= measured["episode/seconds/p95"] <= measured["episode/seconds/max"]
        )
        return measured["groups/solve_all"], measured["groups/solve_none"]

    yes, no = ANSWERS
    right = [("correct", correct)]
    assert await solve_shares(yes, yes, weights=[1.0], rewards=right) == (1, 0)
    assert await solve_shares(yes, no, weights=[1.0], rewards=right) == (0, 0)
    assert await solve_shares(no, no, weights=[1.0], rewards=right) == (0, 1)
    both = [*right, ("style", style)]
    assert await solve_shares(yes, yes, weights=[0.9, 0.2], rewards=both) == (1, 0), "0.9 + 0.1"
    assert await solve_shares(yes, yes, weights=[0.5, 0.5], rewards=both) == (0, 1), "0.5 + 0.25"
    measured = results(await make_worker(make_engine(by_episode), rewards=both).run(order()))
    assert (measured["reward/style"], measured["reward/style/std"]) == (0.75, 0.25)


async def test_a_cancelled_group_reports_failure_and_frees_the_engine(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    engine = make_engine([None])
    worker = make_worker(engine)
    running = asyncio.create_task(worker.run(order(4)))
    await engine.started.wait()
    await worker.cancel(4)
    report = await running
    assert (report.group, report.outcome, report.cancelled) == (4, "failed", True)
    assert engine.aborted == ["4.0.0", "4.1.0"]
    assert memory_journal.records == []


async def test_a_cancelled_group_is_marked_cancelled_and_counts_every_sampled_token(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    """Complete answers and the partial answer in flight both count."""

    async def rollout(task: Task, client: ModelClient) -> None:
        await client.sample(task.prompt)
        await client.sample("more")

    in_second_turn: set[int] = set()
    both_in_second_turn = asyncio.Event()

    def answers(episode: int, turn: int) -> str | None:
        if turn == 0:
            return ANSWERS[episode]
        in_second_turn.add(episode)
        if len(in_second_turn) == 2:
            both_in_second_turn.set()
        return None

    engine = make_engine(answers)
    engine.partial = "hal"
    worker = make_worker(engine, rollout=rollout)
    running = asyncio.create_task(worker.run(order(4)))
    await both_in_second_turn.wait()
    await worker.cancel(4)
    report = await running
    assert report.cancelled
    assert report.tokens_sampled == len("yes") + len("no") + 2 + 2 * len("hal")


async def test_a_group_that_fails_on_its_own_is_not_marked_cancelled(make_engine: Any, make_worker: MakeWorker) -> None:
    report = await make_worker(make_engine([ValueError("boom")])).run(order())
    assert (report.outcome, report.cancelled) == ("failed", False)


async def test_tokens_of_a_request_that_the_rollout_timed_out_are_counted(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    async def impatient(task: Task, client: ModelClient) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.sample(task.prompt)
        await client.sample()

    engine = make_engine(lambda episode, turn: None if turn == 0 else ANSWERS[episode])
    engine.partial = "hal"
    report = await make_worker(engine, rollout=impatient).run(order())
    assert report.outcome == "finished"
    assert report.tokens_sampled == len("yes") + len("no") + 2 + 2 * len("hal")


async def test_cancelling_a_group_that_is_not_running_has_no_effect(make_engine: Any, make_worker: MakeWorker) -> None:
    engine = make_engine(by_episode)
    worker = make_worker(engine)
    await worker.cancel(1)
    assert (await worker.run(order(1))).outcome == "finished"
    await worker.cancel(1)


async def test_cancelling_the_call_aborts_the_groups_requests_and_returns_no_report(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    engine = make_engine([None])
    running = asyncio.create_task(make_worker(engine).run(order()))
    await engine.started.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    assert engine.aborted == ["0.0.0", "0.1.0"]


async def test_an_engine_failure_propagates_and_stops_the_other_episodes(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    engine = make_engine(lambda episode, turn: None if episode == 0 else ComponentFailed("engine-0", "died"))
    with pytest.raises(ComponentFailed, match="died"):
        await make_worker(engine).run(order())
    assert engine.aborted == ["0.0.0"]


async def test_close_waits_for_running_episodes_before_closing_the_journal(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    engine = make_engine([None])
    worker = make_worker(engine)
    running = asyncio.create_task(worker.run(order()))
    await engine.started.wait()
    await worker.close()
    assert engine.aborted == ["0.0.0", "0.1.0"], "the episodes have ended"
    assert memory_journal.closed
    assert (await running).cancelled


async def test_close_ends_evaluations_including_one_with_the_same_id_as_a_training_group(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    engine = make_engine([None])
    worker = make_worker(engine)
    evaluations = [asyncio.create_task(worker.run(order(0, heldout=True, min_version=number))) for number in (2, 3)]
    group = asyncio.create_task(worker.run(order(0)))
    while len(engine.prompts) < 6:  # noqa: ASYNC110 - six requests, one event
        await asyncio.sleep(0.001)
    await worker.cancel(0)
    assert (await group).cancelled
    assert engine.aborted == ["0.0.0", "0.1.0"], "cancel takes the id of a training group"
    evaluations[0].cancel()  # its caller is gone
    await worker.close()
    ids = [f"eval-{number}.0.{episode}.0" for number in (2, 3) for episode in (0, 1)]
    assert sorted(engine.aborted[2:]) == ids, "the episodes have ended"
    assert (await evaluations[1]).cancelled


async def test_every_sampled_token_is_counted_whatever_the_rollout_returns(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    async def keeps_one_of_two(task: Task, client: ModelClient) -> Trajectory:
        await client.chat([{"role": "user", "content": "aside"}], role="helper")
        await client.sample(task.prompt)
        return client.trajectory()

    report = await make_worker(make_engine(by_episode), rollout=keeps_one_of_two).run(order())
    assert report.outcome == "finished"
    assert report.tokens_sampled == 2 * (len("yes") + len("no") + 2)


@pytest.mark.parametrize("heldout", [True, False])
async def test_an_environment_is_freed_right_after_its_group_is_graded(
    heldout: bool, make_engine: Any, make_worker: MakeWorker
) -> None:
    class World:
        pass

    worlds: list[weakref.ref[World]] = []

    async def rollout(task: Task, client: Any) -> None:
        await client.sample(task.prompt)
        client.environment = World()
        worlds.append(weakref.ref(client.environment))

    def alive(completions: Any, environments: list[World]) -> list[float]:
        return [float(index * isinstance(world, World)) for index, world in enumerate(environments)]

    gc.disable()
    try:
        worker = make_worker(make_engine(by_episode), rollout=rollout, rewards=[("alive", alive)])
        assert (await worker.run(order(heldout=heldout))).rewards == [0.0, 1.0]
        assert [world() for world in worlds] == [None, None]
    finally:
        gc.enable()


async def test_a_reward_that_fails_in_a_grader_process_keeps_its_traceback_and_close_ends_the_process(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    def by_letter(completions: list[str], answer: list[str]) -> list[float]:
        if answer[0] == "no":
            raise ValueError("boom")
        return [float(os.getpid()), 0.0]

    rewards = [("by_letter", by_letter)]
    worker = make_worker(make_engine(by_episode), rewards=rewards, pool=GraderPool(isolated_sources(rewards)))
    report = await worker.run(order())
    assert report.outcome == "finished"
    broken = await worker.run(order(1, task=1))
    assert re.search(naming("by_letter", "ValueError", "boom"), broken.reason)
    (failure,) = broken.failures
    assert (failure.source, failure.count) == ("reward by_letter", 2)
    assert re.search(naming("ValueError", "boom"), failure.reason)
    assert "in by_letter" in broken.traceback
    grader = int(report.rewards[0])
    assert psutil.pid_exists(grader)
    await worker.close()
    assert not psutil.pid_exists(grader)


@pytest.mark.parametrize("isolated", [True, False])
async def test_a_reward_that_returns_too_few_values_fails_its_group_without_a_traceback_of_outpace(
    isolated: bool, make_engine: Any, make_worker: MakeWorker
) -> None:
    rewards = [("one", lambda completions: [1.0])]
    pool = GraderPool(isolated_sources(rewards)) if isolated else None
    worker = make_worker(make_engine(by_episode), rewards=rewards, pool=pool)
    report = await worker.run(order())
    await worker.close()
    assert (report.outcome, report.failures[0].source) == ("failed", "reward one")
    assert report.traceback == ""


async def test_released_segments_are_passed_to_the_journal(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    await make_worker(make_engine([])).release(["w-00001.journal"])
    assert memory_journal.released == ["w-00001.journal"]


async def test_held_out_groups_are_graded_and_never_journaled(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    engine = make_engine(by_episode)
    report = await make_worker(engine).run(order(0, size=1, heldout=True, pinned=2))
    assert (report.task_id, report.outcome, report.rewards) == ("h0", "finished", [1.0])
    assert (report.place, memory_journal.records) == (None, [])
    (request,) = engine.samplings
    assert engine.samplings[request].temperature == 0.0
    assert engine.bounds == [(2, 2)]


async def test_every_evaluation_uses_the_same_seeds_and_training_uses_others(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    engine = make_engine(by_episode)
    worker = make_worker(engine)
    for version in (2, 3):
        await worker.run(order(0, size=1, heldout=True, pinned=version, min_version=version))
    await worker.run(order(0))
    seeds = [sampling.seed for sampling in engine.samplings.values()]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3


async def test_an_attempt_of_an_evaluation_has_the_same_seed_alone_as_in_a_group(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    engine = make_engine(by_episode)
    worker = make_worker(engine)
    await worker.run(order(0, size=3, heldout=True))
    for attempt in (1, 2):
        await worker.run(order(attempt, size=1, heldout=True, draw=0, first_attempt=attempt))
    seeds = [sampling.seed for sampling in engine.samplings.values()]
    assert len(set(seeds[:3])) == 3
    assert seeds[3:] == seeds[1:3]


async def test_evaluation_samples_with_its_own_settings_and_training_with_those_of_the_rollout(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    engine = make_engine(by_episode)
    chosen = EvalConfig(seed=99, temperature=0.25, max_tokens=40, stop=["!"], top_p=0.5, top_k=7)
    worker = make_worker(engine, evaluation=chosen)
    await worker.run(order(0, size=1, heldout=True))
    await worker.run(order(1))
    evaluated, trained, _ = engine.samplings.values()
    assert (evaluated.temperature, evaluated.max_tokens, evaluated.stop_strings) == (0.25, 40, ["!"])
    assert (evaluated.top_p, evaluated.top_k) == (0.5, 7)
    assert (trained.temperature, trained.max_tokens, trained.stop_strings) == (0.5, 6, ["\n"])
    assert (trained.top_p, trained.top_k) == (1.0, 0)


async def test_evaluation_runs_its_own_rollout(make_engine: Any, make_worker: MakeWorker) -> None:
    async def half(task: Task, client: ModelClient) -> float:
        await client.sample(task.prompt)
        return 0.5

    worker = make_worker(make_engine(by_episode), evaluation_rollout=half)
    assert (await worker.run(order(0, size=1, heldout=True))).rewards == [1.5]
    assert (await worker.run(order(1))).rewards == [1.0, 0.0]


async def test_tasks_of_a_named_held_out_set_are_reported_with_their_rewards_by_function(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    def brief(completions: list[str]) -> list[float]:
        return [0.25] * len(completions)

    worker = make_worker(make_engine(by_episode), rewards=[("correct", correct), ("brief", brief)], weights=[1.0, 2.0])
    named = order(4, size=1, heldout=True, heldout_set="hard", first_attempt=1, show=True)
    report = await worker.run(named)
    assert (report.task_id, report.rewards) == ("hard0", [1.5])
    assert report.parts == [{"correct": 1.0, "brief": 0.25}]
    (view,) = report.views
    assert (view.heldout_set, view.attempt, view.completion, view.rewards) == ("hard", 1, "no", report.parts[0])
    assert (await worker.run(order(5))).parts == [], "of training groups, the journal has them"


async def test_a_failed_held_out_task_reports_its_error(make_engine: Any, make_worker: MakeWorker) -> None:
    report = await make_worker(make_engine([ValueError("boom")])).run(order(0, size=1, heldout=True))
    assert (report.outcome, report.reason, report.failed_episodes) == ("failed", "ValueError: boom", 1)


async def test_episode_views_are_reported_only_when_the_order_requests_them(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    worker = make_worker(make_engine(by_episode))
    assert (await worker.run(order(0))).views == []
    views = (await worker.run(order(1, show=True))).views
    assert [(view.task_id, view.prompt, view.completion, view.reward) for view in views] == [
        ("t0", "hi", "yes", 1.0),
        ("t0", "hi", "no", 0.0),
    ]


async def test_a_single_answer_is_shown_as_plain_text_even_for_a_message_prompt(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    def fair(completions: Any) -> list[float]:
        return [0.0, 1.0]

    report = await make_worker(make_engine(by_episode), rewards=[("fair", fair)]).run(order(task=2, show=True))
    assert [(view.prompt, view.completion) for view in report.views] == [("user: hi", "yes"), ("user: hi", "no")]


async def test_groups_are_distributed_over_the_engines(make_engine: Any, make_worker: MakeWorker) -> None:
    engines = [make_engine(by_episode), make_engine(by_episode)]
    worker = make_worker(*engines)
    await asyncio.gather(*(worker.run(order(group)) for group in range(8)))
    served = [request for engine in engines for request in engine.prompts]
    assert sorted(served) == sorted(f"{group}.{episode}.0" for group in range(8) for episode in range(2))
    assert all(engine.prompts for engine in engines)


async def test_requests_go_only_to_fleet_members_that_serve(make_engine: Any, make_worker: MakeWorker) -> None:
    resting, serving = make_engine(by_episode), make_engine(by_episode)
    worker = make_worker(resting, serving)
    await worker.fleet(
        [FleetMember("engine-0", "", serves=False, version=9), FleetMember("engine-1", "", True, version=9)]
    )
    assert (await worker.run(order())).outcome == "finished"
    assert (len(resting.prompts), len(serving.prompts)) == (0, 2)


async def test_first_prompts_equal_the_first_requests_sent_to_the_engine(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    engine = make_engine(by_episode)
    worker = make_worker(engine)
    first_prompts = await worker.first_prompts(9)
    assert len(first_prompts) == len(TASKS)
    for task, prompt in enumerate(first_prompts):
        await worker.run(order(task, task=task))
        assert engine.prompts[f"{task}.0.0"] == prompt.tolist()
    assert [len(prompt) for prompt in await worker.first_prompts(1)] == [len(first_prompts[0])]


async def test_an_advantage_estimator_never_runs_on_the_event_loop(make_engine: Any, make_worker: MakeWorker) -> None:
    """The estimator may be user code, and slow."""
    seen: list[int] = []

    def recording(group_returns: Any) -> Any:
        seen.append(threading.get_ident())
        return group_returns.returns_G - group_returns.returns_G.mean()

    worker = make_worker(make_engine(by_episode))
    scoring = worker._scoring
    registration = replace(
        scoring.credit.estimator.registration, function=lambda group_returns, **_: recording(group_returns)
    )
    estimator = replace(scoring.credit.estimator, registration=registration)
    worker._scoring = replace(scoring, credit=replace(scoring.credit, estimator=estimator))
    assert (await worker.run(order())).outcome == "finished"
    assert seen
    assert threading.get_ident() not in seen


async def test_reports_show_total_returns_and_the_journal_keeps_rewards_and_turn_rewards_apart(
    make_engine: Any, make_worker: MakeWorker, memory_journal: RecordingJournal
) -> None:
    async def with_a_turn_reward(task: Task, client: ModelClient) -> Episode:
        await client.sample(task.prompt)
        turn_rewards = np.array([0.25], dtype=np.float32)
        return Episode([msgspec.structs.replace(client.trajectory(), turn_rewards=turn_rewards)])

    report = await make_worker(make_engine(by_episode), rollout=with_a_turn_reward).run(order())
    assert report.rewards == [1.25, 0.25]
    (record,) = memory_journal.records
    assert record.rewards == [1.0, 0.0]
    assert [row.turn_rewards.tolist() for row in record.rows] == [[0.25], [0.25]]
