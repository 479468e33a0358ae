"""Closing a group: from judged episodes to a verdict and the rows that the learner trains on. Pure.

A bad episode is data, not a crash: it is left out and its siblings go on. A group that cannot teach (nobody survived,
one survivor under a group baseline, all rewards equal) says so and why.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outpace.learn.advantages import baseline, is_uniform
from outpace.types import OBSERVED, Episode, Outcome, Row, Trajectory


@dataclass(frozen=True)
class ClosingRules:
    baseline: str
    filter_uniform: bool
    uniform_tolerance: float


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reason: str
    rows: list[Row]


def close_group(episodes: list[Episode], rules: ClosingRules) -> Verdict:
    survivors = [episode for episode in episodes if episode.error is None]
    if not survivors:
        return Verdict("failed", episodes[0].error or "no episode", [])
    if len(survivors) == 1 and rules.baseline != "none":
        reason = next((episode.error for episode in episodes if episode.error), "a group of one")
        return Verdict("failed", f"one survivor has no baseline: {reason}", [])
    rewards = [episode.reward for episode in survivors]
    if rules.filter_uniform and is_uniform(rewards, rules.uniform_tolerance):
        return Verdict("filtered", f"all rewards are {rewards[0]:g}", [])
    rows = [
        _row(trajectory, advantage)
        for episode, advantage in zip(survivors, baseline(rules.baseline)(rewards), strict=True)
        for trajectory in episode.trajectories
        if trajectory.mask.any()
    ]
    return Verdict("finished", "", rows) if rows else Verdict("failed", "no token was sampled", [])


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


def _row(trajectory: Trajectory, advantage: float) -> Row:
    return Row(
        tokens=trajectory.tokens,
        mask=trajectory.mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        advantages=np.where(trajectory.mask, np.float32(advantage), np.float32(0)),
    )
