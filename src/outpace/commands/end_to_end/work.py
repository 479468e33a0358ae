"""The work that outpace and TRL both do: the same prompts in the same order, the same rewards and the same lengths.

equal         the model decides when an answer ends, and the task's reward function grades it
long-tailed   lengths are drawn, the same ones for both systems: see `outpace.commands.end_to_end.lengths`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from outpace.commands.end_to_end.lengths import answer_length
from outpace.config import Config
from outpace.config.defaults import with_values
from outpace.config.load import make_config
from outpace.config.validation import resolve
from outpace.errors import BadInput
from outpace.hardware.cores import available_cores
from outpace.hardware.placement import uses_gpu
from outpace.models.chat import as_messages
from outpace.models.loading import resolve_model
from outpace.protocols import TaskStream
from outpace.rewards.registry import BUILT_FROM_CONFIG, BUILT_IN
from outpace.runtime.references import absolute_reference, is_reference
from outpace.tasks.registry import TaskSources, open_tasks
from outpace.types import Message, Task

Lengths = Literal["equal", "long-tailed"]

PLACE = "outpace.commands.end_to_end.lengths"

SAME_WORK: dict[str, Any] = {
    "filter.uniform": False,  # every group is trained, as in TRL
    "tasks.shuffle": False,
    "eval.count": 0,
    "checkpoint.every": 0,
}
"""Settings that make outpace do what TRL does. The user's settings override them."""


@dataclass(frozen=True)
class Work:
    """The work of a step, as defined by a resolved config."""

    config: Config
    lengths: Lengths

    @classmethod
    def of(cls, settings: Mapping[str, Any], lengths: Lengths) -> Work:
        forced = {"rollout.function": f"{PLACE}:fixed_length"} if lengths == "long-tailed" else {}
        config = resolve(make_config({**SAME_WORK, **settings, **forced}))
        if config.rollout.environment not in (None, "none") or config.tools.functions or config.tools.mcp:
            raise BadInput(f"--task: {config.tasks.name} needs several turns; choose a task with one answer")
        if config.filter.uniform:
            raise BadInput("filter.uniform: TRL trains every group; leave this out")
        return cls(config, lengths)

    def seeded(self, repeat: int) -> Work:
        """Return the work of a repeat, whose seed gives it different tasks and samples."""
        return replace(self, config=with_values(self.config, {"run.seed": self.config.run.seed + repeat}))

    @property
    def prompts(self) -> int:
        return self.config.pacing.groups_per_step

    @property
    def attempts(self) -> int:
        return self.config.rollout.group_size

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.prompts * self.attempts

    @property
    def max_tokens(self) -> int:
        assert self.config.rollout.max_tokens is not None, "the config must be resolved"
        return self.config.rollout.max_tokens

    @property
    def model(self) -> Path:
        """The directory of the model."""
        return resolve_model(self.config.model.path)

    @property
    def on_gpu(self) -> bool:
        return uses_gpu(self.config)

    @cached_property
    def _sources(self) -> TaskSources:
        train, heldout = open_tasks(self.config)
        if isinstance(train, TaskStream):
            raise BadInput("--task: a stream of tasks cannot be given to both systems; name a fixed task source")
        return train, heldout

    @property
    def task_count(self) -> int:
        return len(self._sources[0])

    def tasks(self, steps: int) -> list[Task]:
        """Return the tasks of this many steps, in the order in which both systems visit them."""
        train, _ = self._sources
        return [train[index % len(train)] for index in range(self.prompts * steps)]

    def heldout(self, count: int) -> list[Task]:
        _, source = self._sources
        if source is None:
            raise BadInput("--target: this task has no held-out tasks; leave it out")
        return [source[index] for index in range(min(count, len(source)))]

    def reward(self) -> str:
        """Return the reference of the reward function."""
        if self.lengths == "long-tailed":
            return f"{PLACE}:even_characters"
        functions = self.config.rewards.functions
        if len(functions) != 1 or functions[0] in BUILT_FROM_CONFIG:
            raise BadInput("rewards.functions: name one function in TRL's signature")
        name = functions[0]
        return absolute_reference(name) if is_reference(name) else BUILT_IN[name]

    def trl_job(self, steps: int, batch: int) -> dict[str, Any]:
        """Return what the TRL process needs, as JSON values. `batch` is TRL's per-device batch size."""
        tasks, learner = self.tasks(steps), self.config.learner
        fixed = self.lengths == "long-tailed"
        return {
            "dtype": self.config.model.dtype,
            "on_gpu": self.on_gpu,
            "threads": available_cores(),
            "rows": [
                {**task.columns, "prompt": as_messages(task.prompt, self.config.model.system_prompt)} for task in tasks
            ],
            "lengths": [self._lengths(task) for task in tasks] if fixed else None,
            "reward": self.reward(),
            "steps": steps,
            "prompts": self.prompts,
            "attempts": self.attempts,
            "batch": batch,
            "max_tokens": self.max_tokens,
            "temperature": self.config.rollout.temperature,
            "seed": self.config.run.seed,
            "optimizer": {
                "learning_rate": learner.lr,
                "adam_beta1": learner.beta1,
                "adam_beta2": learner.beta2,
                "weight_decay": learner.weight_decay,
                "max_grad_norm": learner.max_grad_norm,
                "gradient_checkpointing": learner.gradient_checkpointing,
            },
        }

    def accuracy_job(self, count: int) -> dict[str, Any]:
        """Return what `outpace.commands.end_to_end.accuracy` needs, except the files."""
        tasks, config = self.heldout(count), self.config
        return {
            "model": config.model.path,
            "dtype": config.model.dtype,
            "device": "cuda" if self.on_gpu else "cpu",
            "prompts": [self._messages(task) for task in tasks],
            "columns": {name: [task.columns[name] for task in tasks] for name in tasks[0].columns},
            "reward": self.reward(),
            "max_tokens": self.max_tokens,
            "temperature": config.rollout.temperature,
            "seed": config.eval.seed,
        }

    def _messages(self, task: Task) -> list[Message]:
        return as_messages(task.prompt, self.config.model.system_prompt)

    def _lengths(self, task: Task) -> list[int]:
        return [answer_length(task.prompt, attempt, self.max_tokens) for attempt in range(self.attempts)]
