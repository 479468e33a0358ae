"""What no single setting can say: defaults that depend on other keys, and combinations that cannot work.

`check` refuses; `resolve` fills, so that the config written into the run directory says exactly what ran. Resolving
is idempotent. Each rule yields lines that start with the key to change; the first one is told. What the mathematics
adds to both is in `outpace.config.dependent` and `outpace.config.algorithm_rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from outpace.config import STARTER, Config
from outpace.config.algorithm_rules import ALGORITHM_RULES, Rule
from outpace.config.dependent import settled, value_of, with_values
from outpace.errors import BadInput
from outpace.references import absolute

REWARDS_OF_TASKS: dict[str, list[str]] = {"countdown": ["countdown"], "arithmetic": ["number"]}
"""The built-in tasks and what they are graded by unless told otherwise."""

FUNCTIONS = (
    "rollout.function",
    "rollout.environment",
    "algorithm.surrogate",
    "algorithm.advantage",
    "algorithm.normalise",
)
"""Settings that may name a function in a file, beside `rewards.functions`."""

DEFAULT_TASK = "countdown"
DEFAULT_STEPS = 100
CUT = "cutting the distribution biases every importance weight, as the learner cannot replay which tokens were kept"
LOCKSTEP_STARTER_CONTEXT = 256
"""A deterministic engine attends over its whole context at every step; the starter's puzzles need little of it."""


def resolve(
    config: Config, *, own_tasks: bool = False, own_rewards: bool = False, now: datetime | None = None
) -> Config:
    """The config with every dependent default filled in, checked again.

    `own_tasks` and `own_rewards` say that a Python caller brings objects of its own instead of naming them here.
    """
    filled = settled(with_values(config, _defaults(config, own_tasks, now or datetime.now())))
    if not own_rewards and not filled.rewards.functions:
        filled = with_values(filled, {"rewards.functions": _rewards_of_task(filled)})
    filled = _with_absolute_files(filled)
    check(filled)
    return filled


def check(config: Config) -> None:
    """Raise `BadInput` for the first rule that the config, with its dependent defaults, breaks."""
    whole = settled(config)
    for rule in (*RULES, *ALGORITHM_RULES):
        for complaint in rule(whole):
            raise BadInput(complaint)


# --------------------------------------------------------------------------------------------------------- defaults


def _defaults(config: Config, own_tasks: bool, now: datetime) -> dict[str, Any]:
    """New values by dotted key, only for what is to change."""
    starter = config.model.path == STARTER
    unset: dict[str, Any] = {
        "learner.lr": 3e-4 if starter else 1e-6,
        "rollout.max_tokens": 32 if starter else 512,
        "pacing.max_running": 2 * config.engine.slots,
        "eval.temperature": config.rollout.temperature,
        "run.dir": f"runs/{now:%Y%m%d-%H%M%S}",
    }
    if config.run.epochs is None:
        unset["run.steps"] = DEFAULT_STEPS
    if config.tasks.path is None and not own_tasks:
        unset["tasks.name"] = DEFAULT_TASK
    if config.run.deterministic and starter:
        unset["engine.context"] = LOCKSTEP_STARTER_CONTEXT
    values = {key: value for key, value in unset.items() if value_of(config, key) is None}
    values["pacing.chunk_groups"] = min(config.pacing.chunk_groups, config.pacing.groups_per_step)
    if config.run.deterministic and config.run.device == "auto":
        values["run.device"] = "cpu"
    return values


def _with_absolute_files(config: Config) -> Config:
    """A run may be resumed from another directory."""
    named = {key: value_of(config, key) for key in FUNCTIONS}
    values: dict[str, Any] = {key: absolute(name) for key, name in named.items() if name is not None}
    return with_values(config, values | {"rewards.functions": [absolute(name) for name in config.rewards.functions]})


def _rewards_of_task(config: Config) -> list[str]:
    if config.rollout.function is not None or config.rollout.environment is not None:
        return []  # a custom rollout or an environment may give the reward itself
    rewards = REWARDS_OF_TASKS.get(config.tasks.name or "")
    if rewards is None:
        raise BadInput("rewards.functions: name at least one, such as my_rewards.py:score or package.module:score")
    return rewards


# ------------------------------------------------------------------------------------------------------------ rules


def _one_source_of_tasks(config: Config) -> Iterator[str]:
    if config.tasks.name is not None and config.tasks.path is not None:
        yield f"tasks.path: tasks.name is {config.tasks.name} already; keep one of the two"


def _rewards_fit(config: Config) -> Iterator[str]:
    functions, weights = config.rewards.functions, config.rewards.weights
    for name in functions:
        if functions.count(name) > 1:
            yield f"rewards.functions: {name} is there twice; give it a weight of 2 instead"
    if weights is not None and functions and len(weights) != len(functions):
        yield f"rewards.weights: needs one per function, {len(functions)} in all, not {len(weights)}"
    if config.rewards.memory_mb is not None and config.rewards.isolation == "thread":
        yield "rewards.memory_mb: threads have no limit of their own; leave this out or rewards.isolation"


def _one_way_to_roll_out(config: Config) -> Iterator[str]:
    if config.rollout.function is not None and config.rollout.environment is not None:
        yield f"rollout.environment: rollout.function is {config.rollout.function} already; keep one of the two"


def _sampling_is_exact(config: Config) -> Iterator[str]:
    if config.rollout.temperature == 0:
        yield "rollout.temperature: greedy attempts are all alike and teach nothing; only eval.temperature may be 0"
    if config.rollout.top_p < 1:
        yield f"rollout.top_p: {CUT}; leave it at 1.0"
    if config.rollout.top_k > 0:
        yield f"rollout.top_k: {CUT}; leave it at 0"


def _publishing_keeps_the_lag(config: Config) -> Iterator[str]:
    every, max_lag = config.weights.every, config.pacing.max_lag
    if every > max_lag + 1:
        yield (
            f"weights.every: engines would fall {every - 1} versions behind, pacing.max_lag allows {max_lag}; "
            f"use at most {max_lag + 1}"
        )


def _lockstep_is_alone(config: Config) -> Iterator[str]:
    if not config.run.deterministic:
        return
    if config.weights.update != "inflight":
        yield "weights.update: run.deterministic swaps weights at fixed points of its own; leave this out"
    if config.pacing.on_stale != "wait":
        yield f'pacing.on_stale: "{config.pacing.on_stale}" depends on timing; run.deterministic needs "wait"'
    if config.run.device == "cuda":
        yield "run.device: run.deterministic is for the CPU; use cpu, or drop run.deterministic"


RULES: tuple[Rule, ...] = (
    _one_source_of_tasks,
    _rewards_fit,
    _one_way_to_roll_out,
    _sampling_is_exact,
    _publishing_keeps_the_lag,
    _lockstep_is_alone,
)
