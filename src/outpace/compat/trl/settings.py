"""Translation of TRL's configs, ours or TRL's own, to outpace settings.

    args ─▶ Schedule: what a batch is, how many optimizer steps it has ─┐
         ─▶ parts below, each yields settings or refusals ──────────────┴─▶ settings, or one BadInput with every refusal

A field counts as set if its value differs from the default of its class, also from what the class makes of the default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

from outpace.compat.trl.config import AS_IN_TRL, Unset
from outpace.config.other_libraries import EQUIVALENTS
from outpace.config.reporting import TRACKERS
from outpace.errors import BadInput, one_line
from outpace.monitoring.transformers_callbacks import Schedule


class Refusal(NamedTuple):
    """A field, or an argument of the trainer, that cannot be used here."""

    name: str
    reason: str


Found = tuple[str, Any] | Refusal

UNLIMITED = 1_000_000

DIRECT = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "gradient_checkpointing", "seed", "full_determinism",
    "trust_remote_code", "num_generations", "temperature", "reward_weights", "shuffle_dataset", "entropy_coef",
    "eval_on_start", "max_staleness", "weight_sync_steps", "request_timeout", "heartbeat_stale_after_s",
)  # fmt: skip
"""Fields whose values are those of the one setting that replaces them."""


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def value_of(args: Any, name: str, default: Any = None) -> Any:
    return plain(getattr(args, name, default))


def translate(args: Any, rows: int | None, known: frozenset[str] = frozenset()) -> tuple[dict[str, Any], Schedule]:
    """Return the settings by dotted key, without the overrides in `args.outpace`, and the schedule.

    `rows`: of the training data, None if unknown. `known`: further fields that the caller translates itself."""
    schedule = make_schedule(args, rows)
    return as_settings(find(args, schedule, known)), schedule


def find(args: Any, schedule: Schedule, known: frozenset[str] = frozenset()) -> Iterator[Found]:
    """Yield the settings and what is refused."""
    yield from {
        "pacing.groups_per_step": schedule.groups,
        "algorithm.minibatches": schedule.minibatches,
        "algorithm.epochs_per_batch": schedule.passes,
        "run.steps": schedule.max_steps // schedule.updates,
    }.items()
    parts = (_run(args), _model(args), _sampling(args), _optimizer(args, schedule), _engine(args), _algorithm(args))
    yield from chain(_refused_fields(args, known), *parts)


def as_settings(found: Iterable[Found]) -> dict[str, Any]:
    """Return the settings; of one that is found twice, the last value. Raises one error for all refusals."""
    everything = list(found)
    refuse([each for each in everything if isinstance(each, Refusal)])
    return dict(each for each in everything if not isinstance(each, Refusal))


def refuse(refusals: list[Refusal]) -> None:
    """Raise one error for all refusals, if there are any."""
    if refusals:
        raise BadInput(". ".join(f"{name}: {one_line(reason, 200)}" for name, reason in dict(refusals).items()))


def _refused_fields(args: Any, known: frozenset[str]) -> Iterator[Refusal]:
    initial = type(args)(output_dir=args.output_dir)
    for field in dataclasses.fields(args):
        value, default = getattr(args, field.name), getattr(initial, field.name)
        if field.name in AS_IN_TRL | known | {"optim", "outpace"} or value in (field.default, default):
            continue
        found = EQUIVALENTS.get(field.name)
        if found is None:
            yield Refusal(field.name, "outpace does not know this field of TRL; leave this out")
        elif not found.settings and not found.harmless:
            yield Refusal(field.name, found.note)


def make_schedule(args: Any, rows: int | None) -> Schedule:
    """Return what TRL trains on in a step, an epoch and the whole run."""
    size, group, substeps = args.per_device_train_batch_size, args.num_generations, args.gradient_accumulation_steps
    passes, generation = value_of(args, "num_iterations", 1), value_of(args, "steps_per_generation") or substeps
    if hasattr(args, "generation_batch_size") and args.generation_batch_size != size * generation:
        raise BadInput(
            f"generation_batch_size: {args.generation_batch_size} is not a multiple of {size}, the batch size"
        )
    if generation % substeps == 0:  # one or several steps for each generation
        samples, minibatches = size * generation, generation // substeps
    elif substeps % (generation * passes) == 0:  # several generations in one step
        samples, minibatches, passes = size * substeps // passes, 1, 1
    else:
        raise BadInput(
            f"steps_per_generation: must be a multiple of gradient_accumulation_steps, {substeps}, or divide it"
        )
    if samples % group:
        raise BadInput(
            f"num_generations: a batch of {samples} samples has no whole number of groups of {group}; change "
            "per_device_train_batch_size or gradient_accumulation_steps"
        )
    if rows is None and args.max_steps <= 0:
        raise BadInput("max_steps: must be set, because the length of the data is unknown")
    epoch = UNLIMITED if rows is None else max(1, rows // (size * generation // group)) * generation * passes
    steps = math.ceil(epoch / substeps)
    limit = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps)
    epochs = math.ceil(args.max_steps / steps if args.max_steps > 0 else args.num_train_epochs)
    if limit % (minibatches * passes):
        raise BadInput(f"max_steps: {limit} is not a multiple of {minibatches * passes}, the steps of a generation")
    return Schedule(samples // group, minibatches, passes, substeps, epoch, limit, epochs)


def _run(args: Any) -> Iterator[Found]:
    yield from (
        (EQUIVALENTS[name].settings[0], value) for name in DIRECT if (value := value_of(args, name)) is not None
    )
    yield from {"run.dir": args.output_dir, "run.overwrite": True, "eval.end": False, "checkpoint.every": 0}.items()
    yield "checkpoint.keep", args.save_total_limit or UNLIMITED
    yield "checkpoint.keep_best", args.load_best_model_at_end
    yield "eval.attempts", value_of(args, "num_generations_eval") or args.num_generations
    if args.use_cpu:
        yield "run.device", "cpu"
    if args.load_best_model_at_end and (args.metric_for_best_model or "loss").removeprefix("eval_") != "reward":
        yield Refusal("metric_for_best_model", 'the best checkpoint is the one with the best "eval_reward"; use that')
    if unknown := [name for name in args.report_to if name not in TRACKERS]:
        yield Refusal("report_to", f"{', '.join(unknown)} is not supported; use {', '.join(TRACKERS)}")
    elif args.report_to:
        yield from {
            "run.report_to": args.report_to,
            "report.project": args.project,
            "report.name": args.run_name,
        }.items()


def _model(args: Any) -> Iterator[Found]:
    given = dict(args.model_init_kwargs or {})
    yield from (("model.trust_remote_code", given.pop(name)) for name in ("trust_remote_code",) if name in given)
    asked = str(given.pop("dtype", given.pop("torch_dtype", value_of(args, "dtype", "auto")))).removeprefix("torch.")
    for name in set(given) - {"attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache", "use_kernels"}:
        yield Refusal("model_init_kwargs", f"{name} is not supported; leave it out")
    if args.fp16 or asked == "float16":
        yield Refusal("fp16" if args.fp16 else "dtype", "fp16 is not supported; use bfloat16 or float32")
    yield "model.dtype", "bfloat16" if asked == "bfloat16" or (args.bf16 and _has_gpu(args)) else "float32"


def _has_gpu(args: Any) -> bool:
    import torch

    return torch.cuda.is_available() and not args.use_cpu


def _sampling(args: Any) -> Iterator[Found]:
    yield "rollout.max_tokens", args.max_completion_length
    yield "rollout.max_episode_tokens", args.max_completion_length
    calls = args.max_tool_calling_iterations
    yield "rollout.max_turns", UNLIMITED if calls is None else calls + 1
    yield "rewards.timeout_s", 300.0  # TRL has no limit
    yield "filter.uniform", False
    yield "filter.truncated", "mask" if value_of(args, "mask_truncated_completions") else "train"
    for name, neutral in (("top_p", 1.0), ("top_k", 0), ("repetition_penalty", 1.0)):
        if getattr(args, name) != neutral:
            yield Refusal(name, EQUIVALENTS["min_p"].note)
    if args.chat_template_kwargs:
        yield Refusal("chat_template_kwargs", EQUIVALENTS["chat_template_kwargs"].note)
    generation = dict(value_of(args, "generation_kwargs") or {})
    for name in ("stop", "stop_strings"):
        if name in generation:
            yield "rollout.stop", [stop] if isinstance(stop := generation.pop(name), str) else list(stop)
    for name in generation:
        yield Refusal("generation_kwargs", f"{name} is not supported; leave it out")


ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}


def _optimizer(args: Any, schedule: Schedule) -> Iterator[Found]:
    kind = value_of(args, "lr_scheduler_type")
    if value_of(args, "optim") not in ADAMW:
        yield Refusal("optim", EQUIVALENTS["optim"].note)
    if kind not in SCHEDULES:
        yield Refusal("lr_scheduler_type", f"{kind} is not supported; use {', '.join(SCHEDULES)}")
    else:
        yield "learner.schedule", SCHEDULES[kind]
    warmup = args.warmup_steps if args.warmup_steps >= 1 else args.warmup_steps * schedule.max_steps
    yield "learner.lr_warmup_steps", 0 if kind == "constant" else math.ceil(warmup / schedule.updates)
    yield "learner.max_grad_norm", args.max_grad_norm if args.max_grad_norm > 0 else float(UNLIMITED)
    if (value_of(args, "token_budget") or 0) > 0:
        yield "learner.tokens_per_pass", args.token_budget


def _engine(args: Any) -> Iterator[Found]:
    if not hasattr(args, "use_vllm"):  # the asynchronous trainer
        url = args.vllm_server_base_url
        if isinstance(url, Unset) or (url == "http://localhost:8000" and not hasattr(args, "outpace")):
            return  # no server was named
        yield from {"engine.kind": "vllm", "engine.urls": [url], "engine.control_s": args.weight_sync_timeout}.items()
    elif args.use_vllm:
        yield "engine.kind", "vllm"
        yield from (("engine.context", length) for length in [args.vllm_max_model_length] if length is not None)
        if args.vllm_mode == "server":
            address = f"http://{args.vllm_server_host}:{args.vllm_server_port}".replace("//0.0.0.0", "//localhost")
            yield "engine.urls", [args.vllm_server_base_url or address]
            return
        options = {"--tensor-parallel-size": args.vllm_tensor_parallel_size, "--model-impl": args.vllm_model_impl}
        yield "launch.args", [text for name, of in options.items() if of not in (1, "vllm") for text in (name, str(of))]
        yield "launch.start_s", max(600.0, args.vllm_server_timeout)
        if args.vllm_gpu_memory_utilization != 0.3:
            yield "launch.gpu_memory", args.vllm_gpu_memory_utilization


AGGREGATIONS = {
    "dapo": "token_mean", "bnpo": "token_mean", "cispo": "token_mean", "vespo": "token_mean", "dr_grpo": "dr_grpo",
    "grpo": "seq_mean_token_mean", "sapo": "seq_mean_token_mean", "luspo": "seq_mean_token_sum",
}  # fmt: skip


def _algorithm(args: Any) -> Iterator[Found]:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if not hasattr(args, "loss_type"):  # the asynchronous trainer: PPO clip against the sampler, read in order
        yield from _policy_loss("ppo", "token_mean", "rollout", clip_low=args.epsilon, clip_high=high)
        yield from {"advantage.name": "grpo", "tasks.shuffle": False}.items()
        if args.max_inflight_tasks > 0:
            yield "pacing.max_running", args.max_inflight_tasks
        return
    yield "pacing.max_lag", 0
    loss, by_sequence = args.loss_type, args.importance_sampling_level == "sequence"
    apart = args.use_vllm or value_of(args, "async_prefetch", False)  # sampler and learner differ
    corrected = apart and args.vllm_importance_sampling_correction
    if loss not in AGGREGATIONS:
        yield Refusal("loss_type", f"{loss} is not supported; use {', '.join(AGGREGATIONS)}")
        return
    if by_sequence and loss in ("cispo", "sapo", "vespo"):
        yield Refusal("importance_sampling_level", f"sequence is not supported with {loss}; leave this out")
    if loss == "cispo":
        own: dict[str, Any] = {"cap": high}
    elif loss == "sapo":
        own = {"tau_positive": args.sapo_temperature_pos, "tau_negative": args.sapo_temperature_neg}
    elif loss == "vespo":
        own = {
            f"{a}_{sign}tive": getattr(args, f"vespo_{a}_{sign[:3]}")
            for a in ("k", "lambda")
            for sign in ("posi", "nega")
        }
    else:
        own = {"clip_low": args.epsilon, "clip_high": high} | ({} if args.delta is None else {"dual_clip": args.delta})
        loss = "gspo" if by_sequence else "ppo"
        if by_sequence and args.delta is not None:
            yield Refusal("delta", "a sequence ratio has no second clip; leave this out")
    old = "rollout" if loss == "vespo" and corrected else "recomputed"
    yield from _policy_loss(loss, AGGREGATIONS[args.loss_type], old, **own)
    yield from _advantage(args)
    yield from _correction(args, corrected and loss != "vespo")
    yield from _kl(args)


def _policy_loss(name: str, aggregation: str, old_policy: str, **own: Any) -> Iterator[Found]:
    settings = {"name": name, "aggregation": aggregation, "old_policy": old_policy, **own}
    yield from ((f"policy_loss.{key}", value) for key, value in settings.items())


def _advantage(args: Any) -> Iterator[Found]:
    if args.multi_objective_aggregation == "normalize_then_sum":
        yield "advantage.name", "gdpo"
        return
    yield "advantage.name", "grpo" if args.scale_rewards in ("group", True) else "dr_grpo"
    if args.scale_rewards == "batch":
        yield "advantage.normalizer", "batch_std"


def _correction(args: Any, corrected: bool) -> Iterator[Found]:
    low, high = args.vllm_importance_sampling_clip_min or 0.0, args.vllm_importance_sampling_clip_max
    level, _, how = args.vllm_importance_sampling_mode.partition("_")
    masks = [level] if corrected and how == "mask" else []
    yield "correction.weight", level if corrected else "none"
    if masks:  # the weights of what the mask keeps are not truncated
        yield from {
            f"correction.{level}_low": low,
            f"correction.{level}_high": high or 1e9,
            "correction.cap": 0.0,
        }.items()
    elif corrected:
        yield from {"correction.floor": low, "correction.cap": high or 0.0}.items()
    if args.off_policy_mask_threshold is not None:
        masks = [*masks, "opsm"]
        yield "correction.opsm_delta", args.off_policy_mask_threshold
    yield "correction.masks", masks


def _kl(args: Any) -> Iterator[Found]:
    yield "kl.coefficient", args.beta
    if args.beta:
        yield "kl.estimator", "unbiased" if args.use_bias_correction_kl else "k3"
    if args.beta and args.sync_ref_model:
        yield "kl.sync_every", args.ref_model_sync_steps
        if args.ref_model_mixup_alpha != 1.0:
            yield Refusal("ref_model_mixup_alpha", "the reference is replaced, not mixed; set it to 1.0")
