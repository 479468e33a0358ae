"""Run planning: validate a config and the user's Python objects, and build a `RunPlan`.

All validation happens here, before any process starts or any file of the run is written. The only side effect: the
model is downloaded or converted if necessary, and cached.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from outpace.checkpoint import commit
from outpace.config import Config
from outpace.config.defaults import with_values
from outpace.config.load import CONFIG_FILE, load_config, python_objects_of, read_resolved
from outpace.config.producer import ProducerConfig
from outpace.config.validation import resolve
from outpace.engines.server.commands import configured_server
from outpace.errors import BadInput, one_line, plural
from outpace.hardware.cores import check_dtype
from outpace.hardware.memory import with_tokens_per_pass
from outpace.hardware.placement import launches_servers, placement_of, uses_gpu
from outpace.models.loading import resolve_model, tokenizer_digest
from outpace.models.lora import check_peft
from outpace.monitoring.callbacks import Callback
from outpace.monitoring.summary import STOPPED, Summary
from outpace.protocols import Reward, Rollout, TaskSource, TaskStream
from outpace.rewards.registry import NamedReward, check_rewards
from outpace.rollouts.build import check_rollout
from outpace.rollouts.environments.session import EnvironmentArgument
from outpace.run.objects import (
    ENGINE,
    LEARNER,
    WORKER,
    Registered,
    SavedObjects,
    collect_saved_objects,
    load_saved_objects,
    registered_for,
)
from outpace.runtime import by_value
from outpace.runtime.references import accepted_parameters, load_function, named_parameters, refuse_while_importing
from outpace.runtime.registry import TRANSPORTS
from outpace.tasks.dataset import Dataset, check_rows
from outpace.tasks.fingerprint import Fingerprint, fingerprint
from outpace.tasks.producers import AsyncDataProducer
from outpace.tasks.registry import (
    ReopenedSource,
    TaskSources,
    names_tasks,
    open_heldout,
    open_sets,
    open_tasks,
    open_train,
)
from outpace.tasks.stream import STREAM_FINGERPRINT
from outpace.types import Task

NOT_GRADED = "rewards.functions: set at least one; no rollout or environment of this run gives a reward"

BESIDE_LEARNER = ("eval_during_produce", "empty_cache_before_produce", "empty_cache_after_produce")
"""Producer settings that apply only in the learner's process."""

TasksArgument = TaskSource | TaskStream | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class UserObjects:
    """Python objects passed to `Trainer` instead of being named in the config."""

    tasks: TasksArgument | None = None
    eval_tasks: TasksArgument | None = None
    rewards: tuple[Reward | str, ...] = ()
    rollout: Rollout | None = None
    eval_rollout: Rollout | None = None
    environment: EnvironmentArgument | None = None
    tools: tuple[Callable[..., Any] | str, ...] = ()
    callbacks: tuple[Callback, ...] = ()
    producer: Any = None  # a `DataProducer`, or a class or function that makes one


@dataclass(frozen=True)
class RunPlan:
    """A validated and resolved run, ready to start."""

    config: Config
    tasks: Fingerprint  # of the training tasks
    stream: TaskStream | None  # gives the training tasks during the run, instead of a fixed source
    tokenizer: str  # digest
    heldout: int  # number of held-out tasks that are in no named set
    sets: dict[str, int] = field(default_factory=dict)  # number of tasks in each set of `eval.sets`
    code: bytes = b""  # pickled user objects for the workers
    learner_code: bytes = b""  # pickled user objects for the learner
    engine_code: bytes = b""  # the same for the engines
    producer_code: bytes | None = None  # pickled user objects for the producer; None: the run has none
    objects: tuple[str, ...] = ()  # names of the user objects
    saved: SavedObjects | None = None  # lets `outpace eval` restore the user objects
    callbacks: list[Callback] = field(default_factory=list)
    resumes: bool = False  # the run was started before
    checkpoint: Path | None = None  # newest complete one; None: start from version 0
    quiet: bool = False

    @property
    def streamed(self) -> bool:
        """Whether tasks arrive during the run."""
        return self.stream is not None or self.producer_code is not None

    @property
    def producer_warning(self) -> str:
        """Warning if settings are set that apply only in the learner's process; empty otherwise."""
        unused = [key for key in BESIDE_LEARNER if key in self.config.producer.model_fields_set]
        if self.producer_code is None or self.config.run.runtime == "inline" or not unused:
            return ""
        keys = ", ".join(f"producer.{key}" for key in unused)
        return f"{keys}: no effect, because the producer has a process of its own, without the model"

    @property
    def eval_counts(self) -> dict[str, int]:
        """The number of tasks to evaluate in each held-out set; "" is the unnamed one. Sets without tasks are left
        out."""
        counts = {name: min(self.config.eval.count, size) for name, size in {"": self.heldout, **self.sets}.items()}
        return {name: count for name, count in counts.items() if count}

    @property
    def eval_warning(self) -> str:
        """Warning if fewer tasks are held out than `eval.count`, in the unnamed set or in named ones; empty
        otherwise."""
        if self.producer_code is not None and self.config.eval.count and not self.heldout and not self.sets:
            return "tasks.producer: no task is held out, so nothing is evaluated; set tasks.eval_path or eval.sets"
        small = {
            name: size for name, size in {"": self.heldout, **self.sets}.items() if 0 < size < self.config.eval.count
        }
        if not small:
            return ""
        found = ", ".join(plural(size, "task") + (f" in {name}" if name else "") for name, size in small.items())
        return f"eval.count is {self.config.eval.count:,}, but only {found} held out: every evaluation uses all of them"


def make_plan(config: Config, objects: UserObjects, quiet: bool = False) -> RunPlan:
    """Resolve and validate everything once: model and tasks first, then rewards and rollout."""
    refuse_while_importing()
    own_rollout = objects.rollout is not None or objects.environment is not None
    rewards_optional = bool(objects.rewards or objects.producer) or own_rollout
    rewards_optional |= config.rollout.function is not None or config.tasks.producer is not None
    if objects.eval_tasks is not None:
        config = _without_heldout(config)
    config = _with_producer(config, objects)
    produced = objects.producer is not None or config.tasks.producer is not None
    own_tasks = objects.tasks is not None or produced
    config = resolve(config, own_tasks=own_tasks, own_rewards=True, own_rollout=own_rollout)
    check_dtype(config.model.dtype, "model.dtype", on_cpu=not uses_gpu(config))
    model = resolve_model(config.model.path)
    if config.lora.rank:
        check_peft()
    if config.learner.backend is not None:
        load_function(config.learner.backend, "learner.backend")
    _check_engines(config)
    own_sources = None if produced else _own_sources(config, objects)
    prompts, heldout = _produced_sources(config, objects) if produced else (None, None)
    train: TaskSource | None = None
    if not produced:
        train, heldout = own_sources or open_tasks(config)
    config = resolve(config, own_tasks=own_tasks, own_rewards=rewards_optional, own_rollout=own_rollout)
    config = with_tokens_per_pass(config, model)
    stream = train if isinstance(train, TaskStream) else None
    if stream is not None or produced:
        _check_stream(config, produced)
    own = {
        "rollout": objects.rollout,
        "eval_rollout": objects.eval_rollout,
        "environment": objects.environment,
        "tools": objects.tools or None,
    }
    known = prompts if produced else None if stream is not None else train
    first = None if known is None else known[0]
    rewards, graded = check_functions(config, objects.rewards, own, first)
    if not graded and not produced:
        raise BadInput(NOT_GRADED)
    sets = open_sets(config)
    _check_sets_are_graded(config, rewards, sets)
    tasks = own_sources if stream is None or own_sources is None else (None, heldout)  # workers read the journal
    carried: dict[str, Any] = {"tasks": tasks, "rewards": rewards if objects.rewards else None, **own}
    given = {name: value for name, value in (*carried.items(), ("producer", objects.producer)) if value is not None}
    if produced:
        carried["tasks"] = None, heldout
        given |= {"eval_tasks": heldout} if objects.eval_tasks is not None else {}
    for_worker = registered_for(config, WORKER, metrics=True)
    for_learner, for_engine = registered_for(config, LEARNER), registered_for(config, ENGINE)
    has_registered = any(each is not None and each.components for each in (for_worker, for_learner, for_engine))
    return RunPlan(
        config=config,
        tasks=STREAM_FINGERPRINT if train is None or stream is not None else fingerprint(train),
        stream=stream,
        tokenizer=tokenizer_digest(model),
        heldout=0 if heldout is None else len(heldout),
        sets={name: len(source) for name, source in sets.items()},
        code=by_value.pickle_objects({**carried, "registered": for_worker}),
        learner_code=by_value.pickle_objects({"registered": for_learner}),
        engine_code=by_value.pickle_objects({"registered": for_engine}),
        producer_code=_producer_code(objects, graded, for_worker) if produced else None,
        objects=(
            *given,
            *(("registered names",) if has_registered else ()),
        ),
        saved=_saved(config, objects, heldout if own_sources or "eval_tasks" in given else None) if given else None,
        callbacks=list(objects.callbacks),
        quiet=quiet,
    )


def _producer_code(objects: UserObjects, graded: bool, registered: Registered | None) -> bytes:
    return by_value.pickle_objects({"producer": objects.producer, "graded": graded, "registered": registered})


def _check_sets_are_graded(config: Config, rewards: Sequence[NamedReward], sets: Mapping[str, TaskSource]) -> None:
    """Raise if the reward functions need columns that the tasks of a named set do not have."""
    for name, source in sets.items():
        if rewards and len(source):
            try:
                check_rewards([function for _, function in rewards], None, source[0].columns, config)
            except BadInput as error:
                raise BadInput(f"eval.sets: {name} cannot be graded: {error}") from None


def check_functions(
    config: Config, rewards: Sequence[Reward | str], own: Mapping[str, Any], first: Task | None
) -> tuple[list[NamedReward], bool]:
    """Check rewards and rollout, given as objects or named in the config, against the first task, if it is
    known. Returns the reward functions, and whether they or the rollout compute a reward."""
    columns = None if first is None else first.columns
    functions = check_rewards(rewards or config.rewards.functions, config.rewards.weights, columns, config)
    return functions, check_rollout(config, own, first) or bool(functions)


def load_run_with_objects(run: Path, settings: Sequence[str]) -> tuple[Config, UserObjects]:
    """Load a run's config with overrides and, for a run started from Python, the objects that evaluation needs.

    Raises `BadInput` if such an object cannot be restored."""
    file = _config_file(run)
    config = load_config(file, settings)
    if not python_objects_of(file):
        return config, UserObjects()
    found = load_saved_objects(run)
    if config.tasks.name is None and config.tasks.path is None:
        # Evaluation needs no training tasks, but a plan must have some.
        found["tasks"] = found.get("eval_tasks") or _any_heldout_task(config)
        if not found["tasks"]:
            raise BadInput(f"tasks.eval_path: the run in {run} has no held-out tasks; set a file of tasks")
        config = with_values(config.model_copy(update={"producer": ProducerConfig()}), {"tasks.producer": None})
    return config, UserObjects(**found)


def _any_heldout_task(config: Config) -> list[Task]:
    sources = [open_heldout(config)] if config.tasks.eval_path is not None else list(open_sets(config).values())
    return [source[0] for source in sources[:1]]


def load_run_config(run: Path, settings: Sequence[str]) -> Config:
    """Load a run's config with overrides. Rejects runs with Python objects, which a command cannot provide."""
    file = _config_file(run)
    if objects := python_objects_of(file):
        how = f'Trainer(..., config={{"run.dir": "{run}"}}).train(resume=True)'
        raise BadInput(f"{run} was started from Python with its own objects ({objects}); continue it with {how}")
    return load_config(file, settings)


def _saved(config: Config, objects: UserObjects, heldout: TaskSource | None) -> SavedObjects:
    given = {
        "rewards": objects.rewards,
        "rollout": objects.rollout,
        "eval_rollout": objects.eval_rollout,
        "environment": objects.environment,
        "tools": objects.tools,
    }
    return collect_saved_objects({name: value for name, value in given.items() if value}, heldout, config.eval.count)


def _config_file(run: Path) -> Path:
    read_resolved(run)  # raises if this version cannot read it
    return run / CONFIG_FILE


def with_newest_checkpoint(plan: RunPlan, run_dir: Path) -> RunPlan:
    """Return the plan, resuming from the run's newest complete checkpoint, or from version 0 if it has none yet."""
    root = run_dir / "checkpoints"
    checkpoint = commit.newest_complete(root)
    if checkpoint is None and commit.list_steps(root):
        raise BadInput(f"--resume: {run_dir} has no complete checkpoint; start over with run.overwrite = true")
    return replace(plan, resumes=True, checkpoint=checkpoint)


def completed_summary(plan: RunPlan, run_dir: Path) -> Summary | None:
    """Return the summary of a completed run, or None if there is work left.

    A run is complete if it ended without error, its newest checkpoint is of its last step, and `run.steps` and
    `run.epochs` ask for no more."""
    try:
        ended = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Summary)
        resolved = read_resolved(run_dir)
    except (OSError, ValueError):
        return None
    if ended.exit or ended.reason == STOPPED:
        return None
    if plan.checkpoint is None or commit.step_of(plan.checkpoint) != ended.steps:
        return None
    run, before = plan.config.run, resolved["run"]
    rounds = plan.config.producer.max_rollouts == resolved.get("producer", {}).get("max_rollouts")
    same_end = rounds and (run.steps, run.epochs) == (before.get("steps"), before.get("epochs"))
    return ended if same_end or run.steps == ended.steps else None


def completed_message(plan: RunPlan) -> str:
    """Return the message for resuming a completed run."""
    run, rounds = plan.config.run, plan.config.producer.max_rollouts
    if rounds is not None:
        return f"already complete; extend it with --producer.max_rollouts {2 * rounds}, or with more --run.steps"
    if run.epochs is not None:
        return f"already complete after {plural(run.epochs, 'epoch')}; extend it with --run.epochs {run.epochs + 1}"
    return f"already complete after {plural(run.steps or 0, 'step')}; extend it with --run.steps {2 * (run.steps or 0)}"


# ---------------------------------------------------------------------------------------------------------- engines


def _check_engines(config: Config) -> None:
    """Check engines and weight transport, as thoroughly as possible within about a second."""
    if config.weights.transport == "ipc" and not uses_gpu(config):
        raise BadInput('weights.transport: "ipc" shares GPU memory, but this run uses no GPU; use "memory"')
    if config.weights.transport not in ("auto", *TRANSPORTS.built_in):
        TRANSPORTS.find(config.weights.transport)
    placement_of(config)  # raises if the GPUs are too few or too small
    if config.weights.dir is not None:
        _check_writable(Path(config.weights.dir))
    if launches_servers(config):
        configured_server(config)


def _check_writable(folder: Path) -> None:
    """Check by writing a temporary file, since permission bits are not enough. Leaves nothing behind."""
    missing: list[Path] = []
    try:
        missing += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"weights.dir: cannot write to {folder}: {error.strerror}; choose another directory") from None
    finally:
        for created in missing:
            with contextlib.suppress(OSError):  # not empty anymore, or never created
                created.rmdir()


# ------------------------------------------------------------------------------------------------------------- tasks


def _without_heldout(config: Config) -> Config:
    """Clear the config's held-out tasks, which `eval_tasks` objects replace."""
    return with_values(config, {"tasks.eval_path": None, "eval.holdout": 0.0})


def _own_sources(config: Config, objects: UserObjects) -> TaskSources | None:
    """Return training and held-out sources if at least one is a Python object. The other may come from the config."""
    if objects.tasks is None and objects.eval_tasks is None:
        return None
    heldout = None if objects.eval_tasks is None else _as_source(objects.eval_tasks, "eval_tasks", config)
    if objects.tasks is None:
        named = open_train(config)
        return named if isinstance(named, TaskStream) else ReopenedSource(open_train, config), heldout
    train = _as_source(objects.tasks, "tasks", config, config.tasks.limit)
    if heldout is None and config.tasks.eval_path is not None:
        heldout = ReopenedSource(open_heldout, config)
    if heldout is None and isinstance(train, Dataset):
        return train.split(config.eval.holdout, config.eval.seed)
    return train, heldout


def _produced_sources(config: Config, objects: UserObjects) -> tuple[TaskSource | None, TaskSource | None]:
    """Return the tasks that the config names for its producer, and the held-out tasks."""
    prompts, heldout = open_tasks(config) if names_tasks(config) else (None, None)
    if isinstance(prompts, TaskStream):
        raise BadInput("tasks.producer: the tasks of tasks.name are a stream, which has no rows; remove one of the two")
    if objects.eval_tasks is not None:
        return prompts, _as_source(objects.eval_tasks, "eval_tasks", config)
    is_named = config.tasks.eval_path is not None or heldout is not None
    return prompts, ReopenedSource(open_heldout, config) if is_named else None


def _with_producer(config: Config, objects: UserObjects) -> Config:
    """Check the producer and apply the settings that a producer object carries."""
    producer = objects.producer
    if config.tasks.producer is not None:
        if producer is not None:
            raise BadInput("tasks.producer: Trainer(producer=...) is also set; remove one of the two")
        producer = load_function(config.tasks.producer, "tasks.producer")
    if producer is None:
        for name in config.producer.model_fields_set - {"num_iterations"}:  # the same as algorithm.epochs_per_batch
            if getattr(config.producer, name) != ProducerConfig.model_fields[name].default:
                raise BadInput(f"producer.{name}: there is no producer; set tasks.producer, or leave this out")
        return config
    key = "tasks.producer" if objects.producer is None else "producer"
    takes_tasks = callable(producer) and "prompt_dataset" in named_parameters(producer, {"prompt_dataset"})
    named = {} if takes_tasks else {"tasks.name": config.tasks.name, "tasks.path": config.tasks.path}
    for name, other in (named | {"tasks": objects.tasks}).items():
        if other is not None:
            raise BadInput(f"{key}: {name} is also set; remove one of the two")
    if not callable(getattr(producer, "produce", producer if callable(producer) else None)):
        raise BadInput(f"{key}: {one_line(repr(producer), 60)} has no method `produce`; derive it from DataProducer")
    if not isinstance(producer, type) and hasattr(producer, "produce"):
        if config.producer.options:
            raise BadInput("producer.options: the producer is an object; pass these values to its class yourself")
        return _with_settings_of(producer, config)
    options = dict(config.producer.options)
    if "config" in accepted_parameters(producer, {"config"}):
        options.setdefault("config", config.producer)
    if takes_tasks and names_tasks(config):
        options.setdefault("prompt_dataset", ())
    try:
        inspect.signature(producer).bind(**options)
    except TypeError as error:
        raise BadInput(f"producer.options: {getattr(producer, '__name__', producer)}: {one_line(error)}") from None
    return config


def _with_settings_of(producer: Any, config: Config) -> Config:
    """Apply the `ProducerConfig` of a producer object. The config may set the same values, but no others."""
    attempts = getattr(producer, "num_generations", config.rollout.group_size)
    if attempts != config.rollout.group_size:
        raise BadInput(
            f"rollout.group_size: is {config.rollout.group_size}, but num_generations of the producer is {attempts}; "
            "set both to the same number"
        )
    own = getattr(producer, "config", None)
    values = {key: getattr(own, key) for key in own.model_fields_set} if isinstance(own, ProducerConfig) else {}
    if isinstance(producer, AsyncDataProducer):
        values["async_prefetch"] = True
    for key, value in values.items():
        set_value = getattr(config.producer, key)
        if key in config.producer.model_fields_set and set_value != value:
            raise BadInput(f"producer.{key}: is {set_value}, but the producer's own config says {value}; set one")
    defaults = {key: info.default for key, info in ProducerConfig.model_fields.items()}
    changed = {f"producer.{key}": value for key, value in values.items() if value != defaults[key]}
    return with_values(config, changed)


def _check_stream(config: Config, produced: bool) -> None:
    """Reject settings that need all tasks in advance."""
    why = "the tasks come from a producer, " if produced else "the tasks are a stream, "
    if config.run.deterministic and not produced:
        raise BadInput(f"run.deterministic: {why}whose timing decides what is trained when; turn this off")
    if config.run.deterministic and config.producer.async_prefetch:
        raise BadInput("producer.async_prefetch: what is produced in the background depends on timing; turn this off")
    if config.run.epochs not in (None, 1):
        raise BadInput(f"run.epochs: {why}which is used once; set 1 to train until it ends, or set run.steps")
    if config.tasks.limit is not None and not (produced and names_tasks(config)):
        end = "which producer.max_rollouts ends" if produced else "which ends when it returns None"
        raise BadInput(f"tasks.limit: {why}{end}; leave this out")
    of_tasks = () if names_tasks(config) else (("eval", "holdout"), ("tasks", "duplicate_ids"))
    for section, key in (*of_tasks, ("tasks", "shuffle")):
        default = type(getattr(config, section)).model_fields[key].default
        if produced and getattr(getattr(config, section), key) != default:
            raise BadInput(f"{section}.{key}: has no effect, because {why.removesuffix(', ')}; leave this out")
    for key in ("easy_above", "hard_below"):
        if getattr(config.difficulty, key) is not None:
            raise BadInput(f"difficulty.{key}: {why}so no task repeats; leave this out")


def _as_source(given: TasksArgument, name: str, config: Config, limit: int | None = None) -> TaskSource:
    """Return a task source or stream unchanged, or wrap rows in a `Dataset`."""
    if isinstance(given, TaskStream) and name == "tasks":
        return cast(TaskSource, given)
    rows = check_rows(given, name)
    if len(rows) and isinstance(rows[0], Task):
        return cast(TaskSource, given)
    return Dataset(rows, name, limit=limit, duplicate_ids=config.tasks.duplicate_ids, setting=name)
