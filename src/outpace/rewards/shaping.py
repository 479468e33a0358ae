"""MERGED"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from outpace.types import Episode, Trajectory

OVERLONG = "overlong"
"""Key of the penalty in `Episode.rewards`."""


@dataclass(frozen=True)
class Overlong:
    """Linear length penalty over the last `buffer` tokens before `limit`, from 0 up to `penalty`."""

    limit: int
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        assert self.buffer > 0

    def of(self, tokens: int) -> float:
        """Return min(-(tokens - (limit - buffer)) / buffer * penalty, 0), but at least -penalty.

        The lower bound matters for multi-turn episodes, whose total may exceed the limit of a single completion."""
        used = (tokens - (self.limit - self.buffer)) / self.buffer
        return -min(used, 1.0) * self.penalty if used > 0 else 0.0


def shaped(episode: Episode, rule: Overlong | None) -> Episode:
    """Return the episode with the penalty for its sampled tokens added to its reward, and to trajectory rewards if set.

    Failed episodes are returned unchanged."""
    if rule is None or episode.error is not None:
        return episode
    loss = rule.of(sum(int(trajectory.mask.sum()) for trajectory in episode.trajectories))
    return msgspec.structs.replace(
        episode,
        trajectories=[_penalized(trajectory, loss) for trajectory in episode.trajectories],
        reward=episode.reward + loss,
        rewards={**episode.rewards, OVERLONG: loss},
    )


def _penalized(trajectory: Trajectory, loss: float) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    return msgspec.structs.replace(trajectory, reward=trajectory.reward + loss)
