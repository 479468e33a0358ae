"""Algorithm settings (loss, advantages, off-policy correction, data selection), and lookup of the configured functions.

Most keys are None until `outpace.config.defaults` fills them in: whether a key applies, and its default, depend on the
configured functions (`outpace.algorithms.registry`). A key that nothing reads is rejected if set, and stays None in a
resolved config. See docs/algorithms.md.

`configured_policy_loss`, `configured_advantage`, `configured_normalizer` and `configured_masks` return the functions
that a config names, bound to the settings they take. They work on resolved and unresolved configs alike: an unset key
has the default of the function that takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import pydantic
from pydantic import Field

from outpace.algorithms import ADVANTAGES, NORMALIZERS, POLICY_LOSSES
from outpace.algorithms.corrections import MASKS, MaskRegistration
from outpace.algorithms.registry import (
    AdvantageRegistration,
    Aggregation,
    Anchor,
    Credit,
    NormalizerRegistration,
    PolicyLossRegistration,
    Registration,
    Registry,
)
from outpace.config.base import Section
from outpace.errors import BadInput, one_line

if TYPE_CHECKING:
    from outpace.config import Config


Mask = Literal["token", "sequence", "geometric", "veto", "opsm", "m2po"]
FunctionName = Literal["none"] | str
"""A function name. `none` is a valid name; it does not mean "not set"."""


class AlgorithmConfig(Section):
    """Policy loss and advantage estimator.

    Which keys apply depends on the configured functions: each takes its own parameters, and a key that none of them
    takes is rejected. A name with a colon is a custom function.
    """

    preset: str | None = None
    """Named recipe, such as `grpo`, `dapo` or `gspo`. It sets the defaults of the algorithm keys that you leave out."""
    advantage: FunctionName | None = None
    """Advantage estimator: none, dr_grpo, grpo, rloo, reinforce_pp, reinforce_pp_baseline, maxrl, opo, gdpo, pass_at_k,
    gae or `package.module:function`. Default: dr_grpo."""
    normalise: FunctionName | None = None
    """Normalization of advantages over the complete batch: none, batch_std, whiten_tokens, whiten_sequences or
    `package.module:function`. Default: set by the estimator, mostly none."""
    credit: Credit | None = None
    """Unit that gets an advantage: the whole episode, each turn (return from that turn on) or each token. Default: set
    by the estimator, mostly episode."""
    gamma: float | None = Field(default=None, ge=0, le=1)
    """Discount factor, for turn and token credit and for gae. Default: 1."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """GAE lambda: lower values trade variance for bias. Default: 1."""
    pass_k: int | None = Field(default=None, ge=1)
    """k of pass_at_k. Default: all attempts of the group."""
    std_epsilon: float | None = Field(default=None, gt=0)
    """Epsilon added to a standard deviation before dividing by it. Default: 1e-4."""
    surrogate: str | None = None
    """Policy loss: reinforce, truncated_is, cispo, importance, ppo, gspo, gmpo, sapo, vespo, dppo or
    `package.module:function`. Default: truncated_is."""
    anchor: Anchor | None = None
    """Old policy in the denominator of the loss's probability ratio: `proximal` is the policy at the start of the step,
    `rollout` the policy that sampled, `approximate` an interpolated estimate of `proximal`. Default: set by the policy
    loss."""
    cap: float | None = Field(default=None, gt=0)
    """truncated_is and cispo: upper truncation of importance weights. Default: 2, and 5 for cispo."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The ratio is clipped at 1 - clip_low (gmpo: its log at -clip_low). Default: set by the policy loss."""
    clip_high: float | None = Field(default=None, ge=0)
    """The ratio is clipped at 1 + clip_high (gmpo: its log at clip_high). Default: set by the policy loss."""
    dual_clip: float | None = Field(default=None, gt=1)
    """ppo: dual clip; bounds the loss of a token with a negative advantage at this multiple of the advantage."""
    tau_positive: float | None = Field(default=None, gt=0)
    """sapo: temperature for positive advantages."""
    tau_negative: float | None = Field(default=None, gt=0)
    """sapo: temperature for negative advantages."""
    divergence: Literal["tv", "kl"] | None = None
    """dppo: divergence from the sampler's probability that decides which tokens are masked."""
    trust_low: float | None = Field(default=None, ge=0)
    """dppo: mask tokens with a negative advantage whose probability fell by more than this."""
    trust_high: float | None = Field(default=None, ge=0)
    """dppo: mask tokens with a positive advantage whose probability rose by more than this."""
    ratio_penalty: float | None = Field(default=None, ge=0)
    """dppo: coefficient of the squared log-ratio to the sampler that is added to the loss."""
    aggregation: Aggregation | None = None
    """Aggregation of token losses over the whole step. Default: set by the policy loss, mostly token_mean."""
    updates: int = Field(default=1, ge=1)
    """Optimizer updates per pass over a batch. More than one needs the complete batch."""
    passes: int = Field(default=1, ge=1)
    """Passes over each batch."""
    entropy: float = 0.0
    """Entropy bonus coefficient; a negative value is a penalty."""
    force: bool = False
    """Allow unbounded importance weights even if pacing.max_lag is above 1."""


class CorrectionConfig(Section):
    """Off-policy correction: importance weights and masks.

    The weight corrects for the distance between the sampler and the old policy (`algorithm.anchor`). With
    `algorithm.anchor = "rollout"` the policy loss contains that ratio already: only masks apply, to the ratio of the
    current policy to the sampler.
    """

    weight: Literal["none", "token", "sequence"] | None = None
    """Multiply the loss by the truncated ratio old policy / sampler, per token or as the product over a sequence.
    Default: token, or none when algorithm.anchor is rollout."""
    cap: float | None = Field(default=None, ge=0)
    """Upper truncation of the weight. 0 disables it, which needs algorithm.force or a mask if pacing.max_lag is above
    1. Default: 2."""
    floor: float | None = Field(default=None, ge=0)
    """Lower truncation of the weight. Default: 0."""
    masks: list[Mask] | None = None
    """Masks that reject tokens or whole sequences by their ratio to the sampler. Rejected tokens still count in the
    loss denominators. Default: set by the policy loss; opsm for truncated_is, none for the others."""
    token_low: float | None = Field(default=None, ge=0)
    """Mask `token`: smallest ratio kept. Default: 0.5."""
    token_high: float | None = Field(default=None, gt=0)
    """Mask `token`: largest ratio kept. Default: 5."""
    sequence_low: float | None = Field(default=None, ge=0)
    """Mask `sequence`: smallest product of ratios kept. Default: 0.5."""
    sequence_high: float | None = Field(default=None, gt=0)
    """Mask `sequence`: largest product of ratios kept. Default: 2."""
    geometric_low: float | None = Field(default=None, ge=0)
    """Mask `geometric`: smallest geometric mean of ratios kept. Default: 0.99."""
    geometric_high: float | None = Field(default=None, gt=0)
    """Mask `geometric`: largest geometric mean of ratios kept. Default: 1.01."""
    veto_below: float | None = Field(default=None, gt=0)
    """Mask `veto`: reject sequences in which any ratio is below this. Default: 1e-4."""
    opsm_delta: float | None = Field(default=None, ge=0)
    """Mask `opsm`: reject sequences with a negative advantage whose mean log(sampler / current) is above this.
    Default: 0.1."""
    m2po_limit: float | None = Field(default=None, gt=0)
    """Mask `m2po`: reject the tokens with the largest squared log-ratios of the batch until the mean of the rest is
    below this. Default: 0.04."""


class KlConfig(Section):
    """KL penalty to a reference policy.

    The other keys apply only if `kl.coefficient` is above 0.
    """

    coefficient: float = Field(default=0.0, ge=0)
    """KL penalty coefficient. 0 disables the penalty; no reference model is kept."""
    estimator: Literal["k1", "k2", "k3", "unbiased"] | None = None
    """KL estimator. Default: k3 in the loss, k1 in the reward."""
    place: Literal["loss", "reward"] | None = None
    """Where the penalty is applied. Default: loss."""
    sync_every: int | None = Field(default=None, ge=0)
    """Interval in steps at which the reference is replaced by the current policy; 0 keeps the initial policy.
    Default: 0."""


class CriticConfig(Section):
    """Value head, for algorithm.advantage = "gae".

    The value head is trained with the policy. These keys apply only to an estimator that has a critic.
    """

    lr: float | None = Field(default=None, gt=0)
    """Learning rate of the value head. Default: ten times learner.lr."""
    coefficient: float | None = Field(default=None, gt=0)
    """Coefficient of the value loss. Default: 0.5."""
    clip: float | None = Field(default=None, gt=0)
    """Value clipping range around the values at the start of the step. Default: 0.2."""
    shared: bool | None = None
    """Backpropagate the value loss into the model, not only into the value head. Default: false."""


class FilterConfig(Section):
    """Filtering of groups and attempts.

    A group that is filtered out or fails is replaced by the next task.
    """

    uniform: bool | None = None
    """Filter out and replace groups whose rewards are all equal. Default: on if the estimator compares the attempts of
    a group, because such groups have zero advantage."""
    tolerance: float | None = Field(default=None, ge=0)
    """Rewards that differ by less than this count as equal. Default: 1e-6."""
    min_group: int | None = Field(default=None, ge=1)
    """A group with fewer remaining attempts than this fails. Default: 2 if the estimator compares attempts, else 1."""
    truncated: Literal["train", "mask"] = "train"
    """Train on attempts that hit the token limit, or mask them. Masked attempts still count for the baseline."""
    longer_than: int | None = Field(default=None, ge=1)
    """Do not train on attempts with more sampled tokens than this."""


class DifficultyConfig(Section):
    """Skipping tasks that are too easy or too hard."""

    easy_above: float | None = None
    """Skip tasks whose mean reward was at least this for `rest_epochs` epochs."""
    hard_below: float | None = None
    """Skip tasks whose mean reward was at most this for `rest_epochs` epochs."""
    rest_epochs: int | None = Field(default=None, ge=1)
    """Number of epochs to skip a task that was too easy or too hard. Default: 1."""


class ReplayConfig(Section):
    """Replay of groups that were already trained on.

    Old-policy logprobs of replayed groups are recomputed. Checkpoints keep the replay pool, so a resumed run continues
    with it.
    """

    fraction: float = Field(default=0.0, ge=0, lt=1)
    """Replayed groups added to each batch, as a fraction of pacing.groups_per_step. Replayed groups may exceed
    pacing.max_lag."""
    max_age: int | None = Field(default=None, ge=1)
    """Maximum age of a replayed group, in versions since it was first trained on. Default: 8."""
    times: int | None = Field(default=None, ge=1)
    """Maximum replays of one group. Default: 1."""


class GovernorConfig(Section):
    """Adaptive staleness limit: lower the lag while data is too far off-policy.

    The effective max lag follows the effective sample size and the mismatch KL, between `governor.min_lag` and
    `pacing.max_lag`. It decides which groups are admitted, and never changes a batch in progress.
    """

    enabled: bool | None = None
    """Lower the effective max lag when the data is too far off-policy, and raise it again later. Default: on, unless
    run.deterministic is set or pacing.max_lag is 0."""
    ess_min: float | None = Field(default=None, ge=0, le=1)
    """Lower the lag by one if the effective sample size (as a fraction of tokens) is below this. Default: 0.5."""
    kl_max: float | None = Field(default=None, gt=0)
    """Lower the lag by one if the mismatch KL per token is above this. Default: 0.1."""
    patience: int | None = Field(default=None, ge=1)
    """Raise the lag by one after this many good steps in a row. Default: 5."""
    min_lag: int | None = Field(default=None, ge=0)
    """The lag is never lowered below this. Default: 0."""


DEFAULT_POLICY_LOSS = "truncated_is"
DEFAULT_ADVANTAGE = "dr_grpo"

CHOICES = ("preset", "surrogate", "advantage", "normalise", "credit", "anchor", "aggregation")
PARAMETERS = tuple(
    key for key, info in AlgorithmConfig.model_fields.items() if info.default is None and key not in CHOICES
)
"""Keys of `[algorithm]` that a function may take as keyword-only arguments."""

T = TypeVar("T", bound=Registration, covariant=True)
F = TypeVar("F", bound=Registration)


@dataclass(frozen=True)
class ConfiguredFunction(Generic[T]):
    """A registered function bound to the keyword arguments that the config sets."""

    registration: T
    settings: dict[str, Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.registration.function(*arguments, **self.settings)


def configured_policy_loss(config: AlgorithmConfig) -> ConfiguredFunction[PolicyLossRegistration]:
    return _bind(_lookup(POLICY_LOSSES, config.surrogate or DEFAULT_POLICY_LOSS), config)


def configured_advantage(config: AlgorithmConfig) -> ConfiguredFunction[AdvantageRegistration]:
    return _bind(_lookup(ADVANTAGES, config.advantage or DEFAULT_ADVANTAGE), config)


def configured_normalizer(config: AlgorithmConfig) -> ConfiguredFunction[NormalizerRegistration]:
    return _bind(_lookup(NORMALIZERS, config.normalise or configured_advantage(config).registration.normalise), config)


def configured_masks(config: CorrectionConfig) -> dict[str, ConfiguredFunction[MaskRegistration]]:
    """Return every configured mask by name, both per-sequence and whole-batch masks: see `registration.scope`."""
    return {name: _bind(MASKS[name], config) for name in config.masks or []}


def _bind(registration: F, config: AlgorithmConfig | CorrectionConfig) -> ConfiguredFunction[F]:
    given = {name: getattr(config, name) for name in registration.parameters}
    return ConfiguredFunction(
        registration, {name: registration.parameters[name] if value is None else value for name, value in given.items()}
    )


def _lookup(registry: Registry, name: str) -> Any:
    """Return the registration of `name`, after checking a user's own. The name may hold line breaks, so the error is
    reduced to one line."""
    try:
        registration = registry.find(name)
    except BadInput as error:
        raise BadInput(one_line(error, limit=600)) from error
    if name not in registry.built_in:
        _check_parameters(registration, registry.setting)
        for problem in _decorator_problems(registration):
            raise BadInput(f"{registry.setting}: {registration.name} {problem}")
    return registration


def _check_parameters(registration: Registration, setting: str) -> None:
    """Check that a user's function takes only existing settings, and that its defaults are valid values of them."""
    for name, default in registration.parameters.items():
        if name not in PARAMETERS:
            raise BadInput(
                f"{setting}: {registration.name} takes {name}, which is not a setting of [algorithm]; "
                f"rename it to one of {', '.join(PARAMETERS)}, or make it a constant"
            )
        try:
            AlgorithmConfig.model_validate({name: default})
        except pydantic.ValidationError:
            raise BadInput(
                f"{setting}: {registration.name} has the default {name} = {one_line(repr(default), limit=60)}, "
                f"which is not a valid value of algorithm.{name}; change the default"
            ) from None


def _decorator_problems(registration: Registration) -> Iterator[str]:
    """Yield what is wrong with the arguments of a user's decorator, which does not check types when it runs."""
    if isinstance(registration, PolicyLossRegistration):
        yield from _name_problems("anchors", registration.anchors, get_args(Anchor), needed=True)
        yield from _name_problems("masks", registration.masks, tuple(MASKS))
        yield from _name_problems("aggregation", (registration.aggregation,), get_args(Aggregation))
    if isinstance(registration, AdvantageRegistration):
        yield from _name_problems("credits", registration.credits, get_args(Credit), needed=True)
        if "token" in registration.credits and not registration.additive:
            yield (
                'lists "token" in credits, which requires an advantage of the form return minus baseline; '
                'set additive=True if it has this form, or remove "token"'
            )


def _name_problems(argument: str, given: Any, known: tuple[str, ...], *, needed: bool = False) -> Iterator[str]:
    if not isinstance(given, tuple | list):
        yield f"has {argument} = {one_line(repr(given), limit=60)}; give a tuple of {', '.join(known)}"
        return
    if needed and not given:
        yield f"has an empty {argument}; give at least one of {', '.join(known)}"
    for name in given:
        if name not in known:
            yield f"has an unknown value in {argument}: {one_line(repr(name), limit=60)}; use {', '.join(known)}"


def full_batch_reasons(config: Config) -> Iterator[str]:
    """Yield the reasons why the learner needs the complete batch before it can start; none if it can stream."""
    algorithm = config.algorithm
    if (estimator := configured_advantage(algorithm).registration).critic:
        yield f"the advantage estimator {estimator.name} needs the values of the whole batch"
    if (normalizer := configured_normalizer(algorithm).registration) is not NORMALIZERS.find("none"):
        yield f"the normalizer {normalizer.name} needs statistics of the whole batch"
    if algorithm.updates * algorithm.passes > 1:
        yield "several updates per batch need the whole batch"
    for name, mask in configured_masks(config.correction).items():
        if mask.registration.scope == "batch":
            yield f"the mask {name} needs the tokens of the whole batch"
    if config.kl.coefficient > 0 and config.kl.place == "reward":
        yield 'kl.place = "reward" changes rewards before advantages are computed'
