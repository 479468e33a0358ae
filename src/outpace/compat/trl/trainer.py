"""`GRPOTrainer` and `AsyncGRPOTrainer`: TRL's arguments and methods. `outpace.Trainer` does the work."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import TrainOutput

from outpace.compat.trl.config import AsyncGRPOConfig, GRPOConfig, TrainingConfig
from outpace.compat.trl.settings import Settings, refuse, translate
from outpace.config.load import combine, flatten
from outpace.errors import BadInput, ComponentFailed
from outpace.learner.optimizer import optimizer_settings
from outpace.models.loading import resolve_model
from outpace.models.lora import lora_settings
from outpace.monitoring.transformers_callbacks import Schedule, TransformersCallbacks
from outpace.rewards.reward_model import trl_rewards
from outpace.run.resume import check_not_unfinished
from outpace.runtime.cleanup import temporary_directory
from outpace.tasks.dataset import EMPTY_PROMPT, sized_rows
from outpace.tasks.producers import RolloutFunctionProducer
from outpace.trainer import Trainer


class GRPOTrainer:
    """TRL's `GRPOTrainer`, on policy: no token is older than the step that it trains."""

    config_class: type[TrainingConfig] = GRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
        **others: Any,
    ) -> None:
        if train_dataset is None and environment_factory is None:
            raise BadInput("train_dataset: is required without environment_factory")
        others |= {"quantization_config": quantization_config, "optimizers[1]": optimizers[1]}
        refuse({name: "is not supported; leave it out" for name, value in others.items() if value is not None})
        name = model if isinstance(model, str) else model.config._name_or_path
        self.args = args or self.config_class(f"{Path(name).name}-{type(self).__name__.removesuffix('Trainer')}")
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        if isinstance(model, str) and processing_class is not None:
            model = AutoModelForCausalLM.from_pretrained(resolve_model(model), **(self.args.model_init_kwargs or {}))
        if processing_class is None:
            self.processing_class = AutoTokenizer.from_pretrained(resolve_model(name))
        self._given, self._adapter = model, peft_config is not None
        tasks, heldout = (sized_rows(each, environment_factory) for each in (train_dataset, eval_dataset))
        settings, schedule = self._settings(None if tasks is None else len(tasks))
        settings |= optimizer_settings(optimizers[0])
        if peft_config is not None:
            settings |= lora_settings(peft_config, lambda: resolve_model(name))
        if tasks is None:  # no dataset, or one without a length: as many rows as the run needs
            tasks = list(islice(train_dataset or [{"prompt": EMPTY_PROMPT}], schedule.max_steps * schedule.groups))
        attempts, count = settings["eval.attempts"], len(heldout or ())
        self._events = TransformersCallbacks(self.args, schedule, callbacks or (), model, self.processing_class)
        self._events.eval_batches = -(-count * attempts // self.args.per_device_eval_batch_size)
        self.callback_handler = self._events.handler
        produced = self._producer(rollout_func, tasks)
        own = {"eval.holdout": 0.0, "tasks.duplicate_ids": "number"} if produced is None else {"tasks.shuffle": True}
        settings |= {"eval.count": count, **own}
        self._trainer = Trainer(
            model,
            None if produced else tasks,
            trl_rewards(reward_funcs, reward_processing_classes, Path(self.args.output_dir) / "reward_models"),
            combine(flatten(settings), flatten(getattr(self.args, "outpace", None) or {})),
            tokenizer=None if isinstance(model, str) else self.processing_class,
            eval_tasks=heldout,
            tools=tools or (),
            environment=environment_factory,
            callbacks=[self._events],
            producer=produced,
            quiet=bool(self.args.disable_tqdm),
        )

    def _settings(self, rows: int | None) -> tuple[Settings, Schedule]:
        return translate(self.args, rows)

    def _producer(self, rollout_func: Callable[..., Any] | None, tasks: Any) -> Any:
        """Return the producer of each round's tasks or rollouts, None if the run uses the tasks as they are."""
        return None if rollout_func is None else RolloutFunctionProducer(rollout_func, self.args, tasks)

    def __getattr__(self, name: str) -> Any:
        owners = dict.fromkeys(("state", "control", "accelerator", "is_world_process_zero"), "_events")
        owners |= dict.fromkeys(("add_callback", "pop_callback", "remove_callback"), "callback_handler")
        if name not in owners:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(getattr(self, owners[name]), name)

    @property
    def model(self) -> Any:
        """The model object passed in, with the trained weights after training. For a name: a new, trained object."""
        return self._trained() if isinstance(self._given, str) else self._given

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end. `resume_from_checkpoint`: continue from the newest checkpoint in `output_dir`."""
        run, asked = Path(self.args.output_dir).resolve(), Path(str(resume_from_checkpoint)).resolve()
        if isinstance(resume_from_checkpoint, str) and run not in (asked, *asked.parents):
            raise BadInput(f"resume_from_checkpoint: {resume_from_checkpoint} is not in output_dir, {run}")
        if not resume_from_checkpoint:
            check_not_unfinished(run)
        try:
            self._trainer.train(resume=bool(resume_from_checkpoint))
        except ComponentFailed as failure:
            raise self._events.error or failure from None
        if not isinstance(self._given, str):
            self._given.load_state_dict(self._trained().state_dict())
        if self.args.push_to_hub:
            self.push_to_hub()
        metrics = dict(self.state.log_history[-1]) if self.state.log_history else {}
        return TrainOutput(self.state.global_step, metrics.get("train_loss", 0.0), metrics)

    def evaluate(self, eval_dataset: Any = None, *, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Evaluate the newest checkpoint of this run, or the initial model, on the trainer's `eval_dataset`."""
        if self.eval_dataset is None or eval_dataset not in (None, self.eval_dataset):
            raise BadInput("eval_dataset: pass it to the trainer, which evaluates this one only")
        started = time.monotonic()
        metrics = self._events.evaluated(self._trainer.evaluate().metrics(), started)
        return {name.replace("eval_", f"{metric_key_prefix}_", 1): value for name, value in metrics.items()}

    def save_model(self, output_dir: str | None = None) -> None:
        """Save the trained model, or its adapter, with its tokenizer."""
        with temporary_directory("model") as directory:
            saved = self._trainer.export(directory / "model", self.args.load_best_model_at_end, self._adapter)
            shutil.copytree(saved, output_dir or self.args.output_dir, dirs_exist_ok=True)

    def push_to_hub(self, commit_message: str = "End of training", dataset_name: Any = None, **options: Any) -> str:
        """Upload the trained model to the hub, and return its URL."""
        args = self.args
        options = {"private": args.hub_private_repo, "revision": args.hub_revision, "token": args.hub_token, **options}
        name, best = args.hub_model_id or Path(args.output_dir).name, args.load_best_model_at_end
        return self._trainer.push_to_hub(name, best, self._adapter, commit_message=commit_message, **options)

    def _trained(self) -> Any:
        with temporary_directory("model") as directory:
            exported = self._trainer.export(directory / "model", self.args.load_best_model_at_end)
            return AutoModelForCausalLM.from_pretrained(exported)


class AsyncGRPOTrainer(GRPOTrainer):
    """TRL's `AsyncGRPOTrainer`: sampling continues while a step is trained, up to `max_staleness` versions ahead."""

    config_class = AsyncGRPOConfig

    def __init__(self, model: Any, *arguments: Any, **named: Any) -> None:
        names = ("reward_funcs", "args", "train_dataset", "processing_class", "callbacks", "optimizers", "peft_config")
        given = dict(zip((*names, "tools", "environment_factory"), arguments, strict=False))
        super().__init__(model, **given, **named)
