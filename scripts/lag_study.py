"""What staleness costs, and what a correction gives back: the study in docs/algorithms.md.

    python scripts/lag_study.py run RESULTS.jsonl --jobs 2      every run that RESULTS does not have yet
    python scripts/lag_study.py report RESULTS.jsonl            tables on stdout, plots into docs/figures/

Every run trains the built-in model on the built-in puzzles in lockstep, where the lag is exact: batch v is made of
tokens sampled by version v - lag (the first batches, which have no older version, by version 0). A run is one process
with one compute thread a part; repeated on the same machine it gives the same numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS = 50
GROUPS = 32
LAGS = (0, 1, 2, 4, 8)
FAR_LAGS = (4, 8)
SEEDS = (0, 1, 2, 3, 4)
FEW_SEEDS = (0, 1)
STRESSED = ("ppo, rollout old policy", "dppo", "truncated_is cap 5, no mask")
"""What is tried under stress beside none and the default, with one seed."""

LR = 3e-4
STRESS_LR = 1e-3
"""The stress setting, declared before any of it was run: the same training at 3.3 times the learning rate."""

COLLAPSED = 0.05
"""A run is over when the training reward of a step is below this, a quarter of where it began: hardly an answer is
right, and filling a batch with groups that are not all wrong would take for ever."""

NONE = "none"
DEFAULT = "default"

METHODS: dict[str, dict[str, Any]] = {
    NONE: {"policy_loss.name": "reinforce", "correction.weight": "none"},
    DEFAULT: {},
}
"""What is compared. `none` trains on stale tokens as if they were fresh."""

OTHERS: dict[str, dict[str, Any]] = {
    "truncated_is, no mask": {"correction.masks": []},
    "truncated_is cap 5, no mask": {"correction.masks": [], "policy_loss.cap": 5.0},
    "token mask": {"correction.masks": ["token"]},
    "sequence mask": {"correction.masks": ["sequence"]},
    "geometric mask": {"correction.masks": ["geometric"]},
    "veto": {"correction.masks": ["veto"]},
    "m2po": {"correction.masks": ["m2po"]},
    "sequence weight": {"policy_loss.name": "reinforce", "correction.weight": "sequence"},
    "opsm alone": {"policy_loss.name": "reinforce", "correction.weight": "none", "correction.masks": ["opsm"]},
    "ppo, rollout old policy": {
        "policy_loss.name": "ppo",
        "policy_loss.old_policy": "rollout",
        "policy_loss.clip_high": 0.28,
    },
    "ppo, interpolated old policy": {"policy_loss.name": "ppo", "policy_loss.old_policy": "interpolated"},
    "gspo, rollout old policy": {"policy_loss.name": "gspo", "policy_loss.old_policy": "rollout"},
    "cispo, rollout old policy": {"policy_loss.name": "cispo", "policy_loss.old_policy": "rollout"},
    "sapo, rollout old policy": {"policy_loss.name": "sapo", "policy_loss.old_policy": "rollout"},
    "dppo": {"policy_loss.name": "dppo"},
}
"""Every other correction, at the far lags. A mask takes the place of the default's own. With one update per batch the
recomputed old policy is the current policy, so a token weight on it is truncated_is by another name."""


@dataclass(frozen=True, order=True)
class Run:
    """One point of the study. `setting` is `usual` or `stress`."""

    setting: str
    method: str
    lag: int
    seed: int

    @property
    def arguments(self) -> list[str]:
        settings: dict[str, Any] = {
            "pacing.max_lag": self.lag,
            "learner.lr": LR if self.setting == "usual" else STRESS_LR,
            "run.seed": self.seed,
            "run.steps": STEPS,
            "run.deterministic": True,
            "run.runtime": "inline",
            "run.threads": 1,
            "pacing.groups_per_step": GROUPS,
            "engine.context": 96,
            "run.save_rollouts": 0,
            "eval.every": 25,
            "eval.count": 1024,
        } | (METHODS | OTHERS)[self.method]
        return [f"--{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in settings.items()]


def plan() -> Iterator[Run]:
    """The runs of the study, the ones that matter most first."""
    for seed in SEEDS:
        yield from (Run("usual", method, lag, seed) for method in METHODS for lag in LAGS)
    for seed in FEW_SEEDS:
        yield from (Run("stress", method, lag, seed) for method in METHODS for lag in (0, *FAR_LAGS))
        yield from (Run("usual", method, lag, seed) for method in OTHERS for lag in FAR_LAGS)
    yield from (Run("stress", method, lag, FEW_SEEDS[0]) for method in STRESSED for lag in FAR_LAGS)


# ------------------------------------------------------------------------------------------------------------ running


def carry_out(run: Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "outpace.cli", "train", f"--run.dir={directory}", "--run.overwrite"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        errors = Path(directory) / "errors"
        with errors.open("w") as file:
            process = subprocess.Popen(
                [*command, *run.arguments], env=environment, stdout=subprocess.DEVNULL, stderr=file
            )
            while process.poll() is None:
                if has_collapsed(Path(directory)):
                    process.kill()
                    process.wait()
                    return {**asdict(run), "collapsed": True}
                time.sleep(1)
        if process.returncode:
            return {**asdict(run), "failed": errors.read_text().strip().splitlines()[-1:]}
        steps, evals = (_lines(Path(directory) / name) for name in ("metrics.jsonl", "evals.jsonl"))
    return {
        **asdict(run),
        "steps": STEPS,
        "curve": {int(line["step"]): line["eval/reward"] for line in evals},
        "accuracy": evals[-1]["eval/reward"],
        "ess": statistics.fmean(line["offpolicy/ess"] for line in steps),
        "kl": statistics.fmean(line["offpolicy/kl"] for line in steps),
        "masked": statistics.fmean(line["offpolicy/masked"] for line in steps),
        "clipped": statistics.fmean(line["clip_ratio"] for line in steps),
        "lag_max": max(line["lag/max"] for line in steps),
    }


def has_collapsed(directory: Path) -> bool:
    file = directory / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return bool(whole) and json.loads(whole[-1])["reward/mean"] < COLLAPSED


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def finished(results: Path) -> dict[Run, dict[str, Any]]:
    lines = _lines(results) if results.exists() else []
    return {
        Run(line["setting"], line["method"], line["lag"], line["seed"]): line for line in lines if "failed" not in line
    }


def run_all(results: Path, jobs: int, limit: int | None) -> None:
    known = finished(results)
    missing = [run for run in plan() if run not in known][:limit]
    print(f"{len(known)} runs are there, {len(missing)} to do, {jobs} at a time", flush=True)
    with ThreadPoolExecutor(jobs) as pool, results.open("a") as file:
        for number, future in enumerate(as_completed([pool.submit(carry_out, run) for run in missing]), 1):
            line = future.result()
            file.write(json.dumps(line) + "\n")
            file.flush()
            outcome = f"{line['accuracy']:.3f}" if "accuracy" in line else str(line.get("failed", "collapsed"))
            print(
                f"{number}/{len(missing)}  {line['setting']} {line['method']} lag {line['lag']}: {outcome}", flush=True
            )


# ---------------------------------------------------------------------------------------------------------- reporting


def accuracies(known: dict[Run, dict[str, Any]], setting: str, method: str, lag: int) -> list[float]:
    return [
        line["accuracy"]
        for run, line in sorted(known.items())
        if (run.setting, run.method, run.lag) == (setting, method, lag) and "accuracy" in line
    ]


def shown(known: dict[Run, dict[str, Any]], setting: str, method: str, lag: int) -> str:
    """Mean and standard error over the seeds."""
    values = accuracies(known, setting, method, lag)
    lines = [line for run, line in known.items() if (run.setting, run.method, run.lag) == (setting, method, lag)]
    if len(values) < len(lines):
        return f"collapsed ({len(lines) - len(values)} of {len(lines)})"
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.3f} (one seed)"
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def table(known: dict[Run, dict[str, Any]], setting: str, methods: Iterable[str], lags: Iterable[int]) -> str:
    columns = list(lags)
    head = ["| correction | " + " | ".join(f"lag {lag}" for lag in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    rows = [
        f"| {method} | " + " | ".join(shown(known, setting, method, lag) for lag in columns) + " |"
        for method in methods
    ]
    return "\n".join([*head, *rows])


def health(known: dict[Run, dict[str, Any]], lags: Iterable[int]) -> str:
    """How stale the data was, for the default."""
    rows = ["| lag | effective sample size | mismatch KL | masked | clipped |", "|---|---|---|---|---|"]
    for lag in lags:
        lines = [line for run, line in known.items() if (run.setting, run.method, run.lag) == ("usual", DEFAULT, lag)]
        if lines:
            means = {
                name: statistics.fmean(line[name] for line in lines) for name in ("ess", "kl", "masked", "clipped")
            }
            rows.append(
                f"| {lag} | {means['ess']:.3f} | {means['kl']:.4f} | {means['masked']:.4f} | {means['clipped']:.4f} |"
            )
    return "\n".join(rows)


def tables(known: dict[Run, dict[str, Any]]) -> dict[str, str]:
    """The tables of docs/algorithms.md by their captions."""
    return {
        f"Learning rate {LR:g}, {len(SEEDS)} seeds": table(known, "usual", METHODS, LAGS),
        f"Other corrections, {len(FEW_SEEDS)} seeds": table(known, "usual", OTHERS, FAR_LAGS),
        f"Stress: learning rate {STRESS_LR:g}": table(known, "stress", [*METHODS, *STRESSED], (0, *FAR_LAGS)),
        "How stale the data was under the default": health(known, LAGS),
    }


def report(results: Path, figures: Path) -> None:
    known = finished(results)
    for caption, text in tables(known).items():
        print(f"**{caption}**\n\n{text}\n")
    draw(known, figures)


def draw(known: dict[Run, dict[str, Any]], figures: Path) -> None:
    import matplotlib.pyplot as plt

    figures.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "outpace", "font.size": 9})
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    for axis, (setting, lags) in zip(axes, (("usual", LAGS), ("stress", (0, *FAR_LAGS))), strict=True):
        for method in METHODS:
            outcomes = [
                (run.lag, line) for run, line in known.items() if (run.setting, run.method) == (setting, method)
            ]
            points = [(lag, line.get("accuracy", 0.0)) for lag, line in outcomes]
            means = [statistics.fmean(value for place, value in points if place == lag) for lag in lags]
            (curve,) = axis.plot(lags, means, marker="o", label=f"{method} (mean, seeds)")
            axis.scatter(*zip(*points, strict=True), s=9, color=curve.get_color(), alpha=0.5)
        axis.set_title(f"learning rate {LR if setting == 'usual' else STRESS_LR:g}")
        axis.set_xlabel("lag (versions)")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"held-out accuracy after {STEPS} steps")
    axes[0].legend()
    axes[1].annotate("collapsed", (4.2, 0.02))
    figure.tight_layout()
    figure.savefig(figures / "lag.svg", metadata={"Date": None})

    figure, axis = plt.subplots(figsize=(8, 3.6))
    names = [*METHODS, *OTHERS]
    for offset, lag in ((-0.2, 4), (0.2, 8)):
        values = [accuracies(known, "usual", name, lag) for name in names]
        means = [statistics.fmean(found) if found else 0.0 for found in values]
        places = [index + offset for index in range(len(names))]
        axis.bar(places, means, width=0.38, label=f"lag {lag}")
        for place, found in zip(places, values, strict=True):
            axis.scatter([place] * len(found), found, s=6, color="black", zorder=3)
    axis.set_xticks(range(len(names)), names, rotation=40, ha="right")
    axis.set_ylim(0.3, 0.9)
    axis.set_ylabel("held-out accuracy")
    axis.legend(loc="lower right", framealpha=0.9)
    figure.tight_layout()
    figure.savefig(figures / "corrections.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="carry out what is missing")
    running.add_argument("results", type=Path)
    running.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    running.add_argument("--limit", type=int, help="at most so many runs")
    reporting = commands.add_parser("report", help="tables and plots")
    reporting.add_argument("results", type=Path)
    reporting.add_argument("--figures", type=Path, default=Path("docs/figures"))
    options = parser.parse_args()
    if options.command == "run":
        run_all(options.results, options.jobs, options.limit)
    else:
        report(options.results, options.figures)


if __name__ == "__main__":
    main()
