"""Defaults that depend on the model, the task or other settings.

`MODEL_DEFAULTS` has the learning rate and the token limit of each built-in model; `unset_defaults` returns these and
other defaults of a run. The rest of the module fills in dependent settings: those whose default, or whether they apply
at all, depends on other settings.

A dependent key is None unless it is set. `fill_defaults` runs the stages in order. Each stage sees the result of those
before it and returns the keys that now apply, with their defaults:

- an unset key that a stage returns gets the preset's value if there is one, otherwise the default;
- a key that no stage returns stays None, and is rejected if it was set, because nothing would read it.

Invariants
- `fill_defaults` is idempotent.
- A filled config that is dumped and loaded again fills to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from outpace.algorithms import ADVANTAGES, NORMALIZERS, POLICY_LOSSES
from outpace.algorithms.corrections import MASKS
from outpace.config import STARTER, STARTER_AGENT, Config
from outpace.config.algorithm import (
    DEFAULT_ADVANTAGE,
    DEFAULT_POLICY_LOSS,
    configured_advantage,
    configured_masks,
    configured_normalizer,
    configured_policy_loss,
    full_batch_reasons,
)
from outpace.config.engines import DEFAULT_SLOTS
from outpace.config.presets import find_preset
from outpace.errors import BadInput

Values = Mapping[str, Any]
"""Settings by dotted key."""

INDEPENDENT_KEYS = {"algorithm.preset", "filter.longer_than", "difficulty.easy_above", "difficulty.hard_below"}
"""Keys of these sections that may be None but always apply."""

DEPENDENT_SECTIONS = ("algorithm", "correction", "kl", "critic", "filter", "difficulty", "replay", "governor", "lora")

DEPENDENT_KEYS = [
    f"{section}.{key}"
    for section in DEPENDENT_SECTIONS
    for key, info in type(getattr(Config(), section)).model_fields.items()
    if info.default is None and f"{section}.{key}" not in INDEPENDENT_KEYS
] + ["rewards.overlong_penalty"]

DEFAULT_TASK = "countdown"
DEFAULT_STEPS = 100
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    STARTER: {"learner.lr": 3e-4, "rollout.max_tokens": 32},
    STARTER_AGENT: {"learner.lr": 3e-4, "rollout.max_tokens": 48},
}
OTHER_MODELS: dict[str, Any] = {"learner.lr": 1e-6, "rollout.max_tokens": 512}
ADAPTER_LR = {STARTER: 3e-3, STARTER_AGENT: 3e-3}
OTHER_ADAPTER_LR = 1e-5
"""Ten times the learning rate of full training, which works best for LoRA at any rank."""

MAX_DEFAULT_SLOTS = 256

DETERMINISTIC_CONTEXTS = {STARTER: 256, STARTER_AGENT: 512}
"""Context limits in deterministic mode, where the engine attends over its whole context at every step. The built-in
tasks need no more."""


def unset_defaults(config: Config, own_tasks: bool, now: datetime | None = None) -> dict[str, Any]:
    """Return the values to set, by dotted key."""
    engines = config.engine.count or len(config.engine.urls) or 1
    slots = config.engine.slots or _default_slots(config, engines)
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
        unset["engine.context"] = DETERMINISTIC_CONTEXTS.get(config.model.path)
    values = {key: value for key, value in unset.items() if get_value(config, key) is None}
    values["pacing.chunk_groups"] = min(config.pacing.chunk_groups, config.pacing.groups_per_step)
    if config.run.deterministic and config.run.device == "auto":
        values["run.device"] = "cpu"
    return values


def _default_slots(config: Config, engines: int) -> int:
    """Return the default slots per engine: more for the built-in models, up to half a batch over all engines.

    A decode step of a small model costs little more with more sequences. But if all attempts of a batch are in flight
    at once, they also finish at about the same time, and the learner has to wait for the first of them."""
    if config.model.path not in MODEL_DEFAULTS or config.engine.kind != "embedded" or config.run.deterministic:
        return DEFAULT_SLOTS
    half_a_batch = config.pacing.groups_per_step * config.rollout.group_size // 2
    return max(DEFAULT_SLOTS, min(half_a_batch // engines, MAX_DEFAULT_SLOTS))


def default_directory(now: datetime | None = None) -> str:
    return f"runs/{now or datetime.now():%Y%m%d-%H%M%S}"


def fill_defaults(config: Config) -> Config:
    """Return the config with its preset and every dependent default filled in. Raises `BadInput` for a set key that
    nothing would read."""
    filled, defaults = _fill(config)
    for key in DEPENDENT_KEYS:
        if key not in defaults and get_value(filled, key) is not None:
            raise BadInput(f"{key}: {_why_unused(filled, key)}")
    return filled


def keys_at_default(config: Config) -> set[str]:
    """Return the keys that are set to the default they would get if all of them were left out.

    A resolved config spells out many such keys. Dropping them before applying an override does not change the config's
    meaning, and lets the override bring its own defaults."""
    return {key for key, default in _fill(config)[1].items() if get_value(config, key) == default}


def _fill(config: Config) -> tuple[Config, Values]:
    """Return the config with every default filled in, and the defaults of all keys that apply, including set ones."""
    preset = _preset(config)
    config = with_values(config, {key: value for key, value in preset.items() if _has_unset_default(config, key)})
    all_defaults: dict[str, Any] = {}
    for stage in STAGES:
        defaults = {key: preset.get(key, default) for key, default in stage(config).items()}
        all_defaults |= defaults
        config = with_values(config, {key: value for key, value in defaults.items() if get_value(config, key) is None})
    return config, all_defaults


def get_value(config: Config, dotted: str) -> Any:
    section, _, key = dotted.partition(".")
    return getattr(getattr(config, section), key)


def with_values(config: Config, values: Values) -> Config:
    """Return a copy with these values, without validation. Callers pass trusted values and check combinations later."""
    by_section: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        section, _, key = dotted.partition(".")
        by_section.setdefault(section, {})[key] = value
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=keys) for section, keys in by_section.items()}
    )


# ----------------------------------------------------------------------------------------------------------- presets


def _preset(config: Config) -> dict[str, Any]:
    """Return the preset's values, without the parameters of a policy loss or estimator that the config overrides."""
    if config.algorithm.preset is None:
        return {}
    values = dict(find_preset(config.algorithm.preset).values)
    parameters = {
        "algorithm.surrogate": ("anchor", "aggregation", *POLICY_LOSSES.find(values["algorithm.surrogate"]).parameters),
        "algorithm.advantage": ("normalise", "credit", *ADVANTAGES.find(values["algorithm.advantage"]).parameters),
    }
    for choice, keys in parameters.items():
        if get_value(config, choice) not in (None, values[choice]):
            values = {key: value for key, value in values.items() if key.removeprefix("algorithm.") not in keys}
    return values


def _has_unset_default(config: Config, dotted: str) -> bool:
    """Return whether the key has a non-None default and is not set. (The stages handle keys that default to None.)"""
    section, _, key = dotted.partition(".")
    settings = getattr(config, section)
    return type(settings).model_fields[key].default is not None and key not in settings.model_fields_set


# ------------------------------------------------------------------------------------------------------------ stages


def _functions(config: Config) -> Values:
    return {"algorithm.surrogate": DEFAULT_POLICY_LOSS, "algorithm.advantage": DEFAULT_ADVANTAGE}


def _function_defaults(config: Config) -> Values:
    surrogate = configured_policy_loss(config.algorithm).registration
    estimator = configured_advantage(config.algorithm).registration
    return {
        "algorithm.normalise": estimator.normalise,
        "algorithm.credit": estimator.credits[0],
        "algorithm.anchor": surrogate.anchors[0],
        "algorithm.aggregation": surrogate.aggregation,
        "correction.masks": list(surrogate.masks),
        "filter.uniform": estimator.needs_peers,
        "filter.min_group": 2 if estimator.needs_peers else 1,
        "governor.enabled": not config.run.deterministic and config.pacing.max_lag > 0,
    }


def _parameters(config: Config) -> Values:
    """Parameters of the configured functions. The discount depends on the credit, not on the estimator."""
    algorithm = config.algorithm
    critic = configured_advantage(algorithm).registration.critic
    values: dict[str, Any] = {"algorithm.gamma": 1.0} if critic or algorithm.credit != "episode" else {}
    if critic:
        lr = config.learner.lr
        values |= {"algorithm.gae_lambda": 1.0, "critic.lr": None if lr is None else 10 * lr}
        values |= {"critic.coefficient": 0.5, "critic.clip": 0.2, "critic.shared": False}
    chosen = (configured_normalizer(algorithm), configured_advantage(algorithm), configured_policy_loss(algorithm))
    return values | {
        f"algorithm.{name}": default for choice in chosen for name, default in choice.registration.parameters.items()
    }


def _corrections(config: Config) -> Values:
    weight = {"correction.weight": "none" if config.algorithm.anchor == "rollout" else "token"}
    return weight | ({"kl.place": "loss", "kl.sync_every": 0} if config.kl.coefficient > 0 else {})


def _correction_parameters(config: Config) -> Values:
    masks = configured_masks(config.correction).values()
    values = {f"correction.{name}": default for mask in masks for name, default in mask.registration.parameters.items()}
    if config.correction.weight != "none":
        values |= {"correction.cap": 2.0, "correction.floor": 0.0}
    if config.kl.coefficient > 0:
        values["kl.estimator"] = "k3" if config.kl.place == "loss" else "k1"
    return values


def _data(config: Config) -> Values:
    """Filtering, curriculum, replay, reward shaping and the governor."""
    values: dict[str, Any] = {}
    if config.filter.uniform:
        values["filter.tolerance"] = 1e-6
    if config.difficulty.easy_above is not None or config.difficulty.hard_below is not None:
        values["difficulty.rest_epochs"] = 1
    if config.replay.fraction > 0:
        values |= {"replay.max_age": 8, "replay.times": 1}
    if config.rewards.overlong_buffer > 0:
        values["rewards.overlong_penalty"] = 1.0
    if config.governor.enabled:
        values |= {"governor.ess_min": 0.5, "governor.kl_max": 0.1, "governor.patience": 5, "governor.min_lag": 0}
    return values


def _serving(config: Config) -> Values:
    adapters = {"lora.alpha": 2.0 * config.lora.rank} if config.lora.rank > 0 else {}
    return {"engine.count": len(config.engine.urls) or 1} | adapters


def _streaming(config: Config) -> Values:
    return {"learner.stream": not any(full_batch_reasons(config))}


STAGES: tuple[Callable[[Config], Values], ...] = (
    _functions,
    _function_defaults,
    _parameters,
    _corrections,
    _correction_parameters,
    _data,
    _serving,
    _streaming,
)


# ------------------------------------------------------------------------------------------------------- unused keys

WHY_UNUSED = {
    "algorithm.gamma": 'whole episodes have no later rewards to discount; use algorithm.credit = "turn" or "token"',
    "algorithm.gae_lambda": 'only an advantage estimator with a critic uses it; use algorithm.advantage = "gae"',
    "correction": "there is no weight to truncate; set correction.weight to token or sequence",
    "kl": "kl.coefficient is 0, so there is no KL penalty; raise it",
    "lora": "lora.rank is 0, so the full model is trained; set a rank",
    "critic": 'there is no critic; use algorithm.advantage = "gae"',
    "filter": "filter.uniform is off, so rewards are not compared; set it to true",
    "difficulty": "no tasks are skipped; set difficulty.easy_above or difficulty.hard_below",
    "replay": "replay.fraction is 0, so nothing is replayed; raise it",
    "governor": "governor.enabled is off, so the lag never changes; set it to true",
    "rewards": "rewards.overlong_buffer is 0, so there is no length penalty; raise it",
}
"""Why a key has no effect, by key or by section."""


def _why_unused(config: Config, dotted: str) -> str:
    section, _, key = dotted.partition(".")
    if dotted in WHY_UNUSED:
        why = WHY_UNUSED[dotted]
    elif section == "algorithm":
        why = _why_not_a_parameter(config, key)
    elif dotted in ("correction.cap", "correction.floor") and config.algorithm.anchor == "rollout":
        return "algorithm.anchor is rollout, so there is no weight to truncate; leave this out"
    else:
        masks = [name for name, mask in MASKS.items() if section == "correction" and key in mask.parameters]
        why = f"the mask {masks[0]} is not in correction.masks; add it" if masks else WHY_UNUSED[section]
    return f"{why}, or leave this out"


def _why_not_a_parameter(config: Config, key: str) -> str:
    """Return which functions are configured, and which ones take the key."""
    takers = dict.fromkeys(
        name
        for registry in (POLICY_LOSSES, ADVANTAGES, NORMALIZERS)
        for name, registration in registry.built_in.items()
        if key in registration.parameters
    )
    algorithm = config.algorithm
    return (
        f"surrogate = {algorithm.surrogate}, advantage = {algorithm.advantage} and normalise = {algorithm.normalise} "
        f"do not take it; use one that does ({', '.join(takers) or 'a custom function'})"
    )
