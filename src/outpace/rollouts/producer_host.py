"""Producer host: the component that runs the user's data producer and journals its rounds.

    produce(number, step) ─▶ DataProducer.produce, on a thread ─▶ dataset ─▶ tasks ─▶ journal, synced ─▶ reply
                                  │ model.generate ─▶ engines
                                  └ model.logprobs ─▶ learner, in the order of its calls

Invariants
- A round is on disk before `produce` returns. A round on disk is never produced again.
- User code runs on its own threads, never on the event loop.
- The host never computes with the learner's weights: logprobs are an ordinary call to the learner, so a background
  producer cannot interleave with a collective of the learner's ranks. `model.module` is set only in synchronous rounds
  of a producer in the learner's process, while the learner is idle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from outpace.config import Config
from outpace.config.producer import ProducerConfig
from outpace.engines.fleet import EngineFleet
from outpace.errors import BadInput, one_line
from outpace.models.chat_format import ChatFormat
from outpace.monitoring.metric_table import check_name, collecting, full_name
from outpace.monitoring.metrics import Meter
from outpace.protocols import Learner
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.episode import has_reward
from outpace.runtime import rng
from outpace.runtime.async_tools import gather_or_cancel, run_in_thread
from outpace.runtime.references import accepted_parameters
from outpace.tasks.produced import tasks_of
from outpace.tasks.producers import AsyncDataProducer, call_produce
from outpace.tasks.registry import names_tasks, open_train
from outpace.tasks.stream import Round, StreamedTasks
from outpace.types import Aggregate, Answer, FleetMember, Floats, GroupOrder, Ints, Message, Task, Version

PRODUCER_DRAWS = 1 << 41
"""First draw number of producer sampling, which takes one per round. Visits never use these draw numbers."""

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "stop_strings", "seed")
"""Settings of the run that `generate` can override."""

Prompt = str | Sequence[Message] | Sequence[int]
"""Text (one user message), chat messages, or token ids."""

T = TypeVar("T")


class ProducerModel:
    """The `model` argument of `produce`: samples from the current policy. May be called from any thread. `agenerate`
    and `alogprobs` are coroutines for any event loop."""

    module: Any = None
    """The learner's module in synchronous rounds of a run with `run.runtime = "inline"`, else None."""

    def __init__(
        self,
        config: Config,
        engines: EngineFleet,
        chat_format: ChatFormat,
        learner: Callable[[], Awaitable[Learner]],
    ) -> None:
        """`learner` returns the learner, or connects to it. Create the model on the event loop of its host."""
        self._config = config
        self._engines = engines
        self._chat_format = chat_format
        self._learner = learner
        self._loop = asyncio.get_running_loop()
        self._version: Version = 0
        self.newest: Version = 0
        """The newest policy version seen in an engine or an answer."""
        self.start_round(0)

    @property
    def version(self) -> Version:
        """The oldest policy version that an engine serves."""
        return self._version

    def generate(self, prompts: Prompt | Sequence[Prompt], n: int = 1, **sampling: Any) -> list[Answer]:
        """Sample `n` answers to each prompt, in the order of the prompts. `sampling` overrides the run's settings that
        are named in `SAMPLING`."""
        return self._run(self._generate(prompts, n, sampling)).result()

    async def agenerate(self, prompts: Prompt | Sequence[Prompt], n: int = 1, **sampling: Any) -> list[Answer]:
        return await asyncio.wrap_future(self._run(self._generate(prompts, n, sampling)))

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float | None = None) -> list[Floats]:
        """Return the logprobs of every token but the first, under the learner's newest version."""
        return self._run(self._logprobs(sequences, temperature)).result()

    async def alogprobs(self, sequences: Sequence[Sequence[int]], temperature: float | None = None) -> list[Floats]:
        return await asyncio.wrap_future(self._run(self._logprobs(sequences, temperature)))

    def start_round(self, number: int) -> None:
        """Seed all further sampling with the round number."""
        self._round = number
        self._answers = count()

    async def update(self, members: list[FleetMember]) -> None:
        served = [member.version for member in members if member.serves]
        self._version = min(served, default=self._version)
        self.newest = max([self.newest, *served])
        await self._engines.update(members)

    async def close(self) -> None:
        await self._engines.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _generate(self, prompts: Prompt | Sequence[Prompt], n: int, sampling: dict[str, Any]) -> list[Answer]:
        if unknown := sorted(set(sampling) - set(SAMPLING)):
            raise TypeError(f"generate: unknown argument {', '.join(unknown)}; it takes n, {', '.join(SAMPLING)}")
        sampled = [self._answer(prompt, sampling) for prompt in _as_prompts(prompts) for _ in range(n)]
        answers: list[Answer] = await gather_or_cancel(*sampled)
        self.newest = max([self.newest, *(int(answer.versions.max(initial=0)) for answer in answers)])
        return answers

    def _answer(self, prompt: Prompt, sampling: dict[str, Any]) -> Coroutine[Any, Any, Answer]:
        order = GroupOrder(-1 - self._round, 0, 0, self._version, 1, draw=PRODUCER_DRAWS + self._round)
        client = PolicyClient(
            self._engines, self._chat_format, self._config, order, next(self._answers), any_distribution=True
        )
        if isinstance(prompt, str):
            return client.chat([{"role": "user", "content": prompt}], **sampling)
        if len(prompt) and isinstance(prompt[0], dict):
            return client.chat(prompt, **sampling)  # type: ignore[arg-type]
        return client.complete(prompt, **sampling)  # type: ignore[arg-type]

    async def _logprobs(self, sequences: Sequence[Sequence[int]], temperature: float | None) -> list[Floats]:
        learner = await self._learner()
        ids = [np.array(sequence, dtype=np.int32) for sequence in sequences]
        return await learner.logprobs(ids, self._config.rollout.temperature if temperature is None else temperature)


def _as_prompts(prompts: Any) -> Sequence[Prompt]:
    """Return a list of prompts; a single prompt is wrapped in a list."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], dict | int | np.integer)):
        return [prompts]
    return list(prompts)


@dataclass(frozen=True)
class ProducerTrainer:
    """The argument of a producer's `set_trainer`."""

    model: ProducerModel
    processing_class: Any
    args: Config


class ProducerHost:
    """Implements `outpace.protocols.Producer`."""

    def __init__(
        self,
        config: Config,
        producer: Any,
        tasks: StreamedTasks,
        model: ProducerModel,
        tokenizer: Any,
        module: Any = None,
        graded: bool = True,
        vocabulary: int = 0,
    ) -> None:
        """`module`: the learner's module, if the learner is in this process. `graded`: the run's functions or its
        rollout give rewards. `vocabulary`: number of token ids of the model, if the tokenizer has fewer."""
        self._config = config
        self._settings = config.producer
        self._background_kwargs: dict[str, Any] = {}
        if isinstance(producer, AsyncDataProducer):  # rounds are prefetched by the controller, which journals them
            producer, self._background_kwargs = producer.inner, dict(producer.background_produce_kwargs)
        self._producer = producer
        self._tasks = tasks
        self._model = model
        self._tokenizer = tokenizer
        self._module = module
        self._graded = graded
        self._vocabulary = max(len(tokenizer), vocabulary)
        self._rng: str | None = None  # state after the last round; None: this process has produced none
        if hasattr(producer, "set_trainer"):
            producer.set_trainer(ProducerTrainer(model, tokenizer, config))

    async def produce(self, number: int, step: Version) -> dict[str, Aggregate]:
        await asyncio.to_thread(len, self._tasks)  # reads what is on disk
        if number < self._tasks.rounds:
            return {}
        assert number == self._tasks.rounds, f"round {number} was asked for before round {self._tasks.rounds}"
        started = time.monotonic()
        with collecting() as reported:
            made, error = await run_in_thread(partial(self._make_round, number, step))
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        if error is not None:  # a task cannot propagate StopIteration, SystemExit and the like
            raise RuntimeError(f"{type(error).__name__} {error}".strip()) from error
        await asyncio.to_thread(self._tasks.append_round, *made)  # not on the user's thread, which a run may abandon
        reported.add("producer/rounds", 1)
        reported.add("producer/rows", made[0].count)
        reported.add("producer/seconds", time.monotonic() - started)
        meter = Meter()
        meter.collect(reported)
        return meter.take()

    async def fleet(self, members: list[FleetMember]) -> None:
        await self._model.update(members)

    async def close(self) -> None:
        await self._model.close()

    def _make_round(self, number: int, step: Version) -> tuple[Round, list[Task]]:
        """Produce and check a round. Runs on a thread."""
        if self._rng is None:
            if self._tasks.rng:
                rng.restore(self._tasks.rng.encode())
            self._rng = rng.capture().decode()
        with self._module_in_use(number):
            dataset = self._ask(number, step)
        tasks = tasks_of(dataset, number, max(step, self._model.newest), self._graded)
        for name in {name for task in tasks for episode in task.episodes for name in episode.metrics}:
            check_name(full_name(name))
        for task in tasks:
            for wrong in (ids[(ids < 0) | (ids >= self._vocabulary)] for ids in _token_ids(task)):
                if len(wrong):
                    raise BadInput(
                        f"tasks.producer: task {one_line(task.id, 60)} has the token id {wrong[0]}; those of the model "
                        f"are 0 to {self._vocabulary - 1}"
                    )
            if not self._graded and not any(map(has_reward, task.episodes)):
                raise BadInput(f"rewards.functions: set at least one; task {one_line(task.id, 60)} has no reward")
        before, self._rng = self._rng, rng.capture().decode()
        header = Round(
            round=number,
            count=len(tasks),
            passes=self._settings.mini_epochs,
            limit=self._visit_limit(),
            step=step,
            rng=self._rng if self._rng != before else "",
        )
        return header, tasks

    def _ask(self, number: int, step: Version) -> Any:
        producer = self._producer
        self._model.start_round(number)
        known = {"processing_class": self._tokenizer, "accelerator": None, "args": self._config, "round": number}
        given = {name: known[name] for name in accepted_parameters(producer.produce, known)}
        if self._settings.in_background(number):
            given |= self._background_kwargs
        if hasattr(producer, "on_rollout_begin"):
            producer.on_rollout_begin(step)
        dataset = call_produce(producer, self._model, step, given)
        if hasattr(producer, "on_rollout_end"):
            producer.on_rollout_end(dataset, step)
        return dataset

    def _visit_limit(self) -> int | None:
        steps = self._settings.steps_per_generation
        return None if steps is None else steps * self._config.pacing.groups_per_step

    @contextmanager
    def _module_in_use(self, number: int) -> Iterator[None]:
        """Expose the learner's module in a synchronous round, prepared as configured."""
        module = None if self._settings.in_background(number) else self._module
        if module is None:
            yield
            return
        modes = {part: part.training for part in module.modules()}
        if self._settings.eval_during_produce:
            module.eval()
        if self._settings.empty_cache_before_produce:
            _empty_cache()
        self._model.module = module
        try:
            yield
        finally:
            self._model.module = None
            for part, training in modes.items():
                part.training = training
            if self._settings.empty_cache_after_produce:
                _empty_cache()


def _token_ids(task: Task) -> Iterator[Ints]:
    return (kept.tokens for episode in task.episodes for kept in episode.trajectories)


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_producer(given: Any, config: Config) -> Any:
    """Return the producer. A class or function is called with `producer.options`, with `config` if it takes one, and
    with the tasks that the config names, if any, as `prompt_dataset`. An object is returned as it is."""
    if not isinstance(given, type) and hasattr(given, "produce"):
        return given
    options = dict(config.producer.options)
    if "config" in accepted_parameters(given, {"config"}):
        options.setdefault("config", config.producer)
    if names_tasks(config):
        options.setdefault("prompt_dataset", open_train(config))
    producer = given(**options)
    own = getattr(producer, "config", None)
    for key in own.model_fields_set if isinstance(own, ProducerConfig) else ():
        if getattr(own, key) != getattr(config.producer, key):
            raise BadInput(f"producer.{key}: the producer made its own config; set this in the config of the run")
    if isinstance(producer, AsyncDataProducer) and not config.producer.async_prefetch:
        raise BadInput("producer.async_prefetch: the producer is an AsyncDataProducer; turn this on")
    if not callable(getattr(producer, "produce", None)):
        raise BadInput(
            f"tasks.producer: {type(producer).__name__} has no method `produce`; derive it from DataProducer"
        )
    return producer
