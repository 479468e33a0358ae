"""Kill drills: `python -m drills.kills`, with `tests` on the path, or `make kills`.

    reference run ─▶ for every drill: run, kill as specified, resume until done ─▶ checks ─▶ table, result.json

In a drill processes die at crash points (`outpace.runtime.diagnostics`) or at a random moment, at most one per start.
Every visit must be recorded once and nothing may be left behind. In a deterministic mode the result must equal that of
an undisturbed run bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drills.checks import accounting, equality, outcomes
from drills.following import Run, lines_of
from drills.modes import MODES, Assets
from drills.points import AGENT_POINTS, POINTS, WHILE_RESUMING, Point
from drills.striking import RandomKill
from leftovers import LeftoverCheck

START_LIMIT_S = 240.0
"""Time limit of one start; many times what it usually takes."""
ATTEMPTS = 3
"""How often a drill is run until each of its deaths has happened."""
STARTING_UP = ("child.", "user_code.", "controller.started", "learner.built", "engine.built", "load.middle")
"""A component that dies before it was ever ready may end the start."""


@dataclass(frozen=True)
class Drill:
    mode: str
    deaths: tuple[Point, ...] = ()
    seed: int | None = None  # for a kill at a random moment

    @property
    def victim(self) -> str:
        return self.deaths[-1].process if self.deaths else "random"

    @property
    def name(self) -> str:
        if self.seed is not None:
            return f"{self.mode}:random-{self.seed}"
        return f"{self.mode}:" + ("+".join(point.name for point in self.deaths) or "undisturbed")


@dataclass
class Result:
    name: str
    faults: list[str]
    codes: list[int | None]
    seconds: float
    recovery_s: list[float | None] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    output: str = ""
    missed: int | None = None  # number of the first death that did not happen


# ----------------------------------------------------------------------------------------------------------- the drills


def all_drills(seed: int, random_kills: int) -> list[Drill]:
    """Every crash point in a deterministic run with lag; those reached more than once, also in another mode."""
    others = itertools.cycle(("free", "lag0"))
    drills = [Drill("lag2" if point.is_first else next(others), (point,)) for point in POINTS]
    drills += [Drill(mode, (before, point)) for mode, before, point in WHILE_RESUMING]
    drills += [Drill("agent", (point,)) for point in AGENT_POINTS]
    drills += [Drill("agent", (point,)) for point in POINTS if point.is_first and point.process != "grader"][3::8]
    drills += [Drill(mode, seed=seed + number) for number in range(random_kills) for mode in ("lag2", "free")]
    return drills


def sample_of(drills: list[Drill], count: int, seed: int) -> list[Drill]:
    """Draw a random sample that takes turns over the kinds of victims."""
    seen: Counter[str] = Counter()
    turns: list[tuple[int, Drill]] = []
    for drill in random.Random(seed).sample(drills, len(drills)):
        turns.append((seen[drill.victim], drill))
        seen[drill.victim] += 1
    return [drill for _, drill in sorted(turns, key=lambda turn: turn[0])[:count]]


# ------------------------------------------------------------------------------------------------------------ one drill


class DrillRunner:
    """Runs drills. Assets and reference runs are made once; each drill has its own directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.assets = Assets.write(home / "assets")
        self._references: dict[str, Path] = {}

    def make_reference(self, mode: str) -> None:
        """Make the undisturbed run of a deterministic mode, to compare with."""
        if not MODES[mode].deterministic or mode in self._references:
            return
        result = self.run_drill(Drill(mode))
        if result.faults:
            raise SystemExit(f"the undisturbed run {mode} is not right: {result.faults}\n{result.output}")
        self._references[mode] = self._home_of(Drill(mode)) / "run"

    def run_drill(self, drill: Drill) -> Result:
        """Run a drill. In a mode whose timing varies, a run may end without the state that a crash point needs (such
        as answers of unfinished groups): it is checked like any other, and the drill is repeated."""
        for _ in range(1 if MODES[drill.mode].deterministic else ATTEMPTS):
            result = self._attempt(drill)
            if result.faults or result.missed is None:
                break
        if result.missed is not None:
            result.faults.append(f"not reached: death number {result.missed}")
        return result

    def _attempt(self, drill: Drill) -> Result:
        home = self._home_of(drill)
        shutil.rmtree(home, ignore_errors=True)
        began = time.monotonic()
        run = Run(home, MODES[drill.mode].arguments(self.assets))
        deaths = self._run_with_kills(run, drill)
        faults = self._check(run, drill, deaths)
        return Result(
            name=drill.name,
            faults=faults,
            codes=[start.code for start in run.starts],
            seconds=round(time.monotonic() - began, 1),
            recovery_s=[None if died is None else _rounded(run.step_log.recovery_s(died)) for died in deaths],
            outcomes=dict(outcomes(lines_of(run.dir / "batches.jsonl"))) if not faults else {},
            output=run.starts[-1].output if faults else "",
            missed=deaths.index(None) + 1 if None in deaths else None,
        )

    def _home_of(self, drill: Drill) -> Path:
        return self.home / drill.name.replace(":", "/").replace("@", "-").replace("#", "-")

    def _run_with_kills(self, run: Run, drill: Drill) -> list[float | None]:
        """Start the run until it is done. Returns the time of each death, None for a death that did not happen."""
        if drill.seed is not None:
            random_kill = RandomKill(drill.seed)
            run.finish(START_LIMIT_S, 4, random_kill)
            return [random_kill.killed_at]
        marks = [run.home / f"died-{number}" for number in range(len(drill.deaths))]
        while len(run.starts) < len(marks) + 3:
            run.environment = _crash_environment(drill, marks)
            if run.start(START_LIMIT_S).code in (0, None):
                break
        return [mark.stat().st_mtime if mark.exists() else None for mark in marks]

    def _check(self, run: Run, drill: Drill, deaths: list[float | None]) -> list[str]:
        try:
            return list(self._faults(run, drill, deaths))
        except Exception:  # files that cannot be read are a fault as well
            return [traceback.format_exc()]

    def _faults(self, run: Run, drill: Drill, deaths: list[float | None]) -> Iterator[str]:
        if run.starts[-1].code != 0:
            yield f"did not get to the end: exit codes {[start.code for start in run.starts]}"
            yield from run.leftovers()
            run.kill_all()
            return
        yield from (f"left behind: {what}" for what in run.leftovers())
        yield from _wrong_ends(run, drill, sum(died is not None for died in deaths))
        mode = MODES[drill.mode]
        yield from accounting(run.dir, mode.tasks, mode.epochs)
        if reference := self._references.get(drill.mode):
            yield from equality(run.dir, reference)


def _crash_environment(drill: Drill, marks: list[Path]) -> dict[str, str]:
    """Return the crash point of this start: the first whose death has not happened."""
    for point, mark in zip(drill.deaths, marks, strict=True):
        if not mark.exists():
            return {"OUTPACE_CRASH": f"{point.process}@{point.label}#{point.nth}", "OUTPACE_CRASH_MARK": str(mark)}
    return {}


def _wrong_ends(run: Run, drill: Drill, died: int) -> Iterator[str]:
    """A dead controller kills the run, a dead learner ends it with exit code 4, any other process is restarted. Only
    the first `died` deaths happened."""
    codes = [start.code for start in run.starts]
    if drill.seed is not None:
        if set(codes[:-1]) - {-9, 4}:
            yield f"exit codes {codes}"
        return
    expected: list[int] = []
    for point in drill.deaths[:died]:
        if point.process == "controller":
            expected.append(-9)
        elif point.process == "learner" or (point.label.startswith(STARTING_UP) and 4 in codes):
            expected.append(4)
    if codes != [*expected, 0]:
        yield f"exit codes {codes}, not {[*expected, 0]}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


# ----------------------------------------------------------------------------------------------------------- all drills


def run_all(drills: Sequence[Drill], runner: DrillRunner, jobs: int) -> Iterator[Result]:
    """Yield results as they complete."""
    with ThreadPoolExecutor(jobs) as pool:
        modes = dict.fromkeys(drill.mode for drill in drills)
        for made in as_completed([pool.submit(runner.make_reference, mode) for mode in modes]):
            made.result()
        for done in as_completed([pool.submit(runner.run_drill, drill) for drill in drills]):
            yield done.result()


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    drills = all_drills(options.seed, options.random)
    if options.only:
        drills = [drill for drill in drills if any(text in drill.name for text in options.only)]
    if options.sample:
        drills = sample_of(drills, options.sample, options.seed)
    if options.list or not drills:
        print(*(drill.name for drill in drills), sep="\n")
        return 0 if drills else 2
    home = options.home or Path(tempfile.mkdtemp(prefix="outpace-kills-"))
    results: list[Result] = []
    began = time.monotonic()
    with LeftoverCheck(home.absolute()) as check:
        for result in run_all(drills, DrillRunner(home), options.jobs):
            results.append(result)
            print(_row(result, len(results), len(drills)), flush=True)
        left = check.found()
    minutes = (time.monotonic() - began) / 60
    failed = _write_summary(results, drills, minutes, options.result or home / "result.json")
    print(*(f"left behind: {what}" for what in left), sep="\n", end="\n" if left else "")
    return 1 if failed or left else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="drills.kills", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", help="drills whose name contains one of these, as `free:` or `worker@journal`"
    )
    parser.add_argument("--sample", type=int, default=0, help="run only this many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample and of kills at random moments")
    parser.add_argument("--random", type=int, default=6, help="kills at random moments, in each of two modes")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))), help="drills run in parallel")
    parser.add_argument("--home", type=Path, help="directory of the runs; default: a temporary directory")
    parser.add_argument("--result", type=Path, help="result file; default: result.json in that directory")
    parser.add_argument("--list", action="store_true", help="list the drills and exit")
    return parser.parse_args(arguments)


def _row(result: Result, number: int, of: int) -> str:
    recovery = ", ".join("-" if seconds is None else f"{seconds:.1f}" for seconds in result.recovery_s)
    verdict = "ok" if not result.faults else "FAILED: " + "; ".join(result.faults)
    return f"{number:4}/{of}  {result.name:52} {result.seconds:6.1f} s  recovered in {recovery or '-':>10} s  {verdict}"


def _write_summary(results: list[Result], drills: Sequence[Drill], minutes: float, file: Path) -> bool:
    """Write the record and print a summary. Returns whether a drill failed."""
    failed = [result for result in results if result.faults]
    recovery = sorted(seconds for result in results for seconds in result.recovery_s if seconds is not None)
    pairs = {(point.process, point.label) for drill in drills for point in drill.deaths}
    record = {
        "drills": len(results),
        "failed": len(failed),
        "pairs": len(pairs),
        "minutes": round(minutes, 1),
        "recovery_s": {"median": recovery[len(recovery) // 2], "max": recovery[-1]} if recovery else None,
        "results": [asdict(result) for result in sorted(results, key=lambda result: result.name)],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{len(results)} drills over {len(pairs)} pairs of process and point in {minutes:.1f} min: {len(failed)} failed"
    )
    print(f"details: {file}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
