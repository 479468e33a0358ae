"""`GRPOTrainer` and `AsyncGRPOTrainer`: TRL's arguments and methods. `outpace.Trainer` does the work."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from outpace.compat.trl.config import AsyncGRPOConfig, GRPOConfig, TrainingConfig
from outpace.compat.trl.settings import Refusal, refuse, translate
from outpace.config.load import combine, flatten
from outpace.errors import BadInput, ComponentFailed
from outpace.learner.optimizer import optimizer_settings
from outpace.models.loading import resolve_model
from outpace.models.lora import lora_settings
from outpace.monitoring.transformers_callbacks import TransformersCallbacks
from outpace.runtime.cleanup import temporary_directory
from outpace.trainer import Trainer

Factory = Callable[[], Any]


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
        environment_factory: Factory | Mapping[str, Factory] | None = None,
        **others: Any,
    ) -> None:
        refused = {"quantization_config": quantization_config, "optimizers[1]": optimizers[1], **others}
        refuse(
            [Refusal(name, "is not supported; leave it out") for name, value in refused.items() if value is not None]
        )
        name = model if isinstance(model, str) else model.config._name_or_path
        self.args = args or self.config_class(
            f"{name.rpartition('/')[2]}-{type(self).__name__.removesuffix('Trainer')}"
        )
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        if isinstance(model, str) and processing_class is not None:
            model = AutoModelForCausalLM.from_pretrained(resolve_model(model))
        elif not isinstance(model, str) and processing_class is None:
            self.processing_class = AutoTokenizer.from_pretrained(name)
        self._given, self._adapter = model, peft_config is not None
        self._environment = environment_factory
        tasks = self._rows("train_dataset", train_dataset)
        settings, schedule = translate(self.args, None if tasks is None else len(tasks))
        settings |= optimizer_settings(optimizers[0])
        if peft_config is not None:
            settings |= lora_settings(peft_config, lambda: resolve_model(name))
        if tasks is None:
            count = schedule.max_steps // schedule.updates * schedule.groups
            tasks = (
                list(islice(train_dataset, count)) if train_dataset is not None else [self._row({})] * schedule.groups
            )
        heldout = self._rows("eval_dataset", eval_dataset)
        settings |= {"eval.count": len(heldout or ()), "eval.holdout": 0.0, "tasks.duplicate_ids": "number"}
        self._events = TransformersCallbacks(self.args, callbacks or (), model, self.processing_class)
        self._events.schedule = schedule
        self._events.eval_batches = -(-len(heldout or ()) * settings["eval.attempts"] // self.args.eval_batch_size)
        self._trainer = Trainer(
            model,
            tasks,
            reward_funcs,
            combine(flatten(settings), flatten(getattr(self.args, "outpace", None) or {})),
            tokenizer=None if isinstance(model, str) else self.processing_class,
            eval_tasks=heldout,
            tools=tools or (),
            environment=environment_factory,
            callbacks=[self._events],
            quiet=bool(self.args.disable_tqdm),
        )

    def _rows(self, argument: str, dataset: Any) -> Any:
        """Return the rows of a dataset, None if their number is unknown."""
        if isinstance(dataset, Mapping):
            raise BadInput(f"{argument}: several datasets are not supported; pass one")
        if dataset is None or not hasattr(dataset, "__len__"):
            if dataset is None and argument == "train_dataset" and self._environment is None:
                raise BadInput("train_dataset: is required without environment_factory")
            return None
        return dataset if "prompt" in dataset[0] or self._environment is None else [self._row(row) for row in dataset]

    @staticmethod
    def _row(row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of an environment that gives the prompt itself."""
        return {"prompt": [{"role": "user", "content": ""}], **row}

    # ------------------------------------------------------------------------------------------------ TRL's methods

    @property
    def state(self) -> TrainerState:
        return self._events.state

    @property
    def control(self) -> TrainerControl:
        return self._events.control

    @property
    def callback_handler(self) -> Any:
        return self._events.handler

    def add_callback(self, callback: Any) -> None:
        self._events.handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self._events.handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self._events.handler.remove_callback(callback)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end. `resume_from_checkpoint`: continue from the newest checkpoint in `output_dir`."""
        if isinstance(resume_from_checkpoint, str):
            run = Path(self.args.output_dir).resolve()
            if run not in (found := Path(resume_from_checkpoint).resolve(), *found.parents):
                raise BadInput(f"resume_from_checkpoint: {resume_from_checkpoint} is not in output_dir, {run}")
        try:
            self._trainer.train(resume=bool(resume_from_checkpoint))
        except ComponentFailed:
            if self._events.error is not None:
                raise self._events.error from None
            raise
        if not isinstance(self._given, str):
            self._given.load_state_dict(self._trained().state_dict())
        if self.args.push_to_hub:
            self.push_to_hub()
        metrics = dict(self.state.log_history[-1]) if self.state.log_history else {}
        return TrainOutput(self.state.global_step, metrics.get("train_loss", 0.0), metrics)

    @property
    def model(self) -> Any:
        """The model object that was given, with the trained weights after training. For a name: a new object."""
        return self._trained() if isinstance(self._given, str) else self._given

    def _trained(self) -> Any:
        with temporary_directory("model") as directory:
            return AutoModelForCausalLM.from_pretrained(self._export(directory / "model"))

    def _export(self, directory: Path, adapter: bool = False) -> Path:
        return self._trainer.export(directory, best=self.args.load_best_model_at_end, adapter=adapter)

    def evaluate(self, *, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Evaluate the newest checkpoint, or the initial model, on `eval_dataset`."""
        if self.eval_dataset is None:
            raise BadInput("eval_dataset: must be set to evaluate")
        started = time.time()
        metrics = self._events.evaluated(self._trainer.evaluate().metrics(), time.time() - started)
        return {name.replace("eval_", f"{metric_key_prefix}_", 1): value for name, value in metrics.items()}

    def save_model(self, output_dir: str | None = None) -> None:
        """Save the trained model, or its adapter, with its tokenizer."""
        with temporary_directory("model") as directory:
            saved = self._export(directory / "model", self._adapter)
            shutil.copytree(saved, output_dir or self.args.output_dir, dirs_exist_ok=True)

    def push_to_hub(self, commit_message: str = "End of training", **options: Any) -> str:
        """Upload the trained model to the hub, and return its URL."""
        args = self.args
        options = {"private": args.hub_private_repo, "revision": args.hub_revision, "token": args.hub_token, **options}
        name, best = args.hub_model_id or Path(args.output_dir).name, args.load_best_model_at_end
        return self._trainer.push_to_hub(name, best, self._adapter, commit_message=commit_message, **options)


class AsyncGRPOTrainer(GRPOTrainer):
    """TRL's `AsyncGRPOTrainer`: sampling goes on while a step is trained, up to `max_staleness` versions ahead."""

    config_class = AsyncGRPOConfig

    ARGUMENTS = (
        "reward_funcs", "args", "train_dataset", "processing_class", "callbacks", "optimizers", "peft_config", "tools",
        "environment_factory",
    )  # fmt: skip

    def __init__(self, model: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(model, **dict(zip(self.ARGUMENTS, arguments, strict=False)), **named)
