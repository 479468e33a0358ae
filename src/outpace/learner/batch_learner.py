"""BatchLearner: training on a complete batch, for algorithms that need all of it before the first gradient.

Groups are collected, and scored if needed, as they stream in. Once the batch is complete they are sorted by admission,
so that nothing below depends on arrival order:

    score ─▶ `AdvantagePipeline` ─▶ passes × updates: accumulate, update
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from outpace.config import Config
from outpace.learner.advantage_pipeline import AdvantagePipeline, CollectedGroup, TrainingExample
from outpace.learner.backend import LearnerBackend, count_lags
from outpace.types import ChunkReport, GroupRecord, StepReport


class BatchLearner:
    """Collects the groups of a batch, then trains on the whole batch."""

    def __init__(self, backend: LearnerBackend, config: Config) -> None:
        self._backend = backend
        self._config = config
        self.pipeline = AdvantagePipeline(config)
        self.collected: list[CollectedGroup] = []

    # ------------------------------------------------------------------------------------------------- collecting

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

    # --------------------------------------------------------------------------------------------------- training

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
