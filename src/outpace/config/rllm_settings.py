"""Settings of rLLM, including those of its backends, as settings of outpace. Used by `outpace.compat.rllm`.

    {"rllm.rollout.n": 8, …} ─▶ translate ─▶ settings of outpace, and what only the layer needs

Every name is translated, accepted because it has no effect here, or refused. One error lists all refusals. rLLM's
defaults (`DEFAULTS`) apply here too, except for the model, the learning rate and token limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from outpace.errors import BadInput, one_line
from outpace.runtime.registry import TRACKERS

Values = dict[str, Any]


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: key for key, names in table.items() for name in names.split()}


SAME = _by_name({
    "model.path": "model.name actor_rollout_ref.model.path",
    "lora.rank": "model.lora_rank actor_rollout_ref.model.lora.rank actor_rollout_ref.model.lora_rank",
    "lora.alpha": "actor_rollout_ref.model.lora.alpha actor_rollout_ref.model.lora_alpha",
    "engine.kind": "actor_rollout_ref.rollout.name",
    "engine.context": "training.max_length actor_rollout_ref.rollout.max_model_len",
    "launch.gpu_memory": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "gateway.host": "rllm.gateway.host",
    "gateway.port": "rllm.gateway.port",
    "tasks.shuffle": "data.shuffle",
    "run.seed": "rllm.data.seed data.seed",
    "run.dir": "training.default_local_dir trainer.default_local_dir",
    "report.project": "rllm.trainer.project_name trainer.project_name",
    "report.name": "rllm.trainer.experiment_name trainer.experiment_name",
    "eval.attempts": "rllm.rollout.n_val validation.group_size actor_rollout_ref.rollout.val_kwargs.n",
    "eval.temperature":
        "rllm.rollout.val.temperature sampling.val.temperature actor_rollout_ref.rollout.val_kwargs.temperature",
    "eval.top_p": "rllm.rollout.val.top_p sampling.val.top_p actor_rollout_ref.rollout.val_kwargs.top_p",
    "eval.max_tokens": "rllm.rollout.val.max_tokens",
    "rollout.group_size": "rllm.rollout.n training.group_size actor_rollout_ref.rollout.n",
    "rollout.temperature":
        "rllm.rollout.train.temperature sampling.train.temperature actor_rollout_ref.rollout.temperature",
    "rollout.top_p": "rllm.rollout.train.top_p sampling.train.top_p actor_rollout_ref.rollout.top_p",
    "rollout.max_tokens": "rllm.rollout.train.max_tokens rllm.data.max_response_length data.max_response_length",
    "pacing.groups_per_step": "rllm.data.train_batch_size data.train_batch_size",
    "pacing.max_running": "rllm.workflow.n_parallel_tasks workflow.n_parallel_tasks",
    "learner.lr": "training.learning_rate actor_rollout_ref.actor.optim.lr",
    "learner.schedule": "rllm.algorithm.lr_schedule training.lr_schedule",
    "learner.beta1": "training.beta1",
    "learner.beta2": "training.beta2",
    "learner.tokens_per_pass": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "algorithm.minibatches": "training.num_minibatches",
    "kl.coefficient": "rllm.algorithm.kl_beta actor_rollout_ref.actor.kl_loss_coef",
    "policy_loss.clip_low": "actor_rollout_ref.actor.clip_ratio_low",
    "policy_loss.clip_high": "rllm.algorithm.eps_clip_high actor_rollout_ref.actor.clip_ratio_high",
    "correction.cap": "rllm.algorithm.rollout_correction.tis_cap algorithm.rollout_correction.rollout_is_threshold",
    "filter.min_group": "rllm.rejection_sample.min_trajs_per_group",
    "filter.uniform": "rllm.rejection_sample.filter_uniform_groups",
})  # fmt: skip
"""Names whose value is that of a setting of outpace. None means not set."""

MIRRORED = _by_name({
    "rllm.algorithm.adv_estimator": "algorithm.adv_estimator",
    "rllm.algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std_in_grpo",
    "rllm.algorithm.eps_clip": "actor_rollout_ref.actor.clip_ratio",
    "rllm.algorithm.loss_fn": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "rllm.algorithm.loss_agg_mode": "actor_rollout_ref.actor.loss_agg_mode",
    "rllm.algorithm.rollout_correction.bypass_mode": "algorithm.rollout_correction.bypass_mode",
    "rllm.algorithm.rollout_correction.tis_mode": "algorithm.rollout_correction.rollout_is",
    "rllm.trainer.total_epochs": "trainer.total_epochs",
    "rllm.trainer.total_batches": "trainer.total_training_steps",
    "rllm.trainer.logger": "trainer.logger",
    "rllm.trainer.test_freq": "trainer.test_freq",
    "rllm.trainer.save_freq": "trainer.save_freq",
    "rllm.trainer.val_only": "trainer.val_only",
    "rllm.workflow.retry_limit": "workflow.retry_limit",
    "rllm.trainer.resume_mode": "training.resume_mode trainer.resume_mode",
})  # fmt: skip
"""Names of the backends for settings that are converted."""

ESTIMATOR = "rllm.algorithm.adv_estimator"
ESTIMATORS = {
    "grpo": "grpo", "rloo": "rloo", "reinforce": "none", "reinforce_plus_plus_baseline": "reinforce_pp_baseline"
}  # fmt: skip
IGNORED_TRACKERS = ("console", "file")
LOSSES = {"ppo": "ppo", "vanilla": "ppo", "importance_sampling": "importance", "cispo": "cispo", "gspo": "gspo"}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _positive(key: str) -> Callable[[Any], Values]:
    return lambda value: {key: int(value)} if value > 0 else {}


CONVERTED: dict[str, Callable[[Any], Values]] = {
    "rllm.algorithm.adv_estimator": lambda name: {"advantage.name": ESTIMATORS[name]},
    "rllm.algorithm.norm_adv_by_std_in_grpo": lambda on: {} if on else {"advantage.name": "dr_grpo"},
    "rllm.algorithm.eps_clip": lambda clip: {"policy_loss.clip_low": clip, "policy_loss.clip_high": clip},
    "rllm.algorithm.loss_fn": lambda name: {"policy_loss.name": LOSSES[name]},
    "rllm.algorithm.loss_agg_mode": lambda mode: {"policy_loss.aggregation": mode.replace("-", "_")},
    "rllm.algorithm.rollout_correction.bypass_mode": lambda on: {
        "policy_loss.old_policy": "rollout" if on else "recomputed"
    },
    "rllm.algorithm.rollout_correction.tis_mode": lambda mode: {"correction.weight": mode},
    "rllm.algorithm.warmup_steps": _positive("learner.lr_warmup_steps"),
    "rllm.trainer.total_epochs": _positive("run.epochs"),
    "rllm.trainer.total_batches": _positive("run.steps"),
    "rllm.trainer.test_freq": lambda steps: {"eval.every": max(int(steps), 0)},
    "rllm.trainer.save_freq": lambda steps: {"checkpoint.every": max(int(steps), 0)},
    "rllm.trainer.logger": lambda names: {
        "run.report_to": [name for name in _as_list(names) if name not in IGNORED_TRACKERS]
    },
    "rllm.trainer.resume_mode": lambda mode: {"run.overwrite": True} if mode == "disable" else {},
    "rllm.workflow.retry_limit": lambda attempts: {"rollout.retries": max(int(attempts), 1) - 1},
    "rllm.workflow.raise_on_error": lambda on: {"pacing.max_failed": 1} if on else {},
    "rllm.mask_truncated_samples": lambda on: {"filter.truncated": "mask" if on else "train"},
    "actor_rollout_ref.actor.use_kl_loss": lambda on: {} if on else {"kl.coefficient": 0.0},
}
"""Names whose value is converted, in the order in which they apply. `retry_limit` counts attempts; there is always
one."""

ASYNC = {
    f"rllm.async_training.{name}": default
    for name, default in {
        "enable": False, "mini_batch_size": 64, "fwd_bwd_group_size": None, "staleness_threshold": 0.0,
        "trigger_parameter_sync_step": 1, "partial_rollout": False,
    }.items()
}  # fmt: skip
"""Names that decide together about pacing and weight updates, with their defaults."""

MASK, ARGUMENT, VAL_ONLY = "rllm.compact_filtering.mask_", "rllm.workflow.workflow_args.", "rllm.trainer.val_only"
MASKING = "rllm.compact_filtering.enable"
MASKED = {
    "max_prompt_length_exceeded": True, "max_response_length_exceeded": True, "env_done": False,
    "max_turns_exceeded": True, "timeout": True, "unknown": False, "error": True,
}  # fmt: skip
"""Termination reasons, and whether an enabled compact filtering leaves their episodes out by default."""

ONLY: dict[str, tuple[Any, ...]] = {
    "rllm.stepwise_advantage.mode": ("broadcast",),
    "rllm.rejection_sample.multiplier": (1,),
    "rllm.algorithm.router_replay": ("disabled",),
    "actor_rollout_ref.rollout.mode": ("async",),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": (1,),
    "trainer.nnodes": (1,),
    **dict.fromkeys(("sampling.train.top_k", "sampling.val.top_k"), (-1, 0)),
    **dict.fromkeys(
        (
            "rllm.algorithm.use_precomputed_advantage", "rllm.stepwise_advantage.normalize_by_steps",
            "rllm.disable_thinking", "rllm.accumulate_reasoning", "rllm.rejection_sample.enable",
            "rllm.remote_runtime.enabled", "rllm.algorithm.warmup_steps_ratio", "training.warmup_steps_ratio",
        ),
        (False, 0.0),
    ),
}  # fmt: skip
"""Names that may only have these values, or None."""

NO_EFFECT = _by_name({
    "there is one backend": "rllm.backend rllm.algorithm.use_rllm actor_rollout_ref.hybrid_engine",
    "`workflow_class` or `agent_flow` decides": "rllm.workflow.use_workflow rllm.workflow.name",
    "tokens are never rendered again":
        "rllm.gateway.cumulative_token_mode rllm.gateway.renderer_family rllm.filter_token_mismatch "
        "actor_rollout_ref.actor.use_rollout_log_probs",
    "the run directory has every recorded rollout":
        "rllm.gateway.store rllm.gateway.db_path rllm.episode_logging.log_episodes "
        "rllm.episode_logging.episode_log_dir rllm.async_training.episode_offload_dir "
        "rllm.async_training.trajectory_group_offload_dir trainer.default_hdfs_dir",
    "every run evaluates before the first step": "rllm.trainer.val_before_train trainer.val_before_train",
    "validation runs beside training": "rllm.data.val_batch_size data.val_batch_size",
    "prompts are limited by the context, `engine.context`": "rllm.data.max_prompt_length data.max_prompt_length",
    "advantages are those of a trajectory": "rllm.stepwise_advantage.enable",
    "`rllm.rejection_sample.enable` is off": "rllm.rejection_sample.min_partial_solve_tasks",
    "AdamW's epsilon is 1e-8": "training.eps",
    "adapters are merged for engines that need it": "actor_rollout_ref.model.lora.merge",
    "evaluation samples unless its temperature is 0": "actor_rollout_ref.rollout.val_kwargs.do_sample",
    "placement and memory follow the hardware":
        "rllm.workflow.warm_queue_size trainer.n_gpus_per_node actor_rollout_ref.actor.use_dynamic_bsz "
        "actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload "
        "actor_rollout_ref.rollout.enforce_eager actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu "
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
})  # fmt: skip
"""Names that are accepted and ignored, with the reason."""

DEFAULTS: Values = {
    "rllm.rollout.n": 8, "rllm.data.train_batch_size": 64, "rllm.trainer.total_epochs": 10, "rllm.trainer.test_freq": 5,
    "rllm.trainer.save_freq": 20, "rllm.workflow.retry_limit": 3, "rllm.algorithm.adv_estimator": "grpo",
    "rllm.algorithm.loss_fn": "ppo", "rllm.algorithm.loss_agg_mode": "token-mean",
    "rllm.rejection_sample.filter_uniform_groups": False, "rllm.rejection_sample.min_trajs_per_group": 2,
}  # fmt: skip
"""rLLM's own defaults."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of a nested or dotted mapping, or of an OmegaConf config."""
    for key, value in values.items():
        name = f"{prefix}{key}".lstrip("+")
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        elif not isinstance(value, Mapping):
            yield name, list(value) if not isinstance(value, str) and hasattr(value, "__iter__") else value


class Translated(NamedTuple):
    """Settings of outpace, and what the layer needs: arguments of the workflow, termination reasons whose episodes are
    left out, and whether the script only validates."""

    settings: Values
    workflow_args: Values
    left_out: frozenset[str]
    val_only: bool


def translate(values: Mapping[str, Any] | Sequence[str]) -> Translated:
    """`values` is a mapping, or a list such as `["rllm.rollout.n=8"]`."""
    if not isinstance(values, Mapping):
        import yaml  # slow to import

        values = {name: yaml.safe_load(text) for name, _, text in (each.partition("=") for each in values)}
    given = {MIRRORED.get(name, name): value for name, value in flatten(values) if value is not None}
    problems = [problem for name, value in given.items() if (problem := _problem(name, value))]
    if problems:
        raise BadInput(f"config: {'; '.join(problems)}")
    set_by = {SAME.get(name, name) for name in given}
    used = {name: value for name, value in DEFAULTS.items() if SAME.get(name, name) not in set_by} | given
    if "rllm.trainer.total_batches" in given and "rllm.trainer.total_epochs" not in given:
        del used["rllm.trainer.total_epochs"]
    if used[ESTIMATOR] != "grpo":
        used.pop("rllm.algorithm.norm_adv_by_std_in_grpo", None)
    if not given.get("actor_rollout_ref.actor.use_kl_loss", True):
        used = {name: value for name, value in used.items() if SAME.get(name) != "kl.coefficient"}
    settings: Values = {}
    for name, convert in CONVERTED.items():
        if name in used:
            settings |= convert(used[name])
    settings |= {SAME[name]: value for name, value in used.items() if name in SAME}
    settings |= _pacing({**ASYNC, **{name: value for name, value in given.items() if name in ASYNC}})
    project, experiment = settings.get("report.project"), settings.get("report.name")
    if "run.dir" not in settings and project and experiment:
        settings["run.dir"] = f"checkpoints/{project}/{experiment}"
    if not settings.get("run.report_to"):
        settings = {key: value for key, value in settings.items() if not key.startswith("report.")}
    arguments = {name.removeprefix(ARGUMENT): value for name, value in given.items() if name.startswith(ARGUMENT)}
    left_out = {reason for reason, masked in MASKED.items() if given.get(f"{MASK}{reason}", masked)}
    return Translated(settings, arguments, frozenset(left_out if given.get(MASKING) else ()), bool(given.get(VAL_ONLY)))


def _problem(name: str, value: Any) -> str:
    if name in ONLY and value not in ONLY[name]:
        return f"{name} = {one_line(repr(value), 60)} is not supported, only {ONLY[name][0]}"
    known = (SAME, CONVERTED, ASYNC, NO_EFFECT, ONLY, (VAL_ONLY, MASKING), [f"{MASK}{reason}" for reason in MASKED])
    if name.startswith(ARGUMENT) or any(name in names for names in known):
        return _choice_problem(name, value)
    return f"{name} is not supported"


def _choice_problem(name: str, value: Any) -> str:
    trackers = (*TRACKERS.names(), *IGNORED_TRACKERS)
    choices = {ESTIMATOR: ESTIMATORS, "rllm.algorithm.loss_fn": LOSSES, "rllm.trainer.logger": trackers}.get(name)
    values = _as_list(value) if choices is trackers else [value]
    if choices is None or all(each in choices for each in values):
        return ""
    return f"{name} = {one_line(repr(value), 60)} is not supported; use {', '.join(choices)}"


def _pacing(values: Values) -> Values:
    """With a quota of (1 + s) K B groups between two weight updates, K steps of B groups apart, the last groups are
    trained K - 1 + s K versions late."""
    asynchronous = {name.rpartition(".")[2]: value for name, value in values.items()}
    if not asynchronous["enable"]:
        return {"pacing.max_lag": 0}
    every, staleness = asynchronous["trigger_parameter_sync_step"], asynchronous["staleness_threshold"]
    groups = asynchronous["mini_batch_size"]
    return {
        "pacing.groups_per_step": groups,
        "pacing.chunk_groups": asynchronous["fwd_bwd_group_size"] or groups,
        "pacing.max_lag": every - 1 + ceil(staleness * every),
        "pacing.depth": (1 + staleness) * every - 1,
        "weights.every": every,
        "weights.update": "inflight" if asynchronous["partial_rollout"] else "drain",
    }
