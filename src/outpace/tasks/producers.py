"""Data producers: user code that supplies a fresh dataset each round, of new prompts or of finished rollouts.

    DataProducer.produce ─▶ dataset ─▶ `tasks_of` (`outpace.tasks.produced`) ─▶ tasks of one round

The classes have the same names, arguments and semantics as in other libraries. Tensors are recognized by their
methods, without importing torch.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from outpace.config.producer import ProducerConfig
from outpace.errors import BadInput, plural
from outpace.tasks.dataset import Rows


class DataProducer(ABC):
    """Supplies a dataset for each round of training."""

    config: ProducerConfig

    @abstractmethod
    def produce(
        self,
        model: Any,
        global_step: int,
        *,
        processing_class: Any = None,
        accelerator: Any = None,
        args: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the dataset of the next round: rows with a `prompt` to roll out, or finished rollouts.

        A dataset is a `RolloutDataset`, a list of dicts or of `Task`, a Hugging Face `Dataset`, or any object with a
        length and an index. `round` in `kwargs` is the number of the round, counted from 0 across restarts of the
        run. After a kill, `produce` may be called for the same round again."""


class BaseDataProducer(DataProducer):
    """A `DataProducer` with settings and hooks. Override `produce`."""

    def __init__(self, config: ProducerConfig | None = None) -> None:
        self.config = config or ProducerConfig()

    def on_rollout_begin(self, global_step: int) -> None:
        """Called before each `produce`."""

    def on_rollout_end(self, dataset: Any, global_step: int) -> None:
        """Called after each `produce` with the dataset it returned."""


class AsyncDataProducer(DataProducer):
    """Produces datasets on one background thread, `prefetch_depth` ahead and in order.

    The first `sync_warmup_rollouts` calls and the call after them produce in the caller's thread. From then on,
    `prefetch_depth` rounds are pending after every call, but none beyond `max_rollouts`. A round gets the `model`,
    `global_step` and arguments of the call that submitted it, and `background_produce_kwargs`. The thread is a daemon,
    so a `produce` that hangs does not keep the process alive."""

    def __init__(self, inner: DataProducer, background_produce_kwargs: Mapping[str, Any] | None = None) -> None:
        self.inner = inner
        self.config = getattr(inner, "config", None) or ProducerConfig()
        self.background_produce_kwargs = dict(background_produce_kwargs or {})
        self._round = 0  # number of the next round to ask the inner producer for
        self._pending: deque[Future[Any]] = deque()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_shut_down = False

    def produce(
        self,
        model: Any,
        global_step: int,
        *,
        processing_class: Any = None,
        accelerator: Any = None,
        args: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the next dataset, blocking if the prefetch has not finished. An exception of the inner producer is
        raised by the call that would return its round."""
        if self._is_shut_down:
            raise RuntimeError("AsyncDataProducer: produce was called after shutdown")
        kwargs |= {"processing_class": processing_class, "accelerator": accelerator, "args": args}
        if not self._pending:
            self._round = kwargs.get("round", self._round)
        dataset = self._pending.popleft().result() if self._pending else self._next(model, global_step, kwargs)()
        if self._round > self.config.sync_warmup_rollouts:
            last = self.config.max_rollouts
            while len(self._pending) < self.config.prefetch_depth and (last is None or self._round < last):
                self._submit(self._next(model, global_step, kwargs | self.background_produce_kwargs))
        return dataset

    def on_rollout_begin(self, global_step: int) -> None:
        if hook := getattr(self.inner, "on_rollout_begin", None):
            hook(global_step)

    def on_rollout_end(self, dataset: Any, global_step: int) -> None:
        if hook := getattr(self.inner, "on_rollout_end", None):
            hook(dataset, global_step)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Cancel the rounds that have not begun, and wait at most `timeout_s` for the running one to end."""
        self._is_shut_down = True
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has no pending rounds."""
        return AsyncDataProducer, (self.inner, self.background_produce_kwargs)

    def _next(self, model: Any, global_step: int, kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Return the call that produces the next round."""
        given = kwargs | {"round": self._round} if "round" in kwargs else kwargs
        self._round += 1
        return lambda: call_produce(self.inner, model, global_step, given)

    def _submit(self, call: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outpace-async-producer", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._pending.append(future)
        self._jobs.put((future, call))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # thread boundary: raised by `produce`
                    future.set_exception(error)


def call_produce(producer: DataProducer, model: Any, global_step: int, kwargs: Mapping[str, Any]) -> Any:
    """Call `produce` on this thread. A coroutine is run to completion."""
    produced = producer.produce(model, global_step, **kwargs)
    return asyncio.run(produced) if inspect.iscoroutine(produced) else produced


class GRPODataProducer(BaseDataProducer):
    """Supplies the prompts of a dataset in generation batches: `generation_batch_size / num_generations` different
    prompts per round. The run rolls out each prompt as one group.

    With `shuffle_dataset`, every epoch has its own order, which depends only on `seed` and the epoch. An incomplete
    last batch of an epoch is dropped."""

    def __init__(
        self,
        config: ProducerConfig | None,
        prompt_dataset: Rows,
        *,
        num_generations: int,
        generation_batch_size: int,
        train_batch_size: int,
        steps_per_generation: int,
        shuffle_dataset: bool,
        seed: int,
    ) -> None:
        super().__init__(config)
        if num_generations < 1 or generation_batch_size < 1 or generation_batch_size % num_generations:
            raise BadInput(
                f"GRPODataProducer: generation_batch_size = {generation_batch_size} must be a multiple of "
                f"num_generations = {num_generations}"
            )
        self.prompt_dataset = prompt_dataset
        self.num_generations = num_generations
        self.generation_batch_size = generation_batch_size
        self.train_batch_size = train_batch_size
        self.steps_per_generation = steps_per_generation
        self.shuffle_dataset = shuffle_dataset
        self.seed = seed
        self.trainer: Any = None
        self._prompts = generation_batch_size // num_generations
        self._rounds_per_epoch = len(prompt_dataset) // self._prompts
        if not self._rounds_per_epoch:
            raise BadInput(
                f"GRPODataProducer: prompt_dataset has {plural(len(prompt_dataset), 'row')}, but generation_batch_size "
                f"/ num_generations = {self._prompts}; use a smaller generation_batch_size"
            )
        self._round = 0

    def set_trainer(self, trainer: Any) -> None:
        self.trainer = trainer

    def produce(
        self,
        model: Any,
        global_step: int,
        *,
        processing_class: Any = None,
        accelerator: Any = None,
        args: Any = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Return the prompts of `round`; default: the round after the previous call's."""
        number = kwargs.get("round", self._round)
        self._round = number + 1
        epoch, batch = divmod(number, self._rounds_per_epoch)
        count = len(self.prompt_dataset)
        order = np.random.default_rng((self.seed, epoch)).permutation(count) if self.shuffle_dataset else range(count)
        return [self.prompt_dataset[int(index)] for index in order[batch * self._prompts : (batch + 1) * self._prompts]]


class RolloutFunctionProducer(GRPODataProducer):
    """Supplies the finished rollouts of a function with the interface of TRL's `rollout_func`.

    `rollout_func(prompts, trainer)` gets every prompt of a generation batch `num_generations` times, and returns lists
    of `prompt_ids`, `completion_ids` and `logprobs`, one entry per prompt. `env_mask` marks the tokens of a completion
    that the policy sampled. All other entries go to the reward functions: lists per completion, other values
    unchanged. `trainer` has `model`, `processing_class`, `args`, `num_generations` and `state.global_step`."""

    def __init__(self, function: Callable[[list[Any], Any], Mapping[str, Any]], args: Any, prompts: Rows) -> None:
        """`args`: TRL's `GRPOConfig`, or an object with its attributes."""
        super().__init__(
            None,
            prompts,
            num_generations=args.num_generations,
            generation_batch_size=args.generation_batch_size,
            train_batch_size=args.per_device_train_batch_size,
            steps_per_generation=args.steps_per_generation,
            shuffle_dataset=args.shuffle_dataset,
            seed=args.seed,
        )
        self.function, self.args = function, args

    def produce(self, model: Any, global_step: int, *, processing_class: Any = None, **kwargs: Any) -> list[Any]:
        rows = [row for row in super().produce(model, global_step, **kwargs) for _ in range(self.num_generations)]
        state = SimpleNamespace(global_step=global_step)
        trainer = SimpleNamespace(
            model=model,
            processing_class=processing_class,
            args=self.args,
            num_generations=self.num_generations,
            state=state,
        )
        output = dict(self.function([row["prompt"] for row in rows], trainer))
        tokens: dict[str, Any] = {}
        for name in ("prompt_ids", "completion_ids", "logprobs"):
            if len(tokens.setdefault(name, output.pop(name, ()))) != len(rows):
                raise BadInput(f"rollout_func: must return {name}, with one entry for each of the {len(rows)} prompts")
        tokens |= {"tool_mask": output.pop("env_mask")} if "env_mask" in output else {}
        return [
            {**row, **_entry(tokens, index), "extra": _entry(output, index), "group": index // self.num_generations}
            for index, row in enumerate(rows)
        ]


def _entry(columns: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {name: values[index] if isinstance(values, list) else values for name, values in columns.items()}


ALWAYS_SHARED = frozenset({"num_items_in_batch", "_pending_policy_logps"})
"""Keys that are never per sample, regardless of their values."""


class RolloutDataset:
    """Columns as rows. Tensors, arrays, lists and tuples have one value per sample and are sliced by index; everything
    else, such as numbers, text and tensors without dimensions, is shared and passed through to every row.

    Raises `ValueError` if the per-sample columns differ in length or there is none."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = dict(data)
        sizes = {key: len(value) for key, value in data.items() if key not in ALWAYS_SHARED and _is_per_sample(value)}
        if not sizes:
            raise ValueError("RolloutDataset: no value has one entry per sample")
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{key} has {size}" for key, size in sizes.items())
            raise ValueError(f"RolloutDataset: columns differ in length: {listed}")
        self._length = next(iter(sizes.values()))
        self.shared_keys = frozenset(data) - frozenset(sizes)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: value if key in self.shared_keys else value[index] for key, value in self._data.items()}


def _is_per_sample(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def make_rollout_collator(shared_keys: Collection[str]) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]:
    """Return a function that collates rows into a batch: shared keys are passed through, tensors and arrays stacked,
    and all other values become lists."""

    def collate(batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        first = batch[0]
        return {key: first[key] if key in shared_keys else _stacked([row[key] for row in batch]) for key in first}

    return collate


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], np.ndarray | np.generic):
        return np.stack(values)
    if hasattr(values[0], "detach"):  # a tensor
        import torch

        return torch.stack(values)
    return values
