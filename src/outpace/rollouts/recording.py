"""Writes the attempts of scored groups to `rollouts/` in the run directory.

    finished group ─▶ journal ─▶ (trained in step N) ─▶ `record_step` reads the journal ─▶ rollouts/step-N.jsonl
    any other group ─▶ `record_untrained` ─▶ rollouts/filtered/, failed/ or dropped/

The step that trains a finished group is not known when the group is scored, so its `AttemptRecord`s are stored in the
journal entry. Everything here blocks on the disk: call it on a thread. A full or failing disk loses these files and
logs a warning; the run continues.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from outpace.checkpoint import journal
from outpace.errors import CorruptData
from outpace.models.chat import as_text
from outpace.monitoring.metric_table import plain_value
from outpace.monitoring.rollout_files import (
    AttemptOutcome,
    RecordedAttempt,
    RecordedTrajectory,
    RecordedTurn,
    RolloutWriter,
)
from outpace.rollouts.episode import total_return
from outpace.rollouts.group_scoring import MASKED_REASON, row_of, version_range
from outpace.runtime.wire import WireError
from outpace.types import AttemptRecord, Episode, Floats, GroupOrder, GroupRecord, Ints, JournalLocation, Row, Task

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]


def attempt_records(task: Task, episodes: Sequence[Episode], trained: Sequence[Row]) -> list[AttemptRecord]:
    """Return one record per episode. `Row.episode` in `trained` is an index into the episodes that did not fail."""
    in_training = {row.episode for row in trained}
    records, survivors = [], 0
    for episode in episodes:
        is_trained = episode.error is None and survivors in in_training
        survivors += episode.error is None
        records.append(
            AttemptRecord(
                stop=episode.stop,
                reward=total_return(episode) if episode.error is None else None,
                rewards=episode.rewards,
                error=episode.error,
                untrained=[] if is_trained else [row_of(trajectory) for trajectory in episode.trajectories],
                prompt="" if episode.trajectories else as_text(task.prompt),
                extra={column: plain_value(value) for column, value in episode.extra.items()},
            )
        )
    return records


@dataclass(frozen=True)
class RolloutRecorder:
    """Writes rollout files. `decode` must keep special tokens, which show where messages begin and end. Advantages that
    need a critic are not known here and not recorded."""

    writer: RolloutWriter
    journal: Path
    decode: Decode

    def record_step(self, step: int, places: Sequence[JournalLocation]) -> None:
        """Write the journaled groups at `places` as the rollouts of `step`."""
        try:
            attempts = [
                attempt
                for place in places
                for attempt in self._attempts(*journal.read_with_order(self.journal, place), "trained", "", step)
            ]
            self.writer.step(step, attempts)
        except (OSError, CorruptData, WireError) as error:
            log.warning("cannot record the rollouts of step %d: %s", step, error)

    def record_untrained(self, order: GroupOrder, record: GroupRecord, outcome: AttemptOutcome, reason: str) -> None:
        try:
            attempts = list(self._attempts(order, record, outcome, reason))
            self.writer.untrained(outcome, order.group, attempts)
        except OSError as error:
            log.warning("cannot record the rollouts of group %d: %s", order.group, error)

    def _attempts(
        self, order: GroupOrder, record: GroupRecord, outcome: AttemptOutcome, reason: str, step: int | None = None
    ) -> Iterator[RecordedAttempt]:
        survivors = 0
        for number, attempt in enumerate(record.attempts):
            trained: list[Row] = []
            if attempt.error is None:
                trained = [row for row in record.rows if row.episode == survivors]
                survivors += 1
            rows = trained or attempt.untrained
            oldest, newest = version_range(rows)
            attempt_outcome, attempt_reason = _attempt_outcome(attempt, outcome, reason, bool(trained))
            yield RecordedAttempt(
                outcome=attempt_outcome,
                reason=attempt_reason,
                group=order.group,
                attempt=number,
                task=order.task,
                task_id=record.task_id,
                epoch=order.epoch,
                step=step,
                reward=attempt.reward,
                rewards={name: reward for name, reward in attempt.rewards.items() if math.isfinite(reward)},
                advantage=_mean_advantage(trained),
                oldest=oldest,
                newest=newest,
                stop=attempt.stop,
                trajectories=[self._trajectory(row) for row in rows],
                task_prompt=attempt.prompt,
                extra=attempt.extra,
            )

    def _trajectory(self, row: Row) -> RecordedTrajectory:
        return RecordedTrajectory(
            turns=list(self._turns(row)),
            role=row.role,
            reward=row.reward,
            turn_rewards=[float(reward) for reward in row.turn_rewards],
        )

    def _turns(self, row: Row) -> Iterator[RecordedTurn]:
        boundaries = [0, *(np.flatnonzero(np.diff(row.mask)) + 1).tolist(), len(row.tokens)]
        observed = 0
        for start, end in pairwise(boundaries):
            if start == end:  # an empty trajectory
                continue
            tokens = row.tokens[start:end].tolist()
            if not row.mask[start]:
                yield RecordedTurn(_source(row.sources, observed, start), self.decode(tokens), tokens)
                observed += 1
                continue
            yield RecordedTurn(
                source="assistant",
                text=self.decode(tokens),
                tokens=tokens,
                sampled=True,
                logprobs=[*map(_rounded, row.logprobs[start:end])],
                versions=_versions(row.versions[start:end]),
                advantages=_advantages(row.advantages[start:end]),
            )


def _attempt_outcome(
    attempt: AttemptRecord, outcome: AttemptOutcome, reason: str, trained: bool
) -> tuple[AttemptOutcome, str]:
    """Return the outcome of one attempt and its reason."""
    if attempt.error is not None and outcome != "dropped":
        return "failed", attempt.error
    if outcome == "trained" and not trained:
        return "filtered", MASKED_REASON
    return outcome, reason


def _source(sources: Sequence[str], observed: int, start: int) -> str:
    if start == 0:
        return "prompt"
    return sources[observed] if observed < len(sources) else "observation"


def _mean_advantage(rows: Sequence[Row]) -> float | None:
    known = [row.advantages[row.mask] for row in rows if len(row.advantages)]
    return _rounded(np.concatenate(known).mean()) if known else None


def _versions(versions_T: Ints) -> int | list[int]:
    return int(versions_T[0]) if (versions_T == versions_T[0]).all() else versions_T.tolist()


def _advantages(advantages_T: Floats) -> float | list[float]:
    if not len(advantages_T):
        return 0.0
    equal = bool((advantages_T == advantages_T[0]).all())
    return _rounded(advantages_T[0]) if equal else [*map(_rounded, advantages_T)]


def _rounded(value: np.float32) -> float:
    """Round to 9 significant digits, which are enough to restore the same float32."""
    return float(f"{value:.9g}")
