"""`outpace.Trainer`: the whole system from a script or a notebook, the same parts as the command line.

    import outpace

    def short(prompts, completions, **columns):
        return [1.0 / (1 + len(text)) for text in completions]

    outpace.Trainer(model="starter", tasks=[{"prompt": "Say hello"}], rewards=short).train()

The controller runs on a thread of its own with its own event loop, so `train()` also works where a loop is already
running, as in a notebook. Functions that cannot be imported by name reach the workers by value.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.background import BackgroundRun, Prepared, claim, plan_in
from outpace.checkpoint import commit
from outpace.checkpoint.export import export
from outpace.checkpoint.retention import CHECKPOINTS
from outpace.config import Config
from outpace.config.dependent import with_values
from outpace.config.equivalents import equivalent
from outpace.config.loading import load_config, make_config
from outpace.config.rules import default_directory
from outpace.errors import BadInput, one_line
from outpace.evaluate import evaluate_plan
from outpace.models.objects import check_objects, save_objects
from outpace.observe.callbacks import Callback
from outpace.observe.runlog import MODEL, RunLog
from outpace.observe.summary import Summary
from outpace.pipeline.evaluation import Evaluation
from outpace.planning import Objects, Tasks, make_plan
from outpace.protocols import Reward, Rollout
from outpace.references import is_reference
from outpace.rollouts.environments.kinds import Given
from outpace.runtime.scratch import temporary_directory
from outpace.session import Plan
from outpace.tasks.registry import is_of_family

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MOST_REMEDIES = 6
"""Settings of another trainer's arguments that an error names."""


class Trainer:
    """Trains `model` on `tasks` by `rewards`.

    model: what `model.path` takes, or a causal LM of transformers with its `tokenizer`. tasks: a registered name, a
    file or dataset path, a list of rows with a `prompt`, or any sized, indexable source of rows. eval_tasks: what is
    held out, likewise but for the name. rewards: functions in TRL's signature or their names. config: a `Config`, a
    nested or dotted dict, or a TOML or YAML file. rollout: an `async def rollout(task, client)`. environment: a class
    with `reset`, typed methods as tools and, if it judges its episodes itself, `get_reward`; or several of them by the
    name that a column of the task gives. tools: typed, documented functions that the model may call.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        tasks: str | Path | Tasks | None = None,
        rewards: Reward | str | Sequence[Reward | str] | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        eval_tasks: str | Path | Tasks | None = None,
        rollout: Rollout | None = None,
        environment: Given | None = None,
        tools: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] = (),
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
        **others: Any,
    ) -> None:
        for name in others:
            raise BadInput(f"{name}: no such argument of Trainer; {equivalent(name) or 'see its signature'}")
        changes: dict[str, Any] = {}
        self._model: tuple[Any, Any] | None = None  # objects: the model and its tokenizer
        if isinstance(model, str | Path):
            changes["model"] = {"path": str(model)}
        elif model is not None:
            check_objects(model, tokenizer)
            self._model = model, tokenizer
        if tokenizer is not None and self._model is None:
            raise BadInput("tokenizer: model.path brings its own; give one only with a model object")
        if isinstance(tasks, str | Path):
            changes["tasks"] = _named_tasks(tasks)
        if isinstance(eval_tasks, str | Path):
            changes["tasks"] = {**changes.get("tasks", {}), "eval_path": str(eval_tasks)}
        self._objects = Objects(
            tasks=None if isinstance(tasks, str | Path) else tasks,
            eval_tasks=None if isinstance(eval_tasks, str | Path) else eval_tasks,
            rewards=_as_tuple("rewards", rewards),
            rollout=rollout,
            environment=environment,
            tools=_as_tuple("tools", tools),
            callbacks=_checked_callbacks(callbacks),
        )
        self.config = _merge(_as_config(config), changes)
        self._quiet = quiet
        self._run: BackgroundRun | None = None
        self._directory: str | None = None  # of the latest run

    def train(self, resume: bool = False) -> Summary:
        """Run to the end. With `resume`, continue from the newest complete checkpoint of `run.dir`, or of the directory
        that this trainer used last.

        Ctrl-C, or the interrupt of a notebook, once: checkpoint and raise `Interrupted`; twice: leave at once."""
        run = self._run = BackgroundRun(lambda: self._prepare(resume))
        run.prepare()
        return run.run()

    async def train_async(self, resume: bool = False) -> Summary:
        """The same inside a running event loop, which stays free. If the task is cancelled, the run writes a checkpoint
        before CancelledError is raised; a second cancellation ends it at once."""
        run = self._run = BackgroundRun(lambda: self._prepare(resume))
        return await run.run_async()

    def stop(self) -> None:
        """End the run under way after its current step, with a checkpoint: `train()` returns its summary. May be called
        from any thread, coroutine or callback; does nothing if no run is under way."""
        if self._run is not None:
            self._run.stop()

    @property
    def summary(self) -> Summary | None:
        """Of the latest run, in whatever way it ended; None before that."""
        return None if self._run is None else self._run.summary

    def evaluate(self) -> Evaluation:
        """Measure the newest checkpoint of the run, or the model itself if there is none, on the held-out tasks."""
        with temporary_directory("eval") as scratch:
            run, config = self._run_directory, self.config
            checkpoint = None if run is None else commit.newest_complete(run / CHECKPOINTS)
            if self._model is not None:
                save_objects(*self._model, scratch / "given")
                config = with_values(config, {"model.path": str(scratch / "given")})
            plan = make_plan(config, self._objects, self._quiet)
            places = {"run.dir": str(scratch), "run.runtime": "local"}
            if checkpoint is not None:
                places["model.path"] = str(export(checkpoint, scratch / "trained"))
            evaluation = evaluate_plan(replace(plan, config=with_values(plan.config, places)), scratch)
        return replace(evaluation, version=0 if checkpoint is None else commit.step_of(checkpoint))

    def export(self, directory: str | Path, best: bool = False, adapter: bool = False) -> Path:
        """Write the newest checkpoint as a Hugging Face directory; with `best`, that of the best held-out reward; with
        `adapter`, the trained adapters alone."""
        if self._run_directory is None:
            raise BadInput("export: this trainer has not trained yet, and its config names no run.dir")
        return export(self._run_directory, directory, best, adapter)

    @property
    def _run_directory(self) -> Path | None:
        directory = self.config.run.dir or self._directory
        return None if directory is None else Path(directory)

    def _prepare(self, resume: bool) -> Prepared:
        config = self.config
        if resume and config.run.dir is None and self._directory is not None:
            config = with_values(config, {"run.dir": self._directory})
        if self._model is None:
            prepared = claim(make_plan(config, self._objects, self._quiet), resume)
        else:
            named = with_values(config, {"run.dir": config.run.dir or default_directory()})
            prepared = plan_in(named, resume, lambda log: self._plan_with_objects(named, resume, log))
        self._directory = prepared[0].config.run.dir
        return prepared

    def _plan_with_objects(self, config: Config, resume: bool, log: RunLog) -> Plan:
        """The model is saved beside what an earlier run left, and takes its place once everything is checked."""
        assert self._model is not None
        model, new = (log.dir / MODEL).absolute(), (log.dir / f"{MODEL}.new").absolute()
        if resume:
            if not model.is_dir():
                raise BadInput(f"model: the run in {log.dir} was not started with a model object; give its model.path")
            return make_plan(with_values(config, {"model.path": str(model)}), self._objects, self._quiet)
        try:
            save_objects(*self._model, new)
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
        raise BadInput(_why_not_a_config(config))
    return make_config(config or {})


def _why_not_a_config(config: Any) -> str:
    """With what to use instead for what was set in the arguments of a TRL or transformers trainer."""
    reason = f"config: a {type(config).__name__} is not accepted; give a Config, a dict or a TOML file"
    if not dataclasses.is_dataclass(config):
        return reason
    changed = [
        each.name
        for each in dataclasses.fields(config)
        if each.default is not dataclasses.MISSING and getattr(config, each.name, each.default) != each.default
    ]
    remedies = [f"for {name}, {remedy}" for name in changed if (remedy := equivalent(name)) is not None]
    return one_line("; ".join([reason, *remedies[:MOST_REMEDIES]]), 600)


def _merge(config: Config, changes: Mapping[str, Any]) -> Config:
    values = config.model_dump(exclude_unset=True)
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    return make_config(values)


def _named_tasks(tasks: str | Path) -> dict[str, str]:
    """A path if it looks like one or is there, a registered name otherwise."""
    text = str(tasks)
    if isinstance(tasks, str) and (is_reference(text) or is_of_family(text)):
        return {"name": text}
    is_path = "/" in text or text.endswith((".jsonl", ".json", ".parquet")) or Path(text).exists()
    return {"path": text} if is_path or isinstance(tasks, Path) else {"name": text}


def _as_tuple(name: str, given: Reward | str | Sequence[Reward | str] | None) -> tuple[Reward | str, ...]:
    if given is None:
        return ()
    if isinstance(given, str) or callable(given):
        return (given,)
    if not isinstance(given, Iterable):
        raise BadInput(f"{name}: give a function, a name or a list of these, not {one_line(repr(given), 60)}")
    return tuple(given)


def _checked_callbacks(given: Sequence[Callback]) -> tuple[Callback, ...]:
    callbacks = tuple(given) if isinstance(given, Iterable) else (given,)
    for each in callbacks:
        if not isinstance(each, Callback):
            raise BadInput(f"callbacks: {one_line(repr(each), 60)} is not an instance of outpace.Callback")
    return callbacks
