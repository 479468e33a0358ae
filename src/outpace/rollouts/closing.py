"""Group scoring: turns the graded episodes of a group into training rows, and builds the group's report.

    episodes ─▶ score_group ─▶ ScoredGroup (outcome, reason, rows with advantages) ─▶ build_report ─▶ GroupReport

Pure: no I/O.

- A failed episode is left out; the others of its group are still used.
- A group that carries no learning signal (too few episodes left, all compared rewards equal, nothing left to train on)
  is filtered or failed, with the reason.
- An episode that is masked because it was truncated or is too long still counts toward the baseline of the others.
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
"""Stop reasons of truncated episodes: the token limit of an answer, of the episode, or the model's context."""

LEFT_OUT = "not trained on: truncated (filter.truncated) or too long (filter.longer_than)"
"""Reason recorded for an attempt that is masked within a trained group."""


@dataclass(frozen=True)
class Filter:
    """Resolved `[filter]` settings. `longer_than` None means no limit."""

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
    """Decide whether the group can be trained on, and compute the advantages of its rows."""
    survivors = [episode for episode in episodes if episode.error is None]
    if reason := _too_few_reason(episodes, len(survivors), rules.filter.min_group):
        return Verdict("failed", reason, [])
    rows = [row_of(kept, index) for index, episode in enumerate(survivors) for kept in episode.trajectories]
    if not any(row.mask.any() for row in rows):
        return Verdict("failed", "no token was sampled", [])
    if reason := _uniform_reason(rows, survivors, rules):
        return Verdict("filtered", reason, [])
    trained = [
        with_advantages(row, advantages_T)
        for row, advantages_T in zip(rows, _advantages(rows, survivors, rules.credit), strict=True)
        if row.mask.any() and _is_trained_on(survivors[row.episode], rules.filter)
    ]
    if not trained:
        return Verdict("filtered", "every attempt was truncated or is too long to train on", [])
    return Verdict("finished", "", trained)


def version_range(episodes: list[Episode]) -> tuple[int, int]:
    """Return the oldest and newest policy version among the sampled tokens."""
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


def _too_few_reason(episodes: list[Episode], survivors: int, least: int) -> str:
    """Return why too few episodes are left, with the first episode error, or an empty string."""
    error = next((episode.error for episode in episodes if episode.error), "no attempt was made")
    if survivors == 0:
        return error
    if survivors < least:
        return f"{survivors} of {plural(len(episodes), 'attempt')} succeeded, filter.min_group is {least}: {error}"
    return ""


def _uniform_reason(rows: list[Row], survivors: list[Episode], rules: ClosingRules) -> str:
    """Return why the group is uniform, or an empty string if its compared returns differ."""
    if not rules.filter.uniform:
        return ""
    compared = list(compared_returns(rows, *_rewards_of(survivors), rules.credit))
    if not all(is_uniform(returns_G, rules.filter.tolerance) for returns_G in compared):
        return ""
    return f"all rewards are {compared[0][0]:g}" if len(compared) == 1 else "all compared rewards are equal"


def _advantages(rows: list[Row], survivors: list[Episode], credit: CreditSettings) -> Sequence[Doubles]:
    if credit.estimator.facts.critic:
        return [np.zeros(int(row.mask.sum())) for row in rows]  # the learner computes them from the critic
    return group_advantages(rows, *_rewards_of(survivors), credit)


def _rewards_of(survivors: list[Episode]) -> tuple[list[float], list[dict[str, float]]]:
    return [episode.reward for episode in survivors], [episode.rewards for episode in survivors]


def _is_trained_on(episode: Episode, rules: Filter) -> bool:
    if rules.truncated == "mask" and episode.stop in CUT_OFF:
        return False
    return rules.longer_than is None or sampled_tokens(episode) <= rules.longer_than


def sampled_tokens(episode: Episode) -> int:
    return sum(int(trajectory.mask.sum()) for trajectory in episode.trajectories)


def row_of(trajectory: Trajectory, episode: int = 0) -> Row:
    """Convert a trajectory to a training row with zero advantages."""
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
