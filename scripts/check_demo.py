"""Holds a finished demo run against what it promises: `python scripts/check_demo.py runs/demo`."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

MAX_TRAIN_S = 240


def promises(summary: dict[str, Any], config: dict[str, Any], judged: list[float]) -> dict[str, bool]:
    first, last = summary["eval_first"], summary["eval_last"]
    return {
        "exit code 0": summary["exit"] == 0,
        "all steps done": summary["steps"] == config["run"]["steps"],
        "at least 512 held-out puzzles judged each time": min(judged) >= 512,
        "sampled at the training temperature": config["eval"]["temperature"] == config["rollout"]["temperature"],
        "held-out accuracy rose by 0.25": last >= first + 0.25,
        "held-out accuracy doubled": last >= 2 * first,
        "lag within its bound": summary["lag_max"] <= config["pacing"]["max_lag"],
    }


def main(run: Path) -> int:
    summary = json.loads((run / "summary.json").read_text())
    config = tomllib.loads((run / "config.toml").read_text())
    evaluations = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    kept = promises(summary, config, [line["eval/count"] for line in evaluations])
    for promise, is_kept in kept.items():
        print(f"{'ok  ' if is_kept else 'FAIL'} {promise}")
    if summary["train_s"] > MAX_TRAIN_S:  # said, not judged: a busy machine is nobody's fault
        print(f"slow {summary['train_s']:.0f} s of training; on two idle cores it takes less than {MAX_TRAIN_S}")
    print(f"held-out {summary['eval_first']:.3f} -> {summary['eval_last']:.3f} in {summary['train_s']:.0f} s")
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
