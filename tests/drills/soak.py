"""Soak test, a long run with faults: `python -m drills.soak --steps 10000`, with `tests` on the path, or `make soak`.

Every few seconds a reward function or an environment fails, in each of its ways (`toy`). Every ten recovery times a
process is killed, with the roles taking turns; if that ends the run, it is resumed. In the last two fifths of the run
nothing is killed, so that memory can be measured in processes that live long. At the end the reward must have risen,
memory must not have grown, every visit must be accounted for, and nothing may be left behind.
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
from drills.measuring import ProcessMonitor, RoleCost, costs, growing
from drills.modes import CODE, COMMON, Assets, as_arguments, toy_settings
from drills.striking import kill_role
from leftovers import LeftoverCheck

TASKS = 512
ROLES = ("engine-0", "worker-0", "grader", "environment", "learner", "controller")
APART = 10.0
"""Recovery times between two kills."""
FIRST_GUESS_S = 1.0
"""Recovery time assumed before the first measurement."""
KILLS_UNTIL = 0.6
"""Part of the run after which no process is killed. Only processes that live long show whether memory grows."""
EVERY = 100
"""One in this many calls of user code fails."""
SPARE = 2
"""Extra processes allowed at a time: one may end while its replacement starts."""
START_LIMIT_S = 3600.0
FEWEST_TO_JUDGE = 2000
"""Steps. In a shorter run memory has not reached its level yet."""


@dataclass
class Kill:
    role: str
    step: int
    at: float
    recovery_s: float | None = None


class RoleKiller:
    """A hook for `Run.start`: kills each role in turn, in an order drawn anew every round."""

    def __init__(self, seed: int, until: int, apart: float) -> None:
        self._draw = random.Random(seed)
        self._apart = apart
        self._until = until  # no kills from this step on
        self._bag: list[str] = []
        self.kills: list[Kill] = []

    def __call__(self, run: Run) -> None:
        steps = run.step_log
        if self.kills and self.kills[-1].recovery_s is None:
            self.kills[-1].recovery_s = steps.recovery_s(self.kills[-1].at)
            return
        if not run.is_training or steps.last >= self._until or time.time() < self._due(run.began):
            return
        role = self._next_role()
        if kill_role(run, role, self._draw):
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
        "rollout.environment": f"{CODE}:FaultyEnvironment",
        "environment.isolation": "process",
        "environment.reuse": True,
        "environment.timeout_s": 2.0,
        "rollout.max_tokens": 4,
        "pacing.groups_per_step": 2,
        "pacing.max_lag": 2,
        "learner.lr": max(3e-5, 0.2 / steps),  # low enough that learning lasts until the end
        "checkpoint.every": 50,
        "eval.every": 500,
        "supervise.window_s": 60.0,
        "run.steps": steps,
        "run.save_rollouts": 0,
        "run.seed": 0,
    }


# --------------------------------------------------------------------------------------------------------------- checks


def rewards_of(run: Path) -> tuple[float, float]:
    """Return the mean reward of the first tenth of the steps and of the last tenth."""
    known = [line["reward/mean"] for line in lines_of(run / "metrics.jsonl") if "reward/mean" in line]
    tenth = max(1, len(known) // 10)
    return fmean(known[:tenth]), fmean(known[-tenth:])


def find_faults(
    run: Run, steps: int, killer: RoleKiller, monitor: ProcessMonitor, found: list[RoleCost]
) -> Iterator[str]:
    if run.starts[-1].code != 0:
        yield f"did not get to the end: exit codes {[start.code for start in run.starts]}"
        return
    yield from (f"left behind: {what}" for what in run.leftovers())
    yield from accounting(run.dir, TASKS, None)
    first, last = rewards_of(run.dir)
    if not last > first:
        yield f"the reward has not risen: {first:.3f} at first, {last:.3f} at last"
    if not killer.kills:
        yield "no process was killed"
    if steps >= FEWEST_TO_JUDGE:
        for cost in found:
            yield from growing(cost, steps)
        for role, (before, after) in monitor.max_counts().items():
            if after > before + SPARE:
                yield f"{role}: {before} processes at most in the first half, {after} in the second"


def soak(
    home: Path, steps: int, seed: int = 0, every: int = EVERY, apart: float = APART, verbose: bool = True
) -> dict[str, Any]:
    """Run the soak test and return its record; `faults` is empty if it passed."""
    for left in ("run", "tmp"):
        shutil.rmtree(home / left, ignore_errors=True)
    assets = Assets.write(home / "assets", TASKS, with_failures=False)
    environment = {toy.FAULTS_EVERY: str(every), toy.FAULTS_SEED: str(seed)}
    run = Run(home, as_arguments(settings(assets, steps)), environment)
    killer, monitor, progress = (
        RoleKiller(seed, int(steps * KILLS_UNTIL), apart),
        ProcessMonitor(),
        Progress(steps, verbose),
    )

    def hook(run: Run) -> None:
        monitor(run)
        killer(run)
        progress(run, killer)

    began = time.monotonic()
    while run.start(START_LIMIT_S, hook).code not in (0, None):
        if len(run.starts) > len(killer.kills) + 1:
            break
    seconds = time.monotonic() - began
    found = costs(monitor.lives.values())
    faults = list(find_faults(run, steps, killer, monitor, found))
    return _record(run, seconds, killer, monitor, found, faults)


def _record(
    run: Run, seconds: float, killer: RoleKiller, monitor: ProcessMonitor, found: list[RoleCost], faults: list[str]
) -> dict[str, Any]:
    batches = lines_of(run.dir / "batches.jsonl")
    return {
        "faults": faults,
        "steps": len(batches),
        "minutes": round(seconds / 60, 1),
        "starts": [start.code for start in run.starts],
        "rewards": [round(reward, 3) for reward in rewards_of(run.dir)],
        "visits": dict(outcomes(batches)),
        "recovery_s": round(killer.recovery_s, 2),
        "kills": [asdict(kill) for kill in killer.kills],
        "processes": monitor.max_counts(),
        "costs": [asdict(cost) for cost in found],
        "output": run.starts[-1].output if faults else "",
    }


class Progress:
    """Prints a progress line at intervals."""

    def __init__(self, steps: int, verbose: bool, every_s: float = 30.0) -> None:
        self._steps, self._verbose, self._every_s = steps, verbose, every_s
        self._due = 0.0

    def __call__(self, run: Run, killer: RoleKiller) -> None:
        if not self._verbose or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._every_s
        killed = ", ".join(f"{kill.role} at {kill.step}" for kill in killer.kills[-3:])
        print(
            f"step {run.step_log.last}/{self._steps}, {len(killer.kills)} kills (last: {killed or 'none'}), "
            f"recovery {killer.recovery_s:.1f} s",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="drills.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="seed of faults and kills")
    parser.add_argument("--every", type=int, default=EVERY, help="one in this many calls of user code fails")
    parser.add_argument("--apart", type=float, default=APART, help="recovery times between two kills")
    parser.add_argument("--home", type=Path, help="directory of the run; default: a temporary directory")
    parser.add_argument("--result", type=Path, help="result file; default: result.json in that directory")
    options = parser.parse_args(arguments)
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
    print("passed" if not record["faults"] else "FAILED:\n" + "\n".join(record["faults"]))
    print(f"{record['steps']} steps in {record['minutes']} min; details: {file}")
    return 1 if record["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
