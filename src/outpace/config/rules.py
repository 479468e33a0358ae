"""What no single setting can say: defaults that depend on other keys, and combinations that cannot work.

`check` refuses; `resolve` fills, so that the config written into the run directory says exactly what ran. Resolving
is idempotent. Each rule yields lines that start with the key to change; the first one is told. What the mathematics
adds to both is in `outpace.config.dependent` and `outpace.config.algorithm_rules`, what engines and servers add in
`outpace.config.serving_rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from outpace.config import STARTER, STARTER_AGENT, Config
from outpace.config.algorithm_rules import ALGORITHM_RULES, Rule
from outpace.config.dependent import settled, value_of, with_values
from outpace.config.serving import SLOTS
from outpace.config.serving_rules import SERVING_RULES
from outpace.errors import BadInput, one_line
from outpace.references import absolute
from outpace.wording import plural, with_article

REWARDS_OF_TASKS: dict[str, list[str]] = {
    "countdown": ["countdown"],
    "arithmetic": ["number"],
    "calculator": ["number"],
    "guess": [],
    "reasoning_gym": ["reasoning_gym"],
}
"""The built-in tasks and what they are graded by unless told otherwise; by nothing: their environment judges."""

ENVIRONMENTS_OF_TASKS = {
    "calculator": "outpace.tasks.calculator:Calculator",
    "guess": "outpace.tasks.guess:Guess",
}
"""The built-in tasks that are played in an environment, unless told otherwise."""

FUNCTIONS = (
    "tasks.name",
    "rollout.function",
    "rollout.environment",
    "algorithm.surrogate",
    "algorithm.advantage",
    "algorithm.normalise",
)
"""Settings that may name a function in a file."""

LISTS_OF_FUNCTIONS = ("rewards.functions", "tools.functions")
PATHS = ("tasks.path", "tasks.eval_path", "launch.python")
"""Settings that may name what is on this machine."""

DEFAULT_TASK = "countdown"
DEFAULT_STEPS = 100
CUT = "cutting the distribution biases every importance weight, as the learner cannot replay which tokens were kept"
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    STARTER: {"learner.lr": 3e-4, "rollout.max_tokens": 32},
    STARTER_AGENT: {"learner.lr": 3e-4, "rollout.max_tokens": 48},
}
OTHER_MODELS: dict[str, Any] = {"learner.lr": 1e-6, "rollout.max_tokens": 512}
ADAPTER_LR = {STARTER: 3e-3, STARTER_AGENT: 3e-3}
OTHER_ADAPTER_LR = 1e-5
"""Ten times that of all weights: what adapters learn best with, whatever their rank."""

MOST_SLOTS = 256

LOCKSTEP_CONTEXTS = {STARTER: 256, STARTER_AGENT: 512}
"""A deterministic engine attends over its whole context at every step; the built-in tasks need little of it."""


def resolve(
    config: Config,
    *,
    own_tasks: bool = False,
    own_rewards: bool = False,
    own_rollout: bool = False,
    now: datetime | None = None,
) -> Config:
    """The config with every dependent default filled in, checked again.

    `own_tasks`, `own_rewards` and `own_rollout` (or environment) say that a Python caller brings objects of its own
    instead of naming them here.
    """
    filled = settled(with_values(config, _defaults(config, own_tasks, now or datetime.now())))
    if not own_tasks and not own_rollout and not _says_how_to_roll_out(filled):
        filled = with_values(filled, {"rollout.environment": ENVIRONMENTS_OF_TASKS.get(filled.tasks.name or "")})
    if not own_rewards and not filled.rewards.functions:
        filled = with_values(filled, {"rewards.functions": _rewards_of_task(filled)})
    filled = _with_absolute_files(filled)
    check(filled)
    return filled


def check(config: Config) -> None:
    """Raise `BadInput` for the first rule that the config, with its dependent defaults, breaks."""
    whole = settled(config)
    for rule in (*RULES, *SERVING_RULES, *ALGORITHM_RULES):
        for complaint in rule(whole):
            raise BadInput(complaint)


# --------------------------------------------------------------------------------------------------------- defaults


def _defaults(config: Config, own_tasks: bool, now: datetime) -> dict[str, Any]:
    """New values by dotted key, only for what is to change."""
    engines = config.engine.count or len(config.engine.urls) or 1
    slots = config.engine.slots or _slots(config, engines)
    unset: dict[str, Any] = {
        **MODEL_DEFAULTS.get(config.model.path, OTHER_MODELS),
        "engine.slots": slots,
        "pacing.max_running": 2 * slots * engines,
        "eval.temperature": config.rollout.temperature,
        "run.dir": default_directory(now),
    }
    if config.lora.rank > 0:
        unset["learner.lr"] = ADAPTER_LR.get(config.model.path, OTHER_ADAPTER_LR)
    if config.run.epochs is None:
        unset["run.steps"] = DEFAULT_STEPS
    if config.tasks.path is None and not own_tasks:
        unset["tasks.name"] = DEFAULT_TASK
    if config.run.deterministic:
        unset["engine.context"] = LOCKSTEP_CONTEXTS.get(config.model.path)
    values = {key: value for key, value in unset.items() if value_of(config, key) is None}
    values["pacing.chunk_groups"] = min(config.pacing.chunk_groups, config.pacing.groups_per_step)
    if config.run.deterministic and config.run.device == "auto":
        values["run.device"] = "cpu"
    return values


def _slots(config: Config, engines: int) -> int:
    """A small model's decode step costs little more with more sequences. With all attempts of a batch in flight at
    once, though, they also end at once, and the learner waits for the first of them."""
    if config.model.path not in MODEL_DEFAULTS or config.engine.kind != "embedded" or config.run.deterministic:
        return SLOTS
    half_a_batch = config.pacing.groups_per_step * config.rollout.group_size // 2
    return max(SLOTS, min(half_a_batch // engines, MOST_SLOTS))


def default_directory(now: datetime | None = None) -> str:
    return f"runs/{now or datetime.now():%Y%m%d-%H%M%S}"


def brought_by_task(config: Config, another_task: bool) -> set[str]:
    """Keys that are set to what the built-in task of the config would bring if they were left out. As with
    `dependent.redundant`, a choice on top of such a config brings its own. Rewards go only with `another_task` on top:
    a rollout of the user's own brings none, and may well be judged by those of the task."""
    task = config.tasks.name or ""
    brought: dict[str, Any] = {"rollout.environment": ENVIRONMENTS_OF_TASKS.get(task)}
    if another_task:
        brought["rewards.functions"] = _rewards_of_name(task) or None
    return {key for key, value in brought.items() if value is not None and value_of(config, key) == value}


def _with_absolute_files(config: Config) -> Config:
    """A run may be resumed from another directory."""
    named = {key: value_of(config, key) for key in FUNCTIONS}
    values: dict[str, Any] = {key: absolute(name) for key, name in named.items() if name is not None}
    values |= {key: [absolute(name) for name in value_of(config, key)] for key in LISTS_OF_FUNCTIONS}
    values["environment.kinds"] = {kind: absolute(name) for kind, name in config.environment.kinds.items()}
    values |= {key: _absolute_path(path) for key in PATHS if (path := value_of(config, key)) is not None}
    if config.weights.dir is not None:
        values["weights.dir"] = str(Path(config.weights.dir).expanduser().absolute())
    return with_values(config, values)


def _absolute_path(path: str) -> str:
    """Of what is there; a name that is no path, such as a dataset's on the hub, stays."""
    place = Path(path).expanduser()
    return str(place.absolute()) if place.exists() else path


def _says_how_to_roll_out(config: Config) -> bool:
    rollout = config.rollout
    return bool(rollout.function or rollout.agent or rollout.environment or config.environment.kinds)


def _rewards_of_task(config: Config) -> list[str]:
    task = config.tasks.name or ""
    is_another = config.rollout.environment_class not in (None, ENVIRONMENTS_OF_TASKS.get(task))
    if config.rollout.function is not None or config.environment.kinds or is_another:
        return []  # a custom rollout or an environment may give the reward itself
    rewards = _rewards_of_name(task)
    if rewards is None:
        raise BadInput("rewards.functions: name at least one, such as my_rewards.py:score or package.module:score")
    return rewards


def _rewards_of_name(task: str) -> list[str] | None:
    return REWARDS_OF_TASKS.get(task.partition("/")[0])  # the name of a task, or of the family before the slash


# ------------------------------------------------------------------------------------------------------------ rules


def _one_source_of_tasks(config: Config) -> Iterator[str]:
    if config.tasks.name is not None and config.tasks.path is not None:
        yield f"tasks.path: tasks.name is {config.tasks.name} already; keep one of the two"


def _options_can_be_written(config: Config) -> Iterator[str]:
    """The config of a run is TOML, whatever it came from."""
    for place, value in _inside("tasks.options", config.tasks.options):
        if value is None:
            yield f"{place}: there is no null in a config; leave it out, or use a value that the task takes for none"
        elif not isinstance(value, str | int | float):
            kind = with_article(type(value).__name__)
            yield f"{place}: is {kind}; options are text, numbers, true, false, lists and tables"
        elif isinstance(value, str) and _has_half_characters(value):
            yield f"{place}: holds half a character, such as \\ud800 alone"


def _inside(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is not a table or a list, and every name, with where it stands."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield (place, name) if isinstance(name, str) else (f"{place}: the name {name!r}", object())
            yield from _inside(f"{place}.{one_line(ascii(name)[1:-1], 60)}", each)
    elif isinstance(value, list):
        for each in value:
            yield from _inside(place, each)
    else:
        yield place, value


def _has_half_characters(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _rewards_fit(config: Config) -> Iterator[str]:
    functions, weights = config.rewards.functions, config.rewards.weights
    for name in functions:
        if functions.count(name) > 1:
            yield f"rewards.functions: {name} is there twice; give it a weight of 2 instead"
    if weights is not None and functions and len(weights) != len(functions):
        yield f"rewards.weights: needs one per function, {len(functions)} in all, not {len(weights)}"
    if config.rewards.memory_mb is not None and config.rewards.isolation == "thread":
        yield "rewards.memory_mb: threads have no limit of their own; leave this out or rewards.isolation"


def _the_judge_is_asked(config: Config) -> Iterator[str]:
    functions = config.rewards.functions  # empty where a Python caller brings rewards
    if config.judge.base_url is not None and functions and "judge" not in functions:
        yield "judge.base_url: nobody asks the judge; add judge to rewards.functions, or leave this out"


def _one_way_to_roll_out(config: Config) -> Iterator[str]:
    rollout = config.rollout
    ways: dict[str, Any] = {
        "rollout.function": rollout.function,
        "rollout.agent": " ".join(rollout.agent),
        "rollout.environment": rollout.environment_class,
        "environment.kinds": ", ".join(config.environment.kinds),
    }
    (first, named), *others = [(way, value) for way, value in ways.items() if value] or [("", "")]
    for other, _ in others:
        yield f"{other}: {first} is {named} already; keep one of the two"
    for tools, given in (("functions", config.tools.functions), ("mcp", config.tools.mcp)):
        if given and first in ("rollout.function", "rollout.agent"):
            yield f"tools.{tools}: {first} is a rollout of its own, which would not use them; leave this out"


def _environments_can_be_limited(config: Config) -> Iterator[str]:
    if config.environment.memory_mb is not None and config.environment.isolation == "thread":
        yield 'environment.memory_mb: threads have no limit of their own; set environment.isolation = "process"'


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
            f"weights.every: engines would fall {plural(every - 1, 'version')} behind, "
            f"pacing.max_lag allows {max_lag}; use at most {max_lag + 1}"
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
    _options_can_be_written,
    _rewards_fit,
    _the_judge_is_asked,
    _one_way_to_roll_out,
    _environments_can_be_limited,
    _sampling_is_exact,
    _publishing_keeps_the_lag,
    _lockstep_is_alone,
)
