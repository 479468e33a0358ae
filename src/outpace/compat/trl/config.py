"""`GRPOConfig` and `AsyncGRPOConfig`: every field of TRL's configs, with its default.

`outpace.config.other_libraries` maps each field to the settings that replace it, or to the reason why there is none.
This module adds the defaults, and which fields without a setting still work.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")


class Unset(str):
    """Marks a default, to distinguish it from the same text given by the user."""


DEFAULT_URL = "http://localhost:8000"

_SHARED: dict[str, Any] = {
    # length and optimizer
    "output_dir": None, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
    "max_steps": -1, "learning_rate": 1e-6, "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None,
    "optim": "adamw_torch_fused", "optim_args": None, "optim_target_modules": None, "weight_decay": 0.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "label_smoothing_factor": 0.0,
    "neftune_noise_alpha": None, "average_tokens_across_devices": True, "warmup_steps": 0,
    # precision and memory
    "bf16": None, "fp16": False, "bf16_full_eval": False, "fp16_full_eval": False, "tf32": None,
    "gradient_checkpointing": True, "gradient_checkpointing_kwargs": None, "torch_compile": False,
    "torch_compile_backend": None, "torch_compile_mode": None, "use_liger_kernel": False, "liger_kernel_config": None,
    "use_cache": False, "torch_empty_cache_steps": None, "auto_find_batch_size": False,
    # logs
    "logging_strategy": "steps", "logging_steps": 10, "logging_first_step": False, "log_on_each_node": True,
    "logging_nan_inf_filter": True, "include_num_input_tokens_seen": "no", "log_level": "passive",
    "log_level_replica": "warning", "disable_tqdm": None, "report_to": "none", "run_name": None,
    "project": "huggingface", "trackio_space_id": None, "trackio_bucket_id": None, "trackio_static_space_id": None,
    "log_completions": False, "num_completions_to_print": None, "debug": "", "skip_memory_metrics": True,
    # evaluation, checkpoints and hub
    "eval_strategy": "no", "eval_steps": None, "eval_delay": 0, "per_device_eval_batch_size": 8,
    "prediction_loss_only": False, "eval_on_start": False, "eval_do_concat_batches": True,
    "eval_use_gather_object": False, "eval_accumulation_steps": None, "include_for_metrics": [],
    "batch_eval_metrics": False, "save_only_model": False, "save_strategy": "steps", "save_steps": 500,
    "save_on_each_node": False, "save_total_limit": None, "enable_jit_checkpoint": False,
    "load_best_model_at_end": False, "metric_for_best_model": None, "greater_is_better": None,
    "ignore_data_skip": False, "restore_callback_states_from_checkpoint": False, "resume_from_checkpoint": None,
    "push_to_hub": False, "hub_token": None, "hub_private_repo": None, "hub_model_id": None,
    "hub_strategy": "every_save", "hub_always_push": False, "hub_revision": None,
    # data and devices
    "full_determinism": False, "seed": 42, "data_seed": None, "use_cpu": False, "accelerator_config": None,
    "parallelism_config": None, "dataloader_drop_last": False, "dataloader_num_workers": 0,
    "dataloader_pin_memory": True, "dataloader_persistent_workers": False, "dataloader_prefetch_factor": None,
    "dataloader_multiprocessing_context": None, "dataloader_in_order": True, "remove_unused_columns": False,
    "label_names": None, "train_sampling_strategy": "random", "length_column_name": "length",
    "ddp_find_unused_parameters": None, "ddp_bucket_cap_mb": None, "ddp_broadcast_buffers": None,
    "ddp_static_graph": None, "ddp_backend": None, "ddp_timeout": 1800, "fsdp": None, "fsdp_config": None,
    "deepspeed": None, "local_rank": -1, "do_train": False, "do_eval": False, "do_predict": False,
    # model and sampling
    "model_init_kwargs": None, "trust_remote_code": False, "router_aux_loss_coef": None, "num_generations": 8,
    "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
    "repetition_penalty": 1.0, "chat_template_kwargs": None, "max_tool_calling_iterations": None,
    "vllm_server_base_url": None, "vllm_server_timeout": 240.0, "epsilon": 0.2, "epsilon_high": None,
}  # fmt: skip

GRPO_FIELDS: Mapping[str, Any] = {
    **_SHARED,
    "disable_dropout": False, "cast_lm_head_to_fp32": False, "num_generations_eval": None,
    "ds3_gather_for_generation": True, "shuffle_dataset": True, "pad_to_multiple_of": "auto",
    "generation_batch_size": None, "steps_per_generation": None, "generation_kwargs": None,
    "cache_implementation": None, "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None, "use_transformers_paged": False,
    # vLLM
    "use_vllm": False, "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": False,
    "vllm_structured_outputs_regex": None, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
    "vllm_group_port": 51216, "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_cap": None,
    # algorithm
    "beta": 0.0, "num_iterations": 1, "delta": None, "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token", "reward_weights": None, "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group", "loss_type": "dapo", "mask_truncated_completions": False, "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
    "use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005,
    "entropy_target": 0.2, "off_policy_mask_threshold": None, "use_bias_correction_kl": True, "log_multimodal": True,
    "log_unique_prompts": False, "log_completions_hub_repo": None,
}  # fmt: skip

ASYNC_FIELDS: Mapping[str, Any] = {
    **_SHARED,
    "lr_scheduler_type": "constant", "logging_steps": 1, "ignore_data_skip": True, "remove_unused_columns": True,
    "max_completion_length": 2048, "vllm_server_base_url": Unset(DEFAULT_URL), "dtype": "float32",
    "fork_threshold_tokens": 1024, "request_timeout": 600, "weight_sync_timeout": 1800, "token_budget": None,
    "max_inflight_tasks": -1, "max_staleness": 4, "queue_maxsize": 1024, "weight_sync_steps": 1,
    "heartbeat_stale_after_s": 300.0,
}  # fmt: skip

AS_IN_TRL = {
    "logging_strategy", "logging_steps", "logging_first_step", "disable_tqdm", "eval_strategy", "eval_steps",
    "eval_delay", "eval_on_start", "per_device_eval_batch_size", "save_strategy", "save_steps", "greater_is_better",
    "resume_from_checkpoint", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
    "hub_always_push", "hub_revision", "do_train", "do_eval", "do_predict",
}  # fmt: skip
"""Fields that the trainer itself acts on, as TRL does."""


def with_fields(defaults: Mapping[str, Any]) -> Callable[[type[T]], type[T]]:
    """Decorate a config class: make it a dataclass with these fields and defaults, in addition to those it inherits."""

    def make(cls: type[T]) -> type[T]:
        cls.__annotations__ = dict.fromkeys(defaults, Any)
        for name, default in defaults.items():
            setattr(cls, name, dataclasses.field(default_factory=default.copy) if default == [] else default)
        return dataclasses.dataclass(cls)

    return make


class TrainingConfig:
    """Attributes and methods of TRL's configs, apart from fields, that callbacks and scripts use.

    `outpace` overrides any outpace setting: `{"pacing.max_lag": 2}`."""

    world_size = n_gpu = 1
    process_index = local_process_index = 0
    should_log = should_save = True

    if TYPE_CHECKING:

        def __init__(self, output_dir: str | None = None, **fields: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        given = vars(self)
        given["train_batch_size"] = self.per_device_train_batch_size
        given["eval_batch_size"] = self.per_device_eval_batch_size
        given["output_dir"] = str(self.output_dir or "trainer_output")
        trackers = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or [])
        given["report_to"] = [name for name in trackers if name != "none"]
        given["bf16"] = not self.fp16 if self.bf16 is None else self.bf16
        given["do_eval"] = self.do_eval or self.eval_strategy != "no"
        if self.eval_strategy == "steps" and self.eval_steps is None:
            given["eval_steps"] = self.logging_steps
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            given["metric_for_best_model"] = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            given["greater_is_better"] = not self.metric_for_best_model.endswith("loss")

    def to_dict(self) -> dict[str, Any]:
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: getattr(self, field.name) for field in fields if field.name != "hub_token"}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)


@with_fields({**GRPO_FIELDS, "outpace": None})
class GRPOConfig(TrainingConfig):
    """TRL's `GRPOConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = vars(self)
        if self.scale_rewards in (True, False):
            given["scale_rewards"] = "group" if self.scale_rewards else "none"
        if self.vllm_importance_sampling_cap is not None:
            given["vllm_importance_sampling_clip_max"] = self.vllm_importance_sampling_cap
        if self.steps_per_generation is None:
            batch = self.generation_batch_size or self.train_batch_size * self.gradient_accumulation_steps
            given["steps_per_generation"] = max(1, batch // self.train_batch_size)
        if self.generation_batch_size is None:
            given["generation_batch_size"] = self.train_batch_size * self.steps_per_generation


@with_fields({**ASYNC_FIELDS, "outpace": None})
class AsyncGRPOConfig(TrainingConfig):
    """TRL's `AsyncGRPOConfig`."""
