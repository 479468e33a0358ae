"""Groups that are taken up where an earlier attempt at them ended: same answers, no engine, as far as prompts agree."""

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
from outpace.engines.fleet import EngineFleet
from outpace.errors import ComponentFailed
from outpace.models.chat_format import TemplateChatFormat
from outpace.protocols import ModelClient
from outpace.rollouts.environments.session import SINGLE_KIND, EnvironmentSessions, EnvironmentSource
from outpace.rollouts.episode import GroupTurns
from outpace.rollouts.requests import ClientSettings
from outpace.rollouts.tool_loop import EpisodeLimits, ToolLoop
from outpace.rollouts.worker import REUSED, RewardFunctions, RolloutWorker
from outpace.run import components
from outpace.types import Generation, GroupOrder, GroupReport, Sampling, Task
from rollouts_support import RecordingJournal, worker_settings
from support import resolved

POSITION = 9
"""Of the group under test."""
TASKS = [Task("t0", "Find the number.", {"secret": 7})]


class Counting:
    """Says how far off each guess is: the same after the same guesses."""

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


class Moody(Counting):
    """Never says the same thing twice."""

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
class Until:
    """Episodes of different lengths; the engine dies at one of their turns, and the others hang from there on."""

    turn_of_death: int
    episode_of_death: int = 0

    def __call__(self, episode: int, turn: int) -> Any:
        if turn >= self.turn_of_death:
            return ComponentFailed("engine-0", "connection closed") if episode == self.episode_of_death else None
        return said(episode, turn)

    @property
    def answered(self) -> set[tuple[int, int]]:
        """Episode and turn of every answer before the death."""
        return {(episode, turn) for episode in range(2) for turn in range(min(self.turn_of_death, episode + 2))}


class ObservedLog(TurnLog):
    """Which answers of the group under test are recorded, by any of the workers that share `recorded`."""

    def __init__(self, directory: Path, name: str, recorded: set[tuple[int, int]], changed: asyncio.Event) -> None:
        super().__init__(directory, name)
        self._recorded, self._changed = recorded, changed

    def record(self, order: GroupOrder, episode: int, number: int, *rest: Any) -> None:
        super().record(order, episode, number, *rest)
        if order.position == POSITION:
            self._recorded.add((episode, number))
            self._changed.set()


def said(episode: int, turn: int) -> str:
    return GUESSES[turn] if turn < episode + 1 else GUESSES[-1]


def order(**changes: Any) -> GroupOrder:
    return GroupOrder(
        **({"group": 4, "task": 0, "epoch": 0, "min_version": 2, "size": 2, "position": POSITION} | changes)
    )


MakeWorker = Callable[..., RolloutWorker]


@pytest.fixture
async def make_worker(
    tokenizer: Any, make_settings: Callable[..., ClientSettings], tmp_path: Path
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
        settings = worker_settings(make_settings(max_tokens=64, stop_strings=()))
        chat_format = TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,))
        judges, journal = RewardFunctions(list(rewards), [1.0] * len(rewards)), writer or RecordingJournal()
        fleet = EngineFleet({"engine-0": engine})
        if isinstance(engine.answers, Until):
            engine.before_failing = functools.partial(until_recorded, engine.answers.answered)
        workers.append(
            RolloutWorker(
                settings, fleet, chat_format, TASKS, TASKS, rollout or in_environment(Counting), judges, journal,
                turns=ObservedLog(tmp_path, name, recorded, changed),
            )
        )  # fmt: skip
        return workers[-1]

    yield make
    for worker in workers:
        await worker.close()


def in_environment(kind: type[Counting]) -> ToolLoop:
    return ToolLoop(
        stages=EnvironmentSessions({SINGLE_KIND: EnvironmentSource("environment", factory=kind)}),
        limits=EpisodeLimits(8),
    )


async def died(worker: RolloutWorker, ordered: GroupOrder) -> None:
    with pytest.raises(ComponentFailed):
        await worker.run(ordered)
    await worker.close()


def rows(journal: RecordingJournal) -> list[tuple[list[int], list[int]]]:
    return [(row.tokens.tolist(), row.versions.tolist()) for row in journal.records[0].rows]


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_group_goes_on_inside_its_episodes_with_the_same_tokens(
    make_engine: Any, make_worker: MakeWorker, turns: int
) -> None:
    whole = RecordingJournal()
    await make_worker(make_engine(said), name="elsewhere", writer=whole).run(order(position=1))

    engine = make_engine(Until(turns, episode_of_death=1))
    await died(make_worker(engine), order())
    successor, again = make_engine(said), RecordingJournal()
    successor.version = 20
    report = await make_worker(successor, name="w1", writer=again).run(order(recorded=True))

    everything = {"4.0.0", "4.0.1", "4.1.0", "4.1.1", "4.1.2"}
    answered = {f"4.{episode}.{turn}" for episode in range(2) for turn in range(turns)} & everything
    assert set(successor.prompts) == everything - answered, "what was answered before is not asked again"
    assert report.metrics.get(REUSED, 0) == len(answered)
    assert [tokens for tokens, _ in rows(again)] == [tokens for tokens, _ in rows(whole)]
    assert (report.outcome, report.oldest, report.newest) == ("finished", 3 if turns else 20, 24 - len(answered))


async def test_logprobs_and_versions_are_those_of_the_first_time(make_engine: Any, make_worker: MakeWorker) -> None:
    await died(make_worker(make_engine(Until(1))), order())
    journal, engine = RecordingJournal(), make_engine(said)
    engine.version = 20
    await make_worker(engine, writer=journal).run(order(recorded=True))
    for row in journal.records[0].rows:
        versions = [int(version) for version, _ in itertools.groupby(row.versions[row.mask].tolist())]
        assert versions[0] < 10
        assert versions[1:] == sorted(versions[1:])
        assert versions[1] >= 20
        first = row.logprobs[row.mask][: int((row.versions[row.mask] == versions[0]).sum())]
        assert first.tolist() == pytest.approx([-(i + 1) / 100 for i in range(len(first))])


async def test_an_environment_that_says_something_else_gets_fresh_answers(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    await died(make_worker(make_engine(Until(2, episode_of_death=1)), in_environment(Moody)), order())
    engine = make_engine(said)
    report = await make_worker(engine, in_environment(Moody)).run(order(recorded=True))
    assert set(engine.prompts) == {"4.0.1", "4.1.1", "4.1.2"}, "the first question was the same, the second was not"
    assert (report.outcome, report.metrics[REUSED]) == ("finished", 2)


async def test_a_group_that_is_ordered_anew_is_made_anew(make_engine: Any, make_worker: MakeWorker) -> None:
    await died(make_worker(make_engine(Until(2, episode_of_death=1))), order())
    engine = make_engine(said)
    report = await make_worker(engine).run(order())
    assert len(engine.prompts) == 5
    assert REUSED not in report.metrics


async def test_answers_older_than_the_stamp_are_asked_for_again(make_engine: Any, make_worker: MakeWorker) -> None:
    await died(make_worker(make_engine(Until(2, episode_of_death=1))), order())
    engine = make_engine(said)
    engine.version = 20
    report = await make_worker(engine).run(order(recorded=True, min_version=5))
    assert report.oldest >= 5
    assert set(engine.prompts) >= {"4.0.0", "4.1.0"}


async def test_the_same_worker_can_take_a_group_up_again(make_engine: Any, make_worker: MakeWorker) -> None:
    engine = make_engine(Until(2, episode_of_death=1))
    worker = make_worker(engine)
    with pytest.raises(ComponentFailed):
        await worker.run(order())
    asked = set(engine.prompts)
    engine.prompts.clear()
    engine.answers = said
    report = await worker.run(order(recorded=True))
    assert report.outcome == "finished"
    assert set(engine.prompts) == {"4.1.2"}
    assert "4.1.1" in asked


async def test_a_third_attempt_uses_what_both_before_it_had(make_engine: Any, make_worker: MakeWorker) -> None:
    await died(make_worker(make_engine(Until(1, episode_of_death=1)), name="w0"), order())
    await died(make_worker(make_engine(Until(2, episode_of_death=1)), name="w1"), order(recorded=True))
    engine = make_engine(said)
    report = await make_worker(engine, name="w2").run(order(recorded=True))
    assert set(engine.prompts) == {"4.1.2"}
    assert report.metrics[REUSED] == 4


def numbered(dies_at: int | None = None) -> Callable[[int, int], Any]:
    return lambda episode, turn: ComponentFailed("e", "gone") if turn == dies_at else f"say {turn}<|end|>"


HELLO = [{"role": "user", "content": "go"}]


async def test_who_asks_twice_gets_two_answers(make_engine: Any, make_worker: MakeWorker) -> None:
    async def ask(task: Task, model: ModelClient) -> float:
        return float(len({(await model.chat(HELLO)).text for _ in range(3)}))

    await died(make_worker(make_engine(numbered(dies_at=2)), ask), order(size=1))
    engine = make_engine(numbered())
    report = await make_worker(engine, ask).run(order(size=1, recorded=True))
    assert set(engine.prompts) == {"4.0.2"}
    assert report.rewards == [3.0]


async def test_requests_that_come_in_another_order_are_other_requests(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    def ask_in(topics: list[str]) -> Any:
        async def rollout(task: Task, model: ModelClient) -> float:
            told = {topic: (await model.chat([{"role": "user", "content": topic}])).text for topic in topics}
            return float(told.get("b", "") == "say 1")

        return rollout

    await died(make_worker(make_engine(numbered(dies_at=2)), ask_in(["a", "b", "c"])), order(size=1))
    engine = make_engine(numbered())
    report = await make_worker(engine, ask_in(["b", "a", "c"])).run(order(size=1, recorded=True))
    assert set(engine.prompts) == {"4.0.0", "4.0.1", "4.0.2"}
    assert REUSED not in report.metrics
    assert report.rewards == [0.0], "the answer has the noise of its request, not that of another one"


async def test_of_two_samples_of_one_prompt_the_early_one_never_stands_in_for_the_late_one(
    make_engine: Any, make_worker: MakeWorker
) -> None:
    heard: list[tuple[str, ...]] = []

    one = asyncio.Event()

    async def ask(task: Task, model: ModelClient) -> float:
        async def sample() -> str:
            text = (await model.chat(HELLO)).text
            one.set()
            return text

        heard.append(tuple(await asyncio.gather(sample(), sample())))
        return 1.0

    worker = make_worker(make_engine([None, "early<|end|>"]), ask)
    running = asyncio.create_task(worker.run(order(size=1)))
    await one.wait()
    await worker.close()
    await running
    engine = make_engine(["late<|end|>", "early<|end|>"])
    report = await make_worker(engine, ask).run(order(size=1, recorded=True))
    assert heard == [("late", "early")]
    assert set(engine.prompts) == {"4.0.0"}
    assert report.metrics[REUSED] == 1


async def test_an_answer_that_comes_after_its_group_was_given_up_is_not_recorded(tmp_path: Path) -> None:
    log = TurnLog(tmp_path, "w0")
    turns = GroupTurns(log, order())
    prompt, sampling = np.array([1, 2], np.int32), Sampling(max_tokens=8, seed=1)
    answer = Generation(np.array([3], np.int32), np.zeros(1, np.float32), np.array([2], np.int32), "stop")
    turns.episodes[0].record(0, prompt, sampling, answer)
    turns.close()
    turns.episodes[0].record(1, prompt, sampling, answer)
    await asyncio.to_thread(log.close)
    assert survey_turns(tmp_path) == {}


async def test_another_way_of_sampling_is_another_question(make_engine: Any, make_worker: MakeWorker) -> None:
    def at_most(tokens: int) -> Any:
        async def rollout(task: Task, model: ModelClient) -> float:
            await model.chat(HELLO, max_tokens=tokens)
            await model.chat(HELLO)
            return 1.0

        return rollout

    await died(make_worker(make_engine(numbered(dies_at=1)), at_most(32)), order(size=1))
    engine = make_engine(numbered())
    await make_worker(engine, at_most(16)).run(order(size=1, recorded=True))
    assert set(engine.prompts) == {"4.0.0", "4.0.1"}


def stuck_after_a_guess() -> tuple[Callable[[int, int], Any], asyncio.Event]:
    """Two episodes of which nothing is heard after their first turn; the event is set when both are there."""
    hanging, stuck = asyncio.Event(), set()

    def answers(episode: int, turn: int) -> Any:
        if turn == 0:
            return guess(1)
        stuck.add(episode)
        if len(stuck) == 2:
            hanging.set()
        return None

    return answers, hanging


async def test_a_group_that_is_finished_or_given_up_leaves_nothing_recorded(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    engine = make_engine(said)
    worker = make_worker(engine)
    assert (await worker.run(order(group=1, position=1))).outcome == "finished"
    filtered = make_worker(engine, rewards=[("same", lambda completions: [1.0] * len(completions))], name="w1")
    await filtered.run(order(group=2, position=2, size=1))
    engine.answers, hanging = stuck_after_a_guess()
    running = asyncio.create_task(worker.run(order(group=3, position=3)))
    await hanging.wait()
    await worker.cancel(3)
    assert (await running).cancelled
    await asyncio.gather(worker.close(), filtered.close())
    assert survey_turns(tmp_path) == {}


async def test_what_ends_with_its_worker_stays_recorded(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    answers, hanging = stuck_after_a_guess()
    worker = make_worker(make_engine(answers))
    running = asyncio.create_task(worker.run(order()))
    await hanging.wait()
    await worker.close()
    await running
    found = survey_turns(tmp_path)
    assert set(found) == {9}
    assert (found[9].min_version, found[9].newest, found[9].answers) == (2, 4, 2)


async def test_neither_held_out_nor_broken_off_answers_are_recorded(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    async def ask(task: Task, model: ModelClient) -> float:
        for _ in range(2):
            await model.chat(HELLO)
        return 1.0

    engine = make_engine(numbered())
    worker = make_worker(engine, ask)
    await worker.run(order(heldout=True, pinned=3))
    engine.answers, engine.stop = numbered(dies_at=1), "aborted"
    await died(worker, order())
    assert survey_turns(tmp_path) == {}


async def test_the_journal_keeps_order_and_report_without_views_and_place(
    make_engine: Any, make_worker: MakeWorker, tmp_path: Path
) -> None:
    ordered = order(show=True)
    report = await make_worker(make_engine(said), writer=JournalWriter(tmp_path / "journal", "w0")).run(ordered)
    (found,) = survey_journal(tmp_path / "journal")
    assert found.place == report.place
    assert found.kept.order == ordered
    assert report.views
    unplaced: GroupReport = found.kept.report
    assert (unplaced.views, unplaced.place) == ([], None)
    assert (unplaced.group, unplaced.rewards, unplaced.newest, unplaced.metrics) == (
        report.group, report.rewards, report.newest, report.metrics,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "records"), [({}, True), ({"checkpoint.turns": False}, False), ({"run.deterministic": True}, False)]
)
def test_the_config_says_whether_turns_are_recorded(tmp_path: Path, changes: dict[str, Any], records: bool) -> None:
    assert (components._turn_log(resolved(changes), tmp_path, "w0") is not None) == records
