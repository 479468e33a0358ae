"""Per-token advantages of a group: which attempts are compared, and which token gets which advantage.

    rewards, turn rewards, penalties ─▶ attempts ─▶ comparisons ─▶ estimator ─▶ one advantage per trained token

Attempts
- An attempt is one episode's rows of one role; a row with its own reward is an attempt of its own. The rows of an
  attempt follow each other in time, share its advantage, and count once.
- An episode without trained rows still counts by its reward, in every role that uses the episode's reward.
- Rewards arrive at the end: a turn's at its last token, the attempt's at its very last token.
- Only attempts of the same role are compared: the baseline of a judge consists of judges.

`algorithm.credit`
- `episode`: every token gets the advantage of the full return.
- `turn`: every turn gets the advantage of the return from that turn on, compared with the same turn of other attempts.
- `token`: the return from the token on replaces the full return. Requires an additive estimator.

Legend: _G one entry per attempt of a comparison, _T one per trained token, _K one per turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from outpace.algorithms.advantages import Doubles, Peers
from outpace.algorithms.attempts import Attempt, attempts_of
from outpace.algorithms.gae import gae
from outpace.algorithms.registry import AdvantageFacts, Credit
from outpace.errors import BadInput, one_line
from outpace.types import Row
from outpace.wording import plural


class Estimator(Protocol):
    """A registered advantage estimator bound to its settings."""

    @property
    def facts(self) -> AdvantageFacts: ...

    def __call__(self, group: Peers, /) -> Any: ...


@dataclass(frozen=True)
class CreditSettings:
    """`gamma` discounts per turn or per token, depending on `credit`. `weights` are reward weights by reward name."""

    estimator: Estimator
    credit: Credit
    gamma: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        facts = self.estimator.facts
        assert self.credit in facts.credits, f"{facts.name} does not support {self.credit} credit"
        assert self.credit != "token" or facts.additive, f"{facts.name} is not additive"
        assert self.credit == "episode" or not facts.parts, "individual rewards need episode credit"


def credit_settings(estimator: Estimator, credit: Credit | None = None, gamma: float | None = None) -> CreditSettings:
    """Return settings with defaults filled in: the estimator's first credit, and no discount."""
    return CreditSettings(estimator, credit or estimator.facts.credits[0], 1.0 if gamma is None else gamma)


def group_advantages(
    rows: Sequence[Row],
    rewards: Sequence[float],
    parts: Sequence[Mapping[str, float]],
    settings: CreditSettings,
    penalties: Sequence[Doubles] | None = None,
) -> list[Doubles]:
    """Return one advantage per trained token, for each row.

    `rewards` and `parts` have one entry per episode; `parts` may be empty. `penalties` has one array per row, with one
    value per trained token that is subtracted from the reward at that token."""
    facts = settings.estimator.facts
    assert not facts.critic, "the learner computes advantages that need a critic"
    assert penalties is None or not facts.parts, "a penalty is not an individual reward"
    attempts = attempts_of(rows, rewards, parts, penalties)
    by_row: list[Doubles] = [np.zeros(0)] * len(rows)
    for attempt, advantages_T in zip(attempts, _advantages(attempts, settings), strict=True):
        start = 0
        for index in attempt.rows:
            end = start + int(rows[index].mask.sum())
            by_row[index], start = advantages_T[start:end], end
    return by_row


def compared_returns(
    rows: Sequence[Row], rewards: Sequence[float], parts: Sequence[Mapping[str, float]], settings: CreditSettings
) -> Iterator[Doubles]:
    """Yield each set of returns that are compared. If every set is uniform, the group has no training signal.

    With token credit: the full returns and, if turns have rewards, the returns from each turn on."""
    attempts = attempts_of(rows, rewards, parts, None)
    comparisons = list(_comparisons(attempts, settings))
    if settings.credit == "token" and any(len(row.turn_rewards) for row in rows):
        comparisons += _compare_turns(attempts, settings)
    for comparison in comparisons:
        if settings.estimator.facts.parts and comparison.group.parts:
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
    return np.array([attempt.whole for attempt in attempts_of(rows, rewards, [], penalties)], dtype=np.float64)


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
    for attempt in attempts_of(rows, rewards, (), penalties):
        if not attempt.rows:
            continue
        lengths = [len(values[index]) for index in attempt.rows]
        values_T = np.concatenate([values[index] for index in attempt.rows])
        pair = gae(attempt.arriving_T, values_T, gamma, lam)
        for column, found_T in zip((advantages, returns), pair, strict=True):
            for index, part_T in zip(attempt.rows, np.split(found_T, np.cumsum(lengths)[:-1]), strict=True):
                column[index] = part_T
    return advantages, returns


# ------------------------------------------------------------------------------------------------------ comparisons


@dataclass(frozen=True)
class _Comparison:
    """Attempts compared with each other, in full or at one turn. `members` are indices into all attempts."""

    group: Peers
    members: list[int]
    turn: int | None = None


def _comparisons(attempts: list[Attempt], settings: CreditSettings) -> Iterator[_Comparison]:
    return _compare_turns(attempts, settings) if settings.credit == "turn" else _compare_returns(attempts, settings)


def _compare_returns(attempts: list[Attempt], settings: CreditSettings) -> Iterator[_Comparison]:
    for members in _indices_by_role(attempts):
        group = Peers(
            returns_G=np.array([attempts[index].whole for index in members]),
            lengths_G=np.array([len(attempts[index].rewards_T) for index in members], dtype=np.float64),
            parts=_reward_columns([attempts[index].parts for index in members]) if settings.credit == "episode" else {},
            weights=settings.weights,
        )
        yield _Comparison(group, members)


def _compare_turns(attempts: list[Attempt], settings: CreditSettings) -> Iterator[_Comparison]:
    returns = [attempt.from_turns(settings.gamma) for attempt in attempts]
    lengths = [np.bincount(attempt.turn_T) for attempt in attempts]
    for in_role in _indices_by_role(attempts):
        for turn in range(max(attempts[index].turns for index in in_role)):
            members = [index for index in in_role if attempts[index].turns > turn]
            returns_G = np.array([returns[index][turn] for index in members])
            lengths_G = np.array([lengths[index][turn] for index in members], dtype=np.float64)
            yield _Comparison(Peers(returns_G, lengths_G, weights=settings.weights), members, turn)


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


def _advantages(attempts: list[Attempt], settings: CreditSettings) -> list[Doubles]:
    """Return one advantage per trained token, for each attempt."""
    by_attempt = [np.zeros(len(attempt.rewards_T)) for attempt in attempts]
    for comparison in _comparisons(attempts, settings):
        estimated_G = _estimate(comparison.group, settings.estimator)
        for index, estimated in zip(comparison.members, estimated_G, strict=True):
            attempt = attempts[index]
            chosen_T = slice(None) if comparison.turn is None else attempt.turn_T == comparison.turn
            by_attempt[index][chosen_T] = estimated
            if settings.credit == "token" and not _lacks_peers(comparison.group, settings.estimator):
                by_attempt[index] += attempt.from_tokens(settings.gamma) - attempt.whole
    return by_attempt


def _lacks_peers(group: Peers, estimator: Estimator) -> bool:
    return len(group.returns_G) == 1 and estimator.facts.needs_peers


def _estimate(group: Peers, estimator: Estimator) -> Doubles:
    """Call the estimator and validate its result; it may be user code."""
    count, name = len(group.returns_G), estimator.facts.name
    if _lacks_peers(group, estimator):
        return np.zeros(1)
    try:
        advantages_G = np.asarray(estimator(group), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"algorithm.advantage: {name} failed on {plural(count, 'attempt')}: {one_line(error)}"
        ) from error
    if advantages_G.shape != (count,):
        raise BadInput(
            f"algorithm.advantage: {name} returned shape {advantages_G.shape} for {plural(count, 'attempt')}; "
            "return one advantage per attempt"
        )
    if not (np.abs(advantages_G) <= np.finfo(np.float32).max).all():  # false for NaN too
        raise BadInput(
            f"algorithm.advantage: {name} returned a non-finite advantage for the returns {group.returns_G.tolist()}"
        )
    return advantages_G
