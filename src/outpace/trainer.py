"""`outpace.Trainer`: the whole system from a script or a notebook, the same parts as the command line.

    import outpace

    def short(prompts, completions, **columns):
        return [1.0 / (1 + len(text)) for text in completions]

    outpace.Trainer(model="starter", tasks=[{"prompt": "Say hello"}], rewards=short).train()

The controller runs on a thread of its own with its own event loop, so `train()` also works where a loop is already
running, as in a notebook. Functions that cannot be imported by name reach the workers by value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.background import BackgroundRun, Prepared, claim
from outpace.config import Config
from outpace.config.loading import load_config, make_config
from outpace.observe.callbacks import Callback
from outpace.observe.summary import Summary
from outpace.planning import Objects, Tasks, make_plan
from outpace.protocols import Reward, Rollout
from outpace.references import is_reference
from outpace.rollouts.environments.kinds import Given
from outpace.tasks.registry import is_of_family


class Trainer:
    """Trains `model` on `tasks` by `rewards`.

    model: what `model.path` takes. tasks: a registered name, a file or dataset path, a list of rows with a `prompt`,
    or any sized, indexable source of rows. eval_tasks: what is held out, likewise but for the name. rewards: functions
    in TRL's signature or their names. config: a `Config`, a nested or dotted dict, or a TOML or YAML file. rollout: an
    `async def rollout(task, client)`. environment: a class with `reset`, typed methods as tools and, if it judges its
    episodes itself, `get_reward`; or several of them by the name that a column of the task gives. tools: typed,
    documented functions that the model may call.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        tasks: str | Path | Tasks | None = None,
        rewards: Reward | str | Sequence[Reward | str] | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        eval_tasks: str | Path | Tasks | None = None,
        rollout: Rollout | None = None,
        environment: Given | None = None,
        tools: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] = (),
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
    ) -> None:
        changes: dict[str, Any] = {}
        if model is not None:
            changes["model"] = {"path": str(model)}
        if isinstance(tasks, str | Path):
            changes["tasks"] = _named_tasks(tasks)
        if isinstance(eval_tasks, str | Path):
            changes["tasks"] = {**changes.get("tasks", {}), "eval_path": str(eval_tasks)}
        self._objects = Objects(
            tasks=None if isinstance(tasks, str | Path) else tasks,
            eval_tasks=None if isinstance(eval_tasks, str | Path) else eval_tasks,
            rewards=_as_tuple(rewards),
            rollout=rollout,
            environment=environment,
            tools=_as_tuple(tools),
            callbacks=tuple(callbacks),
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

    def _prepare(self, resume: bool) -> Prepared:
        plan = make_plan(self._with_directory(resume), self._objects, self._quiet)
        prepared = claim(plan, resume)
        self._directory = plan.config.run.dir
        return prepared

    def _with_directory(self, resume: bool) -> Config:
        if not resume or self.config.run.dir is not None or self._directory is None:
            return self.config
        return _merge(self.config, {"run": {"dir": self._directory}})


def _as_config(config: Config | Mapping[str, Any] | str | Path | None) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, str | Path):
        return load_config(Path(config))
    return make_config(config or {})


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


def _as_tuple(rewards: Reward | str | Sequence[Reward | str] | None) -> tuple[Reward | str, ...]:
    if rewards is None:
        return ()
    if isinstance(rewards, str) or callable(rewards):
        return (rewards,)
    return tuple(rewards)
