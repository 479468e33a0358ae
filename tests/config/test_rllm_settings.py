"""Settings of rLLM become settings of outpace, or are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from outpace.config.load import KNOWN, make_config
from outpace.config.rllm_settings import CONVERTED, DEFAULTS, MIRRORED, NO_EFFECT, ONLY, SAME, translate
from outpace.errors import BadInput
from support import names


def test_every_name_is_in_one_table_and_names_a_setting_that_exists() -> None:
    tables: list[Mapping[str, Any]] = [SAME, MIRRORED, CONVERTED, NO_EFFECT, ONLY]
    every = [name for table in tables for name in table]
    assert len(every) == len(set(every))
    assert set(SAME.values()) <= set(KNOWN)
    assert set(MIRRORED.values()) <= {*CONVERTED, "rllm.trainer.val_only"}
    assert DEFAULTS.keys() <= {*SAME, *CONVERTED}


def test_the_defaults_are_those_of_rllm() -> None:
    config = make_config(translate({}).settings)
    assert (config.rollout.group_size, config.pacing.groups_per_step, config.run.epochs) == (8, 64, 10)
    assert (config.pacing.max_lag, config.filter.uniform, config.rollout.retries) == (0, False, 2)
    assert (config.policy_loss.name, config.advantage.name) == ("ppo", "grpo")


def test_nested_dotted_and_textual_configs_mean_the_same() -> None:
    nested = {"rllm": {"rollout": {"n": 4}, "trainer": {"total_batches": 7}}, "data": {"train_batch_size": 2}}
    dotted = {"rllm.rollout.n": 4, "rllm.trainer.total_batches": 7, "data.train_batch_size": 2}
    texts = ["rllm.rollout.n=4", "rllm.trainer.total_batches=7", "+data.train_batch_size=2"]
    assert translate(nested) == translate(dotted) == translate(texts)
    settings = translate(dotted).settings
    assert (settings["rollout.group_size"], settings["run.steps"], settings["pacing.groups_per_step"]) == (4, 7, 2)
    assert "run.epochs" not in settings


@pytest.mark.parametrize(
    ("staleness", "every", "lag", "depth"), [(0.0, 1, 0, 0.0), (0.5, 1, 1, 0.5), (0.0, 4, 3, 3.0), (0.5, 4, 5, 5.0)]
)
def test_the_quota_of_groups_between_updates_becomes_lag_and_depth(
    staleness: float, every: int, lag: int, depth: float
) -> None:
    asynchronous = {
        "enable": True,
        "mini_batch_size": 32,
        "staleness_threshold": staleness,
        "trigger_parameter_sync_step": every,
        "partial_rollout": True,
    }
    settings = translate({"rllm": {"async_training": asynchronous}}).settings
    config = make_config(settings)
    assert (config.pacing.max_lag, config.pacing.depth, config.weights.every) == (lag, depth, every)
    assert (config.pacing.groups_per_step, config.weights.update) == (32, "inflight")


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"algorithm.adv_estimator": "rloo"}, {"advantage.name": "rloo"}),
        ({"rllm.algorithm.norm_adv_by_std_in_grpo": False}, {"advantage.name": "dr_grpo"}),
        (
            {"rllm.algorithm.adv_estimator": "rloo", "rllm.algorithm.norm_adv_by_std_in_grpo": False},
            {"advantage.name": "rloo"},
        ),
        ({"rllm.algorithm.eps_clip": 0.1}, {"policy_loss.clip_low": 0.1, "policy_loss.clip_high": 0.1}),
        ({"rllm.algorithm.eps_clip": 0.1, "rllm.algorithm.eps_clip_high": 0.3}, {"policy_loss.clip_high": 0.3}),
        ({"trainer.logger": ["console", "wandb"], "trainer.test_freq": -1}, {"run.report_to": ["wandb"]}),
        ({"trainer.logger": "wandb"}, {"run.report_to": ["wandb"]}),
        ({"trainer.project_name": "p", "trainer.experiment_name": "e"}, {"run.dir": "checkpoints/p/e"}),
        ({"rllm.workflow.retry_limit": 0}, {"rollout.retries": 0}),
    ],
)
def test_values_are_converted(given: dict[str, Any], settings: dict[str, Any]) -> None:
    translated = translate(given).settings
    assert {key: translated[key] for key in settings} == settings
    make_config(translated)


@pytest.mark.parametrize(
    ("given", "coefficient"),
    [
        ({}, 0.0),
        ({"actor_rollout_ref.actor.kl_loss_coef": 0.1}, 0.1),
        ({"actor_rollout_ref.actor.kl_loss_coef": 0.1, "actor_rollout_ref.actor.use_kl_loss": False}, 0.0),
        ({"rllm.algorithm.kl_beta": 0.1}, 0.1),
        ({"rllm.algorithm.kl_beta": 0.1, "actor_rollout_ref.actor.use_kl_loss": False}, 0.0),
    ],
)
def test_the_kl_penalty_can_be_switched_off(given: dict[str, Any], coefficient: float) -> None:
    assert make_config(translate(given).settings).kl.coefficient == coefficient


def test_termination_reasons_are_left_out_as_compact_filtering_says() -> None:
    filtering = {"enable": True, "mask_timeout": False, "mask_env_done": True}
    left_out = translate({"rllm": {"compact_filtering": filtering}}).left_out
    assert {"env_done", "error", "max_turns_exceeded"} <= left_out
    assert not left_out & {"timeout", "unknown"}
    assert translate({"rllm.compact_filtering.mask_timeout": True}).left_out == frozenset()


def test_all_refusals_are_in_one_error() -> None:
    given = {
        "rllm.rollout.n": 4,
        "rllm.rollut.n": 4,
        "rllm.stepwise_advantage.mode": "per_step",
        "rllm.algorithm.adv_estimator": "gae",
        "rllm.trainer.logger": ["console", "file", "swanlab"],
        "trainer.nnodes": 2,
    }
    with pytest.raises(BadInput) as refused:
        translate(given)
    for name in given:
        assert names(str(refused.value), name) == (name != "rllm.rollout.n")
