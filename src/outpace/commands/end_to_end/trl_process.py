"""`python -m outpace.commands.end_to_end.trl_process JOB RESULT`: one training of TRL's GRPOTrainer.

It runs in the Python that `--trl-python` names, which has TRL but perhaps none of outpace's requirements, so it imports
only light modules of outpace. JOB is the JSON of `Work.trl_job` with these fields of `TrlSystem.run`:

    model        model directory
    vllm         sample with vLLM in this process (`vllm_mode="colocate"`)
    save_every   steps between two saves of the weights, 0 for never
    save_to      directory of the weights, in step-N/model.safetensors

RESULT gets times on the clock of `time.monotonic`, which all processes of a machine share: `began` (training begins),
`ends` (each step), and by step the samples and completion tokens that the reward function saw, and their mean reward.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)

from outpace.runtime.references import load_function

Job = dict[str, Any]
Generate = Callable[..., Any]


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    Path(result_file).write_text(json.dumps(train(job)))


def train(job: Job) -> dict[str, Any]:
    trl: Any = importlib.import_module("trl")
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    reward, recorder = CountingReward(job["reward"]), StepRecorder(job)
    with tempfile.TemporaryDirectory(prefix="outpace-trl-") as directory:
        trainer = trl.GRPOTrainer(
            model=model, processing_class=tokenizer, reward_funcs=reward, callbacks=[recorder],
            args=trl.GRPOConfig(directory, **arguments(job)), train_dataset=Dataset.from_list(job["rows"]),
        )  # fmt: skip
        if job["lengths"]:
            force_lengths(trainer, job, list(trainer.eos_token_ids))
        trainer.train()
    return {
        "began": recorder.began,
        "ends": recorder.ends,
        "samples": reward.samples,
        "completion_tokens": reward.tokens,
        "rewards": reward.means,
    }


def arguments(job: Job) -> dict[str, Any]:
    """Return the fields of GRPOConfig. The objective is outpace's default at lag 0: token mean, advantages without
    division by the standard deviation, no KL term."""
    vllm = {"use_vllm": True, "vllm_mode": "colocate"} if job["vllm"] else {}
    return {
        **job["optimizer"],
        **vllm,
        "max_steps": job["steps"],
        "per_device_train_batch_size": job["batch"],
        "gradient_accumulation_steps": job["prompts"] * job["attempts"] // job["batch"],
        "num_generations": job["attempts"],
        "max_completion_length": job["max_tokens"],
        "temperature": job["temperature"],
        "top_k": 0,
        "shuffle_dataset": False,
        "seed": job["seed"],
        "loss_type": "dapo",
        "scale_rewards": "none",
        "beta": 0.0,
        "lr_scheduler_type": "constant",
        "bf16": job["dtype"] == "bfloat16",
        "use_cpu": not job["on_gpu"],
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": job["steps"],
        "disable_tqdm": True,
    }


class CountingReward:
    """The reward function of the task. Records the samples, tokens and mean reward of each call, one per step."""

    def __init__(self, reference: str) -> None:
        self._function = load_function(reference, "rewards.functions")
        self.__name__ = "reward"
        self.samples: list[int] = []
        self.tokens: list[int] = []
        self.means: list[float] = []

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        self.samples.append(len(completion_ids))
        self.tokens.append(sum(map(len, completion_ids)))
        rewards: list[float] = self._function(**columns)
        self.means.append(statistics.fmean(rewards))
        return rewards


class StepRecorder(TrainerCallback):
    """Records when steps end, and saves weights."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.began = 0.0
        self.ends: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._job["on_gpu"]:
            torch.cuda.synchronize()
        self.ends.append(time.monotonic())
        step, every = len(self.ends), self._job["save_every"]
        if every and step % every == 0:
            given["model"].save_pretrained(Path(self._job["save_to"]) / f"step-{step}")


# ------------------------------------------------------------------------------------------------ long-tailed lengths


def force_lengths(trainer: Any, job: Job, eos: list[int]) -> None:
    """Make the trainer sample the job's lengths: one list per prompt, in the order of the prompts."""
    batches = _batches(job)
    if job["vllm"]:
        engine = trainer.vllm_generation.llm
        engine.generate = with_vllm_lengths(engine.generate, batches)
    else:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.generate = with_forced_ends(model.generate, batches, eos)


def _batches(job: Job) -> list[list[int]]:
    """Return the lengths of all samples of each step."""
    prompts = job["prompts"]
    return [
        [length for lengths in job["lengths"][start : start + prompts] for length in lengths]
        for start in range(0, len(job["lengths"]), prompts)
    ]


def with_vllm_lengths(generate: Generate, batches: Sequence[list[int]]) -> Generate:
    remaining = iter(batches)

    def wrapped(prompts: Any, sampling_params: Any, **options: Any) -> Any:
        lengths = next(remaining)
        own = [sampling_params.clone() for _ in lengths]
        for parameters, length in zip(own, lengths, strict=True):
            parameters.min_tokens = parameters.max_tokens = length
        return generate(prompts, sampling_params=own, **options)

    return wrapped


def with_forced_ends(generate: Generate, batches: Sequence[list[int]], eos: list[int]) -> Generate:
    remaining = iter(batches)

    def wrapped(input_ids: torch.Tensor, **options: Any) -> Any:
        ends = ForcedEnds(input_ids, next(remaining), eos)
        return generate(input_ids=input_ids, logits_processor=LogitsProcessorList([ends]), **options)

    return wrapped


class ForcedEnds(LogitsProcessor):
    """Suppresses the end-of-sequence tokens before the last token of each row, and forces one there."""

    def __init__(self, prompts: torch.Tensor, lengths: list[int], eos: list[int]) -> None:
        assert len(prompts) == len(lengths), f"{len(lengths)} samples expected, {len(prompts)} generated"
        self._start = prompts.shape[1]
        self._last_B = torch.tensor(lengths, device=prompts.device) - 1
        self._eos = eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends_B = self._last_B == input_ids.shape[1] - self._start
        scores[:, self._eos] = -torch.inf
        scores[ends_B] = -torch.inf
        scores[ends_B, self._eos[0]] = 0.0
        return scores


if __name__ == "__main__":
    main(*sys.argv[1:])
