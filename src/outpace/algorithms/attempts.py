"""What is compared: the attempts of a group, and what each of them got at which token.

- An attempt is an episode's share of one role; a trajectory with a reward of its own is an attempt of its own.
  Trajectories of one attempt follow one another: they share its advantage, and it counts once.
- An episode of which no row is there (nothing of it is trained on) still counts, by its reward alone, in every role
  that goes by the reward of the episode.
- Rewards arrive at the end: that of a turn at its last token, that of the attempt at its very last token.

Legend: _T one entry per trained token, _K one per turn.
"""

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
"""What single rewards are called that no reward function gave."""


@dataclass(frozen=True)
class Attempt:
    """`rows` are indices, in order. `rewards_T` is what arrives at each token, but for `reward`, which comes at the
    end; `turn_T` numbers the turns over all of its rows."""

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
        """The return of the whole attempt, without any discount."""
        return self.reward + float(self.rewards_T.sum())

    def from_turns(self, gamma: float) -> Doubles:
        """What came from each turn on, discounted per turn."""
        rewards_K: Doubles = np.bincount(self.turn_T, weights=self.rewards_T).astype(np.float64)
        rewards_K[-1:] += self.reward
        return discounted(rewards_K, gamma)

    @property
    def arriving_T(self) -> Doubles:
        """What arrives at each token, the reward of the attempt included."""
        rewards_T = self.rewards_T.copy()
        rewards_T[-1:] += self.reward
        return rewards_T

    def from_tokens(self, gamma: float) -> Doubles:
        """What came from each token on, discounted per token."""
        return discounted(self.arriving_T, gamma)


def attempts_of(
    rows: Sequence[Row],
    rewards: Sequence[float],
    parts: Sequence[Mapping[str, float]],
    penalties: Sequence[Doubles] | None,
) -> list[Attempt]:
    """In the order of the episodes."""
    shares: dict[tuple[int, str, int | None], list[int]] = {}
    for index, row in enumerate(rows):
        shares.setdefault((row.episode, row.role, None if row.reward is None else index), []).append(index)
    attempts = []
    for (episode, role, own), indices in shares.items():
        pieces = [before_the_end(rows[index], None if penalties is None else penalties[index]) for index in indices]
        reward = rewards[episode] if own is None else rows[own].reward
        assert reward is not None
        single = _single_rewards([rows[index] for index in indices], parts[episode] if parts else {})
        attempts.append(Attempt(episode, role, indices, reward, single, np.concatenate(pieces), _turns(rows, indices)))
    attempts += _attempts_without_rows({row.episode for row in rows}, shares, rewards, parts)
    return sorted(attempts, key=lambda attempt: attempt.episode)


def _attempts_without_rows(
    seen: set[int],
    shares: Collection[tuple[int, str, int | None]],
    rewards: Sequence[float],
    parts: Sequence[Mapping[str, float]],
) -> Iterator[Attempt]:
    nothing_T, no_turn_T = np.zeros(0), np.zeros(0, dtype=np.int64)
    for role in sorted({role for _, role, own in shares if own is None}):
        for episode in set(range(len(rewards))) - seen:
            single = parts[episode] if parts else {}
            yield Attempt(episode, role, [], rewards[episode], single, nothing_T, no_turn_T)


def _turns(rows: Sequence[Row], indices: list[int]) -> NDArray[np.int64]:
    numbers: list[NDArray[np.int64]] = []
    before = 0
    for index in indices:
        numbers.append(turn_numbers(rows[index].mask) + before)
        before = int(numbers[-1][-1]) + 1 if len(numbers[-1]) else before
    return np.concatenate(numbers)


def _single_rewards(rows: list[Row], of_episode: Mapping[str, float]) -> dict[str, float]:
    """The rewards that add up to the return of an attempt, by name."""
    own = rows[0].reward
    single = dict(of_episode) if own is None else {OWN_REWARD: own}
    if any(len(row.turn_rewards) for row in rows):
        single[TURN_REWARDS] = float(sum(row.turn_rewards.sum(dtype=np.float64) for row in rows))
    return single


def before_the_end(row: Row, penalties_T: Doubles | None) -> Doubles:
    """The rewards of turns at their last tokens, less the penalties."""
    turn_T = turn_numbers(row.mask)
    rewards_T = np.zeros(len(turn_T)) if penalties_T is None else -np.asarray(penalties_T, dtype=np.float64)
    assert len(rewards_T) == len(turn_T), "a penalty per trained token"
    if len(row.turn_rewards):
        rewards_T[np.diff(turn_T, append=turn_T[-1:] + 1) > 0] += row.turn_rewards
    return rewards_T


def turn_numbers(mask: Bools) -> NDArray[np.int64]:
    """For each trained token the turn it is of: an unbroken run of trained tokens."""
    places_T = np.flatnonzero(mask)
    return np.cumsum(np.diff(places_T, prepend=places_T[:1]) > 1, dtype=np.int64)
