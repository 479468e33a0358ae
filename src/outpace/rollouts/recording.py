"""Writes the attempts of scored groups to `rollouts/` in the run directory.

    finished group ─▶ journal ─▶ (trained in step N) ─▶ `record_step` reads the journal ─▶ rollouts/step-N.jsonl
    any other group ─▶ `record_untrained` ─▶ rollouts/filtered/, failed/ or dropped/

The step that trains a finished group is not known when the group is scored, so its `AttemptRecord`s are stored in the
journal entry. Everything here blocks on the disk: call it on a thread. If the disk is full or fails, the
files are lost and a warning is logged; the run continues.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

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
from outpace.types import AttemptRecord, Episode, GroupOrder, GroupRecord, JournalLocation, Row, Task

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
N = TypeVar("N", int, float)


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
        survivors, texts = 0, _Texts(self.decode)
        rows_of: dict[int, list[Row]] = {}
        for row in record.rows:
            rows_of.setdefault(row.episode, []).append(row)
        for number, attempt in enumerate(record.attempts):
            trained: list[Row] = []
            if attempt.error is None:
                trained = rows_of.get(survivors, [])
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
                trajectories=[_trajectory(row, texts) for row in rows],
                task_prompt=attempt.prompt,
                extra=attempt.extra,
            )


class _Texts(dict[tuple[int, ...], str]):
    """Decoded tokens of one group: its attempts share their prompt."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    def __missing__(self, tokens: tuple[int, ...]) -> str:
        text = self[tokens] = self._decode(tokens)
        return text


def _trajectory(row: Row, texts: _Texts) -> RecordedTrajectory:
    return RecordedTrajectory(
        turns=list(_turns(row, texts)),
        role=row.role,
        reward=row.reward,
        turn_rewards=row.turn_rewards.tolist(),
    )


def _turns(row: Row, texts: _Texts) -> Iterator[RecordedTurn]:
    boundaries = [0, *(np.flatnonzero(row.mask[1:] != row.mask[:-1]) + 1).tolist(), len(row.tokens)]
    ids, observed = row.tokens.tolist(), 0
    for start, end in pairwise(boundaries):
        if start == end:  # an empty trajectory
            continue
        tokens = ids[start:end]
        if not row.mask[start]:
            yield RecordedTurn(_source(row.sources, observed, start), texts[tuple(tokens)], tokens)
            observed += 1
            continue
        yield RecordedTurn(
            source="assistant",
            text=texts[tuple(tokens)],
            tokens=tokens,
            sampled=True,
            logprobs=[*map(_rounded, row.logprobs[start:end].tolist())],
            versions=_single_if_equal(row.versions[start:end].tolist()),
            advantages=_single_if_equal([*map(_rounded, row.advantages[start:end].tolist())] or [0.0]),
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
    if not known:
        return None
    advantages_T = known[0] if len(known) == 1 else np.concatenate(known)
    return _rounded(np.add.reduce(advantages_T) / len(advantages_T))


def _single_if_equal(values: list[N]) -> N | list[N]:
    return values[0] if values.count(values[0]) == len(values) else values


def _rounded(value: float) -> float:
    """Round to 9 significant digits, which are enough to restore the same float32."""
    return float(f"{value:.9g}")
