"""Seconds per step of `outpace.compat.trl` and of `outpace.Trainer` with the same settings, on this machine.

    python benchmarks/through_trl.py [--steps 30] [--repeats 5]

The work is that of `outpace bench overlap`: the starter model on countdown puzzles, synchronous and asynchronous, every
group trained. The trainers of TRL log every step and have a callback of transformers. Compared are mean step times, the
first third of the steps left out. The speed of a shared machine drifts by more than the difference, so both run at the
same time and compete for the same cores, and the median of the ratios counts. The command exits with 1 if it is above
`LIMIT`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from outpace.runtime.cleanup import temporary_directory

PROMPTS, ATTEMPTS, TOKENS = 64, 8, 32
MODES = {"synchronous": 0, "asynchronous": 2}
"""`max_staleness` of each mode."""

LIMIT = 1.02
"""Longest a step may take through TRL's names, relative to a native one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", nargs=3, metavar=("HOW", "MODE", "DIR"), help="run one training and return")
    options = parser.parse_args()
    if options.one:
        train(*options.one, options.steps)
        return 0
    worst = 0.0
    for mode in MODES:
        seconds: dict[str, list[float]] = {"native": [], "trl": []}
        for repeat in range(options.repeats):
            measured = measure(mode, options.steps, [*seconds][:: 1 if repeat % 2 == 0 else -1])
            for how, value in measured.items():
                seconds[how].append(value)
            print(mode, {how: round(values[-1], 3) for how, values in seconds.items()}, file=sys.stderr)
        ratio = median_ratio(seconds)
        worst = max(worst, ratio)
        print(f"{mode}: {statistics.median(seconds['trl']):.3f} s per step through TRL's names, {ratio:.3f} of native")
    return int(worst > LIMIT)


def median_ratio(seconds: dict[str, list[float]]) -> float:
    """Return the time of a step relative to the native run next to it."""
    return statistics.median(trl / native for trl, native in zip(seconds["trl"], seconds["native"], strict=True))


def measure(mode: str, steps: int, order: list[str]) -> dict[str, float]:
    """Return the mean seconds of the later steps of both runs, which are started in this order."""
    with temporary_directory("bench") as directory:
        runs = [
            subprocess.Popen(
                [sys.executable, __file__, "--steps", str(steps), "--one", how, mode, str(directory / how)],
                stdout=subprocess.DEVNULL,
            )
            for how in order
        ]
        codes = [run.wait() for run in runs]
        if any(codes):
            raise SystemExit(f"a run failed: {directory}")
        return {how: _late_steps(directory / how) for how in order}


def _late_steps(run: Path) -> float:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return statistics.fmean(json.loads(line)["time/step_s"] for line in lines[len(lines) // 3 :])


def train(how: str, mode: str, directory: str, steps: int) -> None:
    from transformers import TrainerCallback

    import outpace
    from outpace.compat.trl import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer
    from outpace.compat.trl.settings import translate
    from outpace.rewards.builtin import countdown
    from outpace.tasks.countdown import Countdown

    def reward(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        return countdown(prompts, completions, numbers=kwargs["numbers"], target=kwargs["target"])

    tasks = Countdown("train", size=4096)
    rows = [{"prompt": [{"role": "user", "content": task.prompt}], **task.columns} for task in tasks]
    fields: dict[str, Any] = {
        "per_device_train_batch_size": PROMPTS * ATTEMPTS, "num_generations": ATTEMPTS, "max_steps": steps,
        "max_completion_length": TOKENS, "learning_rate": 1e-12, "gradient_checkpointing": False, "logging_steps": 1,
        "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    if mode == "synchronous":
        args, trainer = GRPOConfig(directory, **fields), GRPOTrainer
    else:
        args, trainer = AsyncGRPOConfig(directory, max_staleness=MODES[mode], **fields), AsyncGRPOTrainer
    if how == "trl":
        trainer("starter", reward, args, rows, callbacks=[TrainerCallback]).train()
        return
    settings, _ = translate(args, len(rows))
    settings |= {"eval.count": 0, "eval.holdout": 0.0}
    outpace.Trainer("starter", rows, [reward], settings, quiet=True).train()


if __name__ == "__main__":
    sys.exit(main())
