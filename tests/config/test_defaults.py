"""Defaults that depend on the chosen functions, as properties of every valid combination."""

import re
import tomllib
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outpace.algorithms import ADVANTAGES, NORMALIZERS, POLICY_LOSSES
from outpace.algorithms.corrections import MASKS
from outpace.config import Config
from outpace.config.algorithm import (
    configured_advantage,
    configured_masks,
    configured_normalizer,
    configured_policy_loss,
)
from outpace.config.defaults import DEPENDENT_KEYS, fill_defaults, get_value, keys_at_default, with_values
from outpace.config.load import FIELDS, dump_toml, make_config
from outpace.config.validation import resolve
from outpace.errors import BadInput

SAMPLE: dict[str, Any] = {
    "algorithm.gamma": 0.5,
    "algorithm.gae_lambda": 0.5,
    "algorithm.pass_k": 2,
    "algorithm.std_epsilon": 0.01,
    "algorithm.cap": 3.0,
    "algorithm.clip_low": 0.1,
    "algorithm.clip_high": 0.3,
    "algorithm.dual_clip": 3.0,
    "algorithm.tau_positive": 2.0,
    "algorithm.tau_negative": 2.0,
    "algorithm.divergence": "kl",
    "algorithm.trust_low": 0.1,
    "algorithm.trust_high": 0.1,
    "algorithm.ratio_penalty": 0.1,
    "correction.cap": 4.0,
    "correction.floor": 0.25,
    "correction.token_low": 0.25,
    "correction.token_high": 4.0,
    "correction.sequence_low": 0.25,
    "correction.sequence_high": 4.0,
    "correction.geometric_low": 0.9,
    "correction.geometric_high": 1.1,
    "correction.veto_below": 0.01,
    "correction.opsm_delta": 0.3,
    "correction.m2po_limit": 0.1,
    "kl.estimator": "k2",
    "kl.place": "reward",
    "kl.sync_every": 7,
    "critic.lr": 0.01,
    "critic.coefficient": 1.0,
    "critic.clip": 0.5,
    "critic.shared": True,
    "filter.tolerance": 0.1,
    "difficulty.rest_epochs": 3,
    "replay.max_age": 3,
    "replay.times": 2,
    "governor.ess_min": 0.25,
    "governor.kl_max": 0.5,
    "governor.patience": 2,
    "governor.min_lag": 1,
    "rewards.overlong_penalty": 2.0,
    "lora.alpha": 5.0,
}
"""A valid non-default value for every key that only some choices read."""

ALWAYS = {f"algorithm.{key}" for key in ("advantage", "normalise", "credit", "surrogate", "anchor", "aggregation")} | {
    "correction.weight",
    "correction.masks",
    "filter.uniform",
    "filter.min_group",
    "governor.enabled",
}

OPTIONAL = {"algorithm.dual_clip", "algorithm.pass_k"}
"""Keys that may have no value although something reads them."""


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """A combination that is valid by construction, whichever keys are drawn."""
    surrogate = draw(st.sampled_from(sorted(POLICY_LOSSES.built_in)))
    advantage = draw(st.sampled_from(sorted(ADVANTAGES.built_in)))
    deterministic = draw(st.booleans())
    values: dict[str, Any] = {
        "algorithm.surrogate": surrogate,
        "algorithm.advantage": advantage,
        "algorithm.anchor": draw(st.sampled_from(POLICY_LOSSES.find(surrogate).anchors)),
        "algorithm.credit": draw(st.sampled_from(ADVANTAGES.find(advantage).credits)),
        "algorithm.normalise": draw(st.sampled_from([None, *NORMALIZERS.built_in])),
        "algorithm.aggregation": draw(st.sampled_from([None, "token_mean", "dr_grpo"])),
        "algorithm.preset": draw(st.sampled_from([None, "grpo", "dapo", "ppo", "gspo"])),
        "algorithm.updates": draw(st.integers(1, 2)),
        "algorithm.force": True,
        "correction.masks": draw(st.lists(st.sampled_from(sorted(MASKS)), unique=True)),
        "kl.coefficient": draw(st.sampled_from([0.0, 0.1])),
        "filter.uniform": draw(st.sampled_from([None, False, True])),
        "difficulty.easy_above": draw(st.sampled_from([None, 0.9])),
        "replay.fraction": draw(st.sampled_from([0.0, 0.25])),
        "rewards.overlong_buffer": draw(st.sampled_from([0, 8])),
        "lora.rank": draw(st.sampled_from([0, 4])),
        "pacing.max_lag": draw(st.integers(2, 8)),  # below 2, governor.min_lag can only be 0
        "run.deterministic": deterministic,
        "run.dir": "here",
    }
    if values["algorithm.anchor"] != "rollout":
        values["correction.weight"] = draw(st.sampled_from([None, "none", "token", "sequence"]))
    if not deterministic:
        values["governor.enabled"] = draw(st.sampled_from([None, False, True]))
    return {key: value for key, value in values.items() if value is not None}


@settings(deadline=None)
@given(choices())
def test_a_resolved_config_resolves_to_itself_also_when_dumped_and_loaded(values: dict[str, Any]) -> None:
    config = resolve(make_config(values))
    assert resolve(config) == config
    loaded = make_config(tomllib.loads(dump_toml(config)))
    assert loaded == config
    assert resolve(loaded) == config


@settings(deadline=None)
@given(choices())
def test_a_resolved_config_without_its_redundant_keys_resolves_to_the_same_config(values: dict[str, Any]) -> None:
    config = resolve(make_config(values))
    minimal = with_values(config, dict.fromkeys(keys_at_default(config)))
    assert resolve(minimal) == config
    assert keys_at_default(minimal) & {key for key in DEPENDENT_KEYS if get_value(minimal, key) is not None} == set()


@settings(deadline=None)
@given(choices(), st.data())
def test_a_key_is_filled_in_if_it_is_read_and_refused_if_it_is_not(values: dict[str, Any], data: Any) -> None:
    config = resolve(make_config(values))
    key = data.draw(st.sampled_from(sorted(SAMPLE)))
    changed = {**values, key: SAMPLE[key]}
    assume(key != "kl.place" or values["algorithm.advantage"] != "gdpo")  # refused for another reason
    assume(key != "algorithm.gamma" or values["algorithm.credit"] != "token")  # the same, with most advantages
    if get_value(config, key) is not None or (key in OPTIONAL and key in read_by_functions(config)):
        assert get_value(resolve(make_config(changed)), key) == SAMPLE[key]
        return
    with pytest.raises(BadInput) as caught:
        make_config(changed)
    assert str(caught.value).startswith(f"{key}: ")


def read_by_functions(config: Config) -> set[str]:
    chosen = (configured_policy_loss, configured_advantage, configured_normalizer)
    return {f"algorithm.{name}" for choose in chosen for name in choose(config.algorithm).settings}


@settings(deadline=None)
@given(choices())
def test_settings_of_the_chosen_functions_match_the_resolved_config(values: dict[str, Any]) -> None:
    config = resolve(make_config(values))
    for choice in (configured_policy_loss(config.algorithm), configured_advantage(config.algorithm)):
        assert choice.settings == {name: getattr(config.algorithm, name) for name in choice.registration.parameters}
    for mask in configured_masks(config.correction).values():
        assert mask.settings == {name: getattr(config.correction, name) for name in mask.registration.parameters}
        assert None not in mask.settings.values()


def test_every_dependent_key_is_covered_by_these_tests() -> None:
    assert set(SAMPLE) | ALWAYS == set(DEPENDENT_KEYS)


def test_a_key_that_always_applies_always_has_a_value() -> None:
    assert {key for key in ALWAYS if get_value(fill_defaults(Config()), key) is None} == set()


# ------------------------------------------------------------------------------------------------------ single defaults


def test_defaults_in_the_help_match_the_filled_in_defaults() -> None:
    everything = {
        "algorithm.advantage": "gae",
        "algorithm.surrogate": "ppo",
        "correction.masks": sorted(MASKS),
        "kl.coefficient": 0.1,
        "filter.uniform": True,
        "difficulty.easy_above": 0.9,
        "replay.fraction": 0.1,
        "rewards.overlong_buffer": 8,
    }
    config = resolve(make_config(everything))
    documented = {key: re.search(r"Default: (-?[0-9.e-]+)\.$", FIELDS[key].description or "") for key in DEPENDENT_KEYS}
    numbers = {key: float(match[1]) for key, match in documented.items() if match}
    assert len(numbers) > 20
    assert numbers == {key: get_value(config, key) for key in numbers}


def algorithm(**values: Any) -> Any:
    return resolve(make_config({key.replace("__", "."): value for key, value in values.items()}))


def test_the_default_is_truncated_importance_sampling_with_the_opsm_mask() -> None:
    config = algorithm()
    chosen = config.algorithm
    assert (chosen.surrogate, chosen.anchor, chosen.cap) == ("truncated_is", "rollout", 2.0)
    assert (chosen.advantage, chosen.normalise, chosen.credit) == ("dr_grpo", "none", "episode")
    assert (chosen.aggregation, config.correction.weight, config.correction.masks) == ("token_mean", "none", ["opsm"])
    assert config.learner.stream is True


@pytest.mark.parametrize("anchor", ["proximal", "approximate"])
def test_an_old_policy_other_than_the_rollout_policy_brings_truncated_weights(anchor: str) -> None:
    correction = algorithm(algorithm__surrogate="ppo", algorithm__anchor=anchor).correction
    assert (correction.weight, correction.cap, correction.floor) == ("token", 2.0, 0.0)


def test_an_advantage_brings_its_normalizer_and_credit() -> None:
    chosen = algorithm(algorithm__advantage="reinforce_pp").algorithm
    assert (chosen.normalise, chosen.credit, chosen.gamma) == ("whiten_tokens", "token", 1.0)


def test_the_critic_defaults_to_ten_times_the_learning_rate_of_the_policy() -> None:
    critic = algorithm(algorithm__advantage="gae", learner__lr=1e-5).critic
    assert critic.lr == pytest.approx(1e-4)
    assert (critic.coefficient, critic.clip, critic.shared) == (0.5, 0.2, False)
    assert algorithm().critic.coefficient is None


@pytest.mark.parametrize(("place", "estimator"), [("loss", "k3"), ("reward", "k1")])
def test_the_default_kl_estimator_depends_on_the_place_of_the_penalty(place: str, estimator: str) -> None:
    kl = algorithm(kl__coefficient=0.1, kl__place=place).kl
    assert (kl.estimator, kl.sync_every) == (estimator, 0)


@pytest.mark.parametrize(
    ("values", "enabled"),
    [({}, True), ({"run__deterministic": True}, False), ({"pacing__max_lag": 0}, False)],
)
def test_the_governor_is_enabled_by_default_only_where_there_can_be_lag(values: dict[str, Any], enabled: bool) -> None:
    assert algorithm(**values).governor.enabled is enabled


@pytest.mark.parametrize(("advantage", "compares"), [("rloo", True), ("none", False), ("gae", False)])
def test_uniform_groups_are_filtered_if_the_advantage_compares_attempts(advantage: str, compares: bool) -> None:
    config = algorithm(algorithm__advantage=advantage)
    assert config.filter.uniform is compares
    assert config.filter.min_group == (2 if compares else 1)


def test_a_preset_is_recorded_but_has_no_effect_once_resolved() -> None:
    config = algorithm(algorithm__preset="dapo")
    swapped = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"preset": "gspo"})})
    assert config.algorithm.preset == "dapo"
    assert resolve(swapped) == swapped
