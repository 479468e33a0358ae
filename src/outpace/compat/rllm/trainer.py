"""`AgentTrainer` and the hooks of a backend, on top of `outpace.Trainer`, which runs the training loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import outpace
from outpace.checkpoint.commit import CHECKPOINTS, newest_complete
from outpace.compat.rllm.rollouts import EpisodeRollout, Workflow
from outpace.config.rllm_settings import translate
from outpace.errors import BadInput

IDS, PROMPTS = ("id", "task_id"), ("instruction", "question", "prompt", "problem")
GRACE_S = 60.0  # added to the workflow's time limit for the run's own limit
FIXED = ("generate_episodes", "process_backend_batch", "compute_advantages", "update_policy")


@dataclass
class TrainerState:
    global_step: int = 0
    epoch: int = 0
    total_steps: int = 0
    weight_version: int = 0
    is_training: bool = True
    metrics: dict[str, float] = field(default_factory=dict)


class BackendProtocol:
    """Base class of hooks: `on_train_start`, `on_epoch_start`, `on_batch_start`, `on_policy_updated`, … are called with
    the `TrainerState`, and the run waits for them. Training itself cannot be replaced."""

    def __init_subclass__(cls) -> None:
        if fixed := [name for name in FIXED if name in vars(cls)]:
            raise BadInput(f"{cls.__name__}: {', '.join(fixed)}: only the on_ hooks of a backend can be defined")


EVENTS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "on_run_start": ("on_train_start", lambda info: {"global_step": info["version"], "total_steps": info["steps"]}),
    "on_run_end": ("on_train_end", lambda summary: {}),
    "on_epoch_start": ("on_epoch_start", lambda epoch: {"epoch": epoch}),
    "on_epoch_end": ("on_epoch_end", lambda epoch: {}),
    "on_batch_start": ("on_batch_start", lambda version: {"metrics": {}}),
    "on_batch_end": ("on_batch_end", lambda metrics: {"metrics": dict(metrics), "global_step": int(metrics["step"])}),
    "on_policy_updated": ("on_policy_updated", lambda version: {"weight_version": version}),
    "on_evaluation_start": ("on_validation_start", lambda version: {"is_training": False}),
    "on_evaluation": ("on_validation_end", lambda _, metrics: {"is_training": True, "metrics": dict(metrics)}),
}
"""Events of outpace: the hook to call, and how the state changes before it is called."""


class BackendHooks(outpace.Callback):
    blocking = True

    def __init__(self, backend: BackendProtocol) -> None:
        self._backend, self._state = backend, TrainerState()
        for event, (hook, changes) in EVENTS.items():
            setattr(self, event, partial(self._call, hook, changes))

    async def _call(self, hook: str, changes: Callable[..., dict[str, Any]], *args: Any) -> None:
        vars(self._state).update(changes(*args))
        if (method := getattr(self._backend, hook, None)) and inspect.isawaitable(result := method(self._state)):
            await result


class AgentTrainer:
    def __init__(
        self,
        config: Any = None,
        workflow_class: type[Workflow] | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        workflow_args: dict[str, Any] | None = None,
        backend: Any = "verl",
        agent_flow: Any = None,
        evaluator: Any = None,
        val_rollout: Any = None,
        **others: Any,
    ) -> None:
        """`backend`: the hooks of a `BackendProtocol`; a name has no effect. `val_rollout`: the workflow class or agent
        flow for validation, if it differs."""
        if refused := [name for name, value in others.items() if value is not None]:
            raise BadInput(f"AgentTrainer: {', '.join(refused)}: not supported")
        if (workflow_class is None) == (agent_flow is None or evaluator is None) or not train_dataset:
            raise BadInput("AgentTrainer: pass train_dataset, and either workflow_class or agent_flow and evaluator")
        settings, given_args, left_out, self._val_only = translate(config or {})
        args = {**given_args, **(workflow_args or {})}
        if "timeout" in args:
            settings["rollout.timeout_s"] = (float(args["timeout"]) + GRACE_S) * (settings["rollout.retries"] + 1)
        rollout = EpisodeRollout(workflow_class, args, agent_flow, evaluator, left_out)
        validation = {"agent_flow" if workflow_class is None else "workflow_class": val_rollout} if val_rollout else {}
        self.trainer = outpace.Trainer(
            tasks=_tasks(train_dataset),
            eval_tasks=_tasks(val_dataset or ()) or None,
            rollout=rollout,
            eval_rollout=replace(rollout, is_validation=True, **validation),
            callbacks=[BackendHooks(backend)] if isinstance(backend, BackendProtocol) else [],
            config=settings if val_dataset else {**settings, "eval.count": 0},
        )

    def train(self) -> Any:
        """Train, from the newest checkpoint in the run directory if there is one, or only validate."""
        if self._val_only:
            return self.trainer.evaluate()
        run = self.trainer.config.run
        found = run.dir is not None and newest_complete(Path(run.dir) / CHECKPOINTS) is not None
        return self.trainer.train(resume=found and not run.overwrite)


def _tasks(rows: Any) -> list[outpace.Task]:
    return [outpace.Task(str(_first(row, IDS, n)), _first(row, PROMPTS, ""), dict(row)) for n, row in enumerate(rows)]


def _first(row: Any, names: tuple[str, ...], default: Any) -> Any:
    return next((row[name] for name in names if row.get(name)), default)
