"""The settings of the mathematics: what is learned from which tokens, how strongly, and what is done about staleness.

Most keys are None until they are resolved (`outpace.config.dependent`): whether they mean anything, and what they
default to, depends on the functions chosen (`outpace.algorithms.registry`). A key that nothing would read is refused,
and stays None in a resolved config. See docs/algorithms.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outpace.algorithms.registry import Aggregation, Anchor, Credit
from outpace.config.section import Section

Mask = Literal["token", "sequence", "geometric", "veto", "opsm", "m2po"]
Name = Literal["none"] | str
"""The name of a function, where `none` is one of the names and not a setting left out."""


class AlgorithmConfig(Section):
    """The policy loss and the advantage estimator."""

    preset: str | None = None
    """A known recipe by name, such as `grpo`, `dapo` or `gspo`: it fills every key of this kind that you leave out."""
    advantage: Name | None = None
    """How rewards become advantages: a built-in estimator or `package.module:function`. Default: dr_grpo."""
    normalise: Name | None = None
    """What is done to the advantages of a closed batch: none, batch_std, whiten_tokens, whiten_sequences, or yours.
    Default: the estimator's own, mostly none."""
    credit: Credit | None = None
    """What an advantage is for: the whole episode, each turn (return from there on), or each token. Default: the
    estimator's own, mostly episode."""
    gamma: float | None = Field(default=None, ge=0, le=1)
    """Discount of later rewards, for turn and token credit and for gae. Default: 1."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """gae's trade of variance for bias. Default: 1."""
    pass_k: int | None = Field(default=None, ge=1)
    """The k of pass_at_k; all attempts of the group when absent."""
    std_epsilon: float | None = Field(default=None, gt=0)
    """Added to a standard deviation before dividing by it. Default: 1e-4."""
    surrogate: str | None = None
    """The policy loss: a built-in surrogate or `package.module:function`. Default: truncated_is."""
    anchor: Anchor | None = None
    """What the surrogate's ratio is taken to: the policy at the start of the step, the one that sampled, or a guess at
    the former. Default: the surrogate's own."""
    cap: float | None = Field(default=None, gt=0)
    """truncated_is and cispo: importance weights are truncated here. Default: 2, and 5 for cispo."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The ratio is clipped at 1 - clip_low (gmpo: its logarithm at -clip_low). Default: the surrogate's own."""
    clip_high: float | None = Field(default=None, ge=0)
    """The ratio is clipped at 1 + clip_high (gmpo: its logarithm at clip_high). Default: the surrogate's own."""
    dual_clip: float | None = Field(default=None, gt=1)
    """ppo: the loss of a token with a negative advantage is at most this many times that advantage."""
    tau_positive: float | None = Field(default=None, gt=0)
    """sapo's temperature where the advantage is positive."""
    tau_negative: float | None = Field(default=None, gt=0)
    """sapo's temperature where the advantage is negative."""
    divergence: Literal["tv", "kl"] | None = None
    """dppo: the distance to the sampler's probability that decides which tokens are masked."""
    trust_low: float | None = Field(default=None, ge=0)
    """dppo: tokens whose probability fell by more than this are masked where the advantage is negative."""
    trust_high: float | None = Field(default=None, ge=0)
    """dppo: tokens whose probability rose by more than this are masked where the advantage is positive."""
    ratio_penalty: float | None = Field(default=None, ge=0)
    """dppo: coefficient of a squared log-ratio to the sampler, added to the loss."""
    aggregation: Aggregation | None = None
    """How token losses of the whole step become one. Default: the surrogate's own, mostly token_mean."""
    updates: int = Field(default=1, ge=1)
    """Optimizer updates per pass over a batch; more than one needs the closed batch."""
    passes: int = Field(default=1, ge=1)
    """Passes over each batch."""
    entropy: float = 0.0
    """Coefficient of an entropy bonus; negative is a penalty."""
    force: bool = False
    """Allow importance weights without a bound although max_lag is above 1."""


class CorrectionConfig(Section):
    """Off-policy correction: importance weights and masks."""

    weight: Literal["none", "token", "sequence"] | None = None
    """Multiply the loss by anchor / sampler, per token or as the product over a sequence, truncated. Default: token,
    or none when algorithm.anchor is rollout."""
    cap: float | None = Field(default=None, ge=0)
    """Upper truncation of that weight; 0: none, which needs algorithm.force or a mask above max_lag 1. Default: 2."""
    floor: float | None = Field(default=None, ge=0)
    """Lower truncation of that weight. Default: 0."""
    masks: list[Mask] | None = None
    """What is rejected, tokens or whole sequences by their ratio to the sampler; denominators still count all tokens.
    Default: the surrogate's own, opsm for truncated_is and nothing for the others."""
    token_low: float | None = Field(default=None, ge=0)
    """mask `token`: smallest ratio kept. Default: 0.5."""
    token_high: float | None = Field(default=None, gt=0)
    """mask `token`: largest ratio kept. Default: 5."""
    sequence_low: float | None = Field(default=None, ge=0)
    """mask `sequence`: smallest product of ratios kept. Default: 0.5."""
    sequence_high: float | None = Field(default=None, gt=0)
    """mask `sequence`: largest product of ratios kept. Default: 2."""
    geometric_low: float | None = Field(default=None, ge=0)
    """mask `geometric`: smallest geometric mean of ratios kept. Default: 0.99."""
    geometric_high: float | None = Field(default=None, gt=0)
    """mask `geometric`: largest geometric mean of ratios kept. Default: 1.01."""
    veto_below: float | None = Field(default=None, gt=0)
    """mask `veto`: a sequence with any ratio below this is rejected. Default: 1e-4."""
    opsm_delta: float | None = Field(default=None, ge=0)
    """mask `opsm`: sequences of negative advantage are rejected when mean log(sampler / current) is above this.
    Default: 0.1."""
    m2po_limit: float | None = Field(default=None, gt=0)
    """mask `m2po`: the largest squared log-ratios of the batch are rejected until the rest have a mean below this.
    Default: 0.04."""


class KlConfig(Section):
    """The KL penalty to a reference policy."""

    coefficient: float = Field(default=0.0, ge=0)
    """Strength of the pull to the reference policy; 0: there is none, and no reference is kept."""
    estimator: Literal["k1", "k2", "k3", "unbiased"] | None = None
    """Which estimate of the divergence. Default: k3 in the loss, k1 in the reward."""
    place: Literal["loss", "reward"] | None = None
    """Where it acts. Default: loss."""
    sync_every: int | None = Field(default=None, ge=0)
    """The reference becomes the current policy after every so many steps; 0: it stays the first one. Default: 0."""


class CriticConfig(Section):
    """The value head, for algorithm.advantage = "gae"."""

    lr: float | None = Field(default=None, gt=0)
    """Learning rate of the value head. Default: ten times learner.lr."""
    coefficient: float | None = Field(default=None, gt=0)
    """Weight of the value loss beside the policy loss. Default: 0.5."""
    clip: float | None = Field(default=None, gt=0)
    """Values may move this far from what they were at the start of the step. Default: 0.2."""
    shared: bool | None = None
    """Let the value loss shape the model itself too, not only the head. Default: false."""


class FilterConfig(Section):
    """Which groups and attempts are trained on."""

    uniform: bool | None = None
    """Filter and replace groups whose rewards are all equal. Default: on where the estimator compares attempts with one
    another, as such groups teach nothing then."""
    tolerance: float | None = Field(default=None, ge=0)
    """Rewards closer than this count as equal. Default: 1e-6."""
    min_group: int | None = Field(default=None, ge=1)
    """A group with fewer attempts left after failures fails. Default: 2 where attempts are compared, 1 otherwise."""
    truncated: Literal["train", "mask"] = "train"
    """Whether attempts that ran into the token limit are trained on; masked ones still count for the baseline."""
    longer_than: int | None = Field(default=None, ge=1)
    """Attempts with more sampled tokens than this are not trained on."""


class DifficultyConfig(Section):
    """Skipping tasks that are too easy or too hard."""

    easy_above: float | None = None
    """Tasks whose attempts had a mean reward of at least this are left out for a while."""
    hard_below: float | None = None
    """Tasks whose attempts had a mean reward of at most this are left out for a while."""
    rest_epochs: int | None = Field(default=None, ge=1)
    """For how many epochs a task that was too easy or too hard is skipped. Default: 1."""


class ReplayConfig(Section):
    """Training on past groups again."""

    fraction: float = Field(default=0.0, ge=0, lt=1)
    """Groups trained once more, beside each batch's own, as a share of groups_per_step; beyond max_lag on purpose."""
    max_age: int | None = Field(default=None, ge=1)
    """Groups that were first trained at most so many versions ago may be replayed. Default: 8."""
    times: int | None = Field(default=None, ge=1)
    """How often one group may be replayed. Default: 1."""


class GovernorConfig(Section):
    """Lowering the lag while data is too far off policy."""

    enabled: bool | None = None
    """Lower the lag in force when the data no longer fits the policy, raise it again later. Default: on, unless
    run.deterministic or max_lag 0."""
    ess_min: float | None = Field(default=None, ge=0, le=1)
    """Below this effective sample size (a share of the tokens) the lag in force goes down by one. Default: 0.5."""
    kl_max: float | None = Field(default=None, gt=0)
    """Above this mismatch KL per token the lag in force goes down by one. Default: 0.1."""
    patience: int | None = Field(default=None, ge=1)
    """So many good steps in a row raise the lag in force by one. Default: 5."""
    min_lag: int | None = Field(default=None, ge=0)
    """The lag in force is never lowered below this. Default: 0."""
