"""Translation of TRL's configs, ours or TRL's own, to outpace settings.

    args ─▶ Schedule: what a batch is, how many steps it has ─┐
         ─▶ the parts below: settings, or refusals ───────────┴─▶ settings, or one BadInput with every refusal

A field counts as set if its value differs from its default and from the value that its class derives from the default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch

from outpace.compat.trl.config import AS_IN_TRL, DEFAULT_URL, Unset
from outpace.config.other_libraries import EQUIVALENTS
from outpace.errors import BadInput, one_line
from outpace.monitoring.transformers_callbacks import Schedule
from outpace.runtime.registry import TRACKERS

Settings = dict[str, Any]  # by dotted key; None: the default of outpace
Refuse = Callable[[str, str], object]  # called with the name of a field that cannot be used, and the reason

UNLIMITED = 1_000_000

DIRECT = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "gradient_checkpointing", "seed", "full_determinism",
    "trust_remote_code", "num_generations", "temperature", "reward_weights", "shuffle_dataset", "entropy_coef",
    "chat_template_kwargs", "eval_on_start", "max_staleness", "weight_sync_steps", "request_timeout",
    "heartbeat_stale_after_s", "vllm_max_model_length", "load_best_model_at_end",
)  # fmt: skip
"""Fields that are replaced by one setting with the same value."""


def value_of(args: Any, name: str, default: Any = None) -> Any:
    value = getattr(args, name, default)
    return value.value if isinstance(value, Enum) else value


def translate(
    args: Any, rows: int | None, known: frozenset[str] = frozenset(), refused: dict[str, str] | None = None
) -> tuple[Settings, Schedule]:
    """Return the settings, without the overrides in `args.outpace`, and the schedule.

    `rows`: number of training rows, None if unknown. `known`: further fields that the caller translates itself. Adds
    unusable fields and their reasons to `refused`, for the caller to `refuse`; if it is None, refuses them here."""
    generation, passes = value_of(args, "steps_per_generation"), value_of(args, "num_iterations", 1)
    if generation and args.generation_batch_size != generation * args.per_device_train_batch_size:
        raise BadInput("generation_batch_size: must be per_device_train_batch_size times steps_per_generation")
    schedule = Schedule.of(args, rows, args.num_generations, generation, passes)
    reasons = {} if refused is None else refused
    reasons |= _refused_fields(args, known)
    found: Settings = {
        **{EQUIVALENTS[name].settings[0]: value_of(args, name) for name in DIRECT},
        "pacing.groups_per_step": schedule.groups,
        "algorithm.minibatches": schedule.minibatches,
        "algorithm.epochs_per_batch": schedule.passes,
        "run.steps": schedule.max_steps // schedule.updates,
    }
    for part in (_run, _model, _sampling, _optimizer, _engine, _algorithm):
        found |= part(args, reasons.setdefault)
    warmup = args.warmup_steps if args.warmup_steps >= 1 else args.warmup_steps * schedule.max_steps
    if value_of(args, "lr_scheduler_type") != "constant":
        found["learner.lr_warmup_steps"] = math.ceil(warmup / schedule.updates)
    if refused is None:
        refuse(reasons)
    return {key: value for key, value in found.items() if value is not None}, schedule


def refuse(reasons: dict[str, str]) -> None:
    """Raise one error for all fields and arguments that cannot be used, if there are any."""
    if reasons:
        raise BadInput(". ".join(f"{name}: {one_line(reason, 200)}" for name, reason in reasons.items()))


def _refused_fields(args: Any, known: frozenset[str]) -> Iterator[tuple[str, str]]:
    initial = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu)
    for field in dataclasses.fields(args):
        value, default = getattr(args, field.name), getattr(initial, field.name)
        unset = value in (field.default, default) or not (value or field.default)
        if unset or field.name in AS_IN_TRL | known | {"optim", "outpace"}:
            continue
        found = EQUIVALENTS.get(field.name)
        if found is None:
            yield field.name, "outpace does not know this field of TRL; leave this out"
        elif not found.settings and not found.harmless:
            yield field.name, found.note


def _run(args: Any, refuse: Refuse) -> Settings:
    if args.load_best_model_at_end and str(args.metric_for_best_model).removeprefix("eval_") != "reward":
        refuse("metric_for_best_model", 'the best checkpoint is that with the best "eval_reward"; use this metric')
    if value_of(args, "hub_strategy") not in ("every_save", "end"):
        refuse("hub_strategy", "only the trained model is uploaded, not checkpoints; leave this out")
    if unknown := [name for name in args.report_to if name not in TRACKERS.names()]:
        refuse("report_to", f"{', '.join(unknown)} is not supported; use {', '.join(TRACKERS.names())}")
    return {
        "run.dir": args.output_dir,
        "run.overwrite": True,
        "run.device": "cpu" if args.use_cpu else None,
        "run.report_to": args.report_to,
        "report.project": args.project if args.report_to else None,
        "report.name": args.run_name if args.report_to else None,
        "checkpoint.every": 0,  # callbacks ask for checkpoints and evaluations
        "checkpoint.keep": args.save_total_limit or UNLIMITED,
        "eval.end": False,
        "eval.attempts": value_of(args, "num_generations_eval") or args.num_generations,
    }


def _model(args: Any, refuse: Refuse) -> Settings:
    given = dict(args.model_init_kwargs or {})
    trusted = given.pop("trust_remote_code", args.trust_remote_code)
    asked = str(given.pop("dtype", given.pop("torch_dtype", value_of(args, "dtype", "auto")))).removeprefix("torch.")
    for name in set(given) - {"attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache", "use_kernels"}:
        refuse("model_init_kwargs", f"{name} is not supported; leave it out")
    if args.fp16 or asked == "float16":
        refuse("fp16" if args.fp16 else "dtype", "fp16 is not supported; use bfloat16 or float32")
    mixed = args.bf16 and torch.cuda.is_available() and not args.use_cpu
    return {
        "model.dtype": "bfloat16" if mixed or asked == "bfloat16" else "float32",
        "model.trust_remote_code": trusted,
        "model.text_prompts": "verbatim",
    }


def _sampling(args: Any, refuse: Refuse) -> Settings:
    for name, neutral in (("top_p", (None, 1.0)), ("top_k", (None, 0, -1)), ("repetition_penalty", (None, 1.0))):
        if getattr(args, name) not in neutral:
            refuse(name, EQUIVALENTS["min_p"].note)
    generation = dict(value_of(args, "generation_kwargs") or {})
    stop = generation.pop("stop_strings", generation.pop("stop", []))
    for name in generation:
        refuse("generation_kwargs", f"{name} is not supported; leave it out")
    calls = args.max_tool_calling_iterations
    return {
        "rollout.stop": [stop] if isinstance(stop, str) else list(stop),
        "rollout.max_tokens": args.max_completion_length,
        "rollout.max_episode_tokens": args.max_completion_length,
        "rollout.max_turns": UNLIMITED if calls is None else calls + 1,
        "rewards.timeout_s": 300.0,  # TRL has no limit
        "filter.uniform": False,
        "filter.truncated": "mask" if value_of(args, "mask_truncated_completions") else "train",
    }


ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}


def _optimizer(args: Any, refuse: Refuse) -> Settings:
    if value_of(args, "optim") not in ADAMW:
        refuse("optim", EQUIVALENTS["optim"].note)
    if (kind := value_of(args, "lr_scheduler_type")) not in SCHEDULES:
        refuse("lr_scheduler_type", f"{kind} is not supported; use {', '.join(SCHEDULES)}")
    budget = value_of(args, "token_budget") or 0
    return {
        "learner.schedule": SCHEDULES.get(kind),
        "learner.max_grad_norm": args.max_grad_norm if args.max_grad_norm else float(UNLIMITED),
        "learner.tokens_per_pass": budget if budget > 0 else None,
    }


def _engine(args: Any, refuse: Refuse) -> Settings:
    url = args.vllm_server_base_url
    if not hasattr(args, "use_vllm"):  # the asynchronous trainer
        if isinstance(url, Unset) or (url == DEFAULT_URL and not hasattr(args, "outpace")):
            return {}  # no server was named
        return {"engine.kind": "vllm", "engine.urls": [url], "engine.control_s": args.weight_sync_timeout}
    if not args.use_vllm:
        return {"engine.context": None}
    if args.vllm_mode == "server":
        host = args.vllm_server_host.replace("0.0.0.0", "localhost")
        return {"engine.kind": "vllm", "engine.urls": [url or f"http://{host}:{args.vllm_server_port}"]}
    options = {"--tensor-parallel-size": args.vllm_tensor_parallel_size, "--model-impl": args.vllm_model_impl}
    memory = args.vllm_gpu_memory_utilization
    return {
        "engine.kind": "vllm",
        "launch.args": [text for name, of in options.items() if of not in (1, "vllm") for text in (name, str(of))],
        "launch.start_s": max(600.0, args.vllm_server_timeout),
        "launch.gpu_memory": None if memory == 0.3 else memory,
    }


AGGREGATIONS = {
    "dapo": "token_mean", "bnpo": "token_mean", "cispo": "token_mean", "vespo": "token_mean", "dr_grpo": "dr_grpo",
    "grpo": "seq_mean_token_mean", "sapo": "seq_mean_token_mean", "luspo": "seq_mean_token_sum",
}  # fmt: skip


def _algorithm(args: Any, refuse: Refuse) -> Settings:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    clip = {"policy_loss.clip_low": args.epsilon, "policy_loss.clip_high": high}
    if not hasattr(args, "loss_type"):  # the asynchronous trainer: PPO clip against the sampler, data in order
        policy = {"name": "ppo", "aggregation": "token_mean", "old_policy": "rollout"}
        running = args.max_inflight_tasks if args.max_inflight_tasks > 0 else None
        other = {"advantage.name": "grpo", "tasks.shuffle": False, "pacing.max_running": running}
        return {f"policy_loss.{key}": value for key, value in policy.items()} | clip | other
    loss, by_sequence = args.loss_type, args.importance_sampling_level == "sequence"
    if loss not in AGGREGATIONS:
        refuse("loss_type", f"{loss} is not supported; use {', '.join(AGGREGATIONS)}")
    if by_sequence and (loss in ("cispo", "sapo", "vespo") or args.delta is not None):
        refuse("importance_sampling_level", "sequence needs loss_type dapo, bnpo, dr_grpo, grpo or luspo, and no delta")
    if args.beta and args.sync_ref_model and args.ref_model_mixup_alpha != 1.0:
        refuse("ref_model_mixup_alpha", "the reference is replaced, not mixed; set it to 1.0")
    own = {
        "cispo": {"policy_loss.cap": high},
        "sapo": {EQUIVALENTS[name].settings[0]: value for name, value in vars(args).items() if name[:5] == "sapo_"},
        "vespo": {EQUIVALENTS[name].settings[0]: value for name, value in vars(args).items() if name[:6] == "vespo_"},
    }.get(loss, {**clip, "policy_loss.dual_clip": args.delta})
    is_apart = args.use_vllm or value_of(args, "async_prefetch", False)  # sampler and learner differ
    corrected = is_apart and args.vllm_importance_sampling_correction
    combined = args.multi_objective_aggregation == "normalize_then_sum"
    return {
        "pacing.max_lag": 0,
        "policy_loss.name": loss if loss in ("cispo", "sapo", "vespo") else "gspo" if by_sequence else "ppo",
        "policy_loss.aggregation": AGGREGATIONS.get(loss),
        "policy_loss.old_policy": "rollout" if loss == "vespo" and corrected else "recomputed",
        **own,
        "advantage.name": "gdpo" if combined else "grpo" if args.scale_rewards == "group" else "dr_grpo",
        "advantage.normalizer": "batch_std" if args.scale_rewards == "batch" and not combined else None,
        **_correction(args, corrected and loss != "vespo"),
        "kl.coefficient": args.beta,
        "kl.estimator": None if not args.beta else "unbiased" if args.use_bias_correction_kl else "k3",
        "kl.sync_every": args.ref_model_sync_steps if args.beta and args.sync_ref_model else None,
    }


def _correction(args: Any, corrected: bool) -> Settings:
    low, high = args.vllm_importance_sampling_clip_min or 0.0, args.vllm_importance_sampling_clip_max
    level, _, how = args.vllm_importance_sampling_mode.partition("_")
    masked, threshold = corrected and how == "mask", args.off_policy_mask_threshold
    return {
        "correction.weight": level if corrected else "none",
        "correction.masks": [level] * masked + ["opsm"] * (threshold is not None),
        "correction.opsm_delta": threshold,
        f"correction.{level}_low": low if masked else None,
        f"correction.{level}_high": (high or float(UNLIMITED)) if masked else None,
        "correction.floor": low if corrected and not masked else None,
        # Tokens that a mask keeps are weighted by their ratio, without a limit.
        "correction.cap": None if not corrected else 0.0 if masked else high or 0.0,
    }
