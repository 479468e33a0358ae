"""Validation of algorithm settings: reject combinations that count a ratio twice, have no effect, or diverge.

Every rule takes a config with its defaults filled in (`outpace.config.defaults`) and yields error lines that start with
the key to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outpace.config import Config
from outpace.config.algorithm import (
    configured_advantage,
    configured_policy_loss,
    full_batch_reasons,
    weight_settings,
)
from outpace.errors import plural

Rule = Callable[[Config], Iterator[str]]

OTHER_LOSSES = "choose a policy loss with another old policy, such as reinforce or ppo"


def _check_old_policy(config: Config) -> Iterator[str]:
    old_policy, registration = config.policy_loss.old_policy, configured_policy_loss(config.policy_loss).registration
    if old_policy not in registration.old_policies:
        choices = " or ".join(registration.old_policies)
        yield f"policy_loss.old_policy: {registration.name} does not support {old_policy}; use {choices}"


def _check_double_counting(config: Config) -> Iterator[str]:
    weight, registration = config.correction.weight, configured_policy_loss(config.policy_loss).registration
    if config.policy_loss.old_policy == "rollout" and weight != "none":
        others = [policy for policy in registration.old_policies if policy != "rollout"]
        instead = f"set policy_loss.old_policy to {' or '.join(others)}" if others else OTHER_LOSSES
        yield (
            f'correction.weight: "{weight}" counts the ratio to the sampler twice: policy_loss.old_policy = "rollout" '
            f'already puts it into the policy loss; use "none", or {instead}'
        )
    if config.kl.place == "reward" and config.kl.estimator == "unbiased":
        yield (
            'kl.estimator: "unbiased" in the reward counts the ratio to the sampler twice, because the policy loss '
            'already applies it to all rewards; use "k1"'
        )


def _check_unbounded_weights(config: Config) -> Iterator[str]:
    """Reject unbounded importance weights if tokens may be more than one version old. The mask `token` bounds
    per-token weights, the mask `sequence` per-sequence weights. With policy_loss.old_policy = rollout, masks apply
    to the policy loss's own ratio."""
    age, why, remedy = _max_token_age(config)
    if age <= 1 or config.algorithm.allow_unbounded:
        return
    correction, masks = config.correction, config.correction.masks or []
    registration = configured_policy_loss(config.policy_loss).registration
    ending, remedy = f"unbounded, and {why}", f"{remedy}, or set algorithm.allow_unbounded = true"
    if registration.unbounded and not (config.policy_loss.old_policy == "rollout" and "token" in masks):
        mask = 'add the mask "token", ' if config.policy_loss.old_policy == "rollout" else ""
        yield f"policy_loss.name: weights of {registration.name} are {ending}; use truncated_is, {mask}{remedy}"
    if correction.weight != "none" and weight_settings(correction).get("cap") == 0 and correction.weight not in masks:
        yield f'correction.cap: 0 leaves weights {ending}; set a cap, add the mask "{correction.weight}", {remedy}'


def _max_token_age(config: Config) -> tuple[int, str, str]:
    """Return the age in versions of the oldest token that may be trained on, the settings that allow it, and how to
    lower it. A replayed group was first trained on up to `max_age` versions ago, and its tokens were sampled up to
    `max_lag` versions before that."""
    max_lag, max_age = config.pacing.max_lag, config.replay.max_age
    if config.replay.fraction == 0:
        return max_lag, f"pacing.max_lag allows tokens {plural(max_lag, 'version')} old", "set pacing.max_lag to 1"
    age = max_lag + max_age
    why = f"pacing.max_lag and replay.max_age allow tokens {max_lag} + {max_age} versions old"
    return age, why, "lower them until their sum is 1"


def _check_bounds_order(config: Config) -> Iterator[str]:
    values = config.correction.model_extra or {}
    pairs = [("floor", "cap"), *((f"{mask}_low", f"{mask}_high") for mask in ("token", "sequence", "geometric"))]
    for low, high in pairs:
        if high in values and 0 < values[high] <= values[low]:
            yield f"correction.{low}: {values[low]} is not below correction.{high}, which is {values[high]}; lower it"


def _check_credit(config: Config) -> Iterator[str]:
    credit, gamma = config.advantage.credit, config.advantage.gamma
    registration = configured_advantage(config.advantage).registration
    if credit not in registration.credits:
        choices = " or ".join(registration.credits)
        yield f"advantage.credit: {registration.name} does not support {credit}; use {choices}"
    elif credit != "episode" and registration.parts:
        yield f'advantage.credit: {registration.name} uses rewards that exist per episode only; use "episode"'
    elif credit == "token" and registration.needs_peers and gamma is not None and gamma < 1:
        turn = '"turn" credit, ' if "turn" in registration.credits else ""
        yield (
            f"advantage.gamma: {registration.name} has one baseline for all tokens: discounted returns of early tokens "
            f'would fall below it; leave this out, or use {turn}the estimator "none" or "reinforce_pp"'
        )


def _check_kl_in_reward(config: Config) -> Iterator[str]:
    registration = configured_advantage(config.advantage).registration
    if config.kl.place == "reward" and registration.parts:
        yield f'kl.place: {registration.name} uses individual rewards, and the KL is not one of them; use "loss"'
    if config.kl.place == "reward" and (config.filter.truncated == "mask" or config.filter.longer_than is not None):
        yield 'kl.place: attempts that are filtered from training have no KL but count for the baseline; use "loss"'


def _check_group_size(config: Config) -> Iterator[str]:
    size, registration, filters = (
        config.rollout.group_size,
        configured_advantage(config.advantage).registration,
        config.filter,
    )
    if size == 1 and registration.needs_peers:
        yield 'rollout.group_size: 1 leaves no attempts to compare; use 2 or more, or advantage.name = "none"'
    elif size == 1 and filters.uniform:
        yield "filter.uniform: a group of one attempt is always uniform and would be filtered; set it to false"
    if filters.min_group is not None and filters.min_group > size:
        attempts = plural(filters.min_group, "attempt")
        yield f"filter.min_group: no group has {attempts}; use at most rollout.group_size, {size}"
    elif filters.min_group == 1 and registration.needs_peers:
        yield f"filter.min_group: {registration.name} compares attempts and needs at least 2; use 2 or more"
    if (k := configured_advantage(config.advantage).settings.get("k") or 0) > size and registration.name == "pass_at_k":
        yield f"advantage.k: no group has {plural(k, 'attempt')}; use at most rollout.group_size, {size}"


def _check_streaming(config: Config) -> Iterator[str]:
    if config.learner.stream:
        for reason in full_batch_reasons(config):
            yield f"learner.stream: {reason}, so streaming is not possible; leave this out or set it to false"


def _check_minibatches(config: Config) -> Iterator[str]:
    minibatches, groups = config.algorithm.minibatches, config.pacing.groups_per_step
    if minibatches > groups:
        yield f"algorithm.minibatches: a batch has only {plural(groups, 'group')} to split; use at most {groups}"
        return
    new = groups - config.replay.groups_of(groups)
    if config.replay.mode == "fill" and minibatches > new:
        yield (
            f"algorithm.minibatches: with replay.mode = fill, a batch may have only {plural(new, 'new group')}, and "
            f"every update needs one; use at most {new}, or lower replay.fraction"
        )


def _check_overlong_buffer(config: Config) -> Iterator[str]:
    buffer, limit = config.rewards.overlong_buffer, config.rollout.max_tokens
    if limit is not None and buffer > limit:
        yield f"rewards.overlong_buffer: {buffer} is larger than rollout.max_tokens, which is {limit}; lower it"


def _check_difficulty(config: Config) -> Iterator[str]:
    easy, hard = config.difficulty.easy_above, config.difficulty.hard_below
    if easy is not None and hard is not None and easy <= hard:
        yield f"difficulty.easy_above: every task is too easy or too hard; set it above difficulty.hard_below, {hard}"
    if config.run.epochs == 1 and (easy is not None or hard is not None):
        key = "hard_below" if easy is None else "easy_above"
        yield f"difficulty.{key}: run.epochs is 1, so no task repeats; raise run.epochs, or leave this out"


def _check_governor(config: Config) -> Iterator[str]:
    governor, max_lag = config.governor, config.pacing.max_lag
    if not governor.enabled:
        return
    if config.run.deterministic:
        yield "governor.enabled: run.deterministic keeps the lag constant; leave this out"
    elif max_lag == 0:
        yield "governor.enabled: pacing.max_lag is 0, so there is no lag to lower; raise it, or leave this out"
    elif governor.min_lag >= max_lag:
        yield (
            f"governor.min_lag: {governor.min_lag} is not below pacing.max_lag, so the lag could never change; "
            f"use at most {max_lag - 1}, or governor.enabled = false"
        )


def _check_replay(config: Config) -> Iterator[str]:
    fraction, size = config.replay.fraction, config.pacing.groups_per_step
    if fraction > 0 and config.replay.groups_of(size) < 1:
        yield f"replay.fraction: {fraction:g} of {plural(size, 'group')} is less than one; use at least {1 / size:.3g}"
    elif fraction > 0 and config.rollout.group_size == 1:
        yield "replay.fraction: replay ranks by reward_std: set rollout.group_size to 2 or more, or leave this out"
    elif config.replay.mode == "fill" and not config.filter.uniform:
        yield "replay.mode: fill replaces filtered groups, and filter.uniform is off; turn it on, or leave this out"


ALGORITHM_RULES: tuple[Rule, ...] = (
    _check_old_policy,
    _check_double_counting,
    _check_unbounded_weights,
    _check_bounds_order,
    _check_credit,
    _check_kl_in_reward,
    _check_group_size,
    _check_streaming,
    _check_minibatches,
    _check_overlong_buffer,
    _check_difficulty,
    _check_governor,
    _check_replay,
)
