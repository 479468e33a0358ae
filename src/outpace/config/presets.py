"""Known recipes by name, in terms of our own settings.

A preset speaks for keys that the config leaves out, and only where its own functions are the chosen ones: see
`outpace.config.dependent.settled`. Where a recipe leaves something open, so does the preset, and the default holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.errors import BadInput
from outpace.references import nearest


@dataclass(frozen=True)
class Preset:
    """`summary` is the line that people read; `values` are settings by dotted key."""

    summary: str
    values: Mapping[str, Any]


def _recipe(summary: str, surrogate: str, advantage: str, **values: Any) -> Preset:
    """Keyword arguments are keys of `[algorithm]`, or of another section with `__` for its dot."""
    named = {"surrogate": surrogate, "advantage": advantage, **values}
    return Preset(summary, {_dotted(key): value for key, value in named.items()})


def _dotted(key: str) -> str:
    return key.replace("__", ".") if "__" in key else f"algorithm.{key}"


CLIP = {"clip_low": 0.2, "clip_high": 0.2}

PRESETS: dict[str, Preset] = {
    "default": _recipe(
        "Truncated weights to the sampler, no punishment of what the policy has left already, reward minus group mean.",
        "truncated_is", "dr_grpo", correction__masks=["opsm"],
    ),
    "aipo": _recipe(
        "Importance weights to the sampler truncated at 5, leave-one-out baseline.", "truncated_is", "rloo", cap=5.0,
        correction__masks=[],
    ),
    "no_correction": _recipe(
        "Policy gradient as if every token were on policy; for comparison.", "reinforce", "dr_grpo",
        correction__weight="none",
    ),
    "grpo": _recipe(
        "PPO clip, group mean and standard deviation, mean over sequences; add `kl.coefficient` for its KL.",
        "ppo", "grpo", **CLIP, aggregation="seq_mean_token_mean",
    ),
    "dapo": _recipe(
        "GRPO with a higher upper clip, a mean over tokens and uniform groups replaced; "
        "add `rewards.overlong_buffer` for its over-long shaping.",
        "ppo", "grpo", clip_low=0.2, clip_high=0.28, aggregation="token_mean", filter__uniform=True,
    ),
    "dr_grpo": _recipe(
        "GRPO without its two divisions: no standard deviation, a constant length.",
        "ppo", "dr_grpo", **CLIP, aggregation="dr_grpo",
    ),
    "lite_ppo": _recipe(
        "PPO clip, group mean, standard deviation of the batch.",
        "ppo", "dr_grpo", **CLIP, normalise="batch_std", aggregation="token_mean",
    ),
    "gspo": _recipe(
        "One clipped ratio per sequence, the geometric mean of its tokens'.",
        "gspo", "grpo", clip_low=3e-4, clip_high=4e-4, aggregation="seq_mean_token_mean",
    ),
    "gmpo": _recipe(
        "Geometric mean of token ratios, clipped token by token.", "gmpo", "grpo", aggregation="seq_mean_token_mean"
    ),
    "cispo": _recipe(
        "Truncated ratios as constant weights: no token's gradient is lost to a clip.",
        "cispo", "grpo", cap=5.0, aggregation="token_mean",
    ),
    "sapo": _recipe(
        "A smooth gate in place of the clip, tighter for negative advantages.",
        "sapo", "grpo", tau_positive=1.0, tau_negative=1.05, aggregation="seq_mean_token_mean",
    ),
    "vespo": _recipe("A smooth weight on the whole sequence's ratio.", "vespo", "grpo"),
    "rloo": _recipe(
        "Plain policy gradient of whole sequences, leave-one-out baseline.",
        "reinforce", "rloo", aggregation="seq_mean_token_sum",
    ),
    "opo": _recipe(
        "Plain policy gradient, baseline weighted by length.", "reinforce", "opo", aggregation="seq_mean_token_sum"
    ),
    "reinforce_pp": _recipe(
        "PPO clip without a critic: discounted returns of tokens, whitened over the batch.",
        "ppo", "reinforce_pp", **CLIP, aggregation="token_mean",
    ),
    "reinforce_pp_baseline": _recipe(
        "The same with the group's mean taken off first.",
        "ppo", "reinforce_pp_baseline", **CLIP, aggregation="token_mean",
    ),
    "maxrl": _recipe(
        "Reward minus group mean, divided by that mean: hard tasks count for more.",
        "ppo", "maxrl", **CLIP, aggregation="token_mean",
    ),
    "gdpo": _recipe(
        "Several rewards, each normalised in its group before they are added.",
        "ppo", "gdpo", **CLIP, aggregation="seq_mean_token_mean",
    ),
    "pass_at_k": _recipe(
        "Learns to have one success among `algorithm.pass_k` attempts.",
        "ppo", "pass_at_k", **CLIP, aggregation="token_mean",
    ),
    "ppo": _recipe(
        "PPO with a critic: clip, generalised advantage estimation at 0.95.",
        "ppo", "gae", **CLIP, gae_lambda=0.95, aggregation="token_mean",
    ),
    "dppo": _recipe(
        "Tokens masked by how far their probability moved from the sampler's, and a small penalty on the ratio.",
        "dppo", "dr_grpo", divergence="tv", trust_low=0.2, trust_high=0.2, ratio_penalty=1e-3, aggregation="token_mean",
    ),
    "decoupled_ppo": _recipe(
        "PPO clip to the policy at the start of the step, times truncated weights from there to the sampler.",
        "ppo", "grpo", **CLIP, anchor="proximal", aggregation="token_mean", correction__weight="token",
        correction__cap=2.0,
    ),
    "a3po": _recipe(
        "The same with that policy guessed from the token's version instead of computed.",
        "ppo", "grpo", **CLIP, anchor="approximate", aggregation="token_mean", correction__weight="token",
        correction__cap=2.0,
    ),
    "bypass_ppo": _recipe(
        "PPO clip straight to the sampler, nothing beside it.",
        "ppo", "grpo", **CLIP, anchor="rollout", aggregation="token_mean",
    ),
    "icepop": _recipe(
        "PPO clip; tokens whose weight leaves 0.5 to 5 are rejected, the others weighted in full.",
        "ppo", "grpo", **CLIP, anchor="proximal", correction__weight="token", correction__cap=0.0,
        correction__masks=["token"], correction__token_low=0.5, correction__token_high=5.0,
    ),
    "seq_mask_tis": _recipe(
        "PPO clip; sequences whose mean ratio leaves 0.999 to 1.002 are rejected, tokens of the others truncated at 2.",
        "ppo", "grpo", **CLIP, anchor="proximal", correction__weight="token", correction__cap=2.0,
        correction__masks=["geometric"], correction__geometric_low=0.999, correction__geometric_high=1.002,
    ),
    "opsm": _recipe(
        "GRPO; sequences of negative advantage that left the sampler far behind are rejected.",
        "ppo", "grpo", **CLIP, anchor="proximal", correction__masks=["opsm"],
    ),
    "m2po": _recipe(
        "GRPO; the tokens farthest from the sampler are rejected until the batch's second moment is small.",
        "ppo", "grpo", **CLIP, anchor="proximal", correction__masks=["m2po"], correction__m2po_limit=0.04,
    ),
}  # fmt: skip


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        close = nearest(name, PRESETS, count=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(PRESETS)}"
        raise BadInput(f"algorithm.preset: no preset is called {name!r}; {hint}")
    return PRESETS[name]
