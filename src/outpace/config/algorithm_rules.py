"""Combinations of the mathematics that are refused: what would count something twice, be ignored, or diverge.

Every rule takes a settled config (`outpace.config.dependent`): the functions are chosen and their settings filled in.
Like all rules, each yields lines that start with the key to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outpace.config import Config
from outpace.config.methods import chosen_advantage, chosen_surrogate, closed_batch_reasons
from outpace.wording import plural

Rule = Callable[[Config], Iterator[str]]

OTHER_SURROGATES = "a surrogate with the anchor proximal, such as reinforce or ppo"


def _the_anchor_fits(config: Config) -> Iterator[str]:
    anchor, facts = config.algorithm.anchor, chosen_surrogate(config.algorithm).facts
    if anchor not in facts.anchors:
        yield f"algorithm.anchor: {facts.name} cannot take its ratio to {anchor}; use {' or '.join(facts.anchors)}"


def _no_ratio_counts_twice(config: Config) -> Iterator[str]:
    weight, facts = config.correction.weight, chosen_surrogate(config.algorithm).facts
    if config.algorithm.anchor == "rollout" and weight != "none":
        others = [anchor for anchor in facts.anchors if anchor != "rollout"]
        instead = f"the anchor {' or '.join(others)}" if others else OTHER_SURROGATES
        yield (
            f'correction.weight: algorithm.anchor = "rollout" puts the ratio to the sampler into the surrogate, '
            f'"{weight}" would count it twice; use "none", or {instead}'
        )
    if config.kl.place == "reward" and config.kl.estimator == "unbiased":
        yield (
            'kl.estimator: "unbiased" weighs by the ratio to the sampler, as the surrogate does to all rewards, so it '
            'would count twice; use "k1" in the reward'
        )


def _weights_have_a_bound(config: Config) -> Iterator[str]:
    """Where tokens may be older than one version. A mask of tokens bounds what is weighted token by token, one of
    sequences what is weighted by sequence; with the anchor `rollout` masks look at the surrogate's own ratio."""
    age, why, remedy = _oldest(config)
    if age <= 1 or config.algorithm.force:
        return
    correction, masks = config.correction, config.correction.masks or []
    facts = chosen_surrogate(config.algorithm).facts
    ending, remedy = f"without an upper bound, and {why}", f"{remedy}, or set algorithm.force = true"
    if facts.unbounded and not (config.algorithm.anchor == "rollout" and "token" in masks):
        mask = 'add the mask "token", ' if config.algorithm.anchor == "rollout" else ""
        yield f"algorithm.surrogate: {facts.name} has importance weights {ending}; use truncated_is, {mask}{remedy}"
    if correction.weight != "none" and correction.cap == 0 and correction.weight not in masks:
        yield f'correction.cap: 0 leaves weights {ending}; set a cap, add the mask "{correction.weight}", {remedy}'


def _oldest(config: Config) -> tuple[int, str, str]:
    """Age in versions of the oldest token that may be trained, which settings allow it, and how to lower it. A replayed
    group was first trained up to `max_age` versions ago, and its tokens sampled up to `max_lag` before that."""
    max_lag, max_age = config.pacing.max_lag, config.replay.max_age
    if config.replay.fraction == 0 or max_age is None:
        return max_lag, f"pacing.max_lag allows tokens {plural(max_lag, 'version')} old", "set pacing.max_lag to 1"
    age = max_lag + max_age
    why = f"pacing.max_lag and replay.max_age allow tokens {max_lag} + {max_age} versions old"
    return age, why, "lower the two to 1 in all"


BOUNDED = {"token": "tokens", "sequence": "sequences", "geometric": "sequences"}
"""Masks with a lower and an upper bound of what they keep, and what they reject."""


def _masks_keep_what_is_on_policy(config: Config) -> Iterator[str]:
    correction = config.correction
    for name, what in BOUNDED.items():
        low, high = getattr(correction, f"{name}_low"), getattr(correction, f"{name}_high")
        ending = f"would reject {what} on policy, whose ratio is 1; use at"
        if low is not None and low > 1:
            yield f"correction.{name}_low: {low} {ending} most 1"
        if high is not None and high < 1:
            yield f"correction.{name}_high: {high} {ending} least 1"
    if (bound := correction.veto_below) is not None and bound > 1:
        yield f"correction.veto_below: {bound} would reject sequences on policy, whose ratios are 1; use at most 1"


def _bounds_are_in_order(config: Config) -> Iterator[str]:
    correction = config.correction
    pairs = [("floor", correction.floor, "cap", correction.cap or None)]
    for name in BOUNDED:
        low, high = getattr(correction, f"{name}_low"), getattr(correction, f"{name}_high")
        pairs.append((f"{name}_low", low, f"{name}_high", high))
    for low_key, low, high_key, high in pairs:
        if low is not None and high is not None and low >= high:
            yield f"correction.{low_key}: {low} is not below correction.{high_key}, which is {high}; lower it"


def _masks_differ(config: Config) -> Iterator[str]:
    masks = config.correction.masks or []
    for name in masks:
        if masks.count(name) > 1:
            yield f"correction.masks: {name} is there twice; once is enough"


def _credit_fits(config: Config) -> Iterator[str]:
    credit, gamma, facts = config.algorithm.credit, config.algorithm.gamma, chosen_advantage(config.algorithm).facts
    if credit not in facts.credits:
        yield f"algorithm.credit: {facts.name} gives no credit by {credit}; use {' or '.join(facts.credits)}"
    elif credit != "episode" and facts.parts:
        yield f'algorithm.credit: {facts.name} looks at single rewards, which are of whole episodes; use "episode"'
    elif credit == "token" and facts.needs_peers and gamma is not None and gamma < 1:
        turn = '"turn" credit, ' if "turn" in facts.credits else ""
        yield (
            f"algorithm.gamma: the baseline of {facts.name} is one number for all tokens, so discounted returns would "
            f"fall below it early on; leave this out, or use {turn}"
            'the estimator "none" or "reinforce_pp"'
        )


def _the_pull_reaches_the_estimator(config: Config) -> Iterator[str]:
    facts = chosen_advantage(config.algorithm).facts
    if config.kl.place == "reward" and facts.parts:
        yield f'kl.place: {facts.name} looks at single rewards, of which the KL is none; use "loss"'
    if config.kl.place == "reward" and (config.filter.truncated == "mask" or config.filter.longer_than is not None):
        yield 'kl.place: attempts that are not trained on have no KL, but count for the baseline; use "loss"'


def _groups_can_teach(config: Config) -> Iterator[str]:
    size, facts, filters = config.rollout.group_size, chosen_advantage(config.algorithm).facts, config.filter
    if size == 1 and facts.needs_peers:
        yield 'rollout.group_size: 1 leaves nothing to compare with; use 2 or more, or algorithm.advantage = "none"'
    elif size == 1 and filters.uniform:
        yield "filter.uniform: a group of one is always uniform, so all would be filtered; set it to false"
    if filters.min_group is not None and filters.min_group > size:
        attempts = plural(filters.min_group, "attempt")
        yield f"filter.min_group: no group has {attempts}; use at most rollout.group_size, {size}"
    elif filters.min_group == 1 and facts.needs_peers:
        yield f"filter.min_group: {facts.name} has nothing to compare a lone attempt with; use 2 or more"
    if (k := config.algorithm.pass_k) is not None and k > size:
        yield f"algorithm.pass_k: no group has {plural(k, 'attempt')}; use at most rollout.group_size, {size}"


def _streaming_changes_nothing(config: Config) -> Iterator[str]:
    if config.learner.stream:
        for reason in closed_batch_reasons(config):
            yield f"learner.stream: {reason}, which must be closed first; leave this out or set it to false"


def _updates_have_groups(config: Config) -> Iterator[str]:
    updates, groups = config.algorithm.updates, config.pacing.groups_per_step
    if updates > groups:
        yield f"algorithm.updates: a batch has {plural(groups, 'group')} to share out; use at most {groups}"


def _shaping_fits(config: Config) -> Iterator[str]:
    buffer, limit = config.rewards.overlong_buffer, config.rollout.max_tokens
    if limit is not None and buffer > limit:
        yield f"rewards.overlong_buffer: {buffer} tokens do not fit into rollout.max_tokens, {limit}; lower it"


def _difficulty_leaves_tasks(config: Config) -> Iterator[str]:
    easy, hard = config.difficulty.easy_above, config.difficulty.hard_below
    if easy is not None and hard is not None and easy <= hard:
        yield f"difficulty.easy_above: every task is too easy or too hard; set it above difficulty.hard_below, {hard}"
    if config.run.epochs == 1 and (easy is not None or hard is not None):
        key = "hard_below" if easy is None else "easy_above"
        yield f"difficulty.{key}: run.epochs is 1, so no task comes again to be left out; raise that, or leave this out"


def _the_governor_can_act(config: Config) -> Iterator[str]:
    governor, max_lag = config.governor, config.pacing.max_lag
    if not governor.enabled:
        return
    if config.run.deterministic:
        yield "governor.enabled: run.deterministic holds the lag constant; leave this out"
    elif max_lag == 0:
        yield "governor.enabled: pacing.max_lag is 0, so there is no lag to lower; raise that, or leave this out"
    elif governor.min_lag is not None and governor.min_lag >= max_lag:
        yield (
            f"governor.min_lag: {governor.min_lag} is not below pacing.max_lag, so the lag in force could not change; "
            f"use at most {max_lag - 1}, or governor.enabled = false"
        )


def _replay_has_groups(config: Config) -> Iterator[str]:
    fraction, size = config.replay.fraction, config.pacing.groups_per_step
    if fraction > 0 and round(fraction * size, 6) < 1:
        yield f"replay.fraction: {fraction:g} of {plural(size, 'group')} is less than one; use at least {1 / size:.3g}"
    elif fraction > 0 and config.rollout.group_size == 1:
        yield "replay.fraction: a group of one attempt has no spread of rewards to be chosen by; leave this out"


ALGORITHM_RULES: tuple[Rule, ...] = (
    _the_anchor_fits,
    _no_ratio_counts_twice,
    _weights_have_a_bound,
    _masks_keep_what_is_on_policy,
    _bounds_are_in_order,
    _masks_differ,
    _credit_fits,
    _the_pull_reaches_the_estimator,
    _groups_can_teach,
    _streaming_changes_nothing,
    _updates_have_groups,
    _shaping_fits,
    _difficulty_leaves_tasks,
    _the_governor_can_act,
    _replay_has_groups,
)
