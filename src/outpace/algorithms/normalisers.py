"""Batch-scope stages: from the advantages of every row of a closed batch to normalised ones.

They see the whole batch at once, and their sums are rounded once at the end, so neither the order of its rows nor the
way its groups arrived changes a single bit. Where nothing varies there is nothing to learn: advantages become 0, never
NaN. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outpace.algorithms.advantages import Doubles, mean, spread
from outpace.algorithms.registry import normaliser


@dataclass(frozen=True)
class BatchSignal:
    """`advantages` has one array per row, one value per trained token; `rewards` one value per attempt."""

    advantages: list[Doubles]
    rewards: Doubles


@normaliser()
def none(batch: BatchSignal) -> list[Doubles]:
    """As they are. The only one that needs no closed batch: it is never called."""
    return batch.advantages


@normaliser()
def batch_std(batch: BatchSignal, *, std_epsilon: float = 1e-4) -> list[Doubles]:
    """Divided by the standard deviation of the rewards of all attempts in the batch: one scale for all groups."""
    return _scaled(batch.advantages, 0.0, spread(batch.rewards), std_epsilon)


@normaliser()
def whiten_tokens(batch: BatchSignal, *, std_epsilon: float = 1e-4) -> list[Doubles]:
    """Mean 0 and standard deviation 1 over all trained tokens of the batch: a long row counts for more."""
    return _whitened(batch.advantages, _joined(batch.advantages), std_epsilon)


@normaliser()
def whiten_sequences(batch: BatchSignal, *, std_epsilon: float = 1e-4) -> list[Doubles]:
    """Mean 0 and standard deviation 1 over the rows of the batch, each counted once, by its mean advantage."""
    means = np.array([mean(row_T) for row_T in batch.advantages if len(row_T)], dtype=np.float64)
    return _whitened(batch.advantages, means, std_epsilon)


def _joined(rows: list[Doubles]) -> Doubles:
    return np.concatenate(rows) if rows else np.zeros(0)


def _whitened(rows: list[Doubles], values: Doubles, epsilon: float) -> list[Doubles]:
    return _scaled(rows, mean(values) if len(values) else 0.0, spread(values), epsilon)


def _scaled(rows: list[Doubles], centre: float, scale: float, epsilon: float) -> list[Doubles]:
    if scale == 0:
        return [np.zeros_like(row_T) for row_T in rows]
    return [(row_T - centre) / (scale + epsilon) for row_T in rows]
