"""Per-token advantages of a group: which attempts are compared, and which token gets which advantage.

    rewards, turn rewards, penalties ─▶ attempts ─▶ comparisons ─▶ estimator ─▶ one advantage per trained token

Attempts
- An attempt is the rows of one episode and role. A row with its own reward is a separate attempt, unless it shares an
  attempt number with other rows of its role. The rows of an attempt follow each other in time, share its advantage,
  and count once.
- An episode without trained rows still counts with its reward, in every role that uses the episode's reward.
- A reward is placed at the end: a turn's reward at the turn's last token, the attempt's at its very last token.
- Only attempts of the same role are compared: the baseline of a judge consists of judges.

`advantage.credit`
- `episode`: every token gets the advantage of the full return.
- `turn`: every turn gets the advantage of the return from that turn on, compared with the same turn of other attempts.
- `token`: the return from the token on replaces the full return. Requires an additive estimator.

Legend: _G one entry per attempt of a comparison, _T one per trained token, _K one per turn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real

import msgspec
import numpy as np
from numpy.typing import NDArray

from outpace.algorithms.advantages import Doubles, GroupReturns, compute_gae, discounted_sums
from outpace.algorithms.registry import AdvantageRegistration, ConfiguredFunction, Credit
from outpace.errors import BadInput, one_line, plural
from outpace.types import Bools, Row, Trajectory, Version

OWN_REWARD = "reward"
TURN_REWARDS = "turn_rewards"
"""Names of individual rewards that do not come from a reward function."""


@dataclass(frozen=True)
class Attempt:
    """One episode's rows of one role. `rows` are indices in time order, `masks` their masks. `rewards_T` is the reward
    at each token, without `reward`, which is added at the last token."""

    episode: int
    role: str
    rows: list[int]
    reward: float
    parts: Mapping[str, float]
    rewards_T: Doubles
    masks: list[Bools] = field(default_factory=list)

    @cached_property
    def turn_T(self) -> NDArray[np.int64]:
        """The turn of each token, counted over all rows."""
        numbers: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        before = 0
        for mask in self.masks:
            numbers.append(turn_numbers(mask) + before)
            before = int(numbers[-1][-1]) + 1 if len(numbers[-1]) else before
        return np.concatenate(numbers)

    @property
    def turns(self) -> int:
        return int(self.turn_T[-1]) + 1 if len(self.turn_T) else 0

    @property
    def total_return(self) -> float:
        """The undiscounted return of the attempt."""
        return self.reward + (float(np.add.reduce(self.rewards_T)) if np.count_nonzero(self.rewards_T) else 0.0)

    def turn_returns(self, gamma: float) -> Doubles:
        """Return from each turn on, discounted per turn."""
        rewards_K: Doubles = np.bincount(self.turn_T, weights=self.rewards_T).astype(np.float64)
        rewards_K[-1:] += self.reward
        return discounted_sums(rewards_K, gamma)

    @property
    def all_rewards_T(self) -> Doubles:
        """Reward at each token, including the attempt's own reward at the end."""
        rewards_T = self.rewards_T.copy()
        rewards_T[-1:] += self.reward
        return rewards_T

    def token_returns(self, gamma: float) -> Doubles:
        """Return from each token on, discounted per token."""
        return discounted_sums(self.all_rewards_T, gamma)


def split_attempts(
    rows: Sequence[Row],
    rewards: Sequence[float],
    parts: Sequence[Mapping[str, float]],
    penalties: Sequence[Doubles] | None,
) -> list[Attempt]:
    """Split the rows of a group into attempts, ordered by episode."""
    rows_of_attempt: dict[tuple[int, str, int | None], list[int]] = {}
    for index, row in enumerate(rows):
        rows_of_attempt.setdefault((row.episode, row.role, _own_attempt(row, index)), []).append(index)
    attempts = []
    for (episode, role, own), indices in rows_of_attempt.items():
        pieces = [_token_rewards(rows[index], None if penalties is None else penalties[index]) for index in indices]
        reward = rewards[episode] if own is None else rows[indices[0]].reward
        assert reward is not None
        by_name = _individual_rewards([rows[index] for index in indices], parts[episode] if parts else {})
        rewards_T = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        masks = [rows[index].mask for index in indices]
        attempts.append(Attempt(episode, role, indices, reward, by_name, rewards_T, masks))
    attempts += _untrained_attempts({row.episode for row in rows}, rows_of_attempt, rewards, parts)
    return sorted(attempts, key=lambda attempt: attempt.episode)


def _own_attempt(row: Row, index: int) -> int | None:
    """Return a number for the attempt of a row with its own reward, or None if the episode's reward applies."""
    if row.reward is None:
        return None
    return index if row.attempt is None else -1 - row.attempt


def _untrained_attempts(
    seen: set[int],
    rows_of_attempt: Collection[tuple[int, str, int | None]],
    rewards: Sequence[float],
    parts: Sequence[Mapping[str, float]],
) -> Iterator[Attempt]:
    for role in sorted({role for _, role, own in rows_of_attempt if own is None}):
        for episode in set(range(len(rewards))) - seen:
            by_name = parts[episode] if parts else {}
            yield Attempt(episode, role, [], rewards[episode], by_name, np.zeros(0))


def _individual_rewards(rows: list[Row], of_episode: Mapping[str, float]) -> dict[str, float]:
    """Return the rewards, by name, that add up to an attempt's return."""
    own = rows[0].reward
    by_name = dict(of_episode) if own is None else {OWN_REWARD: own}
    if any(len(row.turn_rewards) for row in rows):
        by_name[TURN_REWARDS] = float(sum(row.turn_rewards.sum(dtype=np.float64) for row in rows))
    return by_name


def _token_rewards(row: Row, penalties_T: Doubles | None) -> Doubles:
    """Return the reward at each token: turn rewards at the turns' last tokens, minus penalties."""
    count = int(np.count_nonzero(row.mask))
    rewards_T = np.zeros(count) if penalties_T is None else -np.asarray(penalties_T, dtype=np.float64)
    assert len(rewards_T) == count, "one penalty per trained token"
    if len(row.turn_rewards):
        turn_T = turn_numbers(row.mask)
        rewards_T[np.diff(turn_T, append=turn_T[-1:] + 1) > 0] += row.turn_rewards
    return rewards_T


def turn_numbers(mask: Bools) -> NDArray[np.int64]:
    """Return the turn of each trained token. A turn is an uninterrupted run of trained tokens."""
    positions_T = np.flatnonzero(mask)
    return np.cumsum(np.diff(positions_T, prepend=positions_T[:1]) > 1, dtype=np.int64)


AdvantageEstimator = ConfiguredFunction[AdvantageRegistration]


@dataclass(frozen=True)
class AdvantageSettings:
    """`gamma` discounts per turn or per token, depending on `credit`. `weights` are reward weights by reward name."""

    estimator: AdvantageEstimator
    credit: Credit
    gamma: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        registration = self.estimator.registration
        assert self.credit in registration.credits, f"{registration.name} does not support {self.credit} credit"
        assert self.credit != "token" or registration.additive, f"{registration.name} is not additive"
        assert self.credit == "episode" or not registration.parts, "individual rewards need episode credit"


def advantage_settings(
    estimator: AdvantageEstimator, credit: Credit | None = None, gamma: float | None = None
) -> AdvantageSettings:
    """Return settings with defaults filled in: the estimator's first credit, and no discount."""
    return AdvantageSettings(estimator, credit or estimator.registration.credits[0], 1.0 if gamma is None else gamma)


def group_advantages(
    rows: Sequence[Row],
    rewards: Sequence[float],
    parts: Sequence[Mapping[str, float]],
    settings: AdvantageSettings,
    penalties: Sequence[Doubles] | None = None,
) -> list[Doubles]:
    """Return one advantage per trained token, for each row.

    `rewards` and `parts` have one entry per episode; `parts` may be empty. `penalties` has one array per row, with one
    value per trained token that is subtracted from the reward at that token."""
    registration = settings.estimator.registration
    assert not registration.critic, "the learner computes advantages that need a critic"
    assert penalties is None or not registration.parts, "a penalty is not an individual reward"
    attempts = split_attempts(rows, rewards, parts, penalties)
    by_row: list[Doubles] = [np.zeros(0)] * len(rows)
    for attempt, advantages_T in zip(attempts, _advantages(attempts, settings), strict=True):
        start = 0
        for index in attempt.rows:
            end = start + int(np.count_nonzero(rows[index].mask))
            by_row[index], start = advantages_T[start:end], end
    return by_row


def compared_returns(
    rows: Sequence[Row], rewards: Sequence[float], parts: Sequence[Mapping[str, float]], settings: AdvantageSettings
) -> Iterator[Doubles]:
    """Yield each set of returns that are compared. If every set is uniform, the group has no training signal.

    With token credit: the full returns and, if turns have rewards, the returns from each turn on."""
    attempts = split_attempts(rows, rewards, parts, None)
    comparisons = list(_comparisons(attempts, settings))
    if settings.credit == "token" and any(len(row.turn_rewards) for row in rows):
        comparisons += _compare_turns(attempts, settings)
    for comparison in comparisons:
        if settings.estimator.registration.parts and comparison.group.parts:
            yield from (values_G[np.isfinite(values_G)] for values_G in comparison.group.parts.values())
        else:
            yield comparison.group.returns_G


def with_advantages(row: Row, advantages_T: Doubles) -> Row:
    """Return the row with these advantages at its trained tokens and 0 elsewhere."""
    advantages = np.zeros(len(row.tokens), dtype=np.float32)
    advantages[row.mask] = advantages_T
    return msgspec.structs.replace(row, advantages=advantages)


def attempt_returns(
    rows: Sequence[Row], rewards: Sequence[float], penalties: Sequence[Doubles] | None = None
) -> Doubles:
    """Return the undiscounted return of each attempt of a group, as used by `batch_std`."""
    return np.array(
        [attempt.total_return for attempt in split_attempts(rows, rewards, [], penalties)], dtype=np.float64
    )


def critic_advantages(
    rows: Sequence[Row],
    rewards: Sequence[float],
    values: Sequence[Doubles],
    gamma: float,
    lam: float,
    penalties: Sequence[Doubles] | None = None,
) -> tuple[list[Doubles], list[Doubles]]:
    """Return GAE advantages and critic targets, for each row one value per trained token. `values` are the critic's
    predictions. GAE runs across the rows of an attempt."""
    advantages, returns = ([np.zeros(0)] * len(rows) for _ in range(2))
    for attempt in split_attempts(rows, rewards, (), penalties):
        if not attempt.rows:
            continue
        lengths = [len(values[index]) for index in attempt.rows]
        values_T = np.concatenate([values[index] for index in attempt.rows])
        pair = compute_gae(attempt.all_rewards_T, values_T, gamma, lam)
        for column, found_T in zip((advantages, returns), pair, strict=True):
            for index, part_T in zip(attempt.rows, np.split(found_T, np.cumsum(lengths)[:-1]), strict=True):
                column[index] = part_T
    return advantages, returns


# ------------------------------------------------------------------------------------------------------ comparisons


@dataclass(frozen=True)
class _Comparison:
    """Attempts compared with each other, in full or at one turn. `members` are indices into all attempts."""

    group: GroupReturns
    members: list[int]
    turn: int | None = None


def _comparisons(attempts: list[Attempt], settings: AdvantageSettings) -> Iterator[_Comparison]:
    return _compare_turns(attempts, settings) if settings.credit == "turn" else _compare_returns(attempts, settings)


def _compare_returns(attempts: list[Attempt], settings: AdvantageSettings) -> Iterator[_Comparison]:
    for members in _indices_by_role(attempts):
        group = GroupReturns(
            returns_G=np.array([attempts[index].total_return for index in members]),
            lengths_G=np.array([len(attempts[index].rewards_T) for index in members], dtype=np.float64),
            parts=_reward_columns([attempts[index].parts for index in members]) if settings.credit == "episode" else {},
            weights=settings.weights,
        )
        yield _Comparison(group, members)


def _compare_turns(attempts: list[Attempt], settings: AdvantageSettings) -> Iterator[_Comparison]:
    returns = [attempt.turn_returns(settings.gamma) for attempt in attempts]
    lengths = [np.bincount(attempt.turn_T) for attempt in attempts]
    for in_role in _indices_by_role(attempts):
        for turn in range(max(attempts[index].turns for index in in_role)):
            members = [index for index in in_role if attempts[index].turns > turn]
            returns_G = np.array([returns[index][turn] for index in members])
            lengths_G = np.array([lengths[index][turn] for index in members], dtype=np.float64)
            yield _Comparison(GroupReturns(returns_G, lengths_G, weights=settings.weights), members, turn)


def _indices_by_role(attempts: list[Attempt]) -> list[list[int]]:
    roles: dict[str, list[int]] = {}
    for index, attempt in enumerate(attempts):
        roles.setdefault(attempt.role, []).append(index)
    return list(roles.values())


def _reward_columns(rewards: list[Mapping[str, float]]) -> dict[str, Doubles]:
    """Return one value per attempt for each reward name, NaN where absent."""
    names = sorted({name for single in rewards for name in single})
    return {name: np.array([single.get(name, np.nan) for single in rewards]) for name in names}


# ------------------------------------------------------------------------------------------------------- advantages


def _advantages(attempts: list[Attempt], settings: AdvantageSettings) -> list[Doubles]:
    """Return one advantage per trained token, for each attempt."""
    by_attempt = [np.zeros(len(attempt.rewards_T)) for attempt in attempts]
    for comparison in _comparisons(attempts, settings):
        estimated_G = _estimate(comparison.group, settings.estimator)
        for index, estimated in zip(comparison.members, estimated_G, strict=True):
            attempt = attempts[index]
            chosen_T = slice(None) if comparison.turn is None else attempt.turn_T == comparison.turn
            by_attempt[index][chosen_T] = estimated
            if settings.credit == "token" and not _lacks_peers(comparison.group, settings.estimator):
                by_attempt[index] += attempt.token_returns(settings.gamma) - attempt.total_return
    return by_attempt


def _lacks_peers(group: GroupReturns, estimator: AdvantageEstimator) -> bool:
    return len(group.returns_G) == 1 and estimator.registration.needs_peers


def _estimate(group: GroupReturns, estimator: AdvantageEstimator) -> Doubles:
    """Call the estimator and validate its result; it may be user code."""
    count, name = len(group.returns_G), estimator.registration.name
    if _lacks_peers(group, estimator):
        return np.zeros(1)
    try:
        advantages_G = np.asarray(estimator(group), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadInput(f"advantage.name: {name} failed on {plural(count, 'attempt')}: {one_line(error)}") from error
    if advantages_G.shape != (count,):
        raise BadInput(
            f"advantage.name: {name} returned shape {advantages_G.shape} for {plural(count, 'attempt')}; "
            "return one advantage per attempt"
        )
    if not (np.abs(advantages_G) <= np.finfo(np.float32).max).all():  # false for NaN too
        raise BadInput(
            f"advantage.name: {name} returned a non-finite advantage for the returns {group.returns_G.tolist()}"
        )
    return advantages_G


def trajectory_problem(trajectory: Trajectory, min_version: Version = 0) -> str | None:
    """Return why a trajectory cannot be trained on, or None. A rollout may have built it by hand.

    Tokens sampled before `min_version` would exceed the staleness bound."""
    tokens, mask, logprobs, versions = trajectory.tokens, trajectory.mask, trajectory.logprobs, trajectory.versions
    columns = (tokens, mask, logprobs, versions)
    for column in columns:
        if not isinstance(column, np.ndarray) or column.ndim != 1:
            return "its columns must be one-dimensional arrays"
    if not len(tokens) == len(mask) == len(logprobs) == len(versions):
        return f"its columns differ in length: {', '.join(str(len(column)) for column in columns)}"
    if mask.dtype != np.bool_:
        return f"its mask has dtype {mask.dtype}, not bool"
    versions_T = versions[mask]
    if np.count_nonzero(np.isfinite(logprobs[mask])) < len(versions_T):
        return "a sampled token has no finite logprob"
    if np.count_nonzero(versions_T < max(min_version, 0)):
        oldest = int(versions_T.min())
        if oldest < 0:
            return "a sampled token has no version"
        return f"a sampled token has version {oldest}, older than the min_version {min_version} of its group"
    return _reward_problem(trajectory)


def _reward_problem(trajectory: Trajectory) -> str | None:
    """Return why the rewards are invalid, or None. A bad reward would corrupt the advantages of the whole group."""
    reward, turn_rewards = trajectory.reward, trajectory.turn_rewards
    if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
        return f"its reward is {one_line(repr(reward), 60)}, not a finite number"
    if not isinstance(turn_rewards, np.ndarray) or turn_rewards.ndim != 1 or turn_rewards.dtype.kind not in "fiu":
        return "its turn rewards are not a one-dimensional array of numbers"
    if not len(turn_rewards):
        return None
    if not np.isfinite(turn_rewards).all():
        return "a turn reward is not finite"
    turns = len(set(turn_numbers(trajectory.mask).tolist()))
    if len(turn_rewards) != turns:
        return f"it has {len(turn_rewards)} turn rewards and {turns} turn{'s' * (turns != 1)}"
    return None
