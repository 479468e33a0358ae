"""`AsyncGRPOConfig`: the fields that Axolotl adds to TRL's `GRPOConfig`, with its defaults, and their settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from outpace.compat.trl.config import GRPOConfig, with_fields
from outpace.compat.trl.settings import Found, Refusal
from outpace.monitoring.transformers_callbacks import Schedule

FIELDS: Mapping[str, Any] = {
    "use_data_producer": False, "async_prefetch": False, "prefetch_depth": 1, "vllm_sync_interval": 1,
    "batch_flattening": False, "streaming_partial_batch": False, "streaming_min_groups": 1,
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_cap": 3.0, "off_policy_mask_threshold": None, "use_bias_correction_kl": False,
    "reward_num_workers": 1, "replay_buffer_size": 0, "replay_recompute_logps": True, "reroll_start_fraction": 0.5,
    "reroll_max_groups": 1, "skip_zero_advantage_batches": True, "vllm_lora_sync": False,
}  # fmt: skip

REROLLS = 1000
"""Axolotl repeats a prompt without limit; this is the largest one here."""


@with_fields(FIELDS)
class AsyncGRPOConfig(GRPOConfig):
    """Axolotl's `AsyncGRPOConfig`, with the fields of its `FastAsyncGRPOConfig`."""


def find_async(args: Any, schedule: Schedule) -> Iterator[Found]:
    """Yield the settings of Axolotl's own fields."""
    if args.async_prefetch:
        every = math.ceil(args.vllm_sync_interval / schedule.updates)
        yield "weights.every", every
        yield "pacing.depth", args.prefetch_depth
        yield "pacing.max_lag", args.prefetch_depth + every - 1
    if args.streaming_partial_batch:
        yield "pacing.chunk_groups", args.streaming_min_groups
    if not args.replay_recompute_logps:
        yield Refusal("replay_recompute_logps", "old logprobs of replayed groups are always recomputed; leave this out")
    if args.use_data_producer:
        yield "producer.async_prefetch", args.async_prefetch
        if args.async_prefetch:
            yield "producer.prefetch_depth", args.prefetch_depth
        yield "tasks.shuffle", True  # the producer shuffles
        yield "rewards.workers", args.reward_num_workers
        yield from _selection(args, schedule)


def _selection(args: Any, schedule: Schedule) -> Iterator[Found]:
    """Yield the settings of replay and re-rolls, which Axolotl has with a producer only."""
    if args.replay_buffer_size > 0:
        yield "filter.uniform", True
        if schedule.groups > 1:  # a batch has at least one new group
            yield "replay.mode", "fill"
            yield "replay.fraction", (schedule.groups - 1) / schedule.groups
            age = math.ceil(args.replay_buffer_size / schedule.groups)
            yield from {"replay.max_age": age, "replay.times": age}.items()
    if args.reroll_start_fraction < 1:
        steps = schedule.max_steps // schedule.updates
        yield from {"reroll.max_times": REROLLS, "reroll.after_steps": 1}.items()
        yield "reroll.from_step", int(steps * args.reroll_start_fraction)
        yield "reroll.max_groups", args.reroll_max_groups


def producer_options(args: Any) -> dict[str, Any]:
    """Return the arguments of `GRPODataProducer` beside its config and dataset."""
    return {
        "num_generations": args.num_generations,
        "generation_batch_size": args.generation_batch_size,
        "train_batch_size": args.train_batch_size,
        "steps_per_generation": args.steps_per_generation,
        "shuffle_dataset": args.shuffle_dataset,
        "seed": args.seed,
    }
