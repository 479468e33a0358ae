"""MERGED"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import numpy as np

from outpace.algorithms.attempts import turn_numbers
from outpace.errors import one_line
from outpace.types import OBSERVED, Generation, Ints, Trajectory, Version

OBSERVATION = "observation"
"""Source of text that is not a chat message."""


class TrajectoryBuilder:
    """Builds a trajectory by appending. Sampled ids are kept verbatim, with their logprobs and versions."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._sources: list[list[str]] = []  # sources of each run of observed tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def last(self) -> int | None:
        """The last token, or None."""
        return self._tokens[-1] if self._tokens else None

    def observe(self, tokens: Sequence[int], source: str = OBSERVATION) -> None:
        """Append tokens that the policy did not sample. `source` names their origin for display."""
        if tokens and (not self._mask or self._mask[-1]):
            self._sources.append([])
        if tokens and source not in self._sources[-1]:
            self._sources[-1].append(source)
        self._tokens += tokens
        self._mask += [False] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        self._versions += [OBSERVED] * len(tokens)

    def sampled(self, generation: Generation) -> None:
        """Append tokens sampled after exactly the tokens so far."""
        self._tokens += generation.tokens.tolist()
        self._mask += [True] * len(generation.tokens)
        self._logprobs += generation.logprobs.tolist()
        self._versions += generation.versions.tolist()

    def prefix(self) -> Ints:
        return np.array(self._tokens, dtype=np.int32)

    def build(
        self, role: str = "policy", reward: float | None = None, turn_rewards: Sequence[float] = ()
    ) -> Trajectory:
        return Trajectory(
            tokens=np.array(self._tokens, dtype=np.int32),
            mask=np.array(self._mask, dtype=np.bool_),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=np.array(self._versions, dtype=np.int32),
            role=role,
            reward=reward,
            turn_rewards=np.array(turn_rewards, dtype=np.float32),
            sources=[", ".join(sources) for sources in self._sources],
        )


def problem(trajectory: Trajectory, min_version: Version = 0) -> str | None:
    """Return why a trajectory cannot be trained on, or None. A rollout may have built it by hand.

    Tokens sampled before `min_version` would exceed the staleness bound."""
    columns = (trajectory.tokens, trajectory.mask, trajectory.logprobs, trajectory.versions)
    if not all(isinstance(column, np.ndarray) and column.ndim == 1 for column in columns):
        return "its columns must be one-dimensional arrays"
    if len({len(column) for column in columns}) != 1:
        return f"its columns differ in length: {', '.join(str(len(column)) for column in columns)}"
    if trajectory.mask.dtype != np.bool_:
        return f"its mask has dtype {trajectory.mask.dtype}, not bool"
    if not np.isfinite(trajectory.logprobs[trajectory.mask]).all():
        return "a sampled token has no finite logprob"
    if (trajectory.versions[trajectory.mask] < 0).any():
        return "a sampled token has no version"
    if (trajectory.versions[trajectory.mask] < min_version).any():
        oldest = int(trajectory.versions[trajectory.mask].min())
        return f"a sampled token has version {oldest}, older than the min_version {min_version} of its group"
    return _reward_problem(trajectory)


def _reward_problem(trajectory: Trajectory) -> str | None:
    """Return why the rewards are invalid, or None. A bad reward would corrupt the advantages of the whole group."""
    reward, turn_rewards = trajectory.reward, trajectory.turn_rewards
    if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
        return f"its reward is {one_line(repr(reward), 60)}, not a finite number"
    if not isinstance(turn_rewards, np.ndarray) or turn_rewards.ndim != 1 or turn_rewards.dtype.kind not in "fiu":
        return "its turn rewards are not a one-dimensional array of numbers"
    if not np.isfinite(turn_rewards).all():
        return "a turn reward is not finite"
    turns = len(set(turn_numbers(trajectory.mask).tolist()))
    if len(turn_rewards) not in (0, turns):
        return f"it has {len(turn_rewards)} turn rewards and {turns} turn{'s' * (turns != 1)}"
    return None
