"""Validation of a whole config, and resolution of its remaining defaults.

`check` rejects combinations of settings that cannot work or would be ignored. `resolve` fills in every default, so that
the config in the run directory says exactly what ran; it is idempotent. A rule takes a config with its dependent
defaults filled in and yields error lines that start with the key to change; `check` raises the first one. The algorithm
adds its own defaults (`outpace.config.defaults`) and rules (`outpace.config.algorithm_validation`).

Conditions that depend on the machine (is there a GPU, does the server have the plugin) are checked at startup.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from outpace.config import Config
from outpace.config.algorithm_validation import ALGORITHM_RULES, Rule
from outpace.config.defaults import fill_defaults, get_value, unset_defaults, with_defaults
from outpace.config.engines import PLUGIN_TRANSPORTS, ServerAddress, is_server_url, server_address
from outpace.errors import BadInput, one_line, plural, with_article
from outpace.runtime.references import absolute_reference
from outpace.runtime.registry import ENVIRONMENTS, TRACKERS, TRANSPORTS

LAST_PORT = 65535
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""
API_KEY_HINT = "remove it, and put the key into the environment variable named by engine.api_key_env"


def _check_urls(config: Config) -> Iterator[str]:
    urls = config.engine.urls
    first_at: dict[ServerAddress, int] = {}
    for position, url in enumerate(urls):
        first = first_at.setdefault(server_address(url), position)
        if "@" in url:  # do not repeat the URL: this line may end up in a log
            yield f"engine.urls: a URL contains a user name or password; {API_KEY_HINT}"
        elif not is_server_url(url):
            yield f"engine.urls: {url!r} is not a server URL; write http://host:port"
        elif first != position:
            yield f"engine.urls: {urls[first]} and {url} are the same server; list each server once"


def _check_server_source(config: Config) -> Iterator[str]:
    engine, first_port = config.engine, config.launch.port
    if engine.urls and engine.count != len(engine.urls):
        servers = plural(len(engine.urls), "server")
        yield f"engine.count: is {engine.count}, but engine.urls lists {servers}; leave this out"
    elif first_port and first_port + (engine.count or 1) - 1 > LAST_PORT:
        yield f"launch.port: {engine.count} servers starting at {first_port} exceed port {LAST_PORT}; lower it"


def _check_server_mode(config: Config) -> Iterator[str]:
    kind = config.engine.kind
    if kind == "embedded":
        return
    if config.run.deterministic:
        yield f'run.deterministic: {kind} is not deterministic; use engine.kind = "embedded"'
    if config.run.runtime == "inline":
        yield f'run.runtime: {kind} runs in separate processes; use "local", or engine.kind = "embedded"'


def _check_transport(config: Config) -> Iterator[str]:
    transport = config.weights.transport
    if transport != "auto":
        TRANSPORTS.check_known(transport)
    if transport == "ipc" and (config.run.device == "cpu" or config.run.deterministic):
        yield 'weights.transport: "ipc" shares GPU memory, but run.device is cpu; use "memory"'
    if config.engine.kind == "sglang" and transport in PLUGIN_TRANSPORTS:
        yield f'weights.transport: sglang supports only "files", not "{transport}"; leave this out'
    if transport == "ipc" and config.weights.delta:
        yield 'weights.delta: "ipc" shares weights without a copy, so there is no delta; remove one of the two'
    if config.lora.rank == 0:
        return
    if config.engine.kind == "vllm" and transport in PLUGIN_TRANSPORTS:
        yield f'weights.transport: vllm loads adapters from files, not by "{transport}"; leave this out'
    if config.weights.delta:
        yield "weights.delta: adapters are small and change completely; leave this out, or set lora.rank to 0"


def _check_lora(config: Config) -> Iterator[str]:
    lora = config.lora
    if lora.rank > 0 and not lora.targets:
        yield "lora.targets: is empty, so no module would be trained; name some, or leave this out"
    if config.engine.kind == "vllm" and lora.rank > VLLM_LORA_RANKS[-1]:
        yield f"lora.rank: vLLM supports at most rank {VLLM_LORA_RANKS[-1]}, not {lora.rank}; lower it"


def _check_sharding(config: Config) -> Iterator[str]:
    learner = config.learner
    if not learner.sharded:
        return
    key = "learner.devices" if learner.devices > 1 else "learner.offload"
    if learner.backend is not None:
        yield f"{key}: learner.backend {learner.backend} decides itself which devices it uses; leave one of the two out"
    if config.run.runtime == "inline" and learner.devices > 1:
        yield 'learner.devices: needs a process for each device; set run.runtime = "local"'
    if config.weights.transport == "ipc":
        yield f'weights.transport: "ipc" shares the memory of one GPU; set "memory", or leave {key} out'


ENGINE_RULES: tuple[Rule, ...] = (
    _check_urls,
    _check_server_source,
    _check_server_mode,
    _check_transport,
    _check_lora,
    _check_sharding,
)


TASK_REWARDS: dict[str, list[str]] = {
    "countdown": ["countdown"],
    "arithmetic": ["number"],
    "calculator": ["number"],
    "guess": [],
    "reasoning_gym": ["reasoning_gym"],
}
"""Default reward functions of the built-in tasks. Empty: the task's environment gives the reward."""

TASK_ENVIRONMENTS = ENVIRONMENTS.built_in
"""Default environments of the built-in tasks that need one, by the name of the task."""

FUNCTION_KEYS = (
    "tasks.name",
    "tasks.producer",
    "rollout.function",
    "rollout.environment",
    "eval.rollout",
    "policy_loss.name",
    "advantage.name",
    "advantage.normalizer",
    "learner.backend",
    "weights.transport",
)
"""Settings that may name a function in a file, as `path/to/file.py:function`."""

FUNCTION_LIST_KEYS = ("rewards.functions", "tools.functions", "run.report_to", "correction.masks")
PATH_KEYS = ("tasks.path", "tasks.eval_path", "launch.python", "report.python")
"""Settings that may hold a path on this machine."""

SET_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
"""Names of held-out sets. A set called `reward` is refused: its metrics would have the names of reward functions."""

TRUNCATION_BIAS = "truncated sampling biases the importance weights: the learner cannot tell which tokens were kept"


def resolve(
    config: Config,
    *,
    own_tasks: bool = False,
    own_rewards: bool = False,
    own_rollout: bool = False,
    now: datetime | None = None,
) -> Config:
    """Fill in every default, check the result, and return it.

    `own_tasks`, `own_rewards` and `own_rollout` (or environment): the Python caller passes these as objects, so the
    config does not name them.
    """
    filled = fill_defaults(with_defaults(config, unset_defaults(config, own_tasks, now)))
    if not own_tasks and not own_rollout and not _has_rollout(filled):
        filled = with_defaults(filled, {"rollout.environment": TASK_ENVIRONMENTS.get(filled.tasks.name or "")})
    if not own_rewards and not filled.rewards.functions:
        filled = with_defaults(filled, {"rewards.functions": _rewards_for(filled)})
    filled = _with_absolute_files(filled)
    check(filled)
    return filled


def check(config: Config) -> None:
    """Raise `BadInput` for the first rule that the config violates, with its dependent defaults filled in."""
    filled = fill_defaults(config)
    for rule in (*RULES, *ENGINE_RULES, *ALGORITHM_RULES):
        for problem in rule(filled):
            raise BadInput(problem)


# --------------------------------------------------------------------------------------------------------- defaults


def _with_absolute_files(config: Config) -> Config:
    """Make file names absolute, because a run may be resumed from another directory."""
    named = {key: get_value(config, key) for key in FUNCTION_KEYS}
    values: dict[str, Any] = {key: absolute_reference(name) for key, name in named.items() if name is not None}
    lists = {key: get_value(config, key) for key in FUNCTION_LIST_KEYS}
    values |= {key: list(map(absolute_reference, listed)) for key, listed in lists.items() if listed is not None}
    values["environment.kinds"] = {kind: absolute_reference(name) for kind, name in config.environment.kinds.items()}
    values |= {key: _absolute_path(path) for key in PATH_KEYS if (path := get_value(config, key)) is not None}
    values["eval.sets"] = {name: _absolute_path(absolute_reference(at)) for name, at in config.eval.sets.items()}
    if config.weights.dir is not None:
        values["weights.dir"] = str(Path(config.weights.dir).expanduser().absolute())
    return with_defaults(config, values)


def _absolute_path(path: str) -> str:
    """Return the absolute path if it exists; other names, such as Hugging Face datasets, are returned unchanged."""
    file = Path(path).expanduser()
    return str(file.absolute()) if file.exists() else path


def _has_rollout(config: Config) -> bool:
    rollout = config.rollout
    return bool(rollout.function or rollout.agent or rollout.environment or config.environment.kinds)


def _rewards_for(config: Config) -> list[str]:
    task = config.tasks.name or ""
    is_custom = config.rollout.environment_class not in (None, TASK_ENVIRONMENTS.get(task))
    if config.rollout.function is not None or config.environment.kinds or is_custom:
        return []  # a custom rollout or environment may give the reward itself
    rewards = _default_rewards(task)
    if rewards is None:
        raise BadInput(
            "rewards.functions: is empty; name one, such as my_rewards.py:score (in Python: Trainer(rewards=...))"
        )
    return rewards


def _default_rewards(task: str) -> list[str] | None:
    return TASK_REWARDS.get(task.partition("/")[0])  # a task, or the package before the slash


# ------------------------------------------------------------------------------------------------------------ rules


def _check_task_source(config: Config) -> Iterator[str]:
    tasks = config.tasks
    if tasks.name is not None and tasks.path is not None:
        yield f"tasks.path: tasks.name is also set, to {tasks.name}; remove one of the two"


def _check_producer(config: Config) -> Iterator[str]:
    passes, epochs = config.producer.num_iterations, config.algorithm.epochs_per_batch
    if passes != epochs:
        yield f"producer.num_iterations: is {passes}, but algorithm.epochs_per_batch is {epochs}; set one of the two"


def _check_options(config: Config) -> Iterator[str]:
    """Reject values that TOML cannot hold: the config of a run is saved as TOML."""
    options = (("tasks.options", config.tasks.options), ("producer.options", config.producer.options))
    for place, value in (leaf for name, table in options for leaf in _leaves(name, table)):
        if value is None:
            yield f"{place}: null is not supported; leave it out, or use another value that the task treats as none"
        elif not isinstance(value, str | int | float):
            kind = with_article(type(value).__name__)
            yield f"{place}: is {kind}; use text, numbers, true, false, lists or tables"
        elif isinstance(value, str) and _has_lone_surrogate(value):
            yield f"{place}: contains a lone surrogate, such as \\ud800; remove it"


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a table or list, and every table key, with its dotted location."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield (place, name) if isinstance(name, str) else (f"{place}: the name {name!r}", object())
            yield from _leaves(f"{place}.{one_line(ascii(name)[1:-1], 60)}", each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(place, each)
    else:
        yield place, value


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _check_rewards(config: Config) -> Iterator[str]:
    functions, weights = config.rewards.functions, config.rewards.weights
    if weights is not None and functions and len(weights) != len(functions):
        yield f"rewards.weights: has length {len(weights)}; give one weight per function, {len(functions)} in all"


def _check_duplicates(config: Config) -> Iterator[str]:
    remedies = {
        "rewards.functions": "set rewards.weights instead",
        "lora.targets": "remove one",
        "correction.masks": "remove one",
    }
    for key, remedy in remedies.items():
        for name, count in Counter(get_value(config, key)).items():
            if count > 1:
                yield f"{key}: {name} is listed twice; {remedy}"


def _check_judge(config: Config) -> Iterator[str]:
    functions = config.rewards.functions  # empty if a Python caller passes rewards
    if config.judge.base_url is not None and functions and "judge" not in functions:
        yield "judge.base_url: the judge is not used; add judge to rewards.functions, or leave this out"


def _check_rollout_source(config: Config) -> Iterator[str]:
    rollout = config.rollout
    ways: dict[str, Any] = {
        "rollout.function": rollout.function,
        "rollout.agent": " ".join(rollout.agent),
        "rollout.environment": rollout.environment_class,
        "environment.kinds": ", ".join(config.environment.kinds),
    }
    (first, named), *others = [(way, value) for way, value in ways.items() if value] or [("", "")]
    for other, _ in others:
        yield f"{other}: {first} is also set, to {named}; remove one of the two"
    for tools, given in (("functions", config.tools.functions), ("mcp", config.tools.mcp)):
        if given and first in ("rollout.function", "rollout.agent"):
            yield f"tools.{tools}: {first} does not use these tools; leave this out"


def _check_memory_limits(config: Config) -> Iterator[str]:
    for name, section in (("rewards", config.rewards), ("environment", config.environment)):
        if section.memory_mb is not None and section.isolation == "thread":
            yield f'{name}.memory_mb: threads have no memory limit; set {name}.isolation = "process", or leave this out'


def _check_sampling(config: Config) -> Iterator[str]:
    if config.rollout.temperature == 0:
        yield "rollout.temperature: greedy attempts are identical, with zero advantage; only eval.temperature may be 0"
    if config.rollout.top_p < 1:
        yield f"rollout.top_p: {TRUNCATION_BIAS}; leave it at 1.0"
    if config.rollout.top_k > 0:
        yield f"rollout.top_k: {TRUNCATION_BIAS}; leave it at 0"
    for key in ("rollout.stop", "eval.stop"):
        if "" in (get_value(config, key) or ()):
            yield f"{key}: contains an empty string, which ends every completion; remove it"


def _check_evaluation(config: Config) -> Iterator[str]:
    settings = config.eval
    for k in settings.k:
        if not 1 <= k <= settings.attempts:
            yield f"eval.k: {k} is not between 1 and eval.attempts, which is {settings.attempts}; change one of the two"
    for name in settings.sets:
        if not SET_NAME.fullmatch(name) or name == "reward":
            yield f"eval.sets: {one_line(name, 60)!r} cannot name a set; use letters, digits, _, . and -, not reward"


def _check_publish_interval(config: Config) -> Iterator[str]:
    every, max_lag = config.weights.every, config.pacing.max_lag
    if every > max_lag + 1:
        yield (
            f"weights.every: engines would lag by {plural(every - 1, 'version')}, but pacing.max_lag allows {max_lag}; "
            f"use at most {max_lag + 1}"
        )


def _check_deterministic(config: Config) -> Iterator[str]:
    if not config.run.deterministic:
        return
    if config.weights.update != "inflight":
        yield "weights.update: run.deterministic updates weights at its own fixed points; leave this out"
    if config.pacing.on_stale != "wait":
        yield f'pacing.on_stale: "{config.pacing.on_stale}" depends on timing; run.deterministic needs "wait"'
    if config.run.device == "cuda":
        yield "run.device: run.deterministic needs the CPU; use cpu, or remove run.deterministic"


def _check_template(config: Config) -> Iterator[str]:
    model = config.model
    if model.template_arguments and model.chat_renderer != "template":
        yield f"model.template_arguments: the renderer {model.renderer} has no template; leave model.renderer out"
    for name in model.template_arguments:
        if not name.isidentifier():
            yield f"model.template_arguments: {one_line(repr(name), 60)} is not the name of a variable"


def _check_report(config: Config) -> Iterator[str]:
    names = config.run.report_to
    classes = [name.rpartition(":")[2] for name in names]  # they name the files in trackers/
    for name in names:
        if classes.count(name.rpartition(":")[2]) > 1:
            yield f"run.report_to: {name} is listed twice; remove one"
        elif name == "none":
            yield "run.report_to: write [] for no tracker"
        elif config.report.python is None:  # otherwise, that environment decides
            TRACKERS.check_known(name)


RULES: tuple[Rule, ...] = (
    _check_task_source,
    _check_template,
    _check_producer,
    _check_options,
    _check_rewards,
    _check_duplicates,
    _check_judge,
    _check_rollout_source,
    _check_memory_limits,
    _check_sampling,
    _check_evaluation,
    _check_publish_interval,
    _check_deterministic,
    _check_report,
)
