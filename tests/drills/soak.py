"""A long run that nothing is spared: `python -m drills.soak --steps 10000`, with `tests` on the path, or `make soak`.

Every few seconds a reward or an environment goes wrong, in each of the ways it can (`toy`). Every ten recovery times a
process is killed, each kind in its turn; where that ends the run it is resumed. At the end the reward must have risen,
nothing may have grown, every visit must be accounted for, and nothing be left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from drills import toy
from drills.checks import accounting, outcomes
from drills.following import Run, lines_of
from drills.measuring import Cost, Measuring, costs, growing
from drills.modes import CODE, COMMON, Assets, as_arguments, toy_settings
from drills.striking import strike_role
from leftovers import LeftoverCheck

TASKS = 512
ROLES = ("engine-0", "worker-0", "grader", "environment", "learner", "controller")
APART = 10.0
"""So many recovery times lie between two kills."""
FIRST_GUESS_S = 1.0
"""A recovery time, before there was one to measure."""
EVERY = 100
"""One in so many calls of user code goes wrong."""
SPARE = 2
"""So many processes more may be seen at once: one that ends while its successor starts."""
START_LIMIT_S = 3600.0
FEWEST_TO_JUDGE = 2000
"""Steps. In a shorter run memory is still finding its level."""


@dataclass
class Kill:
    role: str
    step: int
    at: float
    recovery_s: float | None = None


class Killing:
    """A hook for `SimulatedRun.start`: each role in its turn, in an order drawn anew every round."""

    def __init__(self, seed: int, until: int, apart: float) -> None:
        self._draw = random.Random(seed)
        self._apart = apart
        self._until = until  # the last step that is disturbed
        self._bag: list[str] = []
        self.kills: list[Kill] = []

    def __call__(self, run: Run) -> None:
        steps = run.marks
        if self.kills and self.kills[-1].recovery_s is None:
            self.kills[-1].recovery_s = steps.recovery_s(self.kills[-1].at)
            return
        if not run.is_training or steps.last >= self._until or time.time() < self._due(run.began):
            return
        role = self._next_role()
        if strike_role(run, role, self._draw):
            self.kills.append(Kill(role, steps.last, time.time()))

    @property
    def recovery_s(self) -> float:
        known = [kill.recovery_s for kill in self.kills if kill.recovery_s is not None]
        return fmean(known) if known else FIRST_GUESS_S

    def _due(self, began: float) -> float:
        last = self.kills[-1].at + (self.kills[-1].recovery_s or 0.0) if self.kills else began
        return last + self._apart * self.recovery_s

    def _next_role(self) -> str:
        if not self._bag:
            self._bag = self._draw.sample(ROLES, len(ROLES))
        return self._bag.pop()


def settings(assets: Assets, steps: int) -> dict[str, Any]:
    return {
        **COMMON,
        **toy_settings(assets),
        "rewards.functions": [f"{CODE}:faulty_share"],
        "rewards.timeout_s": 2.0,
        "rollout.environment": f"{CODE}:Room",
        "environment.isolation": "process",
        "environment.reuse": True,
        "environment.timeout_s": 2.0,
        "rollout.max_tokens": 4,
        "pacing.groups_per_step": 2,
        "pacing.max_lag": 2,
        "learner.lr": max(3e-5, 0.2 / steps),  # so that there is something to learn until the end
        "checkpoint.every": 50,
        "eval.every": 500,
        "supervise.window_s": 60.0,
        "run.steps": steps,
        "run.show_rollouts": 0,
        "run.seed": 0,
    }


# ---------------------------------------------------------------------------------------------------------- the verdict


def rewards_of(run: Path) -> tuple[float, float]:
    """The mean of the first tenth of the steps, and of the last."""
    known = [line["reward/mean"] for line in lines_of(run / "metrics.jsonl") if "reward/mean" in line]
    tenth = max(1, len(known) // 10)
    return fmean(known[:tenth]), fmean(known[-tenth:])


def verdict(run: Run, steps: int, killing: Killing, measuring: Measuring, found: list[Cost]) -> Iterator[str]:
    if run.starts[-1].code != 0:
        yield f"did not get to the end: exit codes {[start.code for start in run.starts]}"
        return
    yield from (f"left behind: {what}" for what in run.leftovers())
    yield from accounting(run.dir, TASKS, None)
    first, last = rewards_of(run.dir)
    if not last > first:
        yield f"the reward has not risen: {first:.3f} at first, {last:.3f} at last"
    if not killing.kills:
        yield "nobody was killed"
    if steps >= FEWEST_TO_JUDGE:
        for cost in found:
            yield from growing(cost, steps)
        for role, (before, after) in measuring.most().items():
            if after > before + SPARE:
                yield f"{role}: {before} processes at most in the first half, {after} in the last"


def soak(
    home: Path, steps: int, seed: int = 0, every: int = EVERY, apart: float = APART, say: bool = True
) -> dict[str, Any]:
    """The whole of it; the returned record has no `faults` when all is well."""
    for left in ("run", "tmp"):
        shutil.rmtree(home / left, ignore_errors=True)
    assets = Assets.written(home / "assets", TASKS, unlucky=False)
    environment = {toy.FAULTS_EVERY: str(every), toy.FAULTS_SEED: str(seed)}
    run = Run(home, as_arguments(settings(assets, steps)), environment)
    killing, measuring, progress = Killing(seed, steps * 95 // 100, apart), Measuring(), Progress(steps, say)

    def hook(run: Run) -> None:
        measuring(run)
        killing(run)
        progress(run, killing)

    began = time.monotonic()
    while run.start(START_LIMIT_S, hook).code not in (0, None):
        if len(run.starts) > len(killing.kills) + 1:
            break
    seconds = time.monotonic() - began
    found = costs(measuring.lives.values())
    faults = list(verdict(run, steps, killing, measuring, found))
    return _record(run, seconds, killing, measuring, found, faults)


def _record(
    run: Run, seconds: float, killing: Killing, measuring: Measuring, found: list[Cost], faults: list[str]
) -> dict[str, Any]:
    batches = lines_of(run.dir / "batches.jsonl")
    return {
        "faults": faults,
        "steps": len(batches),
        "minutes": round(seconds / 60, 1),
        "starts": [start.code for start in run.starts],
        "rewards": [round(reward, 3) for reward in rewards_of(run.dir)],
        "visits": dict(outcomes(batches)),
        "recovery_s": round(killing.recovery_s, 2),
        "kills": [asdict(kill) for kill in killing.kills],
        "processes": measuring.most(),
        "costs": [asdict(cost) for cost in found],
        "said": run.starts[-1].said if faults else "",
    }


class Progress:
    """A line every so often."""

    def __init__(self, steps: int, say: bool, every_s: float = 30.0) -> None:
        self._steps, self._say, self._every_s = steps, say, every_s
        self._due = 0.0

    def __call__(self, run: Run, killing: Killing) -> None:
        if not self._say or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._every_s
        killed = ", ".join(f"{kill.role} at {kill.step}" for kill in killing.kills[-3:])
        print(
            f"step {run.marks.last}/{self._steps}, {len(killing.kills)} kills (last: {killed or 'none'}), "
            f"recovery {killing.recovery_s:.1f} s",
            flush=True,
        )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="drills.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of faults and kills")
    parser.add_argument("--every", type=int, default=EVERY, help="one in so many calls of user code goes wrong")
    parser.add_argument("--apart", type=float, default=APART, help="recovery times between two kills")
    parser.add_argument("--home", type=Path, help="where the run goes; default: a temporary directory")
    parser.add_argument("--result", type=Path, help="where the JSON goes; default: result.json in there")
    options = parser.parse_args(words)
    home = options.home or Path(tempfile.mkdtemp(prefix="outpace-soak-"))
    with LeftoverCheck(home.absolute()) as check:
        record = soak(home, options.steps, options.seed, options.every, options.apart)
        record["faults"] += [f"left behind: {what}" for what in check.found()]
    file = options.result or home / "result.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")
    for cost in record["costs"]:
        print(*(f"{name} {value}" for name, value in cost.items()), sep=", ")
    with suppress(KeyError):
        print(f"reward {record['rewards'][0]} → {record['rewards'][1]}, visits {record['visits']}")
    print("all is well" if not record["faults"] else "FAILED:\n" + "\n".join(record["faults"]))
    print(f"{record['steps']} steps in {record['minutes']} min; everything is in {file}")
    return 1 if record["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
