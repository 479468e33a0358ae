"""Setting names of TRL, verl, prime-rl, OpenRLHF, Axolotl and outpace 0.1, with the settings to use instead.

`equivalent_setting(name)` returns the hint to print for an unknown name. Names of other libraries are never accepted as
settings, because their values do not always mean the same; the note says where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Equivalent(NamedTuple):
    """Dotted keys of `Config` to use instead. Empty `settings`: outpace has no equivalent, and `note` explains."""

    settings: tuple[str, ...]
    note: str = ""

    def remedy(self, prefix: str = "") -> str:
        if not self.settings:
            return self.note
        names = " and ".join(f"{prefix}{setting}" for setting in self.settings)
        return f"use {names} ({self.note})" if self.note else f"use {names}"


def _use(*settings: str, note: str = "") -> Equivalent:
    return Equivalent(settings, note)


def _absent(note: str) -> Equivalent:
    return Equivalent((), note)


RENAMED: Mapping[str, str] = {
    **{
        f"algorithm.{key}": f"policy_loss.{key}"
        for key in (
            "aggregation", "cap", "clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative", "divergence",
            "trust_low", "trust_high", "ratio_penalty",
        )
    },
    **{f"algorithm.{key}": f"advantage.{key}" for key in ("credit", "gamma", "gae_lambda", "std_epsilon")},
    "algorithm.surrogate": "policy_loss.name",
    "algorithm.anchor": "policy_loss.old_policy",
    "algorithm.advantage": "advantage.name",
    "algorithm.normalise": "advantage.normalizer",
    "algorithm.pass_k": "advantage.k",
    "algorithm.updates": "algorithm.minibatches",
    "algorithm.passes": "algorithm.epochs_per_batch",
    "algorithm.entropy": "algorithm.entropy_coefficient",
    "algorithm.force": "algorithm.allow_unbounded",
    "model.system": "model.system_prompt",
    "engine.path": "engine.decoder",
    "run.show_rollouts": "run.save_rollouts",
    "algorithm.importance_cap": "policy_loss.cap",
    "algorithm.baseline": "advantage.name",
    "algorithm.filter_uniform": "filter.uniform",
    "algorithm.uniform_tolerance": "filter.tolerance",
}  # fmt: skip
"""Settings of outpace 0.1 that have a new name."""

RENAMED_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "policy_loss.old_policy": {"proximal": "recomputed", "approximate": "interpolated"},
    "rollout.environment": {
        "outpace.tasks.calculator:Calculator": "outpace.tasks.generated:Calculator",
        "outpace.tasks.guess:Guess": "outpace.tasks.generated:Guess",
    },
}
"""Values of outpace 0.1 that have a new name, by the new name of their setting."""

_ONE_DEVICE = _absent("the learner runs on one device; sharding is not supported yet; leave this out")
_TRACKER = _use("run.report_to", note='such as ["wandb"]')
_TRACKER_PROJECT = _use("report.project")
_AUTOMATIC = _absent("micro-batches are packed by token count; leave this out, or set learner.tokens_per_pass")
_NO_TRUNCATED_SAMPLING = _absent("truncated or reshaped sampling biases the importance weights; leave this out")
_GROUPS = "counts groups: samples per optimizer step divided by rollout.group_size"
_TENSOR_PARALLEL = _use("launch.args", note='["--tensor-parallel-size", "2"]')
_ESTIMATORS = "grpo, rloo, gae and opo keep their names, reinforce_plus_plus is reinforce_pp"
_SERVER_URLS = 'a list such as ["http://host:8000"], with engine.kind = "vllm"'

TRL: Mapping[str, Equivalent] = {
    "model_name_or_path": _use("model.path"),
    "model_init_kwargs": _use("model.dtype", "model.trust_remote_code", note="other arguments are not supported"),
    "torch_dtype": _use("model.dtype"),
    "bf16": _use("model.dtype", note='"bfloat16"'),
    "fp16": _use("model.dtype", note='"float32" or "bfloat16"; fp16 is not supported'),
    "attn_implementation": _absent("the attention implementation is chosen by device; leave this out"),
    "trust_remote_code": _use("model.trust_remote_code"),
    "system_prompt": _use("model.system_prompt"),
    "chat_template_kwargs": _use("model.renderer", note="chat template arguments are not supported"),
    "dataset_name": _use("tasks.path"),
    "dataset_config": _use("tasks.path", note='"owner/name:configuration"'),
    "dataset_train_split": _use("tasks.split"),
    "dataset_test_split": _use("tasks.eval_split"),
    "train_dataset": _use("tasks.path", note="or Trainer(tasks=...)"),
    "eval_dataset": _use("tasks.eval_path", note="or Trainer(eval_tasks=...)"),
    "shuffle_dataset": _use("tasks.shuffle"),
    "reward_funcs": _use("rewards.functions", note="or Trainer(rewards=...)"),
    "reward_weights": _use("rewards.weights"),
    "multi_objective_aggregation": _use("advantage.name", note='"gdpo" for normalize_then_sum'),
    "environment_factory": _use("rollout.environment", note="or Trainer(environment=...)"),
    "rollout_func": _use("rollout.function", note="or Trainer(rollout=...)"),
    "num_generations": _use("rollout.group_size"),
    "num_generations_eval": _absent("evaluation makes one attempt per task; leave this out"),
    "max_completion_length": _use("rollout.max_tokens"),
    "max_prompt_length": _use("engine.context", note="prompt and completion together"),
    "max_tool_calling_iterations": _use("rollout.max_turns"),
    "generation_kwargs": _use("rollout.temperature", "rollout.stop", note="other arguments are not supported"),
    "temperature": _use("rollout.temperature"),
    "top_p": _use("rollout.top_p", note="must stay 1 for training"),
    "top_k": _use("rollout.top_k", note="must stay 0 for training"),
    "min_p": _NO_TRUNCATED_SAMPLING,
    "repetition_penalty": _NO_TRUNCATED_SAMPLING,
    "request_timeout": _use("rollout.timeout_s"),
    "per_device_train_batch_size": _use("pacing.groups_per_step", note=_GROUPS),
    "gradient_accumulation_steps": _use("pacing.groups_per_step", note=_GROUPS),
    "generation_batch_size": _use("pacing.groups_per_step", note=_GROUPS),
    "steps_per_generation": _use("algorithm.minibatches"),
    "num_iterations": _use("algorithm.epochs_per_batch"),
    "token_budget": _use("learner.tokens_per_pass"),
    "max_staleness": _use("pacing.max_lag"),
    "max_inflight_tasks": _use("pacing.max_running"),
    "weight_sync_steps": _use("weights.every"),
    "queue_maxsize": _use("pacing.depth", note="in batches"),
    "learning_rate": _use("learner.lr"),
    "lr_scheduler_type": _use("learner.schedule"),
    "warmup_steps": _use("learner.lr_warmup_steps"),
    "warmup_ratio": _use("learner.lr_warmup_steps", note="in steps"),
    "adam_beta1": _use("learner.beta1"),
    "adam_beta2": _use("learner.beta2"),
    "adam_epsilon": _absent("AdamW's epsilon is fixed at 1e-8; leave this out"),
    "optim": _absent("the optimizer is AdamW; leave this out"),
    "weight_decay": _use("learner.weight_decay"),
    "max_grad_norm": _use("learner.max_grad_norm"),
    "gradient_checkpointing": _use("learner.gradient_checkpointing"),
    "beta": _use("kl.coefficient"),
    "sync_ref_model": _use("kl.sync_every", note="in steps; the reference is replaced, not mixed"),
    "ref_model_sync_steps": _use("kl.sync_every"),
    "ref_model_mixup_alpha": _use("kl.sync_every", note="the reference is replaced, not mixed"),
    "use_bias_correction_kl": _use("kl.estimator", note='"unbiased"'),
    "epsilon": _use("policy_loss.clip_low", "policy_loss.clip_high"),
    "epsilon_high": _use("policy_loss.clip_high", note="with cispo: policy_loss.cap"),
    "delta": _use("policy_loss.dual_clip"),
    "loss_type": _use("algorithm.preset", note="grpo, dapo, dr_grpo, cispo, sapo and vespo are presets"),
    "importance_sampling_level": _use("policy_loss.name", note='"gspo" for sequence'),
    "scale_rewards": _use(
        "advantage.name",
        note='"grpo" for group, "dr_grpo" for none, "dr_grpo" with advantage.normalizer = "batch_std" for batch',
    ),
    "mask_truncated_completions": _use("filter.truncated", note='"mask"'),
    "sapo_temperature_pos": _use("policy_loss.tau_positive"),
    "sapo_temperature_neg": _use("policy_loss.tau_negative"),
    "entropy_coef": _use("algorithm.entropy_coefficient"),
    "top_entropy_quantile": _absent("outpace trains on every sampled token; leave this out"),
    "vllm_importance_sampling_correction": _use("correction.weight", note='"token", "sequence" or "none"'),
    "vllm_importance_sampling_mode": _use("correction.weight", "correction.masks"),
    "vllm_importance_sampling_cap": _use("correction.cap"),
    "vllm_importance_sampling_clip_max": _use("correction.cap"),
    "vllm_importance_sampling_clip_min": _use("correction.floor"),
    "off_policy_mask_threshold": _use("correction.opsm_delta", note='with correction.masks = ["opsm"]'),
    "use_vllm": _use("engine.kind", note='"vllm"'),
    "vllm_mode": _use("engine.urls", note="for running servers; if not set, outpace starts servers"),
    "vllm_server_base_url": _use("engine.urls", note=_SERVER_URLS),
    "vllm_server_host": _use("engine.urls", note=_SERVER_URLS),
    "vllm_server_port": _use("engine.urls", note=_SERVER_URLS),
    "vllm_server_timeout": _use("launch.start_s"),
    "vllm_gpu_memory_utilization": _use("launch.gpu_memory"),
    "vllm_max_model_length": _use("engine.context"),
    "vllm_tensor_parallel_size": _TENSOR_PARALLEL,
    "use_peft": _use("lora.rank"),
    "peft_config": _use("lora.rank", "lora.alpha", "lora.targets"),
    "lora_r": _use("lora.rank"),
    "lora_alpha": _use("lora.alpha"),
    "lora_target_modules": _use("lora.targets"),
    "lora_dropout": _absent("LoRA dropout is not supported; leave this out"),
    "output_dir": _use("run.dir"),
    "overwrite_output_dir": _use("run.overwrite"),
    "max_steps": _use("run.steps"),
    "num_train_epochs": _use("run.epochs"),
    "seed": _use("run.seed"),
    "data_seed": _use("run.seed"),
    "full_determinism": _use("run.deterministic"),
    "use_cpu": _use("run.device", note='"cpu"'),
    "eval_steps": _use("eval.every"),
    "eval_strategy": _use("eval.every", note="in steps"),
    "eval_on_start": _absent("every run evaluates before the first step; leave this out"),
    "per_device_eval_batch_size": _use("eval.max_running", note="concurrent episodes"),
    "save_steps": _use("checkpoint.every"),
    "save_strategy": _use("checkpoint.every", note="in steps"),
    "save_total_limit": _use("checkpoint.keep"),
    "load_best_model_at_end": _use("checkpoint.keep_best", note="then `outpace export --best`"),
    "resume_from_checkpoint": _absent("resume with `outpace train --resume RUN`, or Trainer.train(resume=True)"),
    "log_completions": _use("run.save_rollouts", note="groups per step"),
    "num_completions_to_print": _use("run.save_rollouts", note="groups per step"),
    "logging_steps": _absent("every step is logged to metrics.jsonl in run.dir; leave this out"),
    "report_to": _TRACKER,
    "project": _TRACKER_PROJECT,
    "run_name": _use("run.dir", "report.name"),
    "push_to_hub": _absent("export the model with `outpace export` and upload it; leave this out"),
    "deepspeed": _ONE_DEVICE,
    "fsdp": _ONE_DEVICE,
    "fsdp_config": _ONE_DEVICE,
}
"""Fields of GRPOConfig, AsyncGRPOConfig and ModelConfig, and arguments of the trainers."""

VERL: Mapping[str, Equivalent] = {
    "actor_rollout_ref.model.path": _use("model.path"),
    "model.lora_rank": _use("lora.rank"),
    "model.lora_alpha": _use("lora.alpha"),
    "model.target_modules": _use("lora.targets"),
    "enable_gradient_checkpointing": _use("learner.gradient_checkpointing"),
    "rollout.n": _use("rollout.group_size"),
    "rollout.name": _use("engine.kind", note='"vllm", "sglang" or "embedded"'),
    "rollout.response_length": _use("rollout.max_tokens"),
    "rollout.max_model_len": _use("engine.context"),
    "rollout.gpu_memory_utilization": _use("launch.gpu_memory"),
    "rollout.tensor_model_parallel_size": _TENSOR_PARALLEL,
    "rollout.max_num_seqs": _use("engine.slots"),
    "multi_turn.max_assistant_turns": _use("rollout.max_turns"),
    "multi_turn.tool_config_path": _use("tools.functions"),
    "actor.optim.lr": _use("learner.lr"),
    "critic.optim.lr": _use("critic.lr"),
    "optim.lr_warmup_steps": _use("learner.lr_warmup_steps"),
    "optim.weight_decay": _use("learner.weight_decay"),
    "grad_clip": _use("learner.max_grad_norm"),
    "clip_ratio": _use("policy_loss.clip_low", "policy_loss.clip_high"),
    "clip_ratio_low": _use("policy_loss.clip_low"),
    "clip_ratio_high": _use("policy_loss.clip_high"),
    "clip_ratio_c": _use("policy_loss.dual_clip"),
    "cliprange_value": _use("critic.clip"),
    "loss_agg_mode": _use("policy_loss.aggregation", note="with underscores: token_mean"),
    "policy_loss.loss_mode": _use("policy_loss.name"),
    "use_kl_loss": _use("kl.coefficient", note='with kl.place = "loss"'),
    "kl_loss_coef": _use("kl.coefficient"),
    "kl_loss_type": _use("kl.estimator"),
    "use_kl_in_reward": _use("kl.coefficient", note='with kl.place = "reward"'),
    "kl_ctrl.kl_coef": _use("kl.coefficient", note='with kl.place = "reward"'),
    "kl_penalty": _use("kl.estimator"),
    "entropy_coeff": _use("algorithm.entropy_coefficient"),
    "adv_estimator": _use("advantage.name", note=_ESTIMATORS),
    "norm_adv_by_std_in_grpo": _use("advantage.name", note='"grpo" for true, "dr_grpo" for false'),
    "lam": _use("advantage.gae_lambda"),
    "filter_groups.enable": _use("filter.uniform"),
    "rollout_correction.rollout_is": _use("correction.weight"),
    "rollout_correction.rollout_is_threshold": _use("correction.cap"),
    "rollout_correction.rollout_rs": _use("correction.masks"),
    "tis_imp_ratio_cap": _use("correction.cap"),
    "ppo_mini_batch_size": _use("algorithm.minibatches", note="mini-batches per batch: batch divided by mini-batch"),
    "ppo_epochs": _use("algorithm.epochs_per_batch"),
    "ppo_micro_batch_size": _AUTOMATIC,
    "ppo_micro_batch_size_per_gpu": _AUTOMATIC,
    "log_prob_micro_batch_size_per_gpu": _AUTOMATIC,
    "ppo_max_token_len_per_gpu": _use("learner.tokens_per_pass"),
    "use_dynamic_bsz": _AUTOMATIC,
    "data.train_files": _use("tasks.path", note='.jsonl or .parquet with a column "prompt"'),
    "data.val_files": _use("tasks.eval_path"),
    "data.train_batch_size": _use("pacing.groups_per_step", note="prompts per step, as in verl"),
    "data.gen_batch_size": _use("pacing.groups_per_step"),
    "data.max_prompt_length": _use("engine.context", note="prompt and response together"),
    "data.max_response_length": _use("rollout.max_tokens"),
    "data.shuffle": _use("tasks.shuffle"),
    "data.seed": _use("run.seed"),
    "data.prompt_key": _absent('the column must be named "prompt"'),
    "custom_reward_function.path": _use("rewards.functions", note='["path/to/file.py:function"]'),
    "custom_reward_function.name": _use("rewards.functions", note='["path/to/file.py:function"]'),
    "overlong_buffer.len": _use("rewards.overlong_buffer"),
    "overlong_buffer.penalty_factor": _use("rewards.overlong_penalty"),
    "async_training.staleness_threshold": _use("pacing.max_lag", note="in versions, not a fraction of samples"),
    "async_training.trigger_parameter_sync_step": _use("weights.every"),
    "trainer.total_epochs": _use("run.epochs"),
    "trainer.total_training_steps": _use("run.steps"),
    "trainer.save_freq": _use("checkpoint.every"),
    "trainer.test_freq": _use("eval.every"),
    "trainer.val_before_train": _absent("every run evaluates before the first step; leave this out"),
    "trainer.max_actor_ckpt_to_keep": _use("checkpoint.keep"),
    "trainer.default_local_dir": _use("run.dir"),
    "trainer.resume_mode": _absent("resume with `outpace train --resume RUN`"),
    "trainer.logger": _TRACKER,
    "trainer.project_name": _TRACKER_PROJECT,
    "trainer.experiment_name": _use("run.dir"),
    "trainer.device": _use("run.device"),
    "trainer.n_gpus_per_node": _ONE_DEVICE,
    "trainer.nnodes": _ONE_DEVICE,
    "fsdp_config.param_offload": _ONE_DEVICE,
}
"""Dotted keys of verl's Hydra config; only the last part where it is unambiguous."""

PRIME_RL: Mapping[str, Equivalent] = {
    "model.name": _use("model.path"),
    "max_async_level": _use("pacing.max_lag"),
    "max_off_policy_steps": _use("pacing.max_lag"),
    "strict_async_level": _use("pacing.depth"),
    "rollouts_per_example": _use("rollout.group_size"),
    "orchestrator.group_size": _use("rollout.group_size"),
    "orchestrator.batch_size": _use("pacing.groups_per_step", note=_GROUPS),
    "micro_batch_size": _AUTOMATIC,
    "max_inflight_rollouts": _use("pacing.max_running"),
    "oversampling_factor": _use("pacing.depth", note="batches in flight in addition to the one being filled"),
    "seq_len": _use("engine.context", note="learner.tokens_per_pass limits a packed pass"),
    "max_model_len": _use("engine.context"),
    "sampling.max_tokens": _use("rollout.max_tokens"),
    "max_completion_tokens": _use("rollout.max_tokens"),
    "sampling.temperature": _use("rollout.temperature"),
    "orchestrator.env": _use("rollout.environment"),
    "optim.lr": _use("learner.lr"),
    "optim.max_norm": _use("learner.max_grad_norm"),
    "optim.betas1": _use("learner.beta1"),
    "optim.betas2": _use("learner.beta2"),
    "scheduler.type": _use("learner.schedule"),
    "scheduler.warmup_steps": _use("learner.lr_warmup_steps"),
    "kl_tau": _use("policy_loss.ratio_penalty", note='with algorithm.preset = "dppo"'),
    "lora.alpha": _use("lora.alpha"),
    "ckpt.interval": _use("checkpoint.every"),
    "ckpt.keep_last": _use("checkpoint.keep"),
    "ckpt.resume_step": _absent("resume with `outpace train --resume RUN`"),
    "eval.interval": _use("eval.every"),
    "eval.num_examples": _use("eval.count"),
    "weight_broadcast.type": _use("weights.transport", note='"files" or "collective"'),
    "client.base_url": _use("engine.urls", note=_SERVER_URLS),
    "inference.parallel.tp": _TENSOR_PARALLEL,
    "clean_output_dir": _use("run.overwrite"),
    "wandb": _TRACKER,
}
"""Keys of prime-rl's TOML files, without the process name where several processes share a key."""

OPENRLHF: Mapping[str, Equivalent] = {
    "pretrain": _use("model.path"),
    "prompt_data": _use("tasks.path"),
    "eval_dataset_name": _use("tasks.eval_path"),
    "n_samples_per_prompt": _use("rollout.group_size"),
    "rollout_batch_size": _use("pacing.groups_per_step", note="prompts per step"),
    "micro_train_batch_size": _AUTOMATIC,
    "micro_rollout_batch_size": _AUTOMATIC,
    "train_batch_size": _use("pacing.groups_per_step", note=_GROUPS),
    "generate_max_len": _use("rollout.max_tokens"),
    "prompt_max_len": _use("engine.context", note="prompt and completion together"),
    "max_len": _use("engine.context"),
    "actor_learning_rate": _use("learner.lr"),
    "critic_learning_rate": _use("critic.lr"),
    "advantage_estimator": _use(
        "advantage.name",
        note="reinforce is reinforce_pp, reinforce_baseline is reinforce_pp_baseline, group_norm is grpo",
    ),
    "eps_clip": _use("policy_loss.clip_low", "policy_loss.clip_high"),
    "eps_clip_low_high": _use("policy_loss.clip_low", "policy_loss.clip_high"),
    "value_clip": _use("critic.clip"),
    "lambd": _use("advantage.gae_lambda"),
    "init_kl_coef": _use("kl.coefficient", note='with kl.place = "reward"'),
    "kl_estimator": _use("kl.estimator"),
    "entropy_loss_coef": _use("algorithm.entropy_coefficient"),
    "max_epochs": _use("algorithm.epochs_per_batch"),
    "num_episodes": _use("run.epochs"),
    "dynamic_filtering": _use("filter.uniform"),
    "remote_rm_url": _use("rewards.functions", note='["path/to/file.py:function"]'),
    "agent_func_path": _use("rollout.function"),
    "async_queue_size": _use("pacing.depth", note="in batches"),
    "vllm_num_engines": _use("engine.count", note='with engine.kind = "vllm"'),
    "save_path": _use("run.dir"),
    "ckpt_path": _use("run.dir"),
    "zero_stage": _ONE_DEVICE,
    "use_wandb": _TRACKER,
    "enable_vllm_is_correction": _use("correction.weight", note='"token"'),
}

AXOLOTL: Mapping[str, Equivalent] = {
    "base_model": _use("model.path"),
    "adapter": _use("lora.rank"),
    "datasets": _use("tasks.path"),
    "val_set_size": _use("eval.holdout"),
    "sequence_len": _use("engine.context"),
    "micro_batch_size": _AUTOMATIC,
    "num_epochs": _use("run.epochs"),
    "lr_scheduler": _use("learner.schedule"),
    "optimizer": _absent("the optimizer is AdamW; leave this out"),
    "gradient_clipping": _use("learner.max_grad_norm"),
    "evals_per_epoch": _use("eval.every", note="in steps"),
    "saves_per_epoch": _use("checkpoint.every", note="in steps"),
    "wandb_project": _TRACKER_PROJECT,
    "prefetch_depth": _use("pacing.depth", note="in batches"),
    "vllm_sync_interval": _use("weights.every"),
    "replay_buffer_size": _use("replay.fraction"),
    "skip_zero_advantage_batches": _use("filter.uniform"),
    "reward_num_workers": _use("rewards.workers"),
    "lora_target_linear": _use("lora.targets"),
}

GENERAL: Mapping[str, Equivalent] = {
    "algorithm.kl": _use("kl.coefficient"),
    "group_size": _use("rollout.group_size"),
    "batch_size": _use("pacing.groups_per_step", note=_GROUPS),
    "epochs": _use("run.epochs"),
    "model_name": _use("model.path"),
    "max_new_tokens": _use("rollout.max_tokens"),
    "max_length": _use("engine.context"),
}
"""Names shared by several libraries."""

EQUIVALENTS: Mapping[str, Equivalent] = {**GENERAL, **AXOLOTL, **OPENRLHF, **PRIME_RL, **VERL, **TRL}


def renamed_setting(name: str) -> str | None:
    """Return a hint for a setting of outpace 0.1 that has a new name, or None."""
    if (new := RENAMED.get(name)) is None:
        return None
    values = ", ".join(f"{before} is now {now}" for before, now in RENAMED_VALUES.get(new, {}).items())
    return f"was renamed; use {new}" + f" ({values})" * bool(values)


def equivalent_setting(name: str, prefix: str = "") -> str | None:
    """Return a hint for a setting name of another library, such as `use rollout.group_size` for `num_generations`, or
    None. `prefix` is put before each setting, for example `--` on the command line.

    Dotted names are looked up by successively shorter suffixes, so `trainer.optim.lr` finds `optim.lr`."""
    parts = name.lstrip("-+").replace("-", "_").split(".")
    for start in range(len(parts)):
        found = EQUIVALENTS.get(".".join(parts[start:]))
        if found is not None:
            return found.remedy(prefix)
    return None


def names_with_equivalent(name: str, value: Any) -> Iterator[str]:
    """Yield the dotted names at or below `name`, in a config of another library, that have an equivalent."""
    if equivalent_setting(name) is not None:
        yield name
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from names_with_equivalent(f"{name}.{key}", inner)
