"""BatchLearner: training on a complete batch, for algorithms that need all of it before the first gradient.

Groups are collected, and scored if needed, as they stream in. Once the batch is complete they are sorted by admission,
so that nothing below depends on arrival order:

    scores (policy, critic, reference at the start of the step)
      ─▶ `AdvantagePipeline`: KL in the reward, GAE from the values, batch normalizer, batch masks
      ─▶ passes × updates: accumulate, update

Advantages that need only their group are computed in the worker (`outpace.rollouts.group_scoring`) with the same
functions of `outpace.algorithms`; they are in the rows already. The code is the same for every learner backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.algorithms import NORMALIZERS
from outpace.algorithms.advantages import BatchAdvantages
from outpace.algorithms.losses import kl_penalty
from outpace.algorithms.token_advantages import (
    advantage_settings,
    attempt_returns,
    critic_advantages,
    group_advantages,
    with_advantages,
)
from outpace.config import Config
from outpace.config.algorithm import (
    configured_advantage,
    configured_masks,
    configured_normalizer,
    configured_policy_loss,
)
from outpace.errors import BadInput, one_line, plural
from outpace.learner.backend import (
    KEEP,
    OLD_LOGP,
    OLD_VALUES,
    REFERENCE_LOGP,
    RETURNS,
    LearnerBackend,
    check_rows,
    count_lags,
)
from outpace.types import ChunkReport, Floats, GroupRecord, Row, StepReport

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class CollectedGroup:
    """One group of the batch, with the learner's own scores of each row's trained tokens."""

    record: GroupRecord
    scores: list[dict[str, Floats]]
    replayed: bool


@dataclass(frozen=True)
class TrainingExample:
    """A row ready for training, with its final advantages."""

    row: Row
    extras: dict[str, Floats]
    replayed: bool


@dataclass(frozen=True)
class GroupAdvantages:
    """Returns of a group's attempts. `advantages` and critic `targets` have one array per row with one value per
    trained token; targets are empty without a critic."""

    returns: Doubles
    advantages: list[Doubles]
    targets: list[Doubles]


class AdvantagePipeline:
    """Turns the scored groups of a batch into rows with final advantages."""

    def __init__(self, config: Config) -> None:
        self._config = config
        advantage = config.advantage
        self._credit = advantage_settings(configured_advantage(advantage), advantage.credit, advantage.gamma)
        self._normalizer = configured_normalizer(advantage)
        self._has_critic = self._credit.estimator.registration.critic
        masks = configured_masks(config.correction).values()
        self._masks = [mask for mask in masks if mask.registration.scope == "batch"]

    @property
    def needs_scores(self) -> bool:
        """Whether tokens must be scored with the weights at the start of the step. With a single update, the logprobs
        of the training pass are the same."""
        algorithm, policy_loss = self._config.algorithm, self._config.policy_loss
        several = algorithm.minibatches * algorithm.epochs_per_batch > 1
        ratio = configured_policy_loss(policy_loss).registration.ratio
        needs_old_logp = several and ratio and policy_loss.old_policy == "recomputed"
        return needs_old_logp or bool(self._masks) or self._config.kl.in_reward or self._has_critic

    def examples(self, entries: list[CollectedGroup]) -> list[list[TrainingExample]]:
        """Return the rows of every group with final advantages and the extras the loss needs."""
        by_group = [self._group_advantages(entry) for entry in entries]
        advantages = self._normalized(by_group)
        keep = self._keep_masks(entries)
        examples = []
        for entry, group in zip(entries, by_group, strict=True):
            count = len(entry.record.rows)
            rows = map(with_advantages, entry.record.rows, advantages[:count])
            extras = map(self._extras, entry.scores, group.targets, keep[:count])
            examples.append(
                [TrainingExample(row, extra, entry.replayed) for row, extra in zip(rows, extras, strict=True)]
            )
            advantages, keep = advantages[count:], keep[count:]
        return examples

    def _group_advantages(self, entry: CollectedGroup) -> GroupAdvantages:
        rows, rewards, penalties = entry.record.rows, entry.record.rewards, self._penalties(entry)
        returns = attempt_returns(rows, rewards, penalties)
        if self._has_critic:
            gae_lambda = self._credit.estimator.settings["gae_lambda"]
            values = [score[OLD_VALUES].astype(np.float64) for score in entry.scores]
            both = critic_advantages(rows, rewards, values, self._credit.gamma, gae_lambda, penalties)
            return GroupAdvantages(returns, *both)
        if penalties is None:
            check_rows(rows)
            advantages = [row.advantages[row.mask].astype(np.float64) for row in rows]
        else:
            advantages = group_advantages(rows, rewards, entry.record.parts, self._credit, penalties)
        return GroupAdvantages(returns, advantages, [np.zeros(0)] * len(rows))

    def _normalized(self, by_group: list[GroupAdvantages]) -> list[Doubles]:
        """Apply the batch normalizer to the advantages of all rows and validate its result; it may be user code."""
        before = [values for group in by_group for values in group.advantages]
        if self._normalizer.registration is NORMALIZERS.built_in["none"] or not before:
            return before
        returns = np.concatenate([group.returns for group in by_group])
        name = f"advantage.normalizer: {self._normalizer.registration.name}"
        try:
            after = [
                np.asarray(values, dtype=np.float64) for values in self._normalizer(BatchAdvantages(before, returns))
            ]
        except (TypeError, ValueError) as error:
            raise BadInput(f"{name} failed on {plural(len(before), 'row')}: {one_line(error)}") from error
        if [values.shape for values in after] != [values.shape for values in before]:
            raise BadInput(f"{name} must return one array per row, with one value per trained token")
        if not all(np.isfinite(values).all() for values in after):
            raise BadInput(f"{name} returned a non-finite advantage")
        return after

    def _penalties(self, entry: CollectedGroup) -> list[Doubles] | None:
        """Return the KL penalty of every trained token, None unless KL is part of the reward."""
        if not self._config.kl.in_reward:
            return None
        kl = self._config.kl
        assert kl.estimator is not None, "the config must be resolved"
        penalties = []
        for score in entry.scores:
            logp_N, reference_N = (torch.from_numpy(score[name]).double() for name in (OLD_LOGP, REFERENCE_LOGP))
            penalties.append(kl.coefficient * kl_penalty(kl.estimator, logp_N, reference_N, torch.zeros(())).numpy())
        return penalties

    def _keep_masks(self, entries: list[CollectedGroup]) -> list[Floats | None]:
        """Return which tokens the batch masks keep, per row. They see all tokens of the batch at once."""
        pairs = [pair for entry in entries for pair in zip(entry.record.rows, entry.scores, strict=True)]
        if not self._masks or not pairs:
            return [None] * len(pairs)
        differences = [score[OLD_LOGP] - row.logprobs[row.mask] for row, score in pairs]
        log_rho_N = np.concatenate(differences)
        keep = np.logical_and.reduce([mask(log_rho_N) for mask in self._masks]).astype(np.float32)
        return [*np.split(keep, np.cumsum([len(part) for part in differences])[:-1])]

    def _extras(self, score: dict[str, Floats], returns: Doubles, keep: Floats | None) -> dict[str, Floats]:
        extras = {name: score[name] for name in (OLD_LOGP, OLD_VALUES) if name in score}
        if self._has_critic:
            extras[RETURNS] = returns.astype(np.float32)
        if keep is not None:
            extras[KEEP] = keep
        return extras


class BatchLearner:
    """Collects the groups of a batch, then trains on the whole batch."""

    def __init__(self, backend: LearnerBackend, config: Config) -> None:
        self._backend = backend
        self._config = config
        self.pipeline = AdvantagePipeline(config)
        self.collected: list[CollectedGroup] = []

    def add(self, records: Sequence[GroupRecord], replayed: bool) -> ChunkReport:
        """Add groups to the batch. The report counts the tokens that will be trained."""
        rows = [row for record in records for row in record.rows]
        scores = iter(self._backend.score(rows) if self.pipeline.needs_scores else [{} for _ in rows])
        for record in records:
            self.collected.append(CollectedGroup(record, [next(scores) for _ in record.rows], replayed))
        lags = count_lags(rows, self._backend.version)
        return ChunkReport(
            tokens=sum(lags.values()),
            rows=len(rows),
            loss_sum=0.0,
            lag_counts={} if replayed else lags,
            replay_lag_counts=lags if replayed else {},
        )

    def drop(self) -> None:
        self.collected.clear()

    def train(self) -> StepReport:
        """Train on everything collected: all passes and updates, one new version."""
        entries = sorted(self.collected, key=lambda entry: (entry.replayed, entry.record.group))
        self.collected = []
        groups = self.pipeline.examples(entries)
        for number in range(self._config.algorithm.epochs_per_batch):
            for part in self._groups_per_update(groups, number):
                self._accumulate([example for group in part for example in group])
                self._backend.update()
        return self._backend.finish_step()

    def _groups_per_update(
        self, groups: list[list[TrainingExample]], number: int
    ) -> Iterator[list[list[TrainingExample]]]:
        """Yield the groups of each update, near-equal in number. The shuffle depends on seed, version and pass only.

        Replayed groups are distributed separately, so that every update has fresh groups to measure staleness on."""
        updates = self._config.algorithm.minibatches
        shuffle = np.random.default_rng([self._config.run.seed, self._backend.version, number])
        shares: list[list[int]] = [[] for _ in range(updates)]
        for replayed in (False, True):
            members = [index for index, group in enumerate(groups) if group[0].replayed == replayed]
            order = shuffle.permutation(members) if updates > 1 else np.array(members, dtype=np.int64)
            for share, part in zip(shares, np.array_split(order, updates), strict=True):
                share += sorted(part.tolist())
        for share in shares:
            yield [groups[index] for index in share]

    def _accumulate(self, examples: list[TrainingExample]) -> None:
        for replayed in (False, True):
            chosen = [example for example in examples if example.replayed == replayed]
            if chosen:
                extras = [example.extras for example in chosen]
                self._backend.accumulate([example.row for example in chosen], extras, replayed)
