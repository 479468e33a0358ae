"""MERGED"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outpace.algorithms.advantages import Doubles
from outpace.algorithms.gae import discounted
from outpace.types import Bools, Row

OWN_REWARD = "reward"
TURN_REWARDS = "turn_rewards"
"""Names of individual rewards that do not come from a reward function."""


@dataclass(frozen=True)
class Attempt:
    """One episode's rows of one role. `rows` are indices in time order. `rewards_T` is the reward at each token, except
    for `reward`, which arrives at the end. `turn_T` is the turn of each token, counted over all rows."""

    episode: int
    role: str
    rows: list[int]
    reward: float
    parts: Mapping[str, float]
    rewards_T: Doubles
    turn_T: NDArray[np.int64]

    @property
    def turns(self) -> int:
        return int(self.turn_T[-1]) + 1 if len(self.turn_T) else 0

    @property
    def whole(self) -> float:
        """The undiscounted return of the attempt."""
        return self.reward + float(self.rewards_T.sum())

    def from_turns(self, gamma: float) -> Doubles:
        """Return from each turn on, discounted per turn."""
        rewards_K: Doubles = np.bincount(self.turn_T, weights=self.rewards_T).astype(np.float64)
        rewards_K[-1:] += self.reward
        return discounted(rewards_K, gamma)

    @property
    def arriving_T(self) -> Doubles:
        """Reward at each token, including the attempt's own reward at the end."""
        rewards_T = self.rewards_T.copy()
        rewards_T[-1:] += self.reward
        return rewards_T

    def from_tokens(self, gamma: float) -> Doubles:
        """Return from each token on, discounted per token."""
        return discounted(self.arriving_T, gamma)


def attempts_of(
    rows: Sequence[Row],
    rewards: Sequence[float],
    parts: Sequence[Mapping[str, float]],
    penalties: Sequence[Doubles] | None,
) -> list[Attempt]:
    """Split the rows of a group into attempts, ordered by episode."""
    rows_of_attempt: dict[tuple[int, str, int | None], list[int]] = {}
    for index, row in enumerate(rows):
        rows_of_attempt.setdefault((row.episode, row.role, None if row.reward is None else index), []).append(index)
    attempts = []
    for (episode, role, own), indices in rows_of_attempt.items():
        pieces = [_token_rewards(rows[index], None if penalties is None else penalties[index]) for index in indices]
        reward = rewards[episode] if own is None else rows[own].reward
        assert reward is not None
        by_name = _individual_rewards([rows[index] for index in indices], parts[episode] if parts else {})
        attempts.append(Attempt(episode, role, indices, reward, by_name, np.concatenate(pieces), _turns(rows, indices)))
    attempts += _untrained_attempts({row.episode for row in rows}, rows_of_attempt, rewards, parts)
    return sorted(attempts, key=lambda attempt: attempt.episode)


def _untrained_attempts(
    seen: set[int],
    rows_of_attempt: Collection[tuple[int, str, int | None]],
    rewards: Sequence[float],
    parts: Sequence[Mapping[str, float]],
) -> Iterator[Attempt]:
    no_rewards_T, no_turns_T = np.zeros(0), np.zeros(0, dtype=np.int64)
    for role in sorted({role for _, role, own in rows_of_attempt if own is None}):
        for episode in set(range(len(rewards))) - seen:
            by_name = parts[episode] if parts else {}
            yield Attempt(episode, role, [], rewards[episode], by_name, no_rewards_T, no_turns_T)


def _turns(rows: Sequence[Row], indices: list[int]) -> NDArray[np.int64]:
    numbers: list[NDArray[np.int64]] = []
    before = 0
    for index in indices:
        numbers.append(turn_numbers(rows[index].mask) + before)
        before = int(numbers[-1][-1]) + 1 if len(numbers[-1]) else before
    return np.concatenate(numbers)


def _individual_rewards(rows: list[Row], of_episode: Mapping[str, float]) -> dict[str, float]:
    """Return the rewards, by name, that add up to an attempt's return."""
    own = rows[0].reward
    by_name = dict(of_episode) if own is None else {OWN_REWARD: own}
    if any(len(row.turn_rewards) for row in rows):
        by_name[TURN_REWARDS] = float(sum(row.turn_rewards.sum(dtype=np.float64) for row in rows))
    return by_name


def _token_rewards(row: Row, penalties_T: Doubles | None) -> Doubles:
    """Return the reward at each token: turn rewards at the turns' last tokens, minus penalties."""
    turn_T = turn_numbers(row.mask)
    rewards_T = np.zeros(len(turn_T)) if penalties_T is None else -np.asarray(penalties_T, dtype=np.float64)
    assert len(rewards_T) == len(turn_T), "one penalty per trained token"
    if len(row.turn_rewards):
        rewards_T[np.diff(turn_T, append=turn_T[-1:] + 1) > 0] += row.turn_rewards
    return rewards_T


def turn_numbers(mask: Bools) -> NDArray[np.int64]:
    """Return the turn of each trained token. A turn is an uninterrupted run of trained tokens."""
    positions_T = np.flatnonzero(mask)
    return np.cumsum(np.diff(positions_T, prepend=positions_T[:1]) > 1, dtype=np.int64)
