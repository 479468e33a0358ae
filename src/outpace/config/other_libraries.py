"""Setting names of TRL, verl, rLLM, prime-rl, OpenRLHF, Axolotl and outpace 0.1, with the settings to use instead.

`equivalent_setting(name)` returns the hint to print for an unknown name. Names of other libraries are never accepted as
settings, because their values do not always mean the same; the note says where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from outpace.config.rllm_settings import SAME as RLLM_SAME


class Equivalent(NamedTuple):
    """Dotted keys of `Config` to use instead. Empty `settings`: outpace has no equivalent, and `note` explains.

    `harmless`: the setting does not change what is trained, or cannot apply."""

    settings: tuple[str, ...]
    note: str = ""
    harmless: bool = False

    def remedy(self, prefix: str = "") -> str:
        if not self.settings:
            return self.note
        names = " and ".join(f"{prefix}{setting}" for setting in self.settings)
        return f"use {names} ({self.note})" if self.note else f"use {names}"


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

USE: Mapping[str, str] = {
    "model.path": "model_name base_model pretrain model.name actor_rollout_ref.model.path model_name_or_path",
    "model.dtype": "torch_dtype dtype",
    'model.dtype ("bfloat16")': "bf16",
    'model.dtype ("float32" or "bfloat16"; fp16 is not supported)': "fp16",
    "model.dtype and model.trust_remote_code (other arguments are not supported)": "model_init_kwargs",
    "model.trust_remote_code": "trust_remote_code",
    "model.system_prompt": "system_prompt",
    "model.template_arguments": "chat_template_kwargs",
    "tasks.path": "datasets prompt_data dataset_name",
    "tasks.path (one file; join several with datasets.concatenate_datasets and pass Trainer(tasks=...))":
        "data.train_files",
    'tasks.path ("owner/name:configuration")': "dataset_config",
    "tasks.path (or Trainer(tasks=...))": "train_dataset",
    "tasks.split": "dataset_train_split",
    "tasks.eval_path": "eval_dataset_name data.val_files",
    "tasks.limit": "data.train_max_samples",
    "tasks.eval_path (or Trainer(eval_tasks=...))": "eval_dataset",
    "tasks.eval_split": "dataset_test_split",
    "tasks.shuffle": "data.shuffle shuffle_dataset",
    'rewards.functions (["path/to/file.py:function"])':
        "remote_rm_url custom_reward_function custom_reward_function.path custom_reward_function.name",
    "rewards.functions (or Trainer(rewards=...))": "reward_funcs",
    "rewards.weights": "reward_weights",
    "rewards.workers": "reward_num_workers reward.num_workers",
    'rewards.functions (["judge"], with judge.base_url)': "reward_model.enable reward_model.model_path",
    "rewards.overlong_buffer": "overlong_buffer.len",
    "rewards.overlong_penalty": "overlong_buffer.penalty_factor",
    "rollout.group_size":
        "group_size n_samples_per_prompt rollouts_per_example orchestrator.group_size rollout.n num_generations",
    "rollout.max_tokens":
        "max_new_tokens generate_max_len sampling.max_tokens max_completion_tokens rollout.response_length "
        "data.max_response_length max_completion_length",
    "rollout.temperature": "sampling.temperature temperature",
    "rollout.temperature and rollout.stop (other arguments are not supported)": "generation_kwargs",
    "rollout.top_p (must stay 1 for training)": "top_p",
    "rollout.top_k (must stay 0 for training)": "top_k",
    "rollout.function": "agent_func_path",
    "rollout.function (or Trainer(rollout=...))": "rollout_func",
    "rollout.environment": "orchestrator.env",
    "rollout.environment (or Trainer(environment=...))": "environment_factory",
    "rollout.max_turns": "multi_turn.max_assistant_turns max_tool_calling_iterations",
    "rollout.timeout_s": "request_timeout",
    "rollout.workers": "agent.num_workers",
    "engine.control_s": "weight_sync_timeout",
    "supervise.silent_s": "heartbeat_stale_after_s",
    "tools.functions": "multi_turn.tool_config_path",
    "pacing.max_lag": "max_async_level max_off_policy_steps max_staleness",
    "pacing.max_lag (in versions, not a fraction of samples)": "async_training.staleness_threshold",
    "pacing.depth": "strict_async_level",
    "pacing.depth (in batches)": "prefetch_depth async_queue_size",
    "pacing.depth (batches in flight in addition to the one being filled)": "oversampling_factor",
    "pacing.groups_per_step": "data.gen_batch_size",
    "pacing.groups_per_step (counts groups: samples per optimizer step divided by rollout.group_size)":
        "batch_size train_batch_size orchestrator.batch_size per_device_train_batch_size gradient_accumulation_steps "
        "generation_batch_size",
    "pacing.groups_per_step (prompts per step)": "rollout_batch_size",
    "pacing.groups_per_step (prompts per step, as in verl)": "data.train_batch_size",
    "pacing.max_running": "max_inflight_rollouts max_inflight_tasks",
    "algorithm.preset (grpo, dapo, dr_grpo, cispo, sapo and vespo are presets)": "loss_type",
    "algorithm.minibatches": "steps_per_generation",
    "algorithm.minibatches (mini-batches per batch: batch divided by mini-batch)": "ppo_mini_batch_size",
    "algorithm.epochs_per_batch": "max_epochs ppo_epochs num_iterations",
    "algorithm.entropy_coefficient": "entropy_loss_coef entropy_coeff entropy_coef",
    "policy_loss.name": "policy_loss.loss_mode",
    'policy_loss.name ("gspo" for sequence)': "importance_sampling_level",
    "policy_loss.aggregation (with underscores: token_mean)": "loss_agg_mode",
    "policy_loss.clip_high": "clip_ratio_high",
    "policy_loss.clip_high (with cispo: policy_loss.cap)": "epsilon_high",
    "policy_loss.clip_low": "clip_ratio_low",
    "policy_loss.clip_low and policy_loss.clip_high": "eps_clip eps_clip_low_high clip_ratio epsilon",
    "policy_loss.dual_clip": "clip_ratio_c delta",
    'policy_loss.ratio_penalty (with algorithm.preset = "dppo")': "kl_tau",
    "policy_loss.tau_negative": "sapo_temperature_neg",
    "policy_loss.tau_positive": "sapo_temperature_pos",
    "policy_loss.k_positive": "vespo_k_pos",
    "policy_loss.k_negative": "vespo_k_neg",
    "policy_loss.lambda_positive": "vespo_lambda_pos",
    "policy_loss.lambda_negative": "vespo_lambda_neg",
    "advantage.name (reinforce is reinforce_pp, reinforce_baseline is reinforce_pp_baseline, group_norm is grpo)":
        "advantage_estimator",
    "advantage.name (grpo, rloo, gae and opo keep their names, reinforce_plus_plus is reinforce_pp)": "adv_estimator",
    'advantage.name ("grpo" for true, "dr_grpo" for false)': "norm_adv_by_std_in_grpo",
    'advantage.name ("gdpo" for normalize_then_sum)': "multi_objective_aggregation",
    'advantage.name ("grpo" for group, "dr_grpo" for none, and that with advantage.normalizer = "batch_std" for batch)':
        "scale_rewards",
    "advantage.gae_lambda": "lambd lam",
    "correction.weight": "rollout_correction.rollout_is",
    'correction.weight ("token")': "enable_vllm_is_correction",
    'correction.weight ("token", "sequence" or "none")': "vllm_importance_sampling_correction",
    "correction.weight and correction.masks": "vllm_importance_sampling_mode",
    "correction.masks": "rollout_correction.rollout_rs",
    "correction.cap":
        "rollout_correction.rollout_is_threshold tis_imp_ratio_cap vllm_importance_sampling_cap "
        "vllm_importance_sampling_clip_max",
    "correction.floor": "vllm_importance_sampling_clip_min",
    'correction.opsm_delta (with correction.masks = ["opsm"])': "off_policy_mask_threshold",
    "kl.coefficient": "algorithm.kl kl_loss_coef beta",
    'kl.coefficient (with kl.place = "reward")': "init_kl_coef use_kl_in_reward kl_ctrl.kl_coef",
    'kl.coefficient (with kl.place = "loss")': "use_kl_loss",
    "kl.estimator": "kl_estimator kl_loss_type kl_penalty",
    'kl.estimator ("unbiased")': "use_bias_correction_kl",
    "kl.sync_every": "ref_model_sync_steps",
    "kl.sync_every (in steps; the reference is replaced, not mixed)": "sync_ref_model",
    "kl.sync_every (the reference is replaced, not mixed)": "ref_model_mixup_alpha",
    "critic.lr": "critic_learning_rate critic.optim.lr",
    "critic.clip": "value_clip cliprange_value",
    "filter.uniform": "skip_zero_advantage_batches dynamic_filtering filter_groups.enable",
    'filter.truncated ("mask")': "mask_truncated_completions",
    "replay.fraction": "replay_buffer_size",
    "learner.lr": "actor_learning_rate optim.lr actor.optim.lr learning_rate",
    "learner.schedule": "lr_scheduler scheduler.type lr_scheduler_type",
    "learner.lr_warmup_steps": "scheduler.warmup_steps optim.lr_warmup_steps warmup_steps",
    "learner.lr_warmup_steps (in steps)": "warmup_ratio",
    "learner.weight_decay": "optim.weight_decay weight_decay",
    "learner.beta1": "optim.betas1 adam_beta1",
    "learner.beta2": "optim.betas2 adam_beta2",
    "learner.max_grad_norm": "gradient_clipping optim.max_norm grad_clip max_grad_norm",
    "learner.tokens_per_pass": "ppo_max_token_len_per_gpu token_budget",
    "learner.gradient_checkpointing": "enable_gradient_checkpointing gradient_checkpointing",
    "lora.rank": "adapter model.lora_rank use_peft lora_r",
    "lora.rank and lora.alpha and lora.targets": "peft_config",
    "lora.alpha": "lora.alpha model.lora_alpha lora_alpha",
    "lora.targets": "lora_target_linear model.target_modules lora_target_modules",
    'engine.kind ("vllm", "sglang" or "embedded")': "rollout.name",
    'engine.kind ("vllm")': "use_vllm",
    'engine.count (with engine.kind = "vllm")': "vllm_num_engines",
    'engine.urls (a list such as ["http://host:8000"], with engine.kind = "vllm")':
        "client.base_url vllm_server_base_url vllm_server_host vllm_server_port",
    "engine.urls (for running servers; if not set, outpace starts servers)": "vllm_mode",
    "engine.slots": "rollout.max_num_seqs",
    "engine.context": "max_length sequence_len max_len max_model_len rollout.max_model_len vllm_max_model_length",
    "engine.context (prompt and completion together)": "prompt_max_len max_prompt_length",
    "engine.context (learner.tokens_per_pass limits a packed pass)": "seq_len",
    "engine.context (prompt and response together)": "data.max_prompt_length",
    'launch.args (["--tensor-parallel-size", "2"])':
        "inference.parallel.tp rollout.tensor_model_parallel_size vllm_tensor_parallel_size",
    'launch.args (["--model-impl", "transformers"])': "vllm_model_impl",
    "launch.start_s": "vllm_server_timeout",
    "launch.gpu_memory": "rollout.gpu_memory_utilization vllm_gpu_memory_utilization",
    "weights.every": "vllm_sync_interval async_training.trigger_parameter_sync_step weight_sync_steps",
    'weights.transport ("files" or "collective")': "weight_broadcast.type",
    "checkpoint.every": "ckpt.interval trainer.save_freq save_steps",
    "checkpoint.every (in steps)": "saves_per_epoch save_strategy",
    "checkpoint.keep": "ckpt.keep_last trainer.max_actor_ckpt_to_keep save_total_limit",
    "checkpoint.keep_best (then `outpace export RUN DIR --best`)": "load_best_model_at_end metric_for_best_model",
    "eval.every": "eval.interval trainer.test_freq eval_steps",
    "eval.every (in steps)": "evals_per_epoch eval_strategy",
    "eval.count": "eval.num_examples data.val_max_samples",
    "eval.start": "trainer.val_before_train eval_on_start",
    "eval.attempts": "num_generations_eval eval.rollouts_per_example val_kwargs.n",
    "eval.temperature": "val_kwargs.temperature",
    "eval.top_p": "val_kwargs.top_p",
    "eval.top_k": "val_kwargs.top_k",
    "eval.max_running (concurrent episodes)": "per_device_eval_batch_size",
    "eval.holdout": "val_set_size",
    "run.dir": "save_path ckpt_path trainer.default_local_dir trainer.experiment_name output_dir",
    "run.dir and report.name": "run_name",
    'run.report_to (such as ["wandb"])': "report_to trainer.logger use_wandb wandb",
    "report.project": "project trainer.project_name wandb_project",
    "run.overwrite": "clean_output_dir overwrite_output_dir",
    "run.steps": "trainer.total_training_steps max_steps",
    "run.epochs": "epochs num_epochs num_episodes trainer.total_epochs num_train_epochs",
    "run.seed": "data.seed seed",
    "run.deterministic": "full_determinism",
    "run.device": "trainer.device",
    'run.device ("cpu")': "use_cpu",
    "run.save_rollouts (groups per step)": "log_completions num_completions_to_print trainer.rollout_data_dir",
}  # fmt: skip
"""Names of other libraries by the settings to use instead, with a note in parentheses where values differ. Of a dotted
name, such as the keys of verl's and prime-rl's configs, only the last parts where these are unambiguous."""

ABSENT: Mapping[str, str] = {
    "micro-batches are packed by token count; leave this out, or set learner.tokens_per_pass":
        "micro_batch_size micro_train_batch_size micro_rollout_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu use_dynamic_bsz auto_find_batch_size",
    "the optimizer is AdamW; leave this out": "optimizer optim optim_args optim_target_modules",
    "set learner.devices to shard the learner, and learner.offload to keep it in host memory":
        "zero_stage trainer.n_gpus_per_node trainer.nnodes fsdp_config.param_offload fsdp_config.optimizer_offload "
        "deepspeed fsdp fsdp_config accelerator_config parallelism_config",
    "resume with `outpace train --resume RUN`": "ckpt.resume_step trainer.resume_mode",
    'the column must be named "prompt"': "data.prompt_key",
    'the column must be named "data_source"': "data.reward_fn_key",
    "give the arguments defaults in the reward function": "custom_reward_function.reward_kwargs",
    "rewards.functions grade each answer by itself; leave this out": "reward_manager reward_manager.name",
    "a prompt that does not fit engine.context fails its episode; leave this out, or remove such rows from the data":
        "data.filter_overlong_prompts data.truncation",
    "padding is always removed; leave this out": "model.use_remove_padding",
    "value head and policy are trained from the first step; leave this out": "trainer.critic_warmup",
    "evaluations are every eval.every steps; leave this out": "eval_delay",
    "the attention implementation is chosen by device; leave this out": "attn_implementation",
    "truncated or reshaped sampling biases the importance weights; leave this out": "min_p repetition_penalty",
    "constrained sampling biases the importance weights; leave this out": "vllm_structured_outputs_regex",
    "AdamW's epsilon is fixed at 1e-8; leave this out": "adam_epsilon",
    "a schedule has no settings of its own; leave this out": "lr_scheduler_kwargs",
    "outpace trains on every sampled token; leave this out": "top_entropy_quantile",
    "the coefficient algorithm.entropy_coefficient is constant; leave this out": "use_adaptive_entropy",
    "the load-balancing loss of mixture-of-experts models is not computed; leave this out": "router_aux_loss_coef",
    "noise in the embeddings biases the importance weights; leave this out": "neftune_noise_alpha",
    "the whole model has the dtype model.dtype; leave this out": "cast_lm_head_to_fp32 bf16_full_eval fp16_full_eval",
    "engine and learner share a GPU without sleeping; leave this out": "vllm_enable_sleep_mode",
    "LoRA dropout is not supported; leave this out": "lora_dropout",
    "callbacks have no saved state; leave this out": "restore_callback_states_from_checkpoint",
    "resume with `outpace train --resume RUN`, or Trainer.train(resume=True)": "resume_from_checkpoint",
    "every step is logged to metrics.jsonl in run.dir; leave this out":
        "logging_steps logging_strategy logging_first_step",
    "rollouts with all rewards are saved in run.dir; leave this out": "log_completions_hub_repo",
    "trackio gets its settings from its environment variables; leave this out":
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
    "use Trainer(quiet=True); leave this out": "disable_tqdm",
    "evaluation reports rewards only; leave this out": "greater_is_better",
    "call Trainer.train() and Trainer.evaluate(); leave this out": "do_train do_eval do_predict",
    "export the model with `outpace export` and upload it; leave this out":
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
}  # fmt: skip
"""Names of other libraries without an equivalent, by what to do instead."""

WITHOUT_EFFECT: Mapping[str, str] = {
    "micro-batches are packed by token count; leave this out, or set learner.tokens_per_pass": "pad_to_multiple_of",
    "the learner chooses how its processes communicate; leave this out":
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
        "local_rank average_tokens_across_devices ds3_gather_for_generation log_on_each_node save_on_each_node "
        "log_level_replica",
    "the coefficient algorithm.entropy_coefficient is constant; leave this out":
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
    "dropout is always off; leave this out": "disable_dropout",
    "the policy gradient has no labels; leave this out": "label_smoothing_factor label_names",
    "kernels and memory use are chosen by device; leave this out":
        "tf32 torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config "
        "torch_empty_cache_steps gradient_checkpointing_kwargs",
    "the built-in engine batches continuously, with its own cache; leave this out":
        "use_cache cache_implementation use_transformers_continuous_batching use_transformers_paged "
        "transformers_continuous_batching_config",
    "ports for weight sync are chosen when it starts; leave this out": "vllm_group_port",
    "sampled tokens are never tokenized again; leave this out": "fork_threshold_tokens",
    "pacing.max_lag limits what is sampled in advance; leave this out": "queue_maxsize",
    "workers read tasks one by one, in the order of run.seed; leave this out":
        "data_seed dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy "
        "length_column_name",
    "reward functions get every column; leave this out": "remove_unused_columns",
    "a resumed run continues where its checkpoint was written; leave this out": "ignore_data_skip",
    "every checkpoint has all that a resume needs, and SIGTERM writes one; leave this out":
        "save_only_model enable_jit_checkpoint",
    "every step is logged to metrics.jsonl in run.dir; leave this out":
        "logging_nan_inf_filter include_num_input_tokens_seen",
    "rollouts with all rewards are saved in run.dir; leave this out": "log_multimodal log_unique_prompts",
    "set the level of Python's logger `outpace`; leave this out": "log_level debug skip_memory_metrics",
    "evaluation reports rewards only; leave this out":
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics",
}  # fmt: skip
"""The same for names that do not change what is trained, or cannot apply. Compatible trainers accept any value."""


def _equivalent(text: str) -> Equivalent:
    settings, _, note = text.partition(" (")
    return Equivalent(tuple(settings.split(" and ")), note.removesuffix(")"))


EQUIVALENTS: Mapping[str, Equivalent] = {
    **{name: Equivalent((setting,)) for name, setting in RLLM_SAME.items()},
    **{name: _equivalent(text) for text, names in USE.items() for name in names.split()},
    **{name: Equivalent((), note) for note, names in ABSENT.items() for name in names.split()},
    **{name: Equivalent((), note, True) for note, names in WITHOUT_EFFECT.items() for name in names.split()},
}
"""By the name of the other library."""


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
