"""Closing a group: from judged episodes to a verdict and the rows that the learner trains on. Pure.

A bad episode is data, not a crash: it is left out and its siblings go on. A group that cannot teach (too few survived,
everything compared is equal, nothing is left to train on) says so and why. An episode that is not trained on because it
was cut off or is too long still counts for the baseline of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outpace.algorithms.advantages import Doubles, is_uniform
from outpace.algorithms.credit import CreditSettings, compared_returns, group_advantages, with_advantages
from outpace.types import OBSERVED, Episode, Outcome, Row, Trajectory
from outpace.wording import plural

CUT_OFF = ("length", "tokens", "context")
"""Ends of an episode that had more to say: the limit of an answer, of the episode, or of the model."""

LEFT_OUT = "it was cut off (filter.truncated) or is too long (filter.longer_than) to train on"
"""Why an attempt of a trained group may not be trained on itself."""


@dataclass(frozen=True)
class Filter:
    """The settings of `[filter]`, none of them open any more. `longer_than`: None is no limit."""

    uniform: bool = True
    tolerance: float = 1e-6
    min_group: int = 2
    truncated: Literal["train", "mask"] = "train"
    longer_than: int | None = None


@dataclass(frozen=True)
class ClosingRules:
    credit: CreditSettings
    filter: Filter


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reason: str
    rows: list[Row]


def close_group(episodes: list[Episode], rules: ClosingRules) -> Verdict:
    survivors = [episode for episode in episodes if episode.error is None]
    if reason := _too_few(episodes, len(survivors), rules.filter.min_group):
        return Verdict("failed", reason, [])
    rows = [row_of(kept, index) for index, episode in enumerate(survivors) for kept in episode.trajectories]
    if not any(row.mask.any() for row in rows):
        return Verdict("failed", "no token was sampled", [])
    if reason := _uniform(rows, survivors, rules):
        return Verdict("filtered", reason, [])
    trained = [
        with_advantages(row, advantages_T)
        for row, advantages_T in zip(rows, _advantages(rows, survivors, rules.credit), strict=True)
        if row.mask.any() and _is_trained_on(survivors[row.episode], rules.filter)
    ]
    if not trained:
        return Verdict("filtered", "every attempt was cut off or is too long to train on", [])
    return Verdict("finished", "", trained)


def version_range(episodes: list[Episode]) -> tuple[int, int]:
    """The oldest and newest version among the sampled tokens."""
    sampled = [
        trajectory.versions[trajectory.mask]
        for episode in episodes
        for trajectory in episode.trajectories
        if trajectory.mask.any()
    ]
    if not sampled:
        return OBSERVED, OBSERVED
    versions = np.concatenate(sampled)
    return int(versions.min()), int(versions.max())


def _too_few(episodes: list[Episode], survivors: int, least: int) -> str:
    """Why the group fails, if it does: the first error says most."""
    error = next((episode.error for episode in episodes if episode.error), "no attempt was made")
    if survivors == 0:
        return error
    if survivors < least:
        return f"{survivors} of {plural(len(episodes), 'attempt')} left, filter.min_group is {least}: {error}"
    return ""


def _uniform(rows: list[Row], survivors: list[Episode], rules: ClosingRules) -> str:
    """Why the group teaches nothing, if it does not."""
    if not rules.filter.uniform:
        return ""
    compared = list(compared_returns(rows, *_judgements(survivors), rules.credit))
    if not all(is_uniform(returns_G, rules.filter.tolerance) for returns_G in compared):
        return ""
    return f"all rewards are {compared[0][0]:g}" if len(compared) == 1 else "all rewards that are compared are equal"


def _advantages(rows: list[Row], survivors: list[Episode], credit: CreditSettings) -> Sequence[Doubles]:
    if credit.estimator.facts.critic:
        return [np.zeros(int(row.mask.sum())) for row in rows]  # the learner makes them
    return group_advantages(rows, *_judgements(survivors), credit)


def _judgements(survivors: list[Episode]) -> tuple[list[float], list[dict[str, float]]]:
    return [episode.reward for episode in survivors], [episode.rewards for episode in survivors]


def _is_trained_on(episode: Episode, rules: Filter) -> bool:
    if rules.truncated == "mask" and episode.stop in CUT_OFF:
        return False
    return rules.longer_than is None or sampled_tokens(episode) <= rules.longer_than


def sampled_tokens(episode: Episode) -> int:
    return sum(int(trajectory.mask.sum()) for trajectory in episode.trajectories)


def row_of(trajectory: Trajectory, episode: int = 0) -> Row:
    """Without advantages yet."""
    return Row(
        tokens=trajectory.tokens,
        mask=trajectory.mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        advantages=np.zeros(len(trajectory.tokens), dtype=np.float32),
        episode=episode,
        role=trajectory.role,
        reward=None if trajectory.reward is None else float(trajectory.reward),
        turn_rewards=trajectory.turn_rewards.astype(np.float32, copy=False),
        sources=[str(source) for source in trajectory.sources],
    )
