"""MERGED"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outpace.algorithms.advantages import Doubles, mean, spread
from outpace.algorithms.registry import NORMALISERS, normaliser


@dataclass(frozen=True)
class BatchSignal:
    """The advantages of a whole batch: one array per row with one value per trained token. `rewards` has one value per
    attempt."""

    advantages: list[Doubles]
    rewards: Doubles


@NORMALISERS.register(alias="none")
def no_normalizer(batch: BatchSignal) -> list[Doubles]:
    """Leave advantages unchanged. The only normalizer that does not need the whole batch; it is never called."""
    return batch.advantages


@normaliser()
def batch_std(batch: BatchSignal, *, std_epsilon: float = 1e-4) -> list[Doubles]:
    """Divide by the standard deviation of the rewards of all attempts in the batch: one scale for all groups."""
    return _scaled(batch.advantages, 0.0, spread(batch.rewards), std_epsilon)


@normaliser()
def whiten_tokens(batch: BatchSignal, *, std_epsilon: float = 1e-4) -> list[Doubles]:
    """Mean 0 and standard deviation 1 over all trained tokens of the batch. Longer rows weigh more."""
    return _whitened(batch.advantages, _joined(batch.advantages), std_epsilon)


@normaliser()
def whiten_sequences(batch: BatchSignal, *, std_epsilon: float = 1e-4) -> list[Doubles]:
    """Mean 0 and standard deviation 1 over the rows of the batch, each counted once by its mean advantage."""
    means = np.array([mean(row_T) for row_T in batch.advantages if len(row_T)], dtype=np.float64)
    return _whitened(batch.advantages, means, std_epsilon)


def _joined(rows: list[Doubles]) -> Doubles:
    return np.concatenate(rows) if rows else np.zeros(0)


def _whitened(rows: list[Doubles], values: Doubles, epsilon: float) -> list[Doubles]:
    return _scaled(rows, mean(values) if len(values) else 0.0, spread(values), epsilon)


def _scaled(rows: list[Doubles], center: float, scale: float, epsilon: float) -> list[Doubles]:
    if scale == 0:
        return [np.zeros_like(row_T) for row_T in rows]
    return [(row_T - center) / (scale + epsilon) for row_T in rows]
