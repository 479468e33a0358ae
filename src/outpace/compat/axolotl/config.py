"""`AsyncGRPOConfig`: the fields that Axolotl adds to TRL's `GRPOConfig`, with its defaults, and their settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outpace.compat.trl.config import GRPOConfig, with_fields
from outpace.compat.trl.settings import Settings, translate
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
"""Axolotl repeats a prompt without limit; outpace needs a number."""


@with_fields(FIELDS)
class AsyncGRPOConfig(GRPOConfig):
    """Axolotl's `AsyncGRPOConfig`, with the fields of its `FastAsyncGRPOConfig`."""


def translate_async(args: Any, rows: int | None, refused: dict[str, str]) -> tuple[Settings, Schedule]:
    """Return the settings and the schedule of an `AsyncGRPOConfig`. Adds fields that cannot be used to `refused`."""
    settings, schedule = translate(args, rows, frozenset(FIELDS), refused)
    if not args.replay_recompute_logps:
        refused["replay_recompute_logps"] = "old logprobs of replayed groups are always recomputed; leave this out"
    if args.async_prefetch:
        every = math.ceil(args.vllm_sync_interval / schedule.updates)
        lag = args.prefetch_depth + every - 1
        settings |= {"weights.every": every, "pacing.depth": args.prefetch_depth, "pacing.max_lag": lag}
    if args.streaming_partial_batch:
        settings["pacing.chunk_groups"] = args.streaming_min_groups
    if args.use_data_producer:
        settings |= {"producer.async_prefetch": args.async_prefetch, "rewards.workers": args.reward_num_workers}
        settings |= {"producer.prefetch_depth": args.prefetch_depth} if args.async_prefetch else {}
        settings.pop("tasks.shuffle")  # the producer determines the order
        settings |= _replay(args, schedule) | _rerolls(args, settings["run.steps"])
    return settings, schedule


def _replay(args: Any, schedule: Schedule) -> Settings:
    if args.replay_buffer_size == 0:
        return {}
    age, groups = math.ceil(args.replay_buffer_size / schedule.groups), schedule.groups
    fill = {"replay.mode": "fill", "replay.fraction": (groups - 1) / groups, "replay.max_age": age, "replay.times": age}
    return {"filter.uniform": True} | (fill if groups > 1 else {})  # a batch has at least one new group


def _rerolls(args: Any, steps: int) -> Settings:
    if args.reroll_start_fraction >= 1:
        return {}
    return {
        "reroll.max_times": REROLLS,
        "reroll.after_steps": 1,
        "reroll.from_step": int(steps * args.reroll_start_fraction),
        "reroll.max_groups": args.reroll_max_groups,
    }


def producer_options(args: Any) -> dict[str, Any]:
    """Return the arguments of `GRPODataProducer` other than its config and dataset."""
    return {
        "num_generations": args.num_generations,
        "generation_batch_size": args.generation_batch_size,
        "train_batch_size": args.train_batch_size,
        "steps_per_generation": args.steps_per_generation,
        "shuffle_dataset": args.shuffle_dataset,
        "seed": args.seed,
    }
