"""Presets: published recipes by name, expressed in outpace settings.

A preset sets the defaults of keys that the config leaves out. The parameters of its policy loss or estimator apply only
if the config does not override that function: see `outpace.config.defaults.fill_defaults`. Keys that a preset does not
specify are left to the general defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.errors import BadInput
from outpace.runtime.references import closest_names


@dataclass(frozen=True)
class Preset:
    """A preset: a one-line `summary` for docs and help, and settings by dotted key."""

    summary: str
    values: Mapping[str, Any]


def _preset(summary: str, policy_loss: str, advantage: str, **values: Any) -> Preset:
    """Build a preset. Keyword arguments are keys of `[policy_loss]`, or `section__key` for other sections."""
    named = {"policy_loss__name": policy_loss, "advantage__name": advantage, **values}
    return Preset(summary, {_dotted(key): value for key, value in named.items()})


def _dotted(key: str) -> str:
    return key.replace("__", ".") if "__" in key else f"policy_loss.{key}"


CLIP = {"clip_low": 0.2, "clip_high": 0.2}

PRESETS: dict[str, Preset] = {
    "default": _preset(
        "Truncated importance weights, far off-policy negative sequences masked (OPSM), reward minus group mean.",
        "truncated_is", "dr_grpo", correction__masks=["opsm"],
    ),
    "aipo": _preset(
        "Importance weights truncated at 5, leave-one-out baseline.", "truncated_is", "rloo", cap=5.0,
        correction__masks=[],
    ),
    "no_correction": _preset(
        "Policy gradient without off-policy correction; for comparison.", "reinforce", "dr_grpo",
        correction__weight="none",
    ),
    "grpo": _preset(
        "PPO clip, group mean and standard deviation, mean over sequences; set `kl.coefficient` for its KL penalty.",
        "ppo", "grpo", **CLIP, aggregation="seq_mean_token_mean",
    ),
    "dapo": _preset(
        "GRPO with a higher upper clip, token mean and dynamic sampling (uniform groups are replaced); "
        "set `rewards.overlong_buffer` for its overlong reward shaping.",
        "ppo", "grpo", clip_low=0.2, clip_high=0.28, aggregation="token_mean", filter__uniform=True,
    ),
    "dr_grpo": _preset(
        "GRPO without its two normalizations: no standard deviation, constant length.",
        "ppo", "dr_grpo", **CLIP, aggregation="dr_grpo",
    ),
    "lite_ppo": _preset(
        "PPO clip, group mean, standard deviation of the batch.",
        "ppo", "dr_grpo", **CLIP, advantage__normalizer="batch_std", aggregation="token_mean",
    ),
    "gspo": _preset(
        "One clipped ratio per sequence: the geometric mean of its token ratios.",
        "gspo", "grpo", clip_low=3e-4, clip_high=4e-4, aggregation="seq_mean_token_mean",
    ),
    "gmpo": _preset(
        "Geometric mean of token ratios, each token clipped.", "gmpo", "grpo", aggregation="seq_mean_token_mean"
    ),
    "cispo": _preset(
        "Truncated ratios as constant (detached) weights, so that every token keeps its gradient.",
        "cispo", "grpo", cap=5.0, aggregation="token_mean",
    ),
    "sapo": _preset(
        "A smooth gate instead of the clip, tighter for negative advantages.",
        "sapo", "grpo", tau_positive=1.0, tau_negative=1.05, aggregation="seq_mean_token_mean",
    ),
    "vespo": _preset("A smooth weight on the sequence-level ratio.", "vespo", "grpo"),
    "rloo": _preset(
        "REINFORCE over whole sequences with a leave-one-out baseline.",
        "reinforce", "rloo", aggregation="seq_mean_token_sum",
    ),
    "opo": _preset(
        "REINFORCE with a length-weighted baseline.", "reinforce", "opo", aggregation="seq_mean_token_sum"
    ),
    "reinforce_pp": _preset(
        "REINFORCE++: PPO clip without a critic, discounted token returns whitened over the batch.",
        "ppo", "reinforce_pp", **CLIP, aggregation="token_mean",
    ),
    "reinforce_pp_baseline": _preset(
        "REINFORCE++ with the group mean subtracted first.",
        "ppo", "reinforce_pp_baseline", **CLIP, aggregation="token_mean",
    ),
    "maxrl": _preset(
        "Reward minus group mean, divided by that mean, so that hard tasks weigh more.",
        "ppo", "maxrl", **CLIP, aggregation="token_mean",
    ),
    "gdpo": _preset(
        "Several rewards, each normalized within its group before they are summed.",
        "ppo", "gdpo", **CLIP, aggregation="seq_mean_token_mean",
    ),
    "pass_at_k": _preset(
        "Optimizes pass@k: at least one success among `advantage.k` attempts.",
        "ppo", "pass_at_k", **CLIP, aggregation="token_mean",
    ),
    "ppo": _preset(
        "PPO with a critic: clip, generalized advantage estimation with lambda 0.95.",
        "ppo", "gae", **CLIP, advantage__gae_lambda=0.95, aggregation="token_mean",
    ),
    "dppo": _preset(
        "Masks tokens whose probability moved too far from the sampler's, plus a small penalty on the ratio.",
        "dppo", "dr_grpo", divergence="tv", trust_low=0.2, trust_high=0.2, ratio_penalty=1e-3, aggregation="token_mean",
    ),
    "decoupled_ppo": _preset(
        "PPO clip against the policy at the start of the step, times truncated importance weights to the sampler.",
        "ppo", "grpo", **CLIP, old_policy="recomputed", aggregation="token_mean", correction__weight="token",
        correction__cap=2.0,
    ),
    "a3po": _preset(
        "Decoupled PPO with the old policy interpolated by token version instead of recomputed.",
        "ppo", "grpo", **CLIP, old_policy="interpolated", aggregation="token_mean", correction__weight="token",
        correction__cap=2.0,
    ),
    "bypass_ppo": _preset(
        "PPO clip directly against the sampler, no further correction.",
        "ppo", "grpo", **CLIP, old_policy="rollout", aggregation="token_mean",
    ),
    "icepop": _preset(
        "PPO clip; tokens with an importance weight outside 0.5 to 5 are masked, the others weighted without a cap.",
        "ppo", "grpo", **CLIP, old_policy="recomputed", correction__weight="token", correction__cap=0.0,
        correction__masks=["token"], correction__token_low=0.5, correction__token_high=5.0,
    ),
    "seq_mask_tis": _preset(
        "PPO clip; sequences with a mean ratio outside 0.999 to 1.002 are masked, token weights truncated at 2.",
        "ppo", "grpo", **CLIP, old_policy="recomputed", correction__weight="token", correction__cap=2.0,
        correction__masks=["geometric"], correction__geometric_low=0.999, correction__geometric_high=1.002,
    ),
    "opsm": _preset(
        "GRPO; sequences with a negative advantage that are far off-policy are masked.",
        "ppo", "grpo", **CLIP, old_policy="recomputed", correction__masks=["opsm"],
    ),
    "m2po": _preset(
        "GRPO; the most off-policy tokens are masked until the second moment of the batch's log-ratios is small.",
        "ppo", "grpo", **CLIP, old_policy="recomputed", correction__masks=["m2po"], correction__m2po_limit=0.04,
    ),
}  # fmt: skip


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        close = closest_names(name, PRESETS, count=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(PRESETS)}"
        raise BadInput(f"algorithm.preset: unknown preset {name!r}; {hint}")
    return PRESETS[name]
