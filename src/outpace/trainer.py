"""`outpace.Trainer`: the Python API. Runs the same components as the command line, from a script or a notebook.

    import outpace

    def short(prompts, completions, **columns):
        return [1.0 / (1 + len(text)) for text in completions]

    outpace.Trainer(model="starter", tasks=[{"prompt": "Say hello"}], rewards=short).train()

The controller runs in its own thread with its own event loop, so `train()` also works inside a running loop, as in a
notebook. Functions that cannot be imported by name are sent to the workers by value.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.checkpoint import commit
from outpace.checkpoint.commit import CHECKPOINTS
from outpace.checkpoint.export import export
from outpace.checkpoint.hub import upload
from outpace.commands.evaluate import evaluate_plan
from outpace.config import Config
from outpace.config.defaults import default_directory, with_values
from outpace.config.load import load_config, make_config, user_settings
from outpace.config.other_libraries import equivalent_setting
from outpace.controller.evaluation import Evaluation
from outpace.errors import BadInput, one_line
from outpace.models.loading import check_model_objects, save_model_objects
from outpace.monitoring.callbacks import Callback
from outpace.monitoring.run_directory import MODEL_FOLDER, RunLog
from outpace.monitoring.summary import Summary
from outpace.protocols import Reward, Rollout
from outpace.rollouts.environments.session import EnvironmentArgument
from outpace.run.background import BackgroundRun, PreparedRun, claim_and_plan, claim_run_directory
from outpace.run.plan import RunPlan, TasksArgument, UserObjects, make_plan
from outpace.runtime.cleanup import temporary_directory
from outpace.runtime.torchrun import refuse_torchrun
from outpace.tasks.registry import is_task_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_REMEDIES = 6
"""Replacements for another library's arguments that one error message lists."""


class Trainer:
    """Trains a model with reinforcement learning.

    model: a `model.path` value, or a transformers causal LM together with its `tokenizer`.
    tasks: a registered name, a file or dataset path, a list of rows with a `prompt`, or any sized, indexable source.
    rewards: functions with TRL's signature, or their names.
    config: a `Config`, a nested or dotted dict, or the path of a TOML or YAML file.
    eval_tasks: held-out tasks, in any form that `tasks` accepts except a registered name.
    rollout: an `async def rollout(task, client)`.
    eval_rollout: the same for evaluation, if it differs.
    environment: a class with `reset`, typed methods as tools and optionally `get_reward`; or a dict of such classes,
        selected by a column of the task.
    tools: typed functions with docstrings that the model may call.
    producer: a `DataProducer` object or class that supplies fresh tasks or finished rollouts each round. Replaces
        `tasks`.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        tasks: str | Path | TasksArgument | None = None,
        rewards: Reward | str | Sequence[Reward | str] | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        eval_tasks: str | Path | TasksArgument | None = None,
        rollout: Rollout | None = None,
        eval_rollout: Rollout | None = None,
        environment: EnvironmentArgument | None = None,
        tools: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] = (),
        callbacks: Sequence[Callback] = (),
        producer: Any = None,
        quiet: bool = False,
        **others: Any,
    ) -> None:
        for name in others:
            raise BadInput(f"{name}: Trainer has no such argument; {equivalent_setting(name) or 'see its signature'}")
        changes: dict[str, Any] = {}
        self._model: tuple[Any, Any] | None = None  # model and tokenizer objects
        if isinstance(model, str | Path):
            changes["model"] = {"path": str(model)}
        elif model is not None:
            check_model_objects(model, tokenizer)
            self._model = model, tokenizer
        if tokenizer is not None and self._model is None:
            raise BadInput("tokenizer: pass it only with a model object; model.path already includes a tokenizer")
        if isinstance(tasks, str | Path):
            changes["tasks"] = _task_settings(tasks)
        if isinstance(eval_tasks, str | Path):
            changes["tasks"] = {**changes.get("tasks", {}), "eval_path": str(eval_tasks)}
        self._objects = UserObjects(
            tasks=None if isinstance(tasks, str | Path) else tasks,
            eval_tasks=None if isinstance(eval_tasks, str | Path) else eval_tasks,
            rewards=_as_tuple("rewards", rewards),
            rollout=rollout,
            eval_rollout=eval_rollout,
            environment=environment,
            tools=_as_tuple("tools", tools),
            callbacks=(*_checked_callbacks(callbacks), *([producer] if isinstance(producer, Callback) else [])),
            producer=producer,
        )
        self.config = _merge(_as_config(config), changes)
        self._quiet = quiet
        self._run: BackgroundRun | None = None
        self._directory: str | None = None  # run directory of the latest run

    def train(self, resume: bool = False) -> Summary:
        """Train to the end and return the summary.

        `resume`: continue from the newest complete checkpoint in `run.dir`, or in the directory of this trainer's
        latest run. The first Ctrl-C (or notebook interrupt) writes a checkpoint and raises `Interrupted`; the second
        aborts immediately."""
        run = self._run = BackgroundRun(lambda: self._prepare(resume))
        run.prepare()
        return run.run()

    async def train_async(self, resume: bool = False) -> Summary:
        """Like `train`, without blocking the running event loop.

        If the task is cancelled, the run writes a checkpoint before CancelledError is raised. A second cancellation
        aborts the run immediately."""
        run = self._run = BackgroundRun(lambda: self._prepare(resume))
        return await run.run_async()

    def stop(self) -> None:
        """Stop the active run after its current step, with a checkpoint; `train()` then returns its summary.

        Can be called from any thread, coroutine or callback. Does nothing if no run is active."""
        if self._run is not None:
            self._run.stop()

    @property
    def summary(self) -> Summary | None:
        """Summary of the latest run, however it ended; None before the first run has ended."""
        return None if self._run is None else self._run.summary

    def evaluate(self) -> Evaluation:
        """Evaluate the newest checkpoint, or the original model if there is none, on the held-out tasks."""
        with temporary_directory("eval") as directory:
            run, config = self._run_directory, self.config
            checkpoint = None if run is None else commit.newest_complete(run / CHECKPOINTS)
            if self._model is not None:
                save_model_objects(*self._model, directory / "given")
                config = with_values(config, {"model.path": str(directory / "given")})
            plan = make_plan(config, self._objects, self._quiet)
            overrides = {"run.dir": str(directory), "run.runtime": "local"}
            if checkpoint is not None:
                overrides["model.path"] = str(export(checkpoint, directory / "trained"))
            evaluation = evaluate_plan(replace(plan, config=with_values(plan.config, overrides)), directory)
        return replace(evaluation, version=0 if checkpoint is None else commit.step_of(checkpoint))

    def export(self, directory: str | Path, best: bool = False, adapter: bool = False) -> Path:
        """Export the newest checkpoint as a Hugging Face model directory.

        `best`: export the checkpoint with the best held-out reward instead. `adapter`: export only the LoRA adapter."""
        if self._run_directory is None:
            raise BadInput("export: nothing to export; call train() first or set run.dir to an existing run")
        return export(self._run_directory, directory, best, adapter)

    def push_to_hub(self, name: str, best: bool = False, adapter: bool = False, **options: Any) -> str:
        """Export as `export` does, upload to the repository `name` of the Hugging Face hub, and return its URL.

        `options`: `token`, `private`, and options of `HfApi.upload_folder` such as `commit_message`."""
        with temporary_directory("upload") as directory:
            return upload(self.export(directory / "model", best, adapter), name, **options)

    @property
    def _run_directory(self) -> Path | None:
        earlier = (
            None if self.config.run.overwrite else self.config.run.dir
        )  # a run that will be overwritten is not used
        directory = self._directory or earlier
        return None if directory is None else Path(directory)

    def _prepare(self, resume: bool) -> PreparedRun:
        refuse_torchrun("Trainer")
        config = self.config
        if resume and config.run.dir is None:
            if self._directory is None:
                raise BadInput('run.dir: not set; pass config={"run.dir": ...} with the directory of the run to resume')
            config = with_values(config, {"run.dir": self._directory})
        if self._model is None:
            prepared = claim_run_directory(make_plan(config, self._objects, self._quiet), resume)
        else:
            named = with_values(config, {"run.dir": config.run.dir or default_directory()})
            prepared = claim_and_plan(named, resume, lambda log: self._plan_with_objects(named, resume, log))
        self._directory = prepared[0].config.run.dir
        return prepared

    def _plan_with_objects(self, config: Config, resume: bool, log: RunLog) -> RunPlan:
        """Save the model object beside the one of an earlier run, which it replaces once the plan is valid."""
        assert self._model is not None
        model, new = (log.dir / MODEL_FOLDER).absolute(), (log.dir / f"{MODEL_FOLDER}.new").absolute()
        if resume:
            if not model.is_dir():
                raise BadInput(f"model: the run in {log.dir} was not started with a model object; pass its model.path")
            return make_plan(with_values(config, {"model.path": str(model)}), self._objects, self._quiet)
        try:
            save_model_objects(*self._model, new)
            plan = make_plan(with_values(config, {"model.path": str(new)}), self._objects, self._quiet)
            log.replace_model(new)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return replace(plan, config=with_values(plan.config, {"model.path": str(model)}))


def _as_config(config: Config | Mapping[str, Any] | str | Path | None) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, str | Path):
        return load_config(Path(config))
    if config is not None and not isinstance(config, Mapping):
        raise BadInput(_config_type_error(config))
    return make_config(config or {})


def _config_type_error(config: Any) -> str:
    """Return the error message. For TRL or transformers arguments, name replacements for those set by the user."""
    accepted = "a Config, a dict or a TOML file; TRL's configs go to outpace.compat.trl"
    reason = f"config: {type(config).__name__} is not accepted; pass {accepted}"
    if not dataclasses.is_dataclass(config):
        return reason
    changed = [
        each.name
        for each in dataclasses.fields(config)
        if each.default is not dataclasses.MISSING and getattr(config, each.name, each.default) != each.default
    ]
    remedies = [f"for {name}, {remedy}" for name in changed if (remedy := equivalent_setting(name)) is not None]
    return one_line("; ".join([reason, *remedies[:MAX_REMEDIES]]), 600)


def _merge(config: Config, changes: Mapping[str, Any]) -> Config:
    values = user_settings(config)
    for section, keys in changes.items():
        values[section] |= keys
    return make_config(values)


def _task_settings(tasks: str | Path) -> dict[str, str]:
    """Return `tasks.name` if the value is text that names a task, `tasks.path` otherwise."""
    return {"name": tasks} if isinstance(tasks, str) and is_task_name(tasks) else {"path": str(tasks)}


def _as_tuple(name: str, given: Reward | str | Sequence[Reward | str] | None) -> tuple[Reward | str, ...]:
    if given is None:
        return ()
    if isinstance(given, str) or callable(given):
        return (given,)
    if not isinstance(given, Iterable):
        raise BadInput(f"{name}: pass a function, a name or a list of these, not {one_line(repr(given), 60)}")
    return tuple(given)


def _checked_callbacks(given: Sequence[Callback]) -> tuple[Callback, ...]:
    callbacks = tuple(given) if isinstance(given, Iterable) else (given,)
    for each in callbacks:
        if not isinstance(each, Callback):
            raise BadInput(f"callbacks: {one_line(repr(each), 60)} is not an instance of outpace.Callback")
    return callbacks
