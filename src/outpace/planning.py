"""From a config and the objects of a Python caller to a checked plan. Everything that can be wrong is found here,
before a process is started or a file written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from outpace.checkpoint import commit
from outpace.config import Config
from outpace.config_rules import resolve
from outpace.errors import BadInput
from outpace.models.loading import check_model
from outpace.observe.callbacks import Callback
from outpace.protocols import Reward, Rollout, TaskSource
from outpace.references import load_function
from outpace.rewards.registry import check_rewards
from outpace.runtime import code
from outpace.session import Plan
from outpace.tasks.dataset import Dataset, Rows
from outpace.tasks.registry import open_tasks
from outpace.types import Task

Tasks = TaskSource | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Objects:
    """What a Python caller brings instead of naming it in the config."""

    tasks: Tasks | None = None
    eval_tasks: Tasks | None = None
    rewards: tuple[Reward | str, ...] = ()
    rollout: Rollout | None = None
    callbacks: tuple[Callback, ...] = ()


def make_plan(config: Config, objects: Objects, quiet: bool = False) -> Plan:
    """Resolve, open and check everything once."""
    judged_elsewhere = bool(objects.rewards) or objects.rollout is not None or config.rollout.function is not None
    config = resolve(config, own_tasks=objects.tasks is not None, own_rewards=judged_elsewhere)
    check_model(config.model.path)
    if config.rollout.function is not None:
        load_function(config.rollout.function, "rollout.function")
    own_tasks = _own_tasks(config, objects)
    train, heldout = own_tasks or open_tasks(config)
    rewards = check_rewards(objects.rewards or config.rewards.functions, config.rewards.weights, train[0].columns)
    carried = code.pack(
        {
            "tasks": own_tasks,
            "rewards": rewards if objects.rewards else None,
            "rollout": objects.rollout,
        }
    )
    return Plan(
        config=config,
        tasks=len(train),
        heldout=0 if heldout is None else len(heldout),
        code=carried,
        callbacks=list(objects.callbacks),
        quiet=quiet,
    )


def with_checkpoint(plan: Plan, run_dir: Path) -> Plan:
    """The plan, going on from the newest complete checkpoint of a run."""
    checkpoint = commit.newest_complete(run_dir / "checkpoints")
    if checkpoint is None:
        raise BadInput(f"--resume: {run_dir} has no complete checkpoint; start it anew with run.overwrite = true")
    return replace(plan, resume=checkpoint)


def _own_tasks(config: Config, objects: Objects) -> tuple[TaskSource, TaskSource | None] | None:
    if objects.tasks is None:
        return None
    train = _as_source(objects.tasks, "tasks", config)
    if objects.eval_tasks is not None:
        return train, _as_source(objects.eval_tasks, "eval_tasks", config)
    if isinstance(train, Dataset):
        return train.split(config.eval.holdout, config.eval.seed)
    return train, None


def _as_source(given: Tasks, name: str, config: Config) -> TaskSource:
    """A source of tasks is taken as it is; rows become tasks."""
    if len(given) and isinstance(given[0], Task):
        return cast(TaskSource, given)
    rows = cast(Rows, given)
    return Dataset(rows, name, limit=config.tasks.limit, duplicate_ids=config.tasks.duplicate_ids, setting=name)
