"""Opens the task sources that a config names.

A registered function takes the config and returns the training source (or a `TaskStream`) and the held-out source, or
None if nothing is held out. The function of a built-in task takes split and seed instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from outpace.config import Config
from outpace.config.defaults import with_values
from outpace.errors import BadInput
from outpace.protocols import TaskSource, TaskStream
from outpace.runtime.references import load_function
from outpace.runtime.registry import TASKS
from outpace.tasks.dataset import JSONL_SUFFIXES, TaskSubset, open_dataset
from outpace.tasks.fingerprint import Indices, content_digest
from outpace.types import Task

TaskSources = tuple[TaskSource, TaskSource | None]
TaskFactory = Callable[[Config], TaskSources]

TASK_PACKAGES = {"reasoning_gym": "outpace.tasks.reasoning_gym:open_reasoning_gym"}
"""Task packages: `tasks.name` is `<package>/<task>`."""


def is_package_task(name: str) -> bool:
    """Return whether `name` is a task of another package, as `<package>/<task>`. An existing file takes precedence."""
    package, slash, _ = name.partition("/")
    return bool(slash) and package in TASK_PACKAGES and not Path(name).exists()


def open_tasks(config: Config) -> TaskSources:
    """Return the training tasks and the held-out tasks that the config names."""
    if config.tasks.producer is not None and not names_tasks(config):
        raise BadInput("tasks.producer: a producer gives tasks only while a run trains; set tasks.name or tasks.path")
    train, heldout = _open_path(config) if config.tasks.path is not None else _open_name(config)
    return train, heldout if config.tasks.eval_path is None else open_heldout(config)


def names_tasks(config: Config) -> bool:
    """Return whether the config names tasks, for the run itself or for its producer."""
    return config.tasks.name is not None or config.tasks.path is not None


def is_task_name(text: str) -> bool:
    """Return whether this is a value of `tasks.name`, not of `tasks.path`. A dataset may have a colon too, as in
    `owner/name:configuration`."""
    place, colon, _ = text.rpartition(":")
    if is_package_task(text) or (colon and (place.endswith(".py") or "/" not in place)):
        return True
    return not ("/" in text or text.endswith((*JSONL_SUFFIXES, ".json", ".parquet")) or Path(text).exists())


def open_sets(config: Config) -> dict[str, TaskSource]:
    """Return the held-out tasks of `eval.sets`, by name."""
    return {name: _open_set(f"eval.sets.{name}", place, config) for name, place in config.eval.sets.items()}


def _open_set(setting: str, place: str, config: Config) -> TaskSource:
    if not is_task_name(place):
        return open_dataset(
            place, split=config.tasks.eval_split, duplicate_ids=config.tasks.duplicate_ids, setting=setting
        )
    own_options = config.tasks.options if place == config.tasks.name else {}
    _, heldout = _open_name(with_values(config, {"tasks.name": place, "tasks.options": own_options}), setting)
    if heldout is None:
        raise BadInput(f"{setting}: {place} has no held-out tasks; name another task, or a file")
    return heldout


def open_train(config: Config) -> TaskSource:
    """Return the training tasks that the config names."""
    return open_tasks(config)[0]


def open_heldout(config: Config) -> TaskSource:
    """Return the tasks of `tasks.eval_path`, or the held-out part of the tasks that the config names."""
    if config.tasks.eval_path is None:
        heldout = open_tasks(config)[1]
        assert heldout is not None
        return heldout
    return open_dataset(
        config.tasks.eval_path,
        split=config.tasks.eval_split,
        duplicate_ids=config.tasks.duplicate_ids,
        setting="tasks.eval_path",
    )


class ReopenedSource:
    """A source that a config names, used when the other source is a Python object. It is pickled as its config and
    reopened on arrival, so that neither open files nor rows are sent between processes."""

    def __init__(self, opener: Callable[[Config], TaskSource], config: Config) -> None:
        self._opener = opener
        self._config = config
        self._source = opener(config)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Task:
        return self._source[index]

    def digest(self, indices: Indices) -> bytes:
        return content_digest(self._source, indices)

    def __reduce__(self) -> tuple[type[ReopenedSource], tuple[Callable[[Config], TaskSource], Config]]:
        return ReopenedSource, (self._opener, self._config)


def _open_path(config: Config) -> TaskSources:
    tasks = config.tasks
    assert tasks.path is not None
    if tasks.path.endswith((*JSONL_SUFFIXES, ".parquet")) and tasks.split != "train":
        raise BadInput(f"tasks.split: {tasks.path} is a file and has no splits; leave this out")
    dataset = open_dataset(tasks.path, split=tasks.split, limit=tasks.limit, duplicate_ids=tasks.duplicate_ids)
    return dataset.split(0 if tasks.eval_path else config.eval.holdout, config.eval.seed)


def _open_name(config: Config, setting: str = "tasks.name") -> TaskSources:
    name = config.tasks.name or "countdown"
    if config.tasks.options and name in TASKS.built_in:
        raise BadInput(f"tasks.options: {name} has no options; leave this out")
    sources = _factory(name, setting)(config)
    if not isinstance(sources, tuple) or len(sources) != 2:
        raise BadInput(f"{setting}: {name} should return a training source and a held-out source or None")
    train, heldout = sources
    if isinstance(train, TaskStream):
        return train, heldout
    if len(train) == 0:
        raise BadInput(f"{setting}: {name} has no training tasks")
    limit = config.tasks.limit
    if limit is not None and limit < len(train):
        train = TaskSubset(train, np.arange(limit))
    return train, heldout


def _factory(name: str, setting: str) -> TaskFactory:
    if is_package_task(name):
        return load_function(TASK_PACKAGES[name.partition("/")[0]], setting)
    found: Callable[..., Any] = TASKS.find(name, setting)
    return partial(_open_built_in, found) if name in TASKS.built_in else found


def _open_built_in(make: Callable[[str, int], TaskSource], config: Config) -> TaskSources:
    return make("train", config.run.seed), make("heldout", config.eval.seed)
