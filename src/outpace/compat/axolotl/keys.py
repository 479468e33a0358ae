"""Keys of an Axolotl file, and how each is handled. Keys in none of these tables are unknown."""

from __future__ import annotations

from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "eval_batch_size": "per_device_eval_batch_size",
    "trl.use_liger_loss": "use_liger_kernel",
    "trl.vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.max_model_len": "vllm_max_model_length",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
}
"""Keys that are fields under another name."""

TRANSLATED = frozenset({
    "base_model", "rl", "rl_beta", "bf16", "bfloat16", "float32", "chat_template", "adapter", "lora_r", "lora_alpha",
    "lora_target_modules", "lora_target_linear", "datasets", "test_datasets", "val_set_size", "curriculum_sampling",
    "warmup_steps", "warmup_ratio", "eval_steps", "evals_per_epoch", "eval_strategy", "save_steps", "saves_per_epoch",
    "save_strategy", "use_wandb", "wandb_project", "wandb_name", "wandb_mode", "use_mlflow", "mlflow_experiment_name",
    "mlflow_run_name", "use_trackio", "trackio_project_name", "trackio_run_name", "use_tensorboard", "plugins",
    "trl.reward_funcs", "vllm.host", "vllm.port", "vllm.data_parallel_size", "vllm.enforce_eager",
})  # fmt: skip
"""Keys that `config_file` translates itself."""

REPORT: Mapping[str, tuple[str, ...]] = {
    "report.project": ("wandb_project", "mlflow_experiment_name", "trackio_project_name"),
    "report.name": ("wandb_name", "mlflow_run_name", "trackio_run_name"),
}
OFF_AT_1 = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "dp_shard_size")
"""Refused keys for which 1 also means off."""

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
        "train_on_inputs eval_table_size eval_max_new_tokens generate_samples gradio_title "
        "save_safetensors merge_lora strict",
}  # fmt: skip
"""Keys that accept any value without effect, by reason."""

REFUSED: Mapping[str, str] = {
    "the learner trains the given weights in bfloat16 or float32; leave this out":
        "load_in_8bit load_in_4bit fp8 fp8_config float16 gptq bnb_config_kwargs quantization qat "
        "model_quantization_config quantize_moe_experts use_onebitllms",
    "learner.devices shards the learner, and nothing else divides it; leave this out":
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
"""Keys that are refused unless they are off, by reason."""


def by_key(table: Mapping[str, str]) -> dict[str, str]:
    return {key: reason for reason, keys in table.items() for key in keys.split()}
