"""A GRPO script whose callback writes every call it gets to a file: `recorded_script.py MODULE OUTPUT_DIR FILE CASE`.

MODULE is `trl` or `outpace.compat.trl`; nothing else differs between the two runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

import outpace.models.loading
from outpace.rewards.builtin import countdown
from outpace.tasks.countdown import Countdown

CASES: dict[str, dict[str, Any]] = {
    "accumulation": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 3,
        "logging_steps": 2,
        "logging_first_step": True,
    },
    "iterations": {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "max_steps": 8,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "logging_steps": 1,
    },
    "control": {"per_device_train_batch_size": 8, "num_train_epochs": 3, "logging_steps": 100},
}
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Recorder(TrainerCallback):
    """Records each call with the step, the epoch and the names of the logs."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []


def _record(event: str) -> Any:
    def method(self: Recorder, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = sorted(set(logs) & {"loss", "reward", "eval_reward", "train_loss"}) if logs else []
        self.calls.append([event, state.global_step, round(state.epoch or 0.0, 6), state.max_steps, shown])

    return method


for name in EVENTS:
    setattr(Recorder, name, _record(name))


class Steering(TrainerCallback):
    """Asks for a log, an evaluation and a checkpoint after step 2, and for the end after step 4."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == 2:
            control.should_log = control.should_evaluate = control.should_save = True
        if state.global_step == 4:
            control.should_training_stop = True
        return control


def rows(split: Any, count: int) -> Dataset:
    tasks = Countdown(split, size=count)
    return Dataset.from_list([{"prompt": task.prompt, **task.columns} for task in tasks])


def main(module: str, output_dir: str, file: str, case: str) -> None:
    library = importlib.import_module(module)
    recorder = Recorder()
    args = library.GRPOConfig(
        output_dir=output_dir,
        num_generations=4,
        max_completion_length=8,
        per_device_eval_batch_size=4,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        **CASES[case],
    )
    trainer = library.GRPOTrainer(
        model=str(outpace.models.loading.resolve_model("starter")),
        args=args,
        reward_funcs=countdown,
        train_dataset=rows("train", 6),
        eval_dataset=rows("heldout", 3),
        callbacks=[Steering(), recorder] if case == "control" else [recorder],
    )
    trainer.train()
    history = [sorted(set(line) & {"loss", "reward", "eval_reward", "step"}) for line in trainer.state.log_history]
    Path(file).write_text(json.dumps({"calls": recorder.calls, "history": history}))


if __name__ == "__main__":
    main(*sys.argv[1:])
