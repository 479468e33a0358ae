"""From a config and the objects of a Python caller to a checked plan. Everything that can be wrong is found here,
before a process is started or a file of the run written; a model that has to be downloaded or converted is, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from outpace.checkpoint import commit
from outpace.config import Config
from outpace.config.loading import load_config
from outpace.config.rules import resolve
from outpace.errors import BadInput, one_line
from outpace.models.loading import resolve_model
from outpace.observe.callbacks import Callback
from outpace.protocols import Reward, Rollout, TaskSource
from outpace.references import load_function
from outpace.rewards.registry import check_rewards
from outpace.rollouts.environment import check_environment, gives_reward
from outpace.runtime import code
from outpace.session import Plan
from outpace.tasks.dataset import Dataset, Rows
from outpace.tasks.registry import Reopened, Sources, open_heldout, open_tasks, open_train
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
    if objects.eval_tasks is not None:
        config = _holding_nothing_out(config)
    config = resolve(config, own_tasks=objects.tasks is not None, own_rewards=True)
    resolve_model(config.model.path)
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


def _holding_nothing_out(config: Config) -> Config:
    """The config of a run whose held-out tasks are a Python caller's own: it must not name any others."""
    return config.model_copy(
        update={
            "tasks": config.tasks.model_copy(update={"eval_path": None}),
            "eval": config.eval.model_copy(update={"holdout": 0.0}),
        }
    )


def _own_tasks(config: Config, objects: Objects) -> Sources | None:
    """Both sources, where at least one of them is the caller's own; the other one may be named in the config."""
    if objects.tasks is None and objects.eval_tasks is None:
        return None
    heldout = None if objects.eval_tasks is None else _as_source(objects.eval_tasks, "eval_tasks", config)
    if objects.tasks is None:
        return Reopened(open_train, config), heldout
    train = _as_source(objects.tasks, "tasks", config, config.tasks.limit)
    if heldout is None and config.tasks.eval_path is not None:
        heldout = Reopened(open_heldout, config)
    if heldout is None and isinstance(train, Dataset):
        return train.split(config.eval.holdout, config.eval.seed)
    return train, heldout


def _as_source(given: Tasks, name: str, config: Config, limit: int | None = None) -> TaskSource:
    """A source of tasks is taken as it is; rows become tasks."""
    _check_rows(given, name)
    if len(given) and isinstance(given[0], Task):
        return cast(TaskSource, given)
    return Dataset(cast(Rows, given), name, limit=limit, duplicate_ids=config.tasks.duplicate_ids, setting=name)


def _check_rows(given: Any, name: str) -> None:
    """Refuse what is neither rows nor tasks, above all what else the datasets package has."""
    kind = type(given).__name__
    if isinstance(given, Mapping):
        keys = one_line(", ".join(map(str, given)), 120)
        first = next(iter(given), "train")
        raise BadInput(f"{name}: a {kind} of {keys} is not rows; give one split of it, such as data[{first!r}]")
    try:
        count = len(given)
    except TypeError:
        raise BadInput(
            f"{name}: a {kind} has no length; give rows that can be counted and indexed, such as list(rows)"
        ) from None
    try:
        if count:
            given[0]
    except (KeyError, TypeError, IndexError):
        raise BadInput(f"{name}: a {kind} has no row 0; give a sequence of rows, each a dict with a prompt") from None
