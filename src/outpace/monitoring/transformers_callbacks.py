"""Runs transformers callbacks in an outpace run: a `TrainerCallback` gets the calls that transformers' `Trainer` makes.

    on_batch_start, on_batch_end, on_evaluation, on_checkpoint ─▶ `_training`, a generator in the order of transformers
                                                                  ─▶ on_step_begin, …, on_log, on_evaluate, on_save, …

The generator yields the event that it waits for. Other events, such as an evaluation that no callback requested, make
no calls. A batch with several optimizer updates has one step per update. Their calls are made when the batch is done,
and an evaluation or checkpoint requested in between follows the last step. A deterministic run may save a requested
checkpoint some steps later; on_save is then called late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from outpace.errors import BadInput, one_line
from outpace.monitoring.callbacks import Callback
from outpace.monitoring.metric_table import find
from outpace.monitoring.summary import Summary

LOG_NAMES: Mapping[str, str] = {
    "loss/policy": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "reward/<function>": "rewards/<function>/mean",
    "reward/<function>/std": "rewards/<function>/std",
    "completions/mean_length": "completions/mean_length",
    "completions/clipped_ratio": "completions/clipped_ratio",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio": "clip_ratio/region_mean",
    "time/step_s": "step_time",
    "eval/reward": "eval_reward",
    "eval/reward/<function>": "eval_rewards/<function>/mean",
    "eval/mean_tokens": "eval_completions/mean_length",
}
"""Maps outpace's metric names to the names in TRL's logs."""

OPTIMIZER = ("loss", "grad_norm", "learning_rate")
"""Logged for steps only. A log has the newest gradient norm and learning rate, and the mean of other metrics since the
last log."""

OF_EVERY_STEP = (*OPTIMIZER, "entropy", "kl", "clip_ratio/region_mean", "step_time")
"""Logged for every step of a batch. Other metrics are logged only for its first step, which sampled the batch."""

UNKNOWN = 1 << 40
"""Forward passes of an epoch if the number of prompts is unknown."""

STATE_FILE = "trainer_state.json"

Flow = Generator[str, Any, None]


@dataclass(frozen=True)
class Schedule:
    """The length of a run in transformers' terms, and its batches. A step is one optimizer update."""

    groups: int  # in a batch
    minibatches: int
    passes: int
    substeps: int  # forward passes of a step
    epoch_substeps: int  # forward passes of an epoch
    max_steps: int
    epochs: int

    @classmethod
    def of(cls, args: Any, rows: int | None, group: int, generation: int | None, passes: int) -> Self:
        """Return the GRPO schedule: completions for `generation` forward passes are sampled together, in groups of size
        `group`, and trained on `passes` times. `args` are training arguments; `rows` is the number of prompts, None if
        unknown. Only whole batches are trained on."""
        size, substeps = args.per_device_train_batch_size, args.gradient_accumulation_steps
        generation = generation or substeps
        samples, minibatches, times = size * generation, max(1, generation // substeps), passes
        if substeps % (generation * passes) == 0:  # several generations in one step
            samples, times = size * substeps // passes, 1
        elif generation % substeps:
            raise BadInput(f"steps_per_generation: not a multiple of gradient_accumulation_steps, {substeps}")
        if samples % group or size * generation % group:
            raise BadInput(f"num_generations: a batch of {samples} samples has no whole number of groups of {group}")
        if rows is None and args.max_steps <= 0:
            raise BadInput("max_steps: must be set, because the number of prompts is unknown")
        epoch = UNKNOWN if rows is None else max(1, rows // (size * generation // group)) * generation * passes
        steps, limited = math.ceil(epoch / substeps), args.max_steps > 0
        limit = args.max_steps if limited else math.ceil(args.num_train_epochs * steps)
        if limit % (minibatches * times):
            raise BadInput(f"max_steps: {limit} is not a multiple of {minibatches * times}, the steps of a generation")
        epochs = math.ceil(limit / steps if limited else args.num_train_epochs)
        return cls(samples // group, minibatches, times, substeps, epoch, limit, epochs)

    @property
    def updates(self) -> int:
        """Steps of a batch."""
        return self.minibatches * self.passes

    @property
    def epoch_steps(self) -> int:
        return math.ceil(self.epoch_substeps / self.substeps)


class _RunEnded(Exception):
    """The run has ended before its last step."""


def log_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename metrics to TRL's log names. Metrics of user code keep their names; all others are dropped."""
    named: dict[str, float] = {}
    for name, value in metrics.items():
        found = find(name)
        if found is None or found.source == "user code":
            if name != "step":
                named[name] = value
        elif found.name in LOG_NAMES:
            before, _, after = found.name.partition("<function>")
            function = name.removeprefix(before).removesuffix(after)
            named[LOG_NAMES[found.name].replace("<function>", function)] = value
    return named


class TransformersCallbacks(Callback):
    """`args` are training arguments, or an object with the same attributes."""

    blocking = True

    def __init__(
        self, args: Any, schedule: Schedule, callbacks: Sequence[Any] = (), model: Any = None, tokenizer: Any = None
    ) -> None:
        for each in callbacks:
            if not issubclass(each if isinstance(each, type) else type(each), TrainerCallback):
                raise BadInput(f"callbacks: {one_line(repr(each), 60)} is not a transformers.TrainerCallback")
        self.args = args
        make_handler: Any = CallbackHandler  # untyped
        module = None if isinstance(model, str) else model
        self.handler = make_handler([DefaultFlowCallback, *callbacks], module, tokenizer, None, None)
        self.accelerator = SimpleNamespace(print=print, is_main_process=True, num_processes=1, process_index=0)
        self.control, self.state = TrainerControl(), TrainerState()
        self.schedule = schedule
        self.eval_batches = 0  # on_prediction_step calls per evaluation; 0: no held-out tasks
        self.error: BaseException | None = None  # raised by a callback
        self._flow: Flow | None = None
        self._awaits = ""
        self._checkpoint_step = -1
        self._save_due = False  # the run saves a requested checkpoint after a later step
        self._since_log: list[dict[str, float]] = []
        self._losses: list[float] = []
        self._call("on_init_end")

    def is_world_process_zero(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------------ events of a run

    def on_run_start(self, info: Mapping[str, Any]) -> None:
        self.error = None
        self._flow = self._training(info["version"], time.monotonic())
        self._awaits = self._advance(None)

    def on_batch_start(self, version: int) -> None:
        while self._awaits == "on_checkpoint":
            self._save_due = True
            self._event("on_checkpoint", None)
        self._event("on_batch_start", version)

    def on_batch_end(self, metrics: Mapping[str, float]) -> None:
        self._event("on_batch_end", metrics)

    def on_evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        self._event("on_evaluation", metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._checkpoint_step = step
        if self._save_due and self._awaits != "on_checkpoint":
            self._saved()
        self._event("on_checkpoint", step)

    def on_run_end(self, summary: Summary) -> None:
        if self._flow is not None and summary.exit == 0:
            self._advance(_RunEnded())

    def _event(self, name: str, value: Any) -> None:
        if self._awaits == name:
            self._awaits = self._advance(value)

    def _advance(self, value: Any) -> str:
        assert self._flow is not None
        try:
            return self._flow.throw(value) if isinstance(value, _RunEnded) else self._flow.send(value)
        except StopIteration:
            return ""

    # ------------------------------------------------------------------------------------------------ calls

    def _call(self, event: str, **arguments: Any) -> None:
        try:
            self.control = getattr(self.handler, event)(self.args, self.state, self.control, **arguments)
        except BaseException as error:  # user code
            self.error = error
            raise

    def _training(self, version: int, started: float) -> Flow:
        self._begin(version)
        first = self.state.global_step
        try:
            yield from self._epochs()
            yield "on_run_end"
        except _RunEnded:
            pass
        steps, seconds = self.state.global_step - first, max(time.monotonic() - started, 1e-9)
        samples = steps * self.args.train_batch_size * self.args.gradient_accumulation_steps
        speed = {"train_samples_per_second": samples / seconds, "train_steps_per_second": steps / seconds}
        loss = fmean(self._losses) if self._losses else 0.0
        left = {name: value for name, value in self._take_means().items() if name not in OPTIMIZER}
        self.log({"train_runtime": seconds, **speed, "total_flos": 0.0, "train_loss": loss, **left})
        self._call("on_train_end")

    def _begin(self, version: int) -> None:
        file, step = Path(self.args.output_dir) / STATE_FILE, version * self.schedule.updates
        self.state = TrainerState.load_from_json(str(file)) if version and file.is_file() else TrainerState()
        self.state.log_history = [line for line in self.state.log_history if line["step"] <= step]
        self.state.global_step, self.state.epoch = step, step / self.schedule.epoch_steps
        self.state.compute_steps(self.args, self.schedule.max_steps)
        self.state.train_batch_size = self.args.train_batch_size
        self.state.max_steps, self.state.num_train_epochs = self.schedule.max_steps, self.schedule.epochs
        self._since_log, self._losses, self._checkpoint_step, self._save_due = [], [], -1, False
        self._call("on_train_begin")

    def _epochs(self) -> Flow:
        if self.args.eval_on_start and self.state.global_step == 0:
            yield from self._evaluate()
        for epoch in range(self.state.global_step // self.schedule.epoch_steps, self.schedule.epochs):
            self._call("on_epoch_begin")
            end = (epoch + 1) * self.schedule.epoch_steps
            while self.state.global_step < end and not self._stops:
                yield "on_batch_start"
                self._call("on_step_begin")
                yield from self._batch(epoch, (yield "on_batch_end"))
            self._call("on_epoch_end")
            yield from self._act()
            if self.control.should_training_stop:
                break
        if self.state.global_step < self.schedule.max_steps:
            self.stop()

    @property
    def _stops(self) -> bool:
        return self.control.should_epoch_stop or self.control.should_training_stop

    def _batch(self, epoch: int, metrics: Mapping[str, float]) -> Flow:
        logs = log_names({name: value for name, value in metrics.items() if not name.startswith("eval/")})
        evaluate = save = False
        tokens = int(metrics.get("throughput/sampled_tokens", 0))
        self.state.num_input_tokens_seen += tokens
        for update in range(self.schedule.updates):
            if update:
                self._call("on_step_begin")
            done = (self.state.global_step - epoch * self.schedule.epoch_steps) * self.schedule.substeps
            substeps = min(self.schedule.substeps, self.schedule.epoch_substeps - done)
            for _ in range(substeps - 1):
                self._call("on_substep_end")
            self._call("on_pre_optimizer_step")
            self._call("on_optimizer_step")
            self.state.global_step += 1
            self.state.epoch = epoch + (done + substeps) / self.schedule.epoch_substeps
            self._since_log.append(logs if update == 0 else {n: v for n, v in logs.items() if n in OF_EVERY_STEP})
            self._losses.append(logs.get("loss", 0.0))
            self._call("on_step_end")
            evaluate, save = evaluate or self.control.should_evaluate, save or self.control.should_save
            if update < self.schedule.updates - 1:
                self._log_steps()
        self.control.should_evaluate, self.control.should_save = evaluate, save
        yield from self._act()

    def _act(self) -> Flow:
        """Log, evaluate and save as callbacks request, after a step or an epoch."""
        self._log_steps()
        if self.control.should_evaluate:
            yield from self._evaluate()
        if self.control.should_save:
            yield from self._save()

    def _log_steps(self) -> None:
        if self.control.should_log and self._since_log:
            self.log(self._take_means())

    def _take_means(self) -> dict[str, float]:
        """Return the metrics to log for the steps since the last log."""
        steps, self._since_log = self._since_log, []
        values: dict[str, list[float]] = {}
        for name, value in (item for step in steps for item in step.items()):
            values.setdefault(name, []).append(value)
        means = {name: each[-1] if name in OPTIMIZER[1:] else fmean(each) for name, each in values.items()}
        return means | ({"num_tokens": float(self.state.num_input_tokens_seen)} if "reward" in means else {})

    def log(self, logs: dict[str, float]) -> None:
        """Add a line to the history, and call `on_log`."""
        logs["epoch"] = self.state.epoch or 0.0
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)

    def _evaluate(self) -> Flow:
        if not self.eval_batches:
            self.control.should_evaluate = False
            return
        self.evaluate()
        started = time.monotonic()
        self.evaluated((yield "on_evaluation"), started)

    def evaluated(self, metrics: Mapping[str, float], started: float) -> dict[str, float]:
        """Log the metrics of an evaluation, and return them under TRL's names."""
        for _ in range(self.eval_batches):
            self._call("on_prediction_step")
        logs = {**log_names(metrics), "eval_runtime": time.monotonic() - started}
        self.log(logs)
        self._call("on_evaluate", metrics=logs)
        self._compare_with_best(logs)
        return logs

    def _compare_with_best(self, logs: Mapping[str, float]) -> None:
        name, best = self.args.metric_for_best_model, self.state.best_metric
        is_new = False
        if name is not None and (value := logs.get(f"eval_{name.removeprefix('eval_')}")) is not None:
            is_new = best is None or (value > best if self.args.greater_is_better else value < best)
            if is_new:
                self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        if self.args.save_strategy == "best":
            self.control.should_save = is_new

    def _save(self) -> Flow:
        self.save()
        if self._checkpoint_step < self.state.global_step // self.schedule.updates:
            step = yield "on_checkpoint"
            if step is None:  # the next batch starts first
                self.control.should_save = False
                return
        self._saved()

    def _saved(self) -> None:
        self._save_due = False
        self.state.save_to_json(str(Path(self.args.output_dir) / STATE_FILE))
        self._call("on_save")
