"""Who is compared with whom, and which token gets which advantage.

    rewards, turn rewards, penalties ─▶ attempts ─▶ comparisons ─▶ estimator ─▶ one advantage per trained token

Attempts of one role are compared with one another: a judge's baseline is made of judges.

Credit `episode`: every token gets the advantage of the whole return. `turn`: every turn gets that of what came from
there on, compared with the same turn of the others. `token`: what came from the token on takes the place of the whole
return, which only an additive estimator allows.

Legend: _G one entry per attempt of a comparison, _T one per trained token.
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
    """A registered estimator with its settings."""

    @property
    def facts(self) -> AdvantageFacts: ...

    def __call__(self, peers: Peers, /) -> Any: ...


@dataclass(frozen=True)
class CreditSettings:
    """`gamma` discounts per turn or per token, as the credit is. `weights` are those of the rewards, by their names."""

    estimator: Estimator
    credit: Credit
    gamma: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        facts = self.estimator.facts
        assert self.credit in facts.credits, f"{facts.name} has no {self.credit} credit"
        assert self.credit != "token" or facts.additive, f"{facts.name} cannot be split by token"
        assert self.credit == "episode" or not facts.parts, "single rewards are of the whole episode"


def credit_settings(estimator: Estimator, credit: Credit | None = None, gamma: float | None = None) -> CreditSettings:
    """With the defaults of what is not set: the first credit of the estimator, and no discount."""
    return CreditSettings(estimator, credit or estimator.facts.credits[0], 1.0 if gamma is None else gamma)


def group_advantages(
    rows: Sequence[Row],
    rewards: Sequence[float],
    parts: Sequence[Mapping[str, float]],
    settings: CreditSettings,
    penalties: Sequence[Doubles] | None = None,
) -> list[Doubles]:
    """For each row one advantage per trained token.

    `rewards` and `parts` have an entry per episode; `parts` may be empty. `penalties` have an array per row, with a
    value per trained token that is subtracted from the reward at that token."""
    facts = settings.estimator.facts
    assert not facts.critic, "the learner makes the advantages of a critic"
    assert penalties is None or not facts.parts, "a penalty is not among the single rewards"
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
    """Every set of numbers that are held against one another: a group in which each set is uniform teaches nothing.

    With token credit those are the whole returns and, where turns have rewards, also what came from each turn on."""
    attempts = attempts_of(rows, rewards, parts, None)
    comparisons = list(_comparisons(attempts, settings))
    if settings.credit == "token" and any(len(row.turn_rewards) for row in rows):
        comparisons += _by_turn(attempts, settings)
    for comparison in comparisons:
        if settings.estimator.facts.parts and comparison.peers.parts:
            yield from (values_G[np.isfinite(values_G)] for values_G in comparison.peers.parts.values())
        else:
            yield comparison.peers.returns_G


def with_advantages(row: Row, advantages_T: Doubles) -> Row:
    """The row with these advantages at its trained tokens, and 0 elsewhere."""
    advantages = np.zeros(len(row.tokens), dtype=np.float32)
    advantages[row.mask] = advantages_T
    return msgspec.structs.replace(row, advantages=advantages)


def attempt_returns(
    rows: Sequence[Row], rewards: Sequence[float], penalties: Sequence[Doubles] | None = None
) -> Doubles:
    """The whole return of every attempt of a group: what the spread of a batch is taken of."""
    return np.array([attempt.whole for attempt in attempts_of(rows, rewards, [], penalties)], dtype=np.float64)


def critic_advantages(
    rows: Sequence[Row],
    rewards: Sequence[float],
    values: Sequence[Doubles],
    gamma: float,
    lam: float,
    penalties: Sequence[Doubles] | None = None,
) -> tuple[list[Doubles], list[Doubles]]:
    """For each row what gae makes of the critic's `values`, and what the critic should have said: one value per trained
    token. The rows of one attempt follow one another here too."""
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
    """`members` are the compared attempts, as indices into the list of all: as wholes, or at one turn of each."""

    peers: Peers
    members: list[int]
    turn: int | None = None


def _comparisons(attempts: list[Attempt], settings: CreditSettings) -> Iterator[_Comparison]:
    return _by_turn(attempts, settings) if settings.credit == "turn" else _as_wholes(attempts, settings)


def _as_wholes(attempts: list[Attempt], settings: CreditSettings) -> Iterator[_Comparison]:
    for members in _by_role(attempts):
        peers = Peers(
            returns_G=np.array([attempts[index].whole for index in members]),
            lengths_G=np.array([len(attempts[index].rewards_T) for index in members], dtype=np.float64),
            parts=_columns([attempts[index].parts for index in members]) if settings.credit == "episode" else {},
            weights=settings.weights,
        )
        yield _Comparison(peers, members)


def _by_turn(attempts: list[Attempt], settings: CreditSettings) -> Iterator[_Comparison]:
    returns = [attempt.from_turns(settings.gamma) for attempt in attempts]
    lengths = [np.bincount(attempt.turn_T) for attempt in attempts]
    for same_role in _by_role(attempts):
        for turn in range(max(attempts[index].turns for index in same_role)):
            members = [index for index in same_role if attempts[index].turns > turn]
            returns_G = np.array([returns[index][turn] for index in members])
            lengths_G = np.array([lengths[index][turn] for index in members], dtype=np.float64)
            yield _Comparison(Peers(returns_G, lengths_G, weights=settings.weights), members, turn)


def _by_role(attempts: list[Attempt]) -> list[list[int]]:
    roles: dict[str, list[int]] = {}
    for index, attempt in enumerate(attempts):
        roles.setdefault(attempt.role, []).append(index)
    return list(roles.values())


def _columns(rewards: list[Mapping[str, float]]) -> dict[str, Doubles]:
    """By name one value per attempt, NaN where there is none."""
    names = sorted({name for single in rewards for name in single})
    return {name: np.array([single.get(name, np.nan) for single in rewards]) for name in names}


# ------------------------------------------------------------------------------------------------------- advantages


def _advantages(attempts: list[Attempt], settings: CreditSettings) -> list[Doubles]:
    """For each attempt one advantage per trained token."""
    by_attempt = [np.zeros(len(attempt.rewards_T)) for attempt in attempts]
    for comparison in _comparisons(attempts, settings):
        estimated_G = _estimated(comparison.peers, settings.estimator)
        for index, estimated in zip(comparison.members, estimated_G, strict=True):
            attempt = attempts[index]
            chosen_T = slice(None) if comparison.turn is None else attempt.turn_T == comparison.turn
            by_attempt[index][chosen_T] = estimated
            if settings.credit == "token" and not _is_alone(comparison.peers, settings.estimator):
                by_attempt[index] += attempt.from_tokens(settings.gamma) - attempt.whole
    return by_attempt


def _is_alone(peers: Peers, estimator: Estimator) -> bool:
    return len(peers.returns_G) == 1 and estimator.facts.needs_peers


def _estimated(peers: Peers, estimator: Estimator) -> Doubles:
    """What the estimator says, which may be a user's."""
    count, name = len(peers.returns_G), estimator.facts.name
    if _is_alone(peers, estimator):
        return np.zeros(1)
    try:
        advantages_G = np.asarray(estimator(peers), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"algorithm.advantage: {name} failed on {plural(count, 'attempt')}: {one_line(error)}"
        ) from error
    if advantages_G.shape != (count,):
        raise BadInput(
            f"algorithm.advantage: {name} gave an array of shape {advantages_G.shape} for {plural(count, 'attempt')}"
        )
    if not (np.abs(advantages_G) <= np.finfo(np.float32).max).all():  # NaN is not, either
        raise BadInput(
            f"algorithm.advantage: {name} gave an advantage that is not finite for {peers.returns_G.tolist()}"
        )
    return advantages_G
