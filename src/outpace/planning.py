"""From a config and the objects of a Python caller to a checked plan. Everything that can be wrong is found here,
before a process is started or a file of the run written; a model that has to be downloaded or converted is, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from outpace.checkpoint import commit
from outpace.config import Config
from outpace.config.loading import load_config, objects_beside
from outpace.config.rules import resolve
from outpace.errors import BadInput, one_line
from outpace.models.adapter_files import check_peft
from outpace.models.loading import resolve_model
from outpace.models.tokenizer_files import tokenizer_digest
from outpace.observe.callbacks import Callback
from outpace.protocols import Reward, Rollout, TaskSource
from outpace.resources import learner_gpu_share
from outpace.rewards.registry import check_rewards
from outpace.rollouts.assembly import check_assembly
from outpace.rollouts.environments.kinds import Given
from outpace.runtime import code
from outpace.session import Plan
from outpace.tasks.dataset import Dataset, Rows
from outpace.tasks.fingerprint import fingerprint
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
    environment: Given | None = None
    tools: tuple[Callable[..., Any] | str, ...] = ()
    callbacks: tuple[Callback, ...] = ()


def make_plan(config: Config, objects: Objects, quiet: bool = False) -> Plan:
    """Resolve, open and check everything once: model and tasks first, then what judges them."""
    own_rollout = objects.rollout is not None or objects.environment is not None
    judged_elsewhere = bool(objects.rewards) or own_rollout or config.rollout.function is not None
    if objects.eval_tasks is not None:
        config = _holding_nothing_out(config)
    own_tasks = objects.tasks is not None
    config = resolve(config, own_tasks=own_tasks, own_rewards=True, own_rollout=own_rollout)
    model = resolve_model(config.model.path)
    if config.lora.rank:
        check_peft()
    learner_gpu_share(config)  # refuses budgets that one GPU cannot hold
    own_sources = _own_sources(config, objects)
    train, heldout = own_sources or open_tasks(config)
    config = resolve(config, own_tasks=own_tasks, own_rewards=judged_elsewhere, own_rollout=own_rollout)
    named = objects.rewards or config.rewards.functions
    rewards = check_rewards(named, config.rewards.weights, train[0].columns, config)
    own = {"rollout": objects.rollout, "environment": objects.environment, "tools": objects.tools or None}
    if not check_assembly(config, own, train[0]) and not rewards:
        raise BadInput("rewards.functions: name at least one: nothing else gives an episode of this run a reward")
    carried = {"tasks": own_sources, "rewards": rewards if objects.rewards else None, **own}
    return Plan(
        config=config,
        tasks=fingerprint(train),
        tokenizer=tokenizer_digest(model),
        heldout=0 if heldout is None else len(heldout),
        code=code.pack(carried),
        objects=tuple(name for name, value in carried.items() if value is not None),
        callbacks=list(objects.callbacks),
        quiet=quiet,
    )


def config_of_run(run: Path, settings: Sequence[str]) -> Config:
    """The config that a run left, with changes; for commands, which cannot have a Python caller's objects."""
    file = run / "config.toml"
    if not file.is_file():
        raise BadInput(f"there is no run in {run}")
    if objects := objects_beside(file):
        raise BadInput(f"{run} was started from Python with objects of its own ({objects}); go on with it there")
    return load_config(file, settings)


def with_checkpoint(plan: Plan, run_dir: Path) -> Plan:
    """The plan, going on from the newest complete checkpoint of a run; from its very beginning if there is none yet."""
    root = run_dir / "checkpoints"
    checkpoint = commit.newest_complete(root)
    if checkpoint is None and commit.steps(root):
        raise BadInput(f"--resume: no checkpoint of {run_dir} is complete; start it anew with run.overwrite = true")
    return replace(plan, resumes=True, checkpoint=checkpoint)


def _holding_nothing_out(config: Config) -> Config:
    """The config of a run whose held-out tasks are a Python caller's own: it must not name any others."""
    return config.model_copy(
        update={
            "tasks": config.tasks.model_copy(update={"eval_path": None}),
            "eval": config.eval.model_copy(update={"holdout": 0.0}),
        }
    )


def _own_sources(config: Config, objects: Objects) -> Sources | None:
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
