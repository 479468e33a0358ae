"""TRL's configs: every field has TRL's default and a place here, and refusals come in one error."""

from __future__ import annotations

import dataclasses
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from outpace.compat.trl import AsyncGRPOConfig, GRPOConfig
from outpace.compat.trl.config import AS_IN_TRL, ASYNC_FIELDS, GRPO_FIELDS
from outpace.compat.trl.settings import translate
from outpace.config.load import make_config
from outpace.config.other_libraries import EQUIVALENTS
from outpace.errors import BadInput
from outpace.monitoring.transformers_callbacks import TransformersCallbacks

ROOT = Path(__file__).parents[2]
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def defaults(config: Any) -> dict[str, Any]:
    return {
        field.name: field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        for field in dataclasses.fields(config)
    }


@pytest.mark.slow
def test_every_field_of_trl_has_the_same_default_and_a_setting_or_a_reason() -> None:
    from trl import GRPOConfig as TrlConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig as TrlAsyncConfig

    assert dict(GRPO_FIELDS) == defaults(TrlConfig)
    assert dict(ASYNC_FIELDS) == defaults(TrlAsyncConfig)
    assert {*GRPO_FIELDS, *ASYNC_FIELDS} <= {*EQUIVALENTS, *AS_IN_TRL}


@pytest.mark.slow
def test_a_config_of_trl_itself_gives_the_same_settings(tmp_path: Any) -> None:
    from trl import GRPOConfig as TrlConfig

    chosen: dict[str, Any] = {"num_generations": 4, "loss_type": "cispo", "epsilon_high": 5.0, "use_cpu": True}
    ours, theirs = (translate(config(str(tmp_path), **chosen), 100) for config in (GRPOConfig, TrlConfig))
    assert ours == theirs


def test_the_tables_of_the_page_are_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "trl_docs.py"))
    page = (ROOT / "docs" / "from_trl.md").read_text()
    assert page == script["generate"](page), "run python scripts/trl_docs.py"


def test_values_that_switch_a_limit_off_are_accepted() -> None:
    settings, _ = translate(GRPOConfig("run", top_k=-1, top_p=None, max_grad_norm=None), 16)
    assert settings["learner.max_grad_norm"] > 1e3


@pytest.mark.parametrize("config", [GRPOConfig, AsyncGRPOConfig])
def test_the_defaults_make_a_valid_config(config: Any) -> None:
    settings, _ = translate(config("runs/x"), 100)
    make_config(settings)


def test_all_fields_that_cannot_be_used_are_in_one_error() -> None:
    args = GRPOConfig("runs/x", fp16=True, top_p=0.9, optim="sgd", min_p=0.1, deepspeed="zero.json", tf32=True)
    with pytest.raises(BadInput) as refused:
        translate(args, 100)
    assert all(f"{name}: " in str(refused.value) for name in ("fp16", "top_p", "optim", "min_p", "deepspeed"))
    assert "tf32" not in str(refused.value)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, {"policy_loss.name": "ppo", "policy_loss.aggregation": "token_mean", "advantage.name": "grpo"}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            {"policy_loss.name": "gspo", "policy_loss.clip_low": 3e-4, "policy_loss.clip_high": 4e-4},
        ),
        ({"scale_rewards": "batch"}, {"advantage.name": "dr_grpo", "advantage.normalizer": "batch_std"}),
        ({"loss_type": "vespo", "vespo_k_neg": 2.5}, {"policy_loss.name": "vespo", "policy_loss.k_negative": 2.5}),
        (
            {"use_vllm": True},
            {"correction.weight": "sequence", "correction.masks": ["sequence"], "correction.sequence_high": 3.0},
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            {"correction.weight": "token", "correction.masks": [], "correction.cap": 3.0, "correction.floor": 0.0},
        ),
        ({"beta": 0.1}, {"kl.coefficient": 0.1, "kl.estimator": "unbiased"}),
        ({"outpace": {"pacing.max_lag": 1}, "max_steps": 7}, {"run.steps": 7, "pacing.max_lag": 0}),
    ],
)
def test_the_algorithm_is_that_of_trl(chosen: dict[str, Any], expected: dict[str, Any]) -> None:
    settings, _ = translate(GRPOConfig("runs/x", **chosen), 100)
    assert expected.items() <= settings.items()
    make_config(settings)


@pytest.mark.parametrize(
    ("chosen", "groups", "updates", "epoch_steps", "max_steps"),
    [
        ({}, 1, 1, 20, 60),
        ({"gradient_accumulation_steps": 4}, 4, 1, 5, 15),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 3}, 4, 6, 30, 90),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 1}, 4, 1, 5, 15),
        ({"generation_batch_size": 16, "max_steps": 10}, 2, 2, 20, 10),
    ],
)
def test_steps_are_counted_as_in_trl(
    chosen: dict[str, Any], groups: int, updates: int, epoch_steps: int, max_steps: int
) -> None:
    settings, schedule = translate(GRPOConfig("runs/x", **chosen), 20)
    assert (schedule.groups, schedule.updates) == (groups, updates)
    assert (schedule.epoch_steps, schedule.max_steps) == (epoch_steps, max_steps)
    assert settings["run.steps"] * updates == max_steps


@pytest.mark.parametrize(
    ("chosen", "key"),
    [
        ({"per_device_train_batch_size": 6}, "num_generations"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 6}, "steps_per_generation"),
        ({"num_iterations": 4, "max_steps": 6}, "max_steps"),
    ],
)
def test_batches_that_do_not_fit_are_refused(chosen: dict[str, Any], key: str) -> None:
    with pytest.raises(BadInput, match=f"^{key}: "):
        translate(GRPOConfig("runs/x", **chosen), 20)


def test_a_server_is_used_only_if_its_address_was_given() -> None:
    url = "http://localhost:8000"
    assert "engine.kind" not in translate(AsyncGRPOConfig("runs/x"), 8)[0]
    assert translate(AsyncGRPOConfig("runs/x", vllm_server_base_url=url), 8)[0]["engine.urls"] == [url]


def test_steps_go_on_and_on_save_comes_late_if_a_checkpoint_is_deferred(tmp_path: Path) -> None:
    class Calls(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            calls.append(("step", state.global_step))

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            calls.append(("save", state.global_step))

    calls: list[tuple[str, int]] = []
    chosen: dict[str, Any] = {"num_generations": 2, "per_device_train_batch_size": 2, "use_cpu": True}
    args = GRPOConfig(str(tmp_path), max_steps=4, save_strategy="steps", save_steps=2, **chosen)
    events = TransformersCallbacks(args, translate(args, 100)[1], [Calls])
    events.on_run_start({"version": 0})
    for version in range(4):
        events.on_batch_start(version)
        events.on_batch_end({"step": version + 1})
        if version >= 2:  # that of step 2 is saved after step 3
            events.on_checkpoint(version + 1, tmp_path)
    assert calls == [("step", 1), ("step", 2), ("step", 3), ("save", 3), ("step", 4), ("save", 4)]
