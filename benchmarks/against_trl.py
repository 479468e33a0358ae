"""Seconds per step of outpace and of TRL's GRPOTrainer on the same work, on this machine.

    python benchmarks/against_trl.py [--steps 15] [--repeats 3] [--lags 0,2]

Both train the starter model on countdown puzzles: 64 prompts x 8 attempts a step, at most 32 tokens each,
temperature 1, one optimizer step, every group trained, no KL term. TRL gets all cores for generation and training in
turn, and trains the batch in one pass of padded rows. Compared are mean step times, the first third of the steps left
out. The speed of a shared machine drifts, so a run of outpace is compared with the TRL run next to it, and the median
of these ratios counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPTS, ATTEMPTS, TOKENS = 64, 8, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lags", default="0,2", help="the values of pacing.max_lag to run outpace with")
    parser.add_argument("--trl", action="store_true", help="run TRL alone and print its step times as JSON")
    options = parser.parse_args()
    if options.trl:
        print(json.dumps(train_with_trl(options.steps)))
        return
    first, *others = options.lags.split(",")
    seconds: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        for lag in (first, None, *others):
            steps = _trl_steps(options.steps) if lag is None else _outpace_steps(options.steps, lag, repeat)
            seconds.setdefault("TRL" if lag is None else f"outpace, max_lag {lag}", []).append(_late(steps))
        print({name: round(values[-1], 3) for name, values in seconds.items()}, file=sys.stderr)
    for name, values in seconds.items():
        ratios = [trl / own for trl, own in zip(seconds["TRL"], values, strict=True)]
        speed = f"{statistics.median(values):.2f} s per step, {statistics.median(ratios):.2f} of TRL's speed"
        print(f"{name:24} {speed} {[round(ratio, 2) for ratio in ratios]}")


def _late(steps: list[float]) -> float:
    return statistics.fmean(steps[len(steps) // 3 :])


def _trl_steps(steps: int) -> list[float]:
    command = [sys.executable, __file__, "--trl", "--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def _outpace_steps(steps: int, lag: str, seed: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="outpace-bench-") as directory:
        run_dir = Path(directory) / "run"
        settings = {
            "run.dir": run_dir, "run.steps": steps, "run.seed": seed, "run.device": "cpu", "pacing.max_lag": lag,
            "pacing.groups_per_step": PROMPTS, "rollout.group_size": ATTEMPTS, "rollout.max_tokens": TOKENS,
            "filter.uniform": "false", "eval.count": 0,
        }  # fmt: skip
        words = [f"--{key}={value}" for key, value in settings.items()]
        subprocess.run([sys.executable, "-m", "outpace.cli", "train", "--quiet", *words], check=True)
        return [json.loads(line)["time/step_s"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train_with_trl(steps: int) -> list[float]:
    import time

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import outpace.models
    from outpace.rewards.builtin import countdown
    from outpace.tasks.countdown import Countdown

    class StepTimes(TrainerCallback):
        def __init__(self) -> None:
            self.ends = [time.perf_counter()]

        def on_train_begin(self, *_: object, **__: object) -> None:
            self.ends = [time.perf_counter()]

        def on_step_end(self, *_: object, **__: object) -> None:
            self.ends.append(time.perf_counter())

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    starter = Path(outpace.models.__file__ or "").parent / "starter"
    puzzles = Countdown("train", size=PROMPTS * (steps + 1))
    tasks = [puzzles[index] for index in range(len(puzzles))]
    rows = [{"prompt": [{"role": "user", "content": task.prompt}], **task.columns} for task in tasks]
    times = StepTimes()
    with tempfile.TemporaryDirectory(prefix="trl-bench-") as directory:
        config = GRPOConfig(
            output_dir=directory, use_cpu=True, bf16=False, max_steps=steps, learning_rate=3e-4, beta=0.0,
            per_device_train_batch_size=PROMPTS * ATTEMPTS, num_generations=ATTEMPTS, temperature=1.0, top_k=0,
            max_completion_length=TOKENS, gradient_checkpointing=False, report_to="none", save_strategy="no",
            logging_steps=steps, lr_scheduler_type="constant", disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(starter, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(starter),
            reward_funcs=countdown, args=config, train_dataset=Dataset.from_list(rows), callbacks=[times],
        )  # fmt: skip
        trainer.train()
    return [after - before for before, after in zip(times.ends[:-1], times.ends[1:], strict=True)]


if __name__ == "__main__":
    main()
