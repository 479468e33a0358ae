"""One environment class for every episode of a run: the loop of `outpace.rollouts.loop` on a stage of its own.

A class has `reset(**columns) -> str | None`, whose text is appended to the last user message, any number of typed,
documented public methods, which are the tools, and perhaps `get_reward() -> float`. All of them may be asynchronous.
"""

from __future__ import annotations

from collections.abc import Callable

from outpace.protocols import Rollout
from outpace.rollouts.kinds import ONLY, Origin, check_kinds, give_rewards
from outpace.rollouts.limits import Limits
from outpace.rollouts.loop import ToolLoop, with_observation
from outpace.rollouts.stage import Stages

__all__ = ["Limits", "as_rollout", "check_environment", "gives_reward", "with_observation"]


def as_rollout(factory: Callable[[], object], limits: Limits) -> Rollout:
    """A rollout that makes a fresh environment by `factory()` for every episode."""
    return ToolLoop(stages=Stages({ONLY: Origin("rollout.environment", factory=factory)}), limits=limits)


def check_environment(factory: Callable[[], object], setting: str) -> None:
    """Raise `BadInput` for what can be known to be wrong before anything starts."""
    check_kinds({ONLY: Origin(setting, factory=factory)}, "")


def gives_reward(factory: Callable[[], object]) -> bool:
    """Whether the environment judges its episodes itself; of what a function makes, that is believed."""
    return give_rewards({ONLY: Origin("rollout.environment", factory=factory)})
