"""The component that runs a data producer: rounds in the journal, the model that producers use, and what fails."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outpace
from outpace.config import Config
from outpace.config.producer import ProducerConfig
from outpace.engines.fleet import EngineFleet
from outpace.errors import BadInput
from outpace.models.chat_format import TemplateChatFormat
from outpace.monitoring.metrics import result
from outpace.rollouts.producer_host import ProducerHost, ProducerModel, make_producer
from outpace.tasks.producers import AsyncDataProducer, BaseDataProducer
from outpace.tasks.stream import StreamedTasks
from outpace.types import Episode, FleetMember, Floats, Ints, Task, Trajectory
from rollouts_support import rollout_config
from support import naming

MakeHost = Callable[..., ProducerHost]


class Questions(BaseDataProducer):
    """Calls `make` for each round."""

    def __init__(self, make: Callable[..., Any], config: ProducerConfig | None = None) -> None:
        super().__init__(config)
        self.make = make
        self.calls: list[str] = []

    def on_rollout_begin(self, global_step: int) -> None:
        self.calls.append(f"begin {global_step}")

    def on_rollout_end(self, dataset: Any, global_step: int) -> None:
        self.calls.append(f"end {len(dataset)} {global_step}")

    def produce(self, model: Any, global_step: int, **kwargs: Any) -> Any:
        self.calls.append(f"produce {kwargs['round']} {global_step}")
        return self.make(model)


ATTEMPT = {"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.5], "versions": 0}
TRAJECTORY = Trajectory(
    np.array([1, 2, 3], np.int32),
    np.array([False, False, True]),
    np.array([0.0, 0.0, -0.5], np.float32),
    np.array([-1, -1, 0], np.int32),
)


def rows(*prompts: str) -> list[dict[str, str]]:
    return [{"prompt": prompt} for prompt in prompts]


@pytest.fixture
def make_host(tmp_path: Path, tokenizer: Any) -> MakeHost:
    """A host that journals in `tmp_path`. Its engine gives these answers, its learner these logprobs."""

    def make(
        producer: Any,
        engine: Any = None,
        learner: Any = None,
        module: Any = None,
        graded: bool = True,
        **settings: Any,
    ) -> Any:
        async def connect() -> Any:
            return learner

        config: Config = rollout_config().model_copy(update={"producer": ProducerConfig(**settings)})
        model = ProducerModel(
            config,
            EngineFleet({} if engine is None else {"e0": engine}),
            TemplateChatFormat(tokenizer, (tokenizer.eos_token_id,)),
            connect,
        )
        tasks = StreamedTasks(tmp_path / "tasks.jsonl")
        return ProducerHost(config, producer, tasks, model, tokenizer, module, graded)

    return make


# ------------------------------------------------------------------------------------------------------------- rounds


async def test_a_round_is_journaled_and_not_asked_for_again_also_by_a_restarted_process(
    make_host: MakeHost, tmp_path: Path
) -> None:
    producer = Questions(lambda _: rows("a", "b"))
    await make_host(producer, mini_epochs=2).produce(0, 0)
    restarted = make_host(producer, mini_epochs=2)
    await restarted.produce(0, 0)
    await restarted.produce(1, 7)
    assert producer.calls == ["begin 0", "produce 0 0", "end 2 0", "begin 7", "produce 1 7", "end 2 7"]
    tasks = StreamedTasks(tmp_path / "tasks.jsonl")
    assert len(tasks) == 8
    assert [tasks[visit].prompt for visit in range(8)] == ["a", "b"] * 4
    assert len({tasks[visit].id for visit in range(8)}) == 4


async def test_a_round_reports_its_metrics_and_those_of_the_producer(make_host: MakeHost) -> None:
    def make(_: Any) -> Any:
        outpace.log_metric("episode/candidates", 7)
        return rows("a", "b")

    host = make_host(Questions(make))
    measured = {name: result(each) for name, each in (await host.produce(0, 0)).items()}
    assert (measured.pop("producer/seconds") or 0) > 0
    assert measured == {"producer/rounds": 1, "producer/rows": 2, "episode/candidates": 7}
    assert await host.produce(0, 0) == {}, "the round is on disk: nothing was asked for"


async def test_steps_per_generation_limits_the_visits_of_a_round(make_host: MakeHost, tmp_path: Path) -> None:
    host = make_host(Questions(lambda _: rows(*map(str, range(50)))), steps_per_generation=3)
    await host.produce(0, 0)
    per_step = rollout_config().pacing.groups_per_step
    assert len(StreamedTasks(tmp_path / "tasks.jsonl")) == min(50, 3 * per_step)


async def test_a_producer_may_take_no_further_arguments_and_may_be_a_coroutine(
    make_host: MakeHost, tmp_path: Path
) -> None:
    class Plain:
        async def produce(self, model: Any, global_step: int) -> Any:
            await asyncio.sleep(0)
            return rows(f"step {global_step}")

    await make_host(Plain()).produce(0, 5)
    assert StreamedTasks(tmp_path / "tasks.jsonl")[0].prompt == "step 5"


async def test_random_numbers_continue_after_a_restart_as_without_one(make_host: MakeHost, tmp_path: Path) -> None:
    producer = Questions(lambda _: rows(f"{random.random()} {np.random.random()}"))
    random.seed(1)
    np.random.seed(1)
    host = make_host(producer)
    for number in range(3):
        await host.produce(number, 0)
    whole = [task.prompt for task in map(StreamedTasks(tmp_path / "tasks.jsonl").__getitem__, range(3))]
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))  # the first round
    random.seed(2)
    restarted = make_host(producer)
    for number in range(1, 3):
        await restarted.produce(number, 0)
    assert [task.prompt for task in map(StreamedTasks(path).__getitem__, range(3))] == whole


async def test_a_prefetching_producer_is_asked_in_the_background_with_its_further_arguments(
    make_host: MakeHost,
) -> None:
    seen: list[Any] = []

    class Greedy(Questions):
        def produce(self, model: Any, global_step: int, **kwargs: Any) -> Any:
            seen.append(kwargs.get("temperature"))
            return rows("a")

    producer = AsyncDataProducer(Greedy(lambda _: None), {"temperature": 0.5})
    host = make_host(producer, async_prefetch=True, sync_warmup_rollouts=1)
    for number in range(2):
        await host.produce(number, 0)
    assert seen == [None, 0.5]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda _: None, BadInput, ["round 0", "no data"]),
        (lambda _: [], BadInput, ["round 0", "no data"]),
        (lambda _: [{"prompt": "a"}, {"question": "b"}], BadInput, ["row 1", "prompt"]),
        (lambda _: 3, BadInput, ["int"]),
        (lambda _: [ATTEMPT | {"completion_ids": [10**6]}], BadInput, ["tasks.producer", "1000000"]),
        (lambda _: [ATTEMPT | {"completion": ["hi"]}], BadInput, ["tasks", "completion"]),
        (lambda _: [Task("a", "b", episodes=[Episode([TRAJECTORY], metrics={"bad name": 1})])], BadInput, ["bad name"]),
        (lambda _: next(iter(())), RuntimeError, ["StopIteration"]),
        (lambda _: exit(3), RuntimeError, ["SystemExit", "3"]),
        (lambda _: {}["question"], KeyError, ["question"]),
    ],
)
async def test_a_round_that_cannot_be_used_is_one_error_and_leaves_nothing_in_the_journal(
    make_host: MakeHost, tmp_path: Path, make: Any, error: type[Exception], words: list[str]
) -> None:
    class Unchecked(Questions):
        def on_rollout_end(self, dataset: Any, global_step: int) -> None: ...

    with pytest.raises(error, match=naming(*words)):
        await make_host(Unchecked(make)).produce(0, 0)
    assert len(StreamedTasks(tmp_path / "tasks.jsonl")) == 0


async def test_without_reward_functions_every_task_must_come_with_rewards(make_host: MakeHost, tmp_path: Path) -> None:
    unsolved = Task("b", "?", episodes=[Episode([TRAJECTORY], reward=0.0)] * 2)
    given = [[ATTEMPT | {"reward": 1.0}, ATTEMPT | {"reward": 0.0}, unsolved], [ATTEMPT], rows("a")]
    host = make_host(Questions(lambda _: given.pop(0)), graded=False)
    await host.produce(0, 0)
    first, second = map(StreamedTasks(tmp_path / "tasks.jsonl").__getitem__, range(2))
    assert [episode.reward for episode in first.episodes] == [1.0, 0.0]
    assert [episode.rewards for episode in second.episodes] == [{"rollout": 0.0}] * 2, "all of them failed"
    for _ in range(2):
        with pytest.raises(BadInput, match=r"^rewards.functions: "):
            await host.produce(1, 0)


def test_a_class_that_makes_settings_of_its_own_is_refused() -> None:
    class Own(Questions):
        def __init__(self) -> None:
            super().__init__(rows, ProducerConfig(mini_epochs=3))

    with pytest.raises(BadInput, match=r"^producer\.mini_epochs: "):
        make_producer(Own, rollout_config())
    with pytest.raises(BadInput, match=r"^producer\.async_prefetch: "):
        make_producer(lambda: AsyncDataProducer(Questions(rows)), rollout_config())


def test_a_class_gets_the_settings_and_its_options() -> None:
    settings = ProducerConfig(mini_epochs=3, options={"make": 7})
    config = rollout_config().model_copy(update={"producer": settings})
    producer = make_producer(Questions, config)
    assert (producer.config, producer.make) == (settings, 7)
    assert make_producer(producer, config) is producer
    with pytest.raises(BadInput, match=naming("tasks.producer", "produce")):
        make_producer(lambda make: 3, config)


# -------------------------------------------------------------------------------------------------------------- model


async def test_a_producer_samples_from_the_policy_reproducibly(make_host: MakeHost, make_engine: Any) -> None:
    def ask(model: Any) -> Any:
        assert model.module is None
        assert model.version == 2
        answers = model.generate(["one", [{"role": "user", "content": "two"}]], n=2, temperature=0.25, max_tokens=4)
        answers += model.generate([5, 6, 7])
        found.append([(answer.text, answer.versions.tolist()[0]) for answer in answers])
        return rows(*(answer.text for answer in answers))

    found: list[Any] = []
    engines = [make_engine(lambda episode, turn: f"answer {episode}") for _ in range(2)]
    for engine in engines:
        host = make_host(Questions(ask), engine)
        await host.fleet([FleetMember("e0", "", serves=True, version=2), FleetMember("e1", "", serves=False)])
        await host.produce(0 if engine is engines[0] else 1, 3)
    assert [text for text, _ in found[0]] == [f"answer {number}" for number in range(5)]
    first, second = ({key: value.seed for key, value in engine.samplings.items()} for engine in engines)
    assert len(set(first.values()) | set(second.values())) == 10, "every answer of every round has its own noise"
    assert {(each.temperature, each.max_tokens) for each in list(engines[0].samplings.values())[:4]} == {(0.25, 4)}
    assert all(bound == (2, None) for bound in engines[0].bounds)


class Ranks:
    """A learner of two ranks, behind the protocol: every call runs on one thread of each rank, in the order in which
    the calls arrive, and starts with a collective, in which the ranks must meet."""

    def __init__(self) -> None:
        self._ranks = [ThreadPoolExecutor(1, f"rank-{number}") for number in range(2)]
        self._meeting = threading.Barrier(2, timeout=30)
        self.collectives: list[list[tuple[str, str]]] = [[], []]  # operation and thread, of each rank

    def _run(self, rank: int, operation: str) -> None:
        self.collectives[rank].append((operation, threading.current_thread().name))
        self._meeting.wait()

    async def _call(self, operation: str) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._ranks[n], self._run, n, operation) for n in range(2)))

    async def step(self, version: int) -> None:
        await self._call(f"step {version}")

    async def logprobs(self, sequences: list[Ints], temperature: float) -> list[Floats]:
        await self._call("logprobs")
        return [np.full(len(sequence) - 1, -temperature, np.float32) for sequence in sequences]

    def close(self) -> None:
        for rank in self._ranks:
            rank.shutdown()


class Module:
    """A module whose every use is a collective."""

    training = True

    def modules(self) -> list[Module]:
        return [self]

    def eval(self) -> None:
        self.training = False


async def test_a_background_producer_never_calls_a_collective_of_the_learners_ranks(make_host: MakeHost) -> None:
    learner, stepped = Ranks(), threading.Event()
    modules: list[Any] = []

    def ask(model: Any) -> Any:
        modules.append(model.module)
        for _ in range(5):
            stepped.wait(30)
            (found,) = model.logprobs([[1, 2, 3]])
            assert found.tolist() == [-0.5, -0.5]
        return rows("a")

    host = make_host(Questions(ask), learner=learner, module=Module(), async_prefetch=True)
    producing = asyncio.create_task(host.produce(0, 0))
    for version in range(20):
        await learner.step(version)
        stepped.set()
    await producing
    first, second = ([operation for operation, _ in rank] for rank in learner.collectives)
    assert first == second, "both ranks run the same calls in the same order"
    assert first.count("logprobs") == 5
    assert [each for each in first if each != "logprobs"] == [f"step {version}" for version in range(20)]
    for number, rank in enumerate(learner.collectives):
        assert {thread.rpartition("_")[0] for _, thread in rank} == {f"rank-{number}"}, "on the learner's threads only"
    assert modules == [None], "a background producer has no module to call"
    learner.close()


@pytest.mark.parametrize(("eval_during_produce", "training"), [(True, False), (False, True)])
async def test_a_synchronous_producer_beside_the_learner_gets_the_module(
    make_host: MakeHost, eval_during_produce: bool, training: bool
) -> None:
    module, seen = Module(), list[Any]()

    def ask(model: Any) -> Any:
        seen.append((model.module, model.module.training))
        return rows("a")

    producer = Questions(ask)
    host = make_host(producer, module=module, eval_during_produce=eval_during_produce, empty_cache_after_produce=True)
    await host.produce(0, 0)
    assert seen == [(module, training)]
    assert module.training, "the mode is as before"
