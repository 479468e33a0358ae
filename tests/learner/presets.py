"""Settings of the learner that change its gradient: for the tests on CPUs and on GPUs."""

from __future__ import annotations

from typing import Any

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]

STREAMED: dict[str, dict[str, Any]] = {
    "default": {},
    "decoupled_ppo": {
        "policy_loss.name": "ppo",
        "policy_loss.old_policy": "recomputed",
        "correction.masks": ["geometric"],
    }
    | {"correction.geometric_low": 0.02, "correction.geometric_high": 5.0},
    "gspo": {"policy_loss.name": "gspo"},
    "sequence_weight": {"policy_loss.name": "reinforce", "correction.weight": "sequence"},
    "kl_and_entropy": {"kl.coefficient": 0.1, "algorithm.entropy_coefficient": 0.01},
}
"""Settings that train on groups as they arrive."""

WHOLE_BATCH: dict[str, dict[str, Any]] = {
    "reinforce_pp": {"advantage.name": "reinforce_pp"},
    "batch_std": {"advantage.normalizer": "batch_std"},
    "m2po": {"correction.masks": ["m2po"], "correction.m2po_limit": 0.2},
    "kl_in_reward": {"kl.coefficient": 0.1, "kl.place": "reward"},
    "gae": {"advantage.name": "gae"},
}
"""Settings that need the whole batch before training."""
