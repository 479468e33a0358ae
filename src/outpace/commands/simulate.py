"""`outpace simulate`: simulate a run on a cluster, and print its figures, the best split of devices and how fast
synchronous training would be."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outpace.runtime import diagnostics
from outpace.simulator.metrics import SimulationResult
from outpace.simulator.plan import SimulationPlan, make_plan
from outpace.simulator.settings import SimulationSettings, load_settings

WIDTH = 116

MIN_SPEEDUP = 1.05
"""Speedups below this factor are reported as equally fast."""


def simulate_command(file: Path | None, words: Sequence[str], as_json: bool = False, quiet: bool = False) -> int:
    """Run `outpace simulate [FILE] [--json] [--quiet] [--section.key value …]`."""
    settings = load_settings(file, words)
    diagnostics.tune_gc()  # avoid repeated garbage collection over 100,000 live episodes

    def report(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    plan = make_plan(settings, report)
    if as_json:
        print(json.dumps(plan.as_json(), indent=2))
    else:
        print_plan(plan, settings)
    return 0


def print_plan(plan: SimulationPlan, settings: SimulationSettings, console: Console | None = None) -> None:
    """Print the results of a plan as a table, with the best split and the comparison to synchronous training."""
    console = console or Console(width=WIDTH, highlight=False)
    named = {f"asynchronous (max_lag {settings.pacing.max_lag})": plan.result}
    if settings.pacing.max_lag == 0:
        named = {"as configured (max_lag 0)": plan.result}
    if plan.two_pools is not None and plan.colocated is not None:
        named |= {"synchronous, two pools": plan.two_pools, "synchronous, colocated": plan.colocated}
    console.print(_table(named, settings))
    for line in [*_search(plan), *_early_ends(named), *_comparison(plan)]:
        console.print(line, soft_wrap=True)


def _table(named: dict[str, SimulationResult], settings: SimulationSettings) -> Table:
    cluster = settings.cluster
    table = Table(title=f"{cluster.devices:,} devices, {settings.pacing.groups_per_step:,} groups of "
                        f"{settings.workload.group_size} per step")  # fmt: skip
    table.add_column("")
    for name in named:
        table.add_column(name, justify="right")
    for label, cells in _rows(list(named.values())):
        table.add_row(label, *cells)
    return table


def _rows(all_figures: list[SimulationResult]) -> list[tuple[str, list[str]]]:
    def cells(text: str, *names: str) -> list[str]:
        return [text.format(*(getattr(result, name) for name in names)) for result in all_figures]

    split = [
        f"all {each.training:,}, colocated" if each.in_turns else f"{each.generating:,} + {each.training:,}"
        for each in all_figures
    ]
    rows = [
        ("devices (generation + training)", split),
        ("seconds per step (T)", cells("{:,.1f}", "step_s")),
        ("steps per hour", cells("{:,.1f}", "steps_per_hour")),
        ("T*/T", cells("{:.2f}", "efficiency")),
        ("sampled tokens per second", cells("{:,.0f}", "sampled_tok_s")),
        ("trained tokens per second", cells("{:,.0f}", "trained_tok_s")),
        ("lag: mean, p95, max", cells("{:.2f}, {}, {}", "lag_mean", "lag_p95", "lag_max")),
        ("wasted tokens", cells("{:.1%}", "waste")),
        ("learner idle", cells("{:.0%}", "learner_wait")),
        ("engines idle", cells("{:.0%}", "engine_wait")),
        ("slots in use", cells("{:.0%}", "slots_used")),
    ]
    if any(sum(result.deaths.values()) for result in all_figures):
        rows.append(("failures", [_deaths(result) for result in all_figures]))
    return rows


def _deaths(result: SimulationResult) -> str:
    return ", ".join(f"{count} {role}" for role, count in result.deaths.items() if count) or "none"


def _search(plan: SimulationPlan) -> list[str]:
    if not plan.searched:
        return []
    tried = ", ".join(f"{devices:,}: {seconds:,.1f} s" for devices, seconds in plan.searched.items())
    best = plan.result
    return [
        f"best split: {best.generating:,} generation devices, {best.training:,} training devices "
        f"(seconds per step by training devices: {tried})"
    ]


def _early_ends(named: dict[str, SimulationResult]) -> list[str]:
    return [f"{name}: ended early: {each.ended}" for name, each in named.items() if each.ended != "done"]


def _comparison(plan: SimulationPlan) -> list[str]:
    if plan.factor is None or plan.synchronous is None:
        return []
    way = "colocated" if plan.synchronous is plan.colocated else "with two pools"
    if plan.factor >= MIN_SPEEDUP:
        return [f"asynchronous training is {plan.factor:.2f} times as fast as synchronous training ({way})"]
    if plan.factor > 1 / MIN_SPEEDUP:
        return [f"synchronous training ({way}) is as fast here ({1 / plan.factor:.2f} times): asynchrony gains nothing"]
    return [f"synchronous training ({way}) is {1 / plan.factor:.2f} times as fast here: asynchrony does not pay off"]
