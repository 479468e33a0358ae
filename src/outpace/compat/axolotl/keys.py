"""Keys of an Axolotl file, with what happens to each. Keys in none of these tables are unknown."""

from __future__ import annotations

from collections.abc import Mapping

TRAINING = frozenset({
    "accelerator_config", "adam_beta1", "adam_beta2", "adam_epsilon", "auto_find_batch_size", "batch_flattening",
    "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_timeout", "deepspeed", "fp16",
    "fsdp", "fsdp_config", "gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "learning_rate", "load_best_model_at_end", "local_rank", "lr_scheduler_kwargs", "max_grad_norm", "max_steps",
    "metric_for_best_model", "neftune_noise_alpha", "optim_args", "optim_target_modules", "output_dir",
    "pad_to_multiple_of", "remove_unused_columns", "save_only_model", "save_total_limit", "seed", "tf32",
    "torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "trust_remote_code",
    "weight_decay",
})  # fmt: skip
"""Top-level keys that are fields of `AsyncGRPOConfig`."""

RENAMED: Mapping[str, str] = {
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "trl.use_liger_loss": "use_liger_kernel",
    "trl.vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.max_model_len": "vllm_max_model_length",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
}
"""Keys that are fields under another name."""

TRL = frozenset({
    "beta", "max_completion_length", "use_vllm", "vllm_mode", "vllm_server_host", "vllm_server_port",
    "vllm_server_timeout", "reward_weights", "generation_batch_size", "num_generations", "log_completions",
    "num_completions_to_print", "importance_sampling_level", "sync_ref_model", "ref_model_mixup_alpha",
    "ref_model_sync_steps", "scale_rewards", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "generation_kwargs", "chat_template_kwargs", "num_iterations", "epsilon", "epsilon_high", "loss_type",
    "mask_truncated_completions", "entropy_coef", "use_adaptive_entropy", "entropy_target", "entropy_coef_delta",
    "entropy_coef_min", "entropy_coef_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max",
    "log_multimodal", "vllm_enable_sleep_mode", "multi_objective_aggregation", "use_data_producer", "async_prefetch",
    "prefetch_depth", "vllm_sync_interval", "streaming_partial_batch", "streaming_min_groups",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap",
    "off_policy_mask_threshold", "use_bias_correction_kl", "reward_num_workers", "replay_buffer_size",
    "replay_recompute_logps", "reroll_start_fraction", "reroll_max_groups", "skip_zero_advantage_batches",
    "vllm_lora_sync",
})  # fmt: skip
"""Keys of the section `trl` that are fields of the same name."""

SETTINGS: Mapping[str, str] = {
    "base_model": "`model.path`",
    "rl": "`grpo`, or `gdpo`: `advantage.name` (gdpo)",
    "rl_beta": "`kl.coefficient`, if `trl.beta` is not set",
    "bf16": "`model.dtype` (bfloat16, on a GPU)",
    "bfloat16": "`model.dtype` (bfloat16, on a GPU)",
    "float32": "`model.dtype` (float32)",
    "chat_template": "only `tokenizer_default`, the template of the model",
    "adapter": "`lora.rank`; only `lora`",
    "lora_r": "`lora.rank`",
    "lora_alpha": "`lora.alpha`",
    "lora_target_modules": "`lora.targets`",
    "lora_target_linear": "`lora.targets`: all linear layers, the default",
    "datasets": "`tasks.name`: rows of all datasets, each with the transform that `type` names",
    "test_datasets": "the same, held out",
    "val_set_size": "a fraction or number of rows to hold out",
    "curriculum_sampling": "`tasks.shuffle` off",
    "warmup_steps": "`learner.lr_warmup_steps`; default: 3 % of the steps, at most 100",
    "warmup_ratio": "`learner.lr_warmup_steps`",
    "eval_steps": "`eval.every`", "evals_per_epoch": "`eval.every`", "eval_strategy": "`eval.every`",
    "save_steps": "`checkpoint.every`", "saves_per_epoch": "`checkpoint.every`",
    "save_strategy": "`checkpoint.every`; default: every epoch",
    "use_wandb": "`run.report_to`", "wandb_project": "`run.report_to` and `report.project`",
    "wandb_name": "`report.name`", "wandb_mode": "`disabled` turns reporting off",
    "use_mlflow": "`run.report_to`", "mlflow_experiment_name": "`report.project`", "mlflow_run_name": "`report.name`",
    "use_trackio": "`run.report_to`", "trackio_project_name": "`report.project`", "trackio_run_name": "`report.name`",
    "use_tensorboard": "`run.report_to`",
    "trl.reward_funcs": "`rewards.functions`",
    "vllm.host": "`engine.urls`, if it is another machine; outpace starts local servers itself",
    "vllm.port": "`engine.urls`, if the host is another machine",
    "vllm.data_parallel_size": "`engine.count`",
    "vllm.enforce_eager": "`launch.args`",
    "plugins": "only those of Liger and cut cross-entropy, which have no effect",
}  # fmt: skip
"""Keys that `config_file` translates itself."""

WITHOUT_EFFECT: Mapping[str, str] = {
    "prompts and completions are limited by engine.context and rollout.max_tokens":
        "sequence_len eval_sequence_len excess_length_strategy min_sample_len max_prompt_len",
    "passes are always packed, without padding":
        "sample_packing eval_sample_packing pad_to_sequence_len group_by_length sample_packing_group_size "
        "sample_packing_bin_size sample_packing_sequentially sample_packing_mp_start_method multipack_real_batches "
        "special_tokens.pad_token",
    "rows are read when they are needed":
        "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory skip_prepare_dataset "
        "shuffle_merged_datasets shuffle_before_merging_datasets push_dataset_to_hub num_dataset_shards_to_save",
    "kernels and memory use are chosen by device":
        "attn_implementation flash_attention sdp_attention xformers_attention eager_attention flex_attention "
        "flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_rms_norm sage_attention flex_attn_compile_kwargs "
        "torch_compile_options lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
        "chunked_cross_entropy cut_cross_entropy liger_rope liger_rms_norm liger_glu_activation liger_layer_norm "
        "liger_fused_linear_cross_entropy liger_cross_entropy low_cpu_mem_usage device_map gc_steps use_kernels "
        "vllm.device vllm.dtype vllm.enable_prefix_caching",
    "the engine returns token ids, which the servers of outpace give":
        "vllm.serve_module vllm.worker_extension_cls vllm.enable_reasoning vllm.reasoning_parser",
    "every step is logged to metrics.jsonl in run.dir, and rollouts beside it":
        "logging_steps include_tokens_per_second include_tkps debug profiler_steps profiler_steps_start "
        "wandb_watch wandb_log_model hf_mlflow_log_artifacts use_otel_metrics",
    "this is about other values of rl, or about inference":
        "train_on_inputs eval_batch_size eval_table_size eval_max_new_tokens generate_samples gradio_title "
        "save_safetensors merge_lora strict",
}  # fmt: skip
"""Keys of which any value is accepted, by the reason."""

REFUSED: Mapping[str, str] = {
    "the learner trains the given weights in bfloat16 or float32; leave this out":
        "load_in_8bit load_in_4bit fp8 fp8_config float16 gptq bnb_config_kwargs quantization qat "
        "model_quantization_config quantize_moe_experts use_onebitllms",
    "the learner runs on one device; leave this out":
        "context_parallel_size sequence_parallel_degree tensor_parallel_size dp_shard_size dp_replicate_size "
        "fsdp_version deepcompile use_ray ray_num_workers",
    "the adapter is plain LoRA without dropout on linear layers; leave this out":
        "lora_dropout lora_model_dir lora_modules_to_save lora_target_parameters lora_fan_in_fan_out lora_rank_pattern "
        "lora_alpha_pattern peft peft_use_dora peft_use_rslora peft_layers_to_transform peft_layers_pattern "
        "peft_init_lora_weights peft_trainable_token_indices loraplus_lr_ratio loraplus_lr_embedding relora "
        "unfrozen_parameters lisa_n_layers",
    "the optimizer is AdamW with one learning rate, constant, linear or cosine; leave this out":
        "lr_groups embedding_lr embedding_lr_scale lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio "
        "adam_beta3 adam_epsilon2 jagged_restart_steps",
    "the tokenizer and chat template are those of the model; change them there":
        "chat_template_jinja chat_template_kwargs special_tokens tokens added_tokens_overrides tokenizer_config "
        "tokenizer_type default_system_message eot_tokens resize_token_embeddings_to_32x",
    "the model is loaded as it is; leave this out":
        "base_model_config overrides_of_model_config overrides_of_model_kwargs type_of_model revision_of_model "
        "reinit_weights processor_type",
    "continue with `outpace train --resume RUN`": "resume_from_checkpoint auto_resume_from_checkpoints",
    "export the model with `outpace export` and upload it": "hub_model_id hub_strategy hub_revision",
    "evaluation reports rewards only; leave this out":
        "do_causal_lm_eval do_bench_eval early_stopping_patience greater_is_better loss_watchdog_threshold",
    "outpace does not report there; use wandb, mlflow, trackio or tensorboard": "use_comet comet_project_name",
    "trackers read this from their environment variables; set it there":
        "wandb_entity wandb_run_id mlflow_tracking_uri trackio_space_id",
    "change the rows before training; leave this out":
        "dataset_exact_deduplication dataset_shard_num dataset_shard_idx pretraining_dataset streaming",
    "use `outpace.compat.axolotl.AsyncGRPOTrainer` in a Python script": "trainer_cls",
    "write `async def rollout(task, client)` and set rollout.function: docs/rollouts.md": "trl.rollout_func",
    "outpace trains language models with grpo and gdpo; leave this out":
        "reward_model process_reward_model ebft dpo_beta orpo_alpha kto_desirable_weight kto_undesirable_weight "
        "simpo_gamma cpo_alpha image_size role_boundaries",
}  # fmt: skip
"""Keys that are refused unless they are off, by the reason."""


def by_key(table: Mapping[str, str]) -> dict[str, str]:
    return {key: reason for reason, keys in table.items() for key in keys.split()}
