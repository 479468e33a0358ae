"""Holds finished runs of the built-in models against what they promise.

python scripts/check_demo.py runs/demo
python scripts/check_demo.py --reach 0.75 runs/calculator runs/guess
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

JUDGED = 512
RISE = 0.25


def promises(
    summary: dict[str, Any], config: dict[str, Any], judged: list[float], reach: float | None
) -> dict[str, bool]:
    first, last = summary["eval_first"], summary["eval_last"]
    kept = {
        "exit code 0": summary["exit"] == 0,
        "all steps done": summary["steps"] == config["run"]["steps"],
        f"at least {JUDGED} held-out problems judged each time": min(judged) >= JUDGED,
        "sampled at the training temperature": config["eval"]["temperature"] == config["rollout"]["temperature"],
        f"held-out reward rose by {RISE}": last >= first + RISE,
        "held-out reward doubled": last >= 2 * first,
        "lag within its bound": summary["lag_max"] <= config["pacing"]["max_lag"],
    }
    return kept if reach is None else {**kept, f"held-out reward reached {reach}": last >= reach}


def check(run: Path, reach: float | None, expected_s: float) -> bool:
    """Say what the run kept of its promises; whether it kept them all."""
    summary = json.loads((run / "summary.json").read_text())
    config = tomllib.loads((run / "resolved.toml").read_text())
    evaluations = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    kept = promises(summary, config, [line["eval/count"] for line in evaluations], reach)
    print(run)
    for promise, is_kept in kept.items():
        print(f"{'ok  ' if is_kept else 'FAIL'} {promise}")
    if summary["train_s"] > expected_s:  # said, not judged: a busy machine is nobody's fault
        print(f"slow {summary['train_s']:.0f} s of training; on two idle cores it takes less than {expected_s:.0f}")
    print(f"held-out {summary['eval_first']:.3f} -> {summary['eval_last']:.3f} in {summary['train_s']:.0f} s")
    return all(kept.values())


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Hold finished runs against what they promise.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--reach", type=float, help="the held-out reward at the end")
    parser.add_argument("--seconds", type=float, default=240, help="what two idle cores need at most")
    options = parser.parse_args(words)
    kept = [check(run, options.reach, options.seconds) for run in options.runs]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
