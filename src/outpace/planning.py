"""From a config and the objects of a Python caller to a checked plan. Everything that can be wrong is found here,
before a process is started or a file written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from outpace.checkpoint import commit
from outpace.config import Config
from outpace.config_loading import load_config
from outpace.config_rules import resolve
from outpace.errors import BadInput
from outpace.models.loading import check_model
from outpace.observe.callbacks import Callback
from outpace.protocols import Reward, Rollout, TaskSource
from outpace.references import load_function
from outpace.rewards.registry import check_rewards
from outpace.rollout.environment import check_environment, gives_reward
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
    environment: Callable[[], object] | None = None
    callbacks: tuple[Callback, ...] = ()


def make_plan(config: Config, objects: Objects, quiet: bool = False) -> Plan:
    """Resolve, open and check everything once: model and tasks first, then what judges them."""
    own_rollout = objects.rollout or objects.environment or config.rollout.function
    judged_elsewhere = bool(objects.rewards) or own_rollout is not None
    config = resolve(config, own_tasks=objects.tasks is not None, own_rewards=True)
    check_model(config.model.path)
    if config.rollout.function is not None:
        load_function(config.rollout.function, "rollout.function")
    environment = _environment(config, objects)
    own_tasks = _own_tasks(config, objects)
    train, heldout = own_tasks or open_tasks(config)
    config = resolve(config, own_tasks=objects.tasks is not None, own_rewards=judged_elsewhere)
    rewards = check_rewards(objects.rewards or config.rewards.functions, config.rewards.weights, train[0].columns)
    if environment is not None and not rewards and not gives_reward(environment):
        raise BadInput("rewards.functions: name at least one: the environment has no get_reward of its own")
    carried = code.pack(
        {
            "tasks": own_tasks,
            "rewards": rewards if objects.rewards else None,
            "rollout": objects.rollout,
            "environment": objects.environment,
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


def config_of_run(run: Path, settings: Sequence[str]) -> Config:
    """The config that a run left, with changes; for commands, which cannot have a Python caller's objects."""
    file = run / "config.toml"
    if not file.is_file():
        raise BadInput(f"there is no run in {run}")
    config = load_config(file, settings)
    judged = config.rewards.functions or config.rollout.function or config.rollout.environment
    if (config.tasks.name is None and config.tasks.path is None) or not judged:
        raise BadInput(f"{run} was started from Python with tasks or rewards of its own; go on with it there")
    return config


def with_checkpoint(plan: Plan, run_dir: Path) -> Plan:
    """The plan, going on from the newest complete checkpoint of a run."""
    checkpoint = commit.newest_complete(run_dir / "checkpoints")
    if checkpoint is None:
        raise BadInput(f"--resume: {run_dir} has no complete checkpoint; start it anew with run.overwrite = true")
    return replace(plan, resume=checkpoint)


def _environment(config: Config, objects: Objects) -> Callable[[], object] | None:
    """The environment that is given or named, if one is, as far as it can be checked without making one."""
    named = config.rollout.environment
    ways = (objects.rollout, objects.environment, config.rollout.function, named)
    if sum(way is not None for way in ways) > 1:
        raise BadInput("rollout: a rollout and an environment, or two of either, are given; keep one")
    environment = objects.environment if named is None else load_function(named, "rollout.environment")
    if environment is not None:
        check_environment(environment, "rollout.environment")
    return environment


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
