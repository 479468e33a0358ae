"""From a config and the objects of a Python caller to a checked plan. Everything that can be wrong is found here,
before a process is started or a file of the run written; a model that has to be downloaded or converted is, once."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from outpace import registered
from outpace.checkpoint import commit
from outpace.config import Config
from outpace.config.loading import load_config, objects_beside
from outpace.config.rules import resolve
from outpace.engines.servers.choices import kind_of, python_of
from outpace.engines.servers.starting.commands import base_environment
from outpace.engines.servers.starting.versions import installed
from outpace.errors import BadInput, one_line
from outpace.models.adapter_files import check_peft
from outpace.models.loading import resolve_model
from outpace.models.tokenizer_files import tokenizer_digest
from outpace.observe.callbacks import Callback
from outpace.observe.summary import STOPPED, Summary
from outpace.placement import placement_of, uses_gpu
from outpace.protocols import Reward, Rollout, TaskSource
from outpace.references import refuse_while_importing
from outpace.resources import check_dtype
from outpace.rewards.registry import check_rewards
from outpace.rollouts.assembly import check_assembly
from outpace.rollouts.environments.kinds import Given
from outpace.runtime import code
from outpace.saved_objects import SavedObjects, restored, saved
from outpace.session import Plan
from outpace.tasks.dataset import Dataset, Rows
from outpace.tasks.fingerprint import fingerprint
from outpace.tasks.registry import Reopened, Sources, open_heldout, open_tasks, open_train
from outpace.types import Task
from outpace.wording import plural, with_article

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
    refuse_while_importing()
    own_rollout = objects.rollout is not None or objects.environment is not None
    judged_elsewhere = bool(objects.rewards) or own_rollout or config.rollout.function is not None
    if objects.eval_tasks is not None:
        config = _holding_nothing_out(config)
    own_tasks = objects.tasks is not None
    config = resolve(config, own_tasks=own_tasks, own_rewards=True, own_rollout=own_rollout)
    check_dtype(config.model.dtype, "model.dtype", on_cpu=not uses_gpu(config))
    model = resolve_model(config.model.path)
    if config.lora.rank:
        check_peft()
    _check_serving(config)
    own_sources = _own_sources(config, objects)
    train, heldout = own_sources or open_tasks(config)
    config = resolve(config, own_tasks=own_tasks, own_rewards=judged_elsewhere, own_rollout=own_rollout)
    named = objects.rewards or config.rewards.functions
    rewards = check_rewards(named, config.rewards.weights, train[0].columns, config)
    own = {"rollout": objects.rollout, "environment": objects.environment, "tools": objects.tools or None}
    if not check_assembly(config, own, train[0]) and not rewards:
        raise BadInput("rewards.functions: name at least one: nothing else gives an episode of this run a reward")
    carried = {"tasks": own_sources, "rewards": rewards if objects.rewards else None, **own}
    given = {name: value for name, value in carried.items() if value is not None}
    for_learner = registered.for_learner(config)
    sent = {**carried, "registered": registered.for_worker(config)}
    named_by_program = sent["registered"] is not None or for_learner is not None
    return Plan(
        config=config,
        tasks=fingerprint(train),
        tokenizer=tokenizer_digest(model),
        heldout=0 if heldout is None else len(heldout),
        code=code.pack(sent),
        learner_code=code.pack({"registered": for_learner}),
        objects=(
            *given,
            *(("registered names",) if named_by_program else ()),
        ),
        saved=_saved(config, objects, heldout if own_sources else None) if given else None,
        callbacks=list(objects.callbacks),
        quiet=quiet,
    )


def run_with_objects(run: Path, settings: Sequence[str]) -> tuple[Config, Objects]:
    """The config that a run left, with changes, and of a run that was started from Python the objects that an
    evaluation needs, as far as they can be found again."""
    file = _config_file(run)
    config = load_config(file, settings)
    if not objects_beside(file):
        return config, Objects()
    found = restored(run)
    if config.tasks.name is None and config.tasks.path is None:
        if config.tasks.eval_path is None and not found.get("eval_tasks"):
            raise BadInput(f"tasks.eval_path: the run in {run} held out no tasks; name a file of tasks to evaluate on")
        found["tasks"] = found.get("eval_tasks") or []  # training tasks are not needed, but a plan has some
    return config, Objects(**found)


def config_of_run(run: Path, settings: Sequence[str]) -> Config:
    """The config that a run left, with changes; for commands, which cannot have a Python caller's objects."""
    file = _config_file(run)
    if objects := objects_beside(file):
        raise BadInput(f"{run} was started from Python with objects of its own ({objects}); go on with it there")
    return load_config(file, settings)


def _saved(config: Config, objects: Objects, heldout: TaskSource | None) -> SavedObjects:
    given = {
        "rewards": objects.rewards,
        "rollout": objects.rollout,
        "environment": objects.environment,
        "tools": objects.tools,
    }
    return saved({name: value for name, value in given.items() if value}, heldout, config.eval.count)


def _config_file(run: Path) -> Path:
    file = run / "config.toml"
    if not file.is_file():
        raise BadInput(f"there is no run in {run}")
    return file


def with_checkpoint(plan: Plan, run_dir: Path) -> Plan:
    """The plan, going on from the newest complete checkpoint of a run; from its very beginning if there is none yet."""
    root = run_dir / "checkpoints"
    checkpoint = commit.newest_complete(root)
    if checkpoint is None and commit.steps(root):
        raise BadInput(f"--resume: no checkpoint of {run_dir} is complete; start it anew with run.overwrite = true")
    return replace(plan, resumes=True, checkpoint=checkpoint)


def already_done(plan: Plan, run_dir: Path) -> Summary | None:
    """What a run has come to that has nothing left to do: it ended well, with its last step in its newest checkpoint,
    and is given no other end than it had. None: there is something to do."""
    try:
        ended = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Summary)
        before = tomllib.loads((run_dir / "config.toml").read_text()).get("run", {})
    except (OSError, ValueError):
        return None
    if ended.exit or ended.reason == STOPPED:
        return None
    if plan.checkpoint is None or commit.step_of(plan.checkpoint) != ended.steps:
        return None
    run = plan.config.run
    same_end = (run.steps, run.epochs) == (before.get("steps"), before.get("epochs"))
    return ended if same_end or run.steps == ended.steps else None


def nothing_left(plan: Plan) -> str:
    """What to tell whoever resumes a run that is done."""
    run = plan.config.run
    if run.epochs is not None:
        return f"done, after {plural(run.epochs, 'epoch')}; go on with --run.epochs {run.epochs + 1}"
    return f"done, after {plural(run.steps or 0, 'step')}; go on with --run.steps {2 * (run.steps or 0)}"


# ---------------------------------------------------------------------------------------------------------- serving


def _check_serving(config: Config) -> None:
    """What can be seen, within a second or so, of a run's servers and of the way of its weights."""
    if config.weights.transport == "ipc" and not uses_gpu(config):
        raise BadInput('weights.transport: "ipc" shares the memory of a GPU, and there is none here; use "memory"')
    placement_of(config)  # refuses what the GPUs cannot hold
    if config.weights.dir is not None:
        _check_writable(Path(config.weights.dir))
    if config.engine.kind != "embedded" and not config.engine.urls:
        _check_installed(config)


def _check_installed(config: Config) -> None:
    """On a thread of its own: a caller, such as a notebook, may have a loop that runs."""
    question = installed(python_of(config), kind_of(config), {**base_environment(), **config.launch.env})
    with ThreadPoolExecutor(1) as aside:
        aside.submit(asyncio.run, question).result()


def _check_writable(folder: Path) -> None:
    """By trying: permissions do not tell all, and root may do what a file system cannot. Leaves nothing behind."""
    missing: list[Path] = []
    try:
        missing += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"weights.dir: cannot write to {folder}: {error.strerror}; name another folder") from None
    finally:
        for made in missing:
            with contextlib.suppress(OSError):  # somebody uses it by now, or it was never made
                made.rmdir()


# ------------------------------------------------------------------------------------------------------------- tasks


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
        raise BadInput(
            f"{name}: {with_article(kind)} of {keys} is not rows; give one split of it, such as data[{first!r}]"
        )
    try:
        count = len(given)
    except TypeError:
        raise BadInput(
            f"{name}: {with_article(kind)} has no length; give rows that can be counted and indexed, such as list(rows)"
        ) from None
    try:
        if count:
            given[0]
    except (KeyError, TypeError, IndexError):
        raise BadInput(
            f"{name}: {with_article(kind)} has no row 0; give a sequence of rows, each a dict with a prompt"
        ) from None
