"""Algorithm settings (loss, advantages, off-policy correction, data selection), and lookup of the configured functions.

`[policy_loss]`, `[advantage]` and `[correction]` choose functions of `outpace.algorithms`. Every function declares its
own settings, as keyword-only arguments with types and defaults: choosing it adds them to the section. `settings_model`
builds the model that validates them, so a key that no chosen function takes is rejected, and users' functions work like
built-in ones. The values are in `model_extra` of the section. See docs/algorithms.md.

`configured_policy_loss`, `configured_advantage`, `configured_normalizer` and `configured_masks` return the functions
that a config names, bound to their settings. They work on resolved and unresolved configs alike: an unset key has the
default of the function that takes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import floor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import pydantic
from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo

from outpace.algorithms import ADVANTAGES, MASKS, NORMALIZERS, POLICY_LOSSES
from outpace.algorithms.corrections import correction_weights
from outpace.algorithms.registry import (
    AdvantageRegistration,
    Aggregation,
    ConfiguredFunction,
    Credit,
    FunctionRegistry,
    MaskRegistration,
    NormalizerRegistration,
    OldPolicy,
    PolicyLossRegistration,
    Registration,
    Scope,
)
from outpace.config.base import OpenedBy, Section, first_error
from outpace.config.other_libraries import equivalent_setting
from outpace.errors import BadInput, one_line
from outpace.runtime.references import closest_names

if TYPE_CHECKING:
    from outpace.config import Config


FunctionName = Literal["none"] | str
"""A function name. `none` is a valid name; it does not mean "not set"."""


class AlgorithmConfig(Section):
    """Preset, updates per batch, entropy bonus."""

    preset: str | None = None
    """Named recipe, such as `grpo`, `dapo` or `gspo`. It sets the defaults of the algorithm keys that you leave out."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per pass over a batch. More than one needs the complete batch."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over each batch."""
    entropy_coefficient: float = 0.0
    """Entropy bonus coefficient; a negative value is a penalty."""
    allow_unbounded: bool = False
    """Allow unbounded importance weights even if pacing.max_lag is above 1."""


class ChoiceSection(Section):
    """A section that chooses functions. The settings of the chosen functions are further keys (`model_extra`)."""

    model_config = ConfigDict(extra="allow")


class PolicyLossConfig(ChoiceSection):
    """Policy loss.

    The keys below the first three are settings of single losses: a key that the chosen loss does not take is rejected.
    """

    name: str = "truncated_is"
    """reinforce, truncated_is, cispo, importance, ppo, gspo, gmpo, sapo, vespo, dppo or `package.module:function`."""
    old_policy: OldPolicy | None = None
    """Old policy in the denominator of the loss's probability ratio: `recomputed` is the policy at the start of the
    step, `rollout` the policy that sampled, `interpolated` an estimate of `recomputed` between sampler and current
    policy. Default: set by the policy loss."""
    aggregation: Aggregation | None = None
    """Aggregation of token losses over the whole step. Default: set by the policy loss, mostly token_mean."""


class AdvantageConfig(ChoiceSection):
    """Advantage estimator.

    The keys below the first four are settings of single estimators or normalizers: a key that the chosen ones do not
    take is rejected.
    """

    name: str = "dr_grpo"
    """none, dr_grpo, grpo, rloo, reinforce_pp, reinforce_pp_baseline, maxrl, opo, gdpo, pass_at_k, gae or
    `package.module:function`."""
    normalizer: FunctionName | None = None
    """Normalization of advantages over the complete batch: none, batch_std, whiten_tokens, whiten_sequences or
    `package.module:function`. Default: set by the estimator, mostly none."""
    credit: Credit | None = None
    """Unit that gets an advantage: the whole episode, each turn (return from that turn on) or each token. Default: set
    by the estimator, mostly episode."""
    gamma: float | None = Field(default=None, ge=0, le=1)
    """Discount factor, for turn and token credit and for gae. Default: 1."""


class CorrectionConfig(ChoiceSection):
    """Off-policy correction: importance weights and masks.

    The weight corrects for the distance between the sampler and the old policy (`policy_loss.old_policy`). With
    `policy_loss.old_policy = "rollout"` the policy loss contains that ratio already: only masks apply, to the ratio of
    the current policy to the sampler. The keys below the first two are settings of the weight or of single masks.
    """

    weight: Literal["none", "token", "sequence"] | None = None
    """Multiply the loss by the truncated ratio old policy / sampler, per token or as the product over a sequence.
    Default: token, or none when policy_loss.old_policy is rollout."""
    masks: list[FunctionName] | None = None
    """Masks that reject tokens or whole sequences by their ratio to the sampler: token, sequence, geometric, veto,
    opsm, m2po or `package.module:function`. Rejected tokens still count in the loss denominators. Default: set by the
    policy loss; opsm for truncated_is, none for the others."""


class KlConfig(Section):
    """KL penalty to a reference policy.

    The other keys apply only if `kl.coefficient` is above 0.
    """

    coefficient: float = Field(default=0.0, ge=0)
    """KL penalty coefficient. 0 disables the penalty; no reference model is kept."""
    estimator: Annotated[Literal["k1", "k2", "k3", "unbiased"] | None, OpenedBy("coefficient")] = None
    """KL estimator. Default: k3 in the loss, k1 in the reward."""
    place: Annotated[Literal["loss", "reward"], OpenedBy("coefficient")] = "loss"
    """Where the penalty is applied."""
    sync_every: Annotated[int, OpenedBy("coefficient")] = Field(default=0, ge=0)
    """Interval in steps at which the reference is replaced by the current policy; 0 keeps the initial policy."""

    @property
    def in_loss(self) -> bool:
        return self.coefficient > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coefficient > 0 and self.place == "reward"


class CriticConfig(Section):
    """Value head, for advantage.name = "gae".

    The value head is trained with the policy. These keys apply only to an estimator that has a critic.
    """

    lr: float | None = Field(default=None, gt=0)
    """Learning rate of the value head. Default: ten times learner.lr."""
    coefficient: float = Field(default=0.5, gt=0)
    """Coefficient of the value loss."""
    clip: float = Field(default=0.2, gt=0)
    """Value clipping range around the values at the start of the step."""
    shared: bool = False
    """Backpropagate the value loss into the model, not only into the value head."""


class FilterConfig(Section):
    """Filtering of groups and attempts.

    A group that is filtered out or fails is replaced by the next task.
    """

    uniform: bool | None = None
    """Filter out and replace groups whose rewards are all equal. Default: on if the estimator compares the attempts of
    a group, because such groups have zero advantage."""
    tolerance: Annotated[float, OpenedBy("uniform")] = Field(default=1e-6, ge=0)
    """Rewards that differ by less than this count as equal."""
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
    rest_epochs: Annotated[int, OpenedBy("easy_above", "hard_below")] = Field(default=1, ge=1)
    """Number of epochs to skip a task that was too easy or too hard."""

    @property
    def is_on(self) -> bool:
        return self.easy_above is not None or self.hard_below is not None


class ReplayConfig(Section):
    """Replay of groups that were already trained on.

    Old-policy logprobs of replayed groups are recomputed. Checkpoints keep the replay pool, so a resumed run continues
    with it.
    """

    fraction: float = Field(default=0.0, ge=0, lt=1)
    """Maximum replayed groups of each batch, as a fraction of pacing.groups_per_step. Replayed groups may exceed
    pacing.max_lag."""
    mode: Annotated[Literal["add", "fill"], OpenedBy("fraction")] = "add"
    """`add`: replayed groups are added to the pacing.groups_per_step groups of each batch. `fill`: they take the places
    of filtered groups, which would otherwise go to the next tasks; the batch size stays the same."""
    max_age: Annotated[int, OpenedBy("fraction")] = Field(default=8, ge=1)
    """Maximum age of a replayed group, in versions since it was first trained on."""
    times: Annotated[int, OpenedBy("fraction")] = Field(default=1, ge=1)
    """Maximum replays of one group."""

    def groups_of(self, batch: int) -> int:
        """Return how many groups a batch of this size may replay."""
        # Rounded, so that 0.29 * 100 = 28.999999999999996 does not lose a group.
        return min(floor(round(self.fraction * batch, 6)), batch - 1 if self.mode == "fill" else batch)


class RerollConfig(Section):
    """Later visits of tasks that no attempt solved.

    A re-roll is a prompt visit of its own. Checkpoints keep the tasks that wait for one. A run does not wait for them:
    after the last new task, no re-roll starts.
    """

    max_times: int = Field(default=0, ge=0, le=1000)
    """Maximum re-rolls of one visit whose attempts all failed or got a reward of at most `solved_above`; 0 disables
    re-rolls."""
    after_steps: Annotated[int, OpenedBy("max_times")] = Field(default=8, ge=1)
    """Minimum number of versions between the policy that a visit starts with and the one that its re-roll starts
    with."""
    from_step: Annotated[int, OpenedBy("max_times")] = Field(default=0, ge=0)
    """No re-roll starts with an earlier version than this."""
    max_groups: Annotated[int | None, OpenedBy("max_times")] = Field(default=None, ge=1)
    """Maximum re-rolls that start with the same version. Default: no limit."""
    solved_above: Annotated[float, OpenedBy("max_times")] = 0.0
    """A task counts as solved if the reward of at least one attempt is above this."""
    max_waiting: Annotated[int, OpenedBy("max_times")] = Field(default=4096, ge=1)
    """Maximum tasks that wait for a re-roll; beyond it, those that have waited longest are dropped."""


class GovernorConfig(Section):
    """Adaptive staleness limit: lower the lag while data is too far off-policy.

    The effective max lag follows the effective sample size and the mismatch KL, between `governor.min_lag` and
    `pacing.max_lag`. It decides which groups are admitted, and never changes a batch in progress.
    """

    enabled: bool | None = None
    """Lower the effective max lag when the data is too far off-policy, and raise it again later. Default: on, unless
    run.deterministic is set or pacing.max_lag is 0."""
    ess_min: Annotated[float, OpenedBy("enabled")] = Field(default=0.5, ge=0, le=1)
    """Lower the lag by one if the effective sample size (as a fraction of tokens) is below this."""
    kl_max: Annotated[float, OpenedBy("enabled")] = Field(default=0.1, gt=0)
    """Lower the lag by one if the mismatch KL per token is above this."""
    patience: Annotated[int, OpenedBy("enabled")] = Field(default=5, ge=1)
    """Raise the lag by one after this many good steps in a row."""
    min_lag: Annotated[int, OpenedBy("enabled")] = Field(default=0, ge=0)
    """The lag is never lowered below this."""


F = TypeVar("F", bound=Registration)
Function = Callable[..., Any]


# ------------------------------------------------------------------------------------------------- settings models


@cache
def settings_model(*functions: Function) -> type[Section]:
    """Return the model of the settings that these functions take: one field per keyword-only argument."""
    fields = {name: field for function in functions for name, field in _fields(function).items()}
    return pydantic.create_model("FunctionSettings", __base__=_FunctionSettings, **fields)


class _FunctionSettings(Section):
    """Disables the search for field docstrings, which takes seconds in a process that has imported transformers."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def _fields(function: Function) -> dict[str, Any]:
    """Return type and default of each keyword-only argument."""
    arguments = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {p.name: (_annotation(function, p), p.default) for p in arguments}


def _annotation(function: Function, argument: inspect.Parameter) -> Any:
    """Return the type of one argument: its annotation, or the type of its default if that cannot be evaluated.

    Annotations are evaluated one by one: others may only exist for type checkers, such as Tensor."""
    from_default = Any if argument.default is None else type(argument.default)
    if argument.annotation is argument.empty:
        return from_default
    holder = SimpleNamespace(__annotations__={argument.name: argument.annotation})
    try:
        namespace = getattr(function, "__globals__", {})
        return get_type_hints(holder, globalns=namespace, include_extras=True)[argument.name]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return from_default


def open_settings(name: str, section: ChoiceSection, chosen: str, functions: tuple[Function, ...]) -> dict[str, Any]:
    """Validate the settings of the chosen functions in a section, and return them with their defaults.

    `chosen` describes the choice in errors. None values are left out, because TOML cannot hold them."""
    model = settings_model(*functions)
    given = {key: value for key, value in (section.model_extra or {}).items() if key in model.model_fields}
    for key in given:
        if given[key] is None and (default := model.model_fields[key].default) is not None:
            raise BadInput(f"{name}.{key}: cannot be none for {chosen}; leave it out for the default, {default}")
    try:
        values = dict(model.model_validate(given))
    except pydantic.ValidationError as error:
        raise BadInput(f"{first_error(error, name)} (with {chosen})") from None
    return {key: value for key, value in values.items() if value is not None}


def unread_settings(
    name: str, section: ChoiceSection, chosen: str, functions: tuple[Function, ...]
) -> Iterator[tuple[str, str]]:
    """Yield the settings in a section that none of the chosen functions takes, each with the reason."""
    fields, known = settings_model(*functions).model_fields, function_parameters(name)
    takes = f"{chosen} takes {', '.join(fields) or 'no settings of its own'}"
    for key in section.model_extra or {}:
        if key in fields:
            continue
        if key in known:
            yield key, f"this is a setting of {', '.join(known[key])}; {takes}"
        elif remedy := equivalent_setting(f"{name}.{key}"):
            yield key, f"no such setting; {remedy}"
        else:
            close = closest_names(key, {*type(section).model_fields, *known, *fields})
            yield key, f"no such setting; did you mean {name}.{close[0]}?" if close else f"no such setting; {takes}"


@cache
def function_parameters(section: str) -> Mapping[str, Mapping[str, FieldInfo]]:
    """Return the settings of all built-in functions of a section: by key, then by function."""
    found: dict[str, dict[str, FieldInfo]] = {}
    for label, function in _built_in_functions(section):
        for key, info in settings_model(function).model_fields.items():
            found.setdefault(key, {})[label] = info
    return found


def _built_in_functions(section: str) -> Iterator[tuple[str, Function]]:
    if section == "correction":
        yield "the weight", correction_weights
    for registry in (POLICY_LOSSES, ADVANTAGES, NORMALIZERS, MASKS):
        if registry.setting.partition(".")[0] == section:
            label = "the mask " if registry is MASKS else ""
            yield from ((f"{label}{name}", registration.function) for name, registration in registry.built_in.items())


# ---------------------------------------------------------------------------------------------- configured functions


def configured_policy_loss(config: PolicyLossConfig) -> ConfiguredFunction[PolicyLossRegistration]:
    return _bind(_lookup(POLICY_LOSSES, config.name), config)


def configured_advantage(config: AdvantageConfig) -> ConfiguredFunction[AdvantageRegistration]:
    return _bind(_lookup(ADVANTAGES, config.name), config)


def configured_normalizer(config: AdvantageConfig) -> ConfiguredFunction[NormalizerRegistration]:
    name = config.normalizer or configured_advantage(config).registration.normalizer
    return _bind(_lookup(NORMALIZERS, name), config)


def configured_masks(config: CorrectionConfig) -> dict[str, ConfiguredFunction[MaskRegistration]]:
    """Return every configured mask by name, both per-sequence and whole-batch masks: see `registration.scope`."""
    return {name: _bind(_lookup(MASKS, name), config) for name in config.masks or []}


def weight_settings(config: CorrectionConfig) -> dict[str, float]:
    """Return the settings of the correction weight."""
    extra = config.model_extra or {}
    return {key: extra[key] for key in settings_model(correction_weights).model_fields if key in extra}


def _bind(registration: F, config: ChoiceSection) -> ConfiguredFunction[F]:
    extra = config.model_extra or {}
    return ConfiguredFunction(
        registration, {name: extra.get(name, default) for name, default in registration.parameters.items()}
    )


def _lookup(registry: FunctionRegistry, name: str) -> Any:
    """Return the registration of `name`, after checking a user's own. The name may hold line breaks, so the error is
    reduced to one line."""
    try:
        registration = registry.find(name)
    except BadInput as error:
        raise BadInput(one_line(error, limit=600)) from error
    if name not in registry.built_in:
        for problem in _user_function_problems(registration, registry.setting.partition(".")[0]):
            raise BadInput(f"{registry.setting}: {registration.name} {problem}")
    return registration


def _user_function_problems(registration: Registration, section: str) -> Iterator[str]:
    """Yield the problems of a user's function: of its settings, or of its decorator's arguments, whose types the
    decorator itself does not check."""
    model, reserved = settings_model(registration.function), SECTION_KEYS[section]
    try:
        for key, default in registration.parameters.items():
            model.model_validate({key: default})
            if key in reserved:
                yield f"takes {key}, which is a setting of [{section}] already; rename the argument"
    except pydantic.ValidationError as error:
        yield f"has an invalid default: {first_error(error, registration.name)}"
    if isinstance(registration, PolicyLossRegistration):
        yield from _name_problems("old_policies", registration.old_policies, get_args(OldPolicy), needed=True)
        yield from _name_problems("masks", registration.masks, tuple(MASKS.names()))
        yield from _name_problems("aggregation", (registration.aggregation,), get_args(Aggregation))
    if isinstance(registration, MaskRegistration):
        yield from _name_problems("scope", (registration.scope,), get_args(Scope))
    if isinstance(registration, AdvantageRegistration):
        yield from _name_problems("credits", registration.credits, get_args(Credit), needed=True)
        if "token" in registration.credits and not registration.additive:
            yield (
                'lists "token" in credits, which requires an advantage of the form return minus baseline; '
                'set additive=True if it has this form, or remove "token"'
            )


SECTION_KEYS = {
    "policy_loss": PolicyLossConfig.model_fields,
    "advantage": AdvantageConfig.model_fields,
    "correction": CorrectionConfig.model_fields,
}


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
    if (estimator := configured_advantage(config.advantage).registration).critic:
        yield f"the advantage estimator {estimator.name} needs the values of the whole batch"
    if (normalizer := configured_normalizer(config.advantage).registration) is not NORMALIZERS.find("none"):
        yield f"the normalizer {normalizer.name} needs statistics of the whole batch"
    if algorithm.minibatches * algorithm.epochs_per_batch > 1:
        yield "several updates per batch need the whole batch"
    for name, mask in configured_masks(config.correction).items():
        if mask.registration.scope == "batch":
            yield f"the mask {name} needs the tokens of the whole batch"
    if config.kl.in_reward:
        yield 'kl.place = "reward" changes rewards before advantages are computed'
