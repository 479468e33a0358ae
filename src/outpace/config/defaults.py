"""Defaults that depend on the model, the task or other settings.

`MODEL_DEFAULTS` has the learning rate and the token limit of each built-in model; `unset_defaults` returns these and
other defaults of a run. `fill_defaults` applies the preset, adds the settings of the chosen functions, and fills in
what depends on them. It rejects a key that the user set and nothing reads.

Invariants
- Filling in a default does not mark the key as set: `model_fields_set` holds what the user set.
- `fill_defaults` is idempotent.
- A filled config that is dumped and loaded again fills to itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from outpace.algorithms.corrections import correction_weights
from outpace.config import STARTER, STARTER_AGENT, Config
from outpace.config.algorithm import (
    configured_advantage,
    configured_masks,
    configured_normalizer,
    configured_policy_loss,
    full_batch_reasons,
    open_settings,
    unread_settings,
)
from outpace.config.base import OpenedBy, Section, closed_keys
from outpace.config.engines import DEFAULT_SLOTS
from outpace.config.presets import find_preset
from outpace.errors import BadInput, one_line

Values = Mapping[str, Any]
"""Settings by dotted key."""

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

MAX_DEFAULT_SLOTS = 512

DETERMINISTIC_CONTEXTS = {STARTER: 256, STARTER_AGENT: 512}
"""Context limits in deterministic mode, where the engine attends over its whole context at every step. The built-in
tasks need no more."""


def unset_defaults(config: Config, own_tasks: bool, now: datetime | None = None) -> dict[str, Any]:
    """Return the values to set, by dotted key."""
    engines = config.engine.count or len(config.engine.urls) or 1
    slots = config.engine.slots or _default_slots(config, engines)
    of_model = MODEL_DEFAULTS.get(config.model.path, OTHER_MODELS)
    unset: dict[str, Any] = {
        **of_model,
        "engine.slots": slots,
        "pacing.max_running": 2 * slots * engines,
        "eval.temperature": config.rollout.temperature,
        "eval.max_tokens": config.rollout.max_tokens or of_model["rollout.max_tokens"],
        "eval.stop": config.rollout.stop,
        "run.dir": default_directory(now),
    }
    if config.lora.rank > 0:
        unset["learner.lr"] = ADAPTER_LR.get(config.model.path, OTHER_ADAPTER_LR)
    if config.run.epochs is None:
        unset["run.steps"] = DEFAULT_STEPS
    if config.tasks.path is None and config.tasks.producer is None and not own_tasks:
        unset["tasks.name"] = DEFAULT_TASK
    if config.run.deterministic:
        unset["engine.context"] = DETERMINISTIC_CONTEXTS.get(config.model.path)
    values = {key: value for key, value in unset.items() if get_value(config, key) is None}
    values["pacing.chunk_groups"] = min(config.pacing.chunk_groups, config.pacing.groups_per_step)
    if config.run.deterministic and config.run.device == "auto":
        values["run.device"] = "cpu"
    return values


def _default_slots(config: Config, engines: int) -> int:
    """Return the default slots per engine: more for the built-in models, up to a whole batch over all engines. A decode
    step of a small model costs little more with more sequences."""
    if config.model.path not in MODEL_DEFAULTS or config.engine.kind != "embedded" or config.run.deterministic:
        return DEFAULT_SLOTS
    batch = config.pacing.groups_per_step * config.rollout.group_size
    return max(DEFAULT_SLOTS, min(batch // engines, MAX_DEFAULT_SLOTS))


def default_directory(now: datetime | None = None) -> str:
    return f"runs/{now or datetime.now():%Y%m%d-%H%M%S}"


def get_value(config: Config, dotted: str) -> Any:
    section, _, key = dotted.partition(".")
    return getattr(getattr(config, section), key)


def is_set(config: Config, dotted: str) -> bool:
    """Return whether the user set the key, to something other than none."""
    section, _, key = dotted.partition(".")
    settings = getattr(config, section)
    return key in settings.model_fields_set and getattr(settings, key) is not None


def with_values(config: Config, values: Values) -> Config:
    """Return a copy with these values set, without validation. Callers pass trusted values."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in by_section(values).items()}
    )


def with_defaults(config: Config, values: Values) -> Config:
    """Return a copy with these values, which do not count as set by the user."""
    sections = {name: _with_defaults(getattr(config, name), keys) for name, keys in by_section(values).items()}
    return config.model_copy(update=sections)


def _with_defaults(section: Section, keys: Values) -> Section:
    return type(section).model_construct(section.model_fields_set, **{**dict(section), **keys})


def by_section(values: Values) -> dict[str, dict[str, Any]]:
    """Return nested settings from dotted ones."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        name, _, key = dotted.partition(".")
        sections.setdefault(name, {})[key] = value
    return sections


def evaluation_config(config: Config) -> Config:
    """Return the config for sampling held-out episodes: settings and seed of `eval` replace those of training."""
    chosen, trained = config.eval, config.rollout
    return with_values(
        config,
        {
            "rollout.temperature": trained.temperature if chosen.temperature is None else chosen.temperature,
            "rollout.max_tokens": chosen.max_tokens or trained.max_tokens,
            "rollout.stop": trained.stop if chosen.stop is None else chosen.stop,
            "rollout.top_p": chosen.top_p,
            "rollout.top_k": chosen.top_k,
            "run.seed": chosen.seed,
        },
    )


# ------------------------------------------------------------------------------------------------ dependent defaults


def fill_defaults(config: Config) -> Config:
    """Return the config with its preset, the settings of its functions and every dependent default filled in."""
    filled = fill_unchecked(config)
    for key, why in unread_keys(filled):
        raise BadInput(f"{one_line(key)}: {why}")
    return filled


def fill_unchecked(config: Config) -> Config:
    """Fill in the defaults without rejecting keys that nothing reads."""
    preset = _preset(config)
    config = _fill(config, {key: value for key, value in preset.items() if _is_field(config, key)})
    config = _open_loss_and_advantage(config, preset)
    config = _open_correction(config, preset)
    config = _fill(config, _dependent_defaults(config))
    return _fill(config, {"learner.stream": not any(full_batch_reasons(config))})


def _fill(config: Config, defaults: Values) -> Config:
    return with_defaults(config, {key: value for key, value in defaults.items() if not is_set(config, key)})


def _is_field(config: Config, dotted: str) -> bool:
    """Return whether the key is one of its section, not a setting of a function."""
    section, _, key = dotted.partition(".")
    return key in type(getattr(config, section)).model_fields


def _preset(config: Config) -> dict[str, Any]:
    """Return the preset's values, without those for a policy loss or estimator that the config replaces."""
    if config.algorithm.preset is None:
        return {}
    values = dict(find_preset(config.algorithm.preset).values)
    for choice in ("policy_loss.name", "advantage.name"):
        if is_set(config, choice) and get_value(config, choice) != values[choice]:
            section = choice.partition(".")[0]
            values = {key: value for key, value in values.items() if key.partition(".")[0] != section}
    return values


def _open_loss_and_advantage(config: Config, preset: Values) -> Config:
    loss = configured_policy_loss(config.policy_loss).registration
    estimator = configured_advantage(config.advantage).registration
    config = _fill_unset(
        config,
        {
            "policy_loss.old_policy": loss.old_policies[0],
            "policy_loss.aggregation": loss.aggregation,
            "advantage.normalizer": estimator.normalizer,
            "advantage.credit": estimator.credits[0],
        },
    )
    config = _open(_open(config, "policy_loss", preset), "advantage", preset)
    discounts = estimator.critic or config.advantage.credit != "episode"
    return _fill_unset(config, {"advantage.gamma": 1.0}) if discounts else config


def _open_correction(config: Config, preset: Values) -> Config:
    loss = configured_policy_loss(config.policy_loss).registration
    weight = "none" if config.policy_loss.old_policy == "rollout" else "token"
    config = _fill_unset(config, {"correction.weight": weight, "correction.masks": list(loss.masks)})
    return _open(config, "correction", preset)


def _open(config: Config, name: str, preset: Values) -> Config:
    """Return the config with the settings of the chosen functions in this section. What the user set for other
    functions stays, for `unread_keys` to report."""
    section, (chosen, functions) = getattr(config, name), _chosen_functions(config, name)
    settings = open_settings(name, section, chosen, functions)
    settings |= {
        key: preset[f"{name}.{key}"]
        for key in settings
        if f"{name}.{key}" in preset and key not in section.model_fields_set
    }
    kept = {key: getattr(section, key) for key in type(section).model_fields}
    for key, _ in unread_settings(name, section, chosen, functions):
        if key in section.model_fields_set:
            kept[key] = section.model_extra[key]
    opened = type(section).model_construct(section.model_fields_set, **kept, **settings)
    return config.model_copy(update={name: opened})


def _chosen_functions(config: Config, name: str) -> tuple[str, tuple[Any, ...]]:
    """Return the functions that a section chooses, and a description of the choice for errors."""
    if name == "policy_loss":
        loss = configured_policy_loss(config.policy_loss).registration
        return f"the policy loss {loss.name}", (loss.function,)
    if name == "advantage":
        estimator = configured_advantage(config.advantage).registration
        normalizer = configured_normalizer(config.advantage).registration
        chosen = f"the estimator {estimator.name} with the normalizer {normalizer.name}"
        return chosen, (normalizer.function, estimator.function)
    weight, masks = config.correction.weight, configured_masks(config.correction)
    functions = [mask.registration.function for mask in masks.values()] + [correction_weights] * (weight != "none")
    return f"the weight {weight} with the masks {', '.join(masks) or 'none'}", tuple(functions)


def _fill_unset(config: Config, defaults: Values) -> Config:
    return with_defaults(config, {key: value for key, value in defaults.items() if get_value(config, key) is None})


def _dependent_defaults(config: Config) -> Values:
    estimator = configured_advantage(config.advantage).registration
    defaults: dict[str, Any] = {
        "filter.min_group": 2 if estimator.needs_peers else 1,
        "governor.enabled": not config.run.deterministic and config.pacing.max_lag > 0,
        "engine.count": len(config.engine.urls) or 1,
        "kl.estimator": None if config.kl.coefficient == 0 else "k3" if config.kl.place == "loss" else "k1",
        "lora.alpha": 2.0 * config.lora.rank if config.lora.rank > 0 else None,
        "critic.lr": 10 * config.learner.lr if estimator.critic and config.learner.lr else None,
    }
    if is_set(config, "producer.num_iterations"):
        defaults["algorithm.epochs_per_batch"] = config.producer.num_iterations
    else:
        defaults["producer.num_iterations"] = config.algorithm.epochs_per_batch
    if config.filter.uniform is None:
        defaults["filter.uniform"] = estimator.needs_peers
    return defaults


# ------------------------------------------------------------------------------------------------------- unused keys


def unread_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys of a filled config that the user set and nothing reads, each with the reason."""
    for name in ("policy_loss", "advantage", "correction"):
        for key, why in unread_settings(name, getattr(config, name), *_chosen_functions(config, name)):
            yield f"{name}.{key}", why
    for key, why in unused_keys(config):
        if is_set(config, key) and not _is_harmless(config, key):
            yield key, f"{why}, or leave this out"


def _is_harmless(config: Config, dotted: str) -> bool:
    """Return whether a key of servers or trackers has its default value, as in a config that lists every key."""
    name, _, key = dotted.partition(".")
    section = getattr(config, name)
    return name in ("launch", "weights", "report") and getattr(section, key) == type(section).model_fields[key].default


def unused_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys of a filled config, other than settings of functions, that nothing reads, each with the reason."""
    for name, section in config:
        for key, mark in closed_keys(section).items():
            yield f"{name}.{key}", _why_closed(name, section, mark)
    yield from _unused_of_engines(config)
    if not config.run.report_to:
        why = "run.report_to is empty, so nothing is reported; name a tracker there"
        yield from ((f"report.{key}", why) for key in type(config.report).model_fields)
    estimator = configured_advantage(config.advantage).registration
    if not estimator.critic:
        why = f'advantage.name is {estimator.name}, which has no critic; use "gae"'
        yield from ((f"critic.{key}", why) for key in type(config.critic).model_fields)
        if config.advantage.credit == "episode":
            why = 'whole episodes have no later rewards to discount; use advantage.credit = "turn" or "token"'
            yield "advantage.gamma", why


def _unused_of_engines(config: Config) -> Iterator[tuple[str, str]]:
    is_embedded = config.engine.kind == "embedded"
    reason = "engine.urls lists running ones; remove engine.urls"
    if is_embedded:
        reason = 'engine.kind is "embedded"; set it to vllm or sglang'
        yield "weights.transport", f"the embedded engine always reads weights from memory, and {reason}"
        if not config.weights.delta:
            yield "weights.dir", "the embedded engine reads only delta files; set weights.delta"
    if is_embedded or config.engine.urls:
        for key in type(config.launch).model_fields:
            yield f"launch.{key}", f"no server is started, because {reason}"


def _why_closed(name: str, section: Section, mark: OpenedBy) -> str:
    values = {f"{name}.{switch}": getattr(section, switch) for switch in mark.switches}
    shown = (f"{key} is {'not set' if value is None else json.dumps(value)}" for key, value in values.items())
    remedy = f"use {' or '.join(mark.values)}" if mark.values else "change that"
    return f"it has no effect because {' and '.join(shown)}; {remedy}"
