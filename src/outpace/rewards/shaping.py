"""Shaping of rewards that the reward functions do not see: what an attempt loses for nearly running out of tokens.

Being cut off is a cliff: one token decides between a whole reward and none, and nothing tells the policy that it comes
near. Over-long shaping makes it a slope. It applies to training only: an evaluation reports what the rewards say.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from outpace.types import Episode, Trajectory

OVERLONG = "overlong"
"""The name of what an attempt lost among its single rewards."""


@dataclass(frozen=True)
class Overlong:
    """The last `buffer` tokens before `limit` cost more and more, up to `penalty` for all of them."""

    limit: int
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        assert self.buffer > 0

    def of(self, tokens: int) -> float:
        """min(-(tokens - (limit - buffer)) / buffer * penalty, 0). An episode of several answers may have more tokens
        than the limit of each; it loses no more than the penalty either."""
        used = (tokens - (self.limit - self.buffer)) / self.buffer
        return -min(used, 1.0) * self.penalty if used > 0 else 0.0


def shaped(episode: Episode, rule: Overlong | None) -> Episode:
    """The episode with what its sampled tokens cost it, as a part of its reward; trajectories with rewards of their own
    lose the same. One that failed has no reward to shape."""
    if rule is None or episode.error is not None:
        return episode
    loss = rule.of(sum(int(trajectory.mask.sum()) for trajectory in episode.trajectories))
    return msgspec.structs.replace(
        episode,
        trajectories=[_less(trajectory, loss) for trajectory in episode.trajectories],
        reward=episode.reward + loss,
        rewards={**episode.rewards, OVERLONG: loss},
    )


def _less(trajectory: Trajectory, loss: float) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    return msgspec.structs.replace(trajectory, reward=trajectory.reward + loss)
