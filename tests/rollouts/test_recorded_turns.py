"""Resuming a group: recorded answers are reused without the engine as long as the prompts match."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.checkpoint.journal import JournalWriter, survey_journal
from outpace.checkpoint.turn_log import TurnLog, survey_turns
from outpace.config import Config
from outpace.engines.fleet import EngineFleet
from outpace.errors import ComponentFailed
from outpace.models.chat_format import TemplateChatFormat
from outpace.protocols import ModelClient
from outpace.rollouts.environments.session import SINGLE_KIND, EnvironmentSource
from outpace.rollouts.requests import RecordedTurns
from outpace.rollouts.tool_loop import ToolLoop
from outpace.rollouts.worker import REUSED, RewardFunctions, RolloutWorker
from outpace.run import build
from outpace.types import Generation, GroupOrder, GroupReport, Sampling, Task
from rollouts_support import RecordingJournal, environment_sessions
from support import resolved

POSITION = 9
"""Position of the group under test."""
TASKS = [Task("t0", "Find the number.", {"secret": 7})]


class Counting:
    """Reports how far off each guess is; deterministic."""

    def reset(self, secret: int) -> str:
        self.secret = secret
        self.guesses = 0
        return " It is below ten."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self.guesses += 1
        return f"{self.guesses}: off by {abs(number - self.secret)}"

    def get_reward(self) -> float:
        return 1.0 / self.guesses if self.guesses else 0.0


class Nondeterministic(Counting):
    """Never returns the same text twice."""

    moods = itertools.count()

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        return f"{super().guess(number)}, mood {next(self.moods)}"


def guess(number: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'guess', 'arguments': {'number': number}})}</tool_call><|end|>"


GUESSES = [guess(1), guess(3), guess(5), "It is 7.<|end|>"]


@dataclass
class FailsAt:
    """Episodes of different lengths; the engine fails at one turn of one episode, and the others hang from there on."""

    failing_turn: int
    failing_episode: int = 0

    def __call__(self, episode: int, turn: int) -> Any:
        if turn >= self.failing_turn:
            return ComponentFailed("engine-0", "connection closed") if episode == self.failing_episode else None
        return scripted_answer(episode, turn)

    @property
    def answered(self) -> set[tuple[int, int]]:
        """Episode and turn of every answer before the failure."""
        return {(episode, turn) for episode in range(2) for turn in range(min(self.failing_turn, episode + 2))}


class ObservedLog(TurnLog):
    """Tracks which answers of the group under test are recorded, across all workers that share `recorded`."""

    def __init__(self, directory: Path, name: str, recorded: set[tuple[int, int]], changed: asyncio.Event) -> None:
        super().__init__(directory, name)
        self._recorded, self._changed = recorded, changed

    def record(self, order: GroupOrder, episode: int, number: int, *rest: Any) -> None:
        super().record(order, episode, number, *rest)
        if order.position == POSITION:
            self._recorded.add((episode, number))
            self._changed.set()


def scripted_answer(episode: int, turn: int) -> str:
    return GUESSES[turn] if turn < episode + 1 else GUESSES[-1]


def order(**changes: Any) -> GroupOrder:
    return GroupOrder(
        **({"group": 4, "task": 0, "epoch": 0, "min_version": 2, "size": 2, "position": POSITION} | changes)
    )


MakeWorker = Callable[..., RolloutWorker]


@pytest.fixture
async def make_worker(
    tokenizer: Any, make_settings: Callable[..., Config], tmp_path: Path
) -> AsyncIterator[MakeWorker]:
    workers: list[RolloutWorker] = []
    recorded: set[tuple[int, int]] = set()
    changed = asyncio.Event()

    async def until_recorded(answered: set[tuple[int, int]]) -> None:
        while not answered <= recorded:
            changed.clear()
            await changed.wait()

    def make(
        engine: Any, rollout: Any = None, name: str = "w0", writer: Any = None, rewards: Any = ()
    ) -> RolloutWorker:
        settings = make_settings(max_tokens=64, stop_strings=())
        chat_format = TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,))
        reward_functions, journal = RewardFunctions(list(rewards), [1.0] * len(rewards)), writer or RecordingJournal()
        fleet = EngineFleet({"engine-0": engine})
        if isinstance(engine.answers, FailsAt):
            engine.before_failing = functools.partial(until_recorded, engine.answers.answered)
        workers.append(
            RolloutWorker(
                settings, fleet, chat_format, TASKS, {"": TASKS}, rollout or in_environment(Counting), reward_functions,
                journal, turns=ObservedLog(tmp_path, name, recorded, changed),
            )
        )  # fmt: skip
        return workers[-1]

    yield make
    for worker in workers:
        await worker.close()


def in_environment(kind: type[Counting]) -> ToolLoop:
    return ToolLoop(
        environments=environment_sessions({SINGLE_KIND: EnvironmentSource("environment", factory=kind)}),
    )


async def run_until_failure(worker: RolloutWorker, ordered: GroupOrder) -> None:
    with pytest.raises(ComponentFailed):
        await worker.run(ordered)
    await worker.close()


def rows(journal: RecordingJournal) -> list[tuple[list[int], list[int]]]:
    return [(row.tokens.tolist(), row.versions.tolist()) for row in journal.records[0].rows]


def reused(report: GroupReport) -> float:
    return report.measured[REUSED].total if REUSED in report.measured else 0.0


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_resumed_group_reuses_recorded_turns_and_ends_with_the_same_tokens(
    make_engine: Any, make_worker: MakeWorker, turns: int
) -> None:
    whole = RecordingJournal()
    await make_worker(make_engine(scripted_answer), name="elsewhere", writer=whole).run(order(position=1))

    engine = make_engine(FailsAt(turns, failing_episode=1))
    await run_until_failure(make_worker(engine), order())
    successor, again = make_engine(scripted_answer), RecordingJournal()
    successor.version = 20
    report = await make_worker(successor, name="w1", writer=again).run(order(recorded=True))

    everything = {"4.0.0", "4.0.1", "4.1.0", "4.1.1", "4.1.2"}
    answered = {f"4.{episode}.{turn}" for episode in range(2) for turn in range(turns)} & everything
    assert set(successor.prompts) == everything - answered, "recorded answers are not requested again"
    assert reused(report) == len(answered)
    assert [tokens for tokens, _ in rows(again)] == [tokens for tokens, _ in rows(whole)]
    assert (report.outcome, report.oldest, report.newest) == ("finished", 3 if turns else 20, 24 - len(answered))


async def test_reused_answers_keep_their_logprobs_and_versions(make_engine: Any, make_worker: MakeWorker) -> None:
    await run_until_failure(make_worker(make_engine(FailsAt(1))), order())
    journal, engine = RecordingJournal(), make_engine(scripted_answer)
    engine.version = 20
    await make_worker(engine, writer=journal).run(order(recorded=True))
    for row in journal.records[0].rows:
        versions = [int(version) for version, _ in itertools.groupby(row.versions[row.mask].tolist())]
        assert versions[0] < 10
        assert versions[1:] == sorted(versions[1:])
        assert versions[1] >= 20
        first = row.logprobs[row.mask][: int((row.versions[row.mask] == versions[0]).sum())]
        assert first.tolist() == pytest.approx([-(i + 1) / 100 for i in range(len(first))])


async def test_a_changed_environment_response_is_answered_by_the_engine_again(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    await run_until_failure(
        make_worker(make_engine(FailsAt(2, failing_episode=1)), in_environment(Nondeterministic)), order()
    )
    engine = make_engine(scripted_answer)
    report = await make_worker(engine, in_environment(Nondeterministic)).run(order(recorded=True))
    assert set(engine.prompts) == {"4.0.1", "4.1.1", "4.1.2"}, "the first prompt is the same, the second is not"
    assert (report.outcome, reused(report)) == ("finished", 2)


async def test_a_group_ordered_without_the_recorded_flag_is_generated_from_scratch(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    await run_until_failure(make_worker(make_engine(FailsAt(2, failing_episode=1))), order())
    engine = make_engine(scripted_answer)
    report = await make_worker(engine).run(order())
    assert len(engine.prompts) == 5
    assert reused(report) == 0


async def test_answers_older_than_min_version_are_requested_again(make_engine: Any, make_worker: MakeWorker) -> None:
    await run_until_failure(make_worker(make_engine(FailsAt(2, failing_episode=1))), order())
    engine = make_engine(scripted_answer)
    engine.version = 20
    report = await make_worker(engine).run(order(recorded=True, min_version=5))
    assert report.oldest >= 5
    assert set(engine.prompts) >= {"4.0.0", "4.1.0"}


async def test_the_same_worker_can_resume_a_group(make_engine: Any, make_worker: MakeWorker) -> None:
    engine = make_engine(FailsAt(2, failing_episode=1))
    worker = make_worker(engine)
    with pytest.raises(ComponentFailed):
        await worker.run(order())
    first_requests = set(engine.prompts)
    engine.prompts.clear()
    engine.answers = scripted_answer
    report = await worker.run(order(recorded=True))
    assert report.outcome == "finished"
    assert set(engine.prompts) == {"4.1.2"}
    assert "4.1.1" in first_requests


async def test_a_third_attempt_reuses_the_turns_of_both_earlier_attempts(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    await run_until_failure(make_worker(make_engine(FailsAt(1, failing_episode=1)), name="w0"), order())
    await run_until_failure(make_worker(make_engine(FailsAt(2, failing_episode=1)), name="w1"), order(recorded=True))
    engine = make_engine(scripted_answer)
    report = await make_worker(engine, name="w2").run(order(recorded=True))
    assert set(engine.prompts) == {"4.1.2"}
    assert reused(report) == 4


def numbered(dies_at: int | None = None) -> Callable[[int, int], Any]:
    return lambda episode, turn: ComponentFailed("e", "gone") if turn == dies_at else f"say {turn}<|end|>"


HELLO = [{"role": "user", "content": "go"}]


async def test_repeated_identical_prompts_reuse_distinct_recorded_answers(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    async def chat_rollout(task: Task, model: ModelClient) -> float:
        return float(len({(await model.chat(HELLO)).text for _ in range(3)}))

    await run_until_failure(make_worker(make_engine(numbered(dies_at=2)), chat_rollout), order(size=1))
    engine = make_engine(numbered())
    report = await make_worker(engine, chat_rollout).run(order(size=1, recorded=True))
    assert set(engine.prompts) == {"4.0.2"}
    assert report.rewards == [3.0]


async def test_recorded_answers_are_not_reused_when_requests_come_in_a_different_order(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    def rollout_over(topics: list[str]) -> Any:
        async def rollout(task: Task, model: ModelClient) -> float:
            texts = {topic: (await model.chat([{"role": "user", "content": topic}])).text for topic in topics}
            return float(texts.get("b", "") == "say 1")

        return rollout

    await run_until_failure(make_worker(make_engine(numbered(dies_at=2)), rollout_over(["a", "b", "c"])), order(size=1))
    engine = make_engine(numbered())
    report = await make_worker(engine, rollout_over(["b", "a", "c"])).run(order(size=1, recorded=True))
    assert set(engine.prompts) == {"4.0.0", "4.0.1", "4.0.2"}
    assert reused(report) == 0
    assert report.rewards == [0.0], "an answer is sampled with the seed of its own request"


async def test_recorded_answers_to_identical_concurrent_prompts_are_matched_by_request_number(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    sampled: list[tuple[str, ...]] = []

    first_answered = asyncio.Event()

    async def chat_rollout(task: Task, model: ModelClient) -> float:
        async def sample() -> str:
            text = (await model.chat(HELLO)).text
            first_answered.set()
            return text

        sampled.append(tuple(await asyncio.gather(sample(), sample())))
        return 1.0

    worker = make_worker(make_engine([None, "early<|end|>"]), chat_rollout)
    running = asyncio.create_task(worker.run(order(size=1)))
    await first_answered.wait()
    await worker.close()
    await running
    engine = make_engine(["late<|end|>", "early<|end|>"])
    report = await make_worker(engine, chat_rollout).run(order(size=1, recorded=True))
    assert sampled == [("late", "early")]
    assert set(engine.prompts) == {"4.0.0"}
    assert reused(report) == 1


async def test_an_answer_that_arrives_after_its_group_is_closed_is_not_recorded(tmp_path: Path) -> None:
    log = TurnLog(tmp_path, "w0")
    turns = RecordedTurns(log, order())
    prompt, sampling = np.array([1, 2], np.int32), Sampling(max_tokens=8, seed=1)
    answer = Generation(np.array([3], np.int32), np.zeros(1, np.float32), np.array([2], np.int32), "stop")
    turns.record(0, 0, prompt, sampling, answer)
    turns.close()
    turns.record(0, 1, prompt, sampling, answer)
    await asyncio.to_thread(log.close)
    assert survey_turns(tmp_path) == {}


async def test_a_recorded_answer_is_not_reused_with_different_sampling(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    def at_most(tokens: int) -> Any:
        async def rollout(task: Task, model: ModelClient) -> float:
            await model.chat(HELLO, max_tokens=tokens)
            await model.chat(HELLO)
            return 1.0

        return rollout

    await run_until_failure(make_worker(make_engine(numbered(dies_at=1)), at_most(32)), order(size=1))
    engine = make_engine(numbered())
    await make_worker(engine, at_most(16)).run(order(size=1, recorded=True))
    assert set(engine.prompts) == {"4.0.0", "4.0.1"}


def hanging_after_the_first_turn() -> tuple[Callable[[int, int], Any], asyncio.Event]:
    """Answers for two episodes that hang after their first turn; the event is set once both hang."""
    hanging, stuck = asyncio.Event(), set()

    def answers(episode: int, turn: int) -> Any:
        if turn == 0:
            return guess(1)
        stuck.add(episode)
        if len(stuck) == 2:
            hanging.set()
        return None

    return answers, hanging


async def test_a_finished_filtered_or_cancelled_group_leaves_no_recorded_turns(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    engine = make_engine(scripted_answer)
    worker = make_worker(engine)
    assert (await worker.run(order(group=1, position=1))).outcome == "finished"
    filtered = make_worker(engine, rewards=[("same", lambda completions: [1.0] * len(completions))], name="w1")
    await filtered.run(order(group=2, position=2, size=1))
    engine.answers, hanging = hanging_after_the_first_turn()
    running = asyncio.create_task(worker.run(order(group=3, position=3)))
    await hanging.wait()
    await worker.cancel(3)
    assert (await running).cancelled
    await asyncio.gather(worker.close(), filtered.close())
    assert survey_turns(tmp_path) == {}


async def test_turns_of_a_group_in_flight_when_the_worker_closes_stay_recorded(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    answers, hanging = hanging_after_the_first_turn()
    worker = make_worker(make_engine(answers))
    running = asyncio.create_task(worker.run(order()))
    await hanging.wait()
    await worker.close()
    await running
    found = survey_turns(tmp_path)
    assert set(found) == {9}
    assert {head.min_version for head in found[9]} == {2}
    assert (max(head.newest for head in found[9]), len(found[9])) == (4, 2)


async def test_held_out_and_aborted_answers_are_not_recorded(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    async def chat_rollout(task: Task, model: ModelClient) -> float:
        for _ in range(2):
            await model.chat(HELLO)
        return 1.0

    engine = make_engine(numbered())
    worker = make_worker(engine, chat_rollout)
    await worker.run(order(heldout=True, pinned=3))
    engine.answers, engine.stop = numbered(dies_at=1), "aborted"
    await run_until_failure(worker, order())
    assert survey_turns(tmp_path) == {}


async def test_the_journal_keeps_the_order_and_the_report_without_views(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    ordered = order(show=True)
    report = await make_worker(make_engine(scripted_answer), writer=JournalWriter(tmp_path / "journal", "w0")).run(
        ordered
    )
    (found,) = survey_journal(tmp_path / "journal")
    kept: GroupReport = found.report
    assert (found.order, kept.place) == (ordered, report.place)
    assert report.views
    assert not kept.views
    assert (kept.group, kept.rewards, kept.newest, kept.measured) == (
        report.group, report.rewards, report.newest, report.measured,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "records"), [({}, True), ({"checkpoint.turns": False}, False), ({"run.deterministic": True}, False)]
)
def test_turn_recording_follows_checkpoint_turns_and_run_deterministic(
    tmp_path: Path, changes: dict[str, Any], records: bool
) -> None:
    assert (build._turn_log(resolved(changes), tmp_path, "w0") is not None) == records
