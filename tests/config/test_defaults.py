"""Defaults that depend on the chosen functions, as properties of every valid combination."""

import tomllib
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outpace.algorithms import ADVANTAGES, MASKS, NORMALIZERS, POLICY_LOSSES
from outpace.config import Config
from outpace.config.algorithm import (
    configured_advantage,
    configured_masks,
    configured_normalizer,
    configured_policy_loss,
)
from outpace.config.base import OpenedBy
from outpace.config.defaults import fill_defaults, get_value, unused_keys
from outpace.config.load import FIELDS, PARAMETERS, SECTIONS, dump_settings, dump_toml, make_config, user_settings
from outpace.config.validation import resolve
from outpace.errors import BadInput

SAMPLE: dict[str, Any] = {
    "advantage.gamma": 0.5,
    "advantage.gae_lambda": 0.5,
    "advantage.k": 2,
    "advantage.std_epsilon": 0.01,
    "policy_loss.cap": 3.0,
    "policy_loss.clip_low": 0.1,
    "policy_loss.clip_high": 0.3,
    "policy_loss.dual_clip": 3.0,
    "policy_loss.tau_positive": 2.0,
    "policy_loss.tau_negative": 2.0,
    "policy_loss.k_positive": 1.0,
    "policy_loss.k_negative": 1.0,
    "policy_loss.lambda_positive": 1.0,
    "policy_loss.lambda_negative": 1.0,
    "policy_loss.divergence": "kl",
    "policy_loss.trust_low": 0.1,
    "policy_loss.trust_high": 0.1,
    "policy_loss.ratio_penalty": 0.1,
    "producer.prefetch_depth": 2,
    "producer.sync_warmup_rollouts": 1,
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
    "replay.mode": "fill",
    "replay.max_age": 3,
    "replay.times": 2,
    "reroll.after_steps": 2,
    "reroll.from_step": 5,
    "reroll.max_groups": 2,
    "reroll.solved_above": 0.5,
    "reroll.max_waiting": 10,
    "governor.ess_min": 0.25,
    "governor.kl_max": 0.5,
    "governor.patience": 2,
    "governor.min_lag": 1,
    "rewards.overlong_penalty": 2.0,
    "lora.alpha": 5.0,
    "lora.targets": ["q_proj"],
}
"""A valid non-default value for every key that only some choices read."""

ALWAYS = {
    "policy_loss.old_policy",
    "policy_loss.aggregation",
    "advantage.normalizer",
    "advantage.credit",
    "correction.weight",
    "correction.masks",
    "filter.uniform",
    "filter.min_group",
    "governor.enabled",
}


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """A combination that is valid by construction, whichever keys are drawn."""
    surrogate = draw(st.sampled_from(sorted(POLICY_LOSSES.built_in)))
    advantage = draw(st.sampled_from(sorted(ADVANTAGES.built_in)))
    deterministic = draw(st.booleans())
    values: dict[str, Any] = {
        "policy_loss.name": surrogate,
        "advantage.name": advantage,
        "policy_loss.old_policy": draw(st.sampled_from(POLICY_LOSSES.find(surrogate).old_policies)),
        "advantage.credit": draw(st.sampled_from(ADVANTAGES.find(advantage).credits)),
        "advantage.normalizer": draw(st.sampled_from([None, *NORMALIZERS.built_in])),
        "policy_loss.aggregation": draw(st.sampled_from([None, "token_mean", "dr_grpo"])),
        "algorithm.preset": draw(st.sampled_from([None, "grpo", "dapo", "ppo", "gspo"])),
        "algorithm.minibatches": draw(st.integers(1, 2)),
        "algorithm.allow_unbounded": True,
        "correction.masks": draw(st.lists(st.sampled_from(sorted(MASKS.built_in)), unique=True)),
        "kl.coefficient": draw(st.sampled_from([0.0, 0.1])),
        "filter.uniform": draw(st.sampled_from([None, False, True])),
        "difficulty.easy_above": draw(st.sampled_from([None, 0.9])),
        "replay.fraction": draw(st.sampled_from([0.0, 0.25])),
        "reroll.max_times": draw(st.integers(0, 2)),
        "rewards.overlong_buffer": draw(st.sampled_from([0, 8])),
        "lora.rank": draw(st.sampled_from([0, 4])),
        "pacing.max_lag": draw(st.integers(2, 8)),  # below 2, governor.min_lag can only be 0
        "run.deterministic": deterministic,
        "run.dir": "here",
    }
    if values["policy_loss.old_policy"] != "rollout":
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
def test_a_resolved_config_still_says_what_the_user_set(values: dict[str, Any]) -> None:
    config = resolve(make_config(values))
    given = {f"{name}.{key}": value for name, keys in user_settings(config).items() for key, value in keys.items()}
    assert given == values
    assert resolve(make_config(tomllib.loads(dump_settings(config)))) == config


@settings(deadline=None)
@given(choices(), st.data())
def test_a_key_is_filled_in_if_it_is_read_and_refused_if_it_is_not(values: dict[str, Any], data: Any) -> None:
    config = resolve(make_config(values))
    key = data.draw(st.sampled_from(sorted(SAMPLE)))
    changed = {**values, key: SAMPLE[key]}
    assume(key != "kl.place" or values["advantage.name"] != "gdpo")  # refused for another reason
    assume(key != "replay.mode" or config.filter.uniform)  # the same
    assume(key != "advantage.gamma" or values["advantage.credit"] != "token")  # the same, with most advantages
    read = (
        read_by_functions(config) if key in PARAMETERS else set(FIELDS) - {unused for unused, _ in unused_keys(config)}
    )
    if key in read:
        assert get_value(resolve(make_config(changed)), key) == SAMPLE[key]
        return
    with pytest.raises(BadInput) as caught:
        make_config(changed)
    assert str(caught.value).startswith(f"{key}: ")


def read_by_functions(config: Config) -> set[str]:
    loss, estimator = configured_policy_loss(config.policy_loss), configured_advantage(config.advantage)
    normalizer = configured_normalizer(config.advantage)
    masks = configured_masks(config.correction).values()
    weight = ("cap", "floor") if config.correction.weight != "none" else ()
    return {
        *(f"policy_loss.{name}" for name in loss.settings),
        *(f"advantage.{name}" for name in (*estimator.settings, *normalizer.settings)),
        *(f"correction.{name}" for name in (*weight, *(name for mask in masks for name in mask.settings))),
    }


@settings(deadline=None)
@given(choices())
def test_settings_of_the_chosen_functions_match_the_resolved_config(values: dict[str, Any]) -> None:
    config = resolve(make_config(values))
    loss, estimator = configured_policy_loss(config.policy_loss), configured_advantage(config.advantage)
    assert loss.settings == {name: getattr(config.policy_loss, name, None) for name in loss.registration.parameters}
    assert estimator.settings == {
        name: getattr(config.advantage, name, None) for name in estimator.registration.parameters
    }
    for mask in configured_masks(config.correction).values():
        assert mask.settings == {name: getattr(config.correction, name) for name in mask.registration.parameters}
        assert None not in mask.settings.values()


def test_every_dependent_key_is_covered_by_these_tests() -> None:
    marked = {
        f"{name}.{key}"
        for name, section in SECTIONS.items()
        for key, info in section.model_fields.items()
        if any(isinstance(mark, OpenedBy) and not mark.values for mark in info.metadata)
    }
    critic = {f"critic.{key}" for key in SECTIONS["critic"].model_fields}
    assert set(SAMPLE) == {*PARAMETERS, *marked, *critic, "advantage.gamma"}


def test_a_key_that_always_applies_always_has_a_value() -> None:
    assert {key for key in ALWAYS if get_value(fill_defaults(Config()), key) is None} == set()


# ------------------------------------------------------------------------------------------------------ single defaults


def algorithm(**values: Any) -> Any:
    return resolve(make_config({key.replace("__", "."): value for key, value in values.items()}))


def test_the_default_is_truncated_importance_sampling_with_the_opsm_mask() -> None:
    config = algorithm()
    loss, advantage, correction = config.policy_loss, config.advantage, config.correction
    assert (loss.name, loss.old_policy, loss.cap) == ("truncated_is", "rollout", 2.0)
    assert (advantage.name, advantage.normalizer, advantage.credit) == ("dr_grpo", "none", "episode")
    assert (loss.aggregation, correction.weight, correction.masks) == ("token_mean", "none", ["opsm"])
    assert config.learner.stream is True


@pytest.mark.parametrize("old_policy", ["recomputed", "interpolated"])
def test_an_old_policy_other_than_the_rollout_policy_brings_truncated_weights(old_policy: str) -> None:
    correction = algorithm(policy_loss__name="ppo", policy_loss__old_policy=old_policy).correction
    assert (correction.weight, correction.cap, correction.floor) == ("token", 2.0, 0.0)


def test_an_advantage_brings_its_normalizer_and_credit() -> None:
    chosen = algorithm(advantage__name="reinforce_pp").advantage
    assert (chosen.normalizer, chosen.credit, chosen.gamma) == ("whiten_tokens", "token", 1.0)


def test_the_critic_defaults_to_ten_times_the_learning_rate_of_the_policy() -> None:
    critic = algorithm(advantage__name="gae", learner__lr=1e-5).critic
    assert critic.lr == pytest.approx(1e-4)
    assert (critic.coefficient, critic.clip, critic.shared) == (0.5, 0.2, False)
    assert algorithm().critic.lr is None


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
    config = algorithm(advantage__name=advantage)
    assert config.filter.uniform is compares
    assert config.filter.min_group == (2 if compares else 1)


def test_a_preset_is_recorded_but_has_no_effect_once_resolved() -> None:
    config = algorithm(algorithm__preset="dapo")
    assert config.algorithm.preset == "dapo"
    written = tomllib.loads(dump_toml(config))
    swapped = resolve(make_config(written | {"algorithm": written["algorithm"] | {"preset": "gspo"}}))
    assert (swapped.policy_loss, swapped.advantage) == (config.policy_loss, config.advantage)
