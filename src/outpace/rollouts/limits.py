"""The budgets of one episode with tools, and what it has used of them.

Pure bookkeeping: the clock is given, nothing waits. Every budget has a stop reason of its own, named after its field.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """When an episode ends although the policy would go on; None is no limit."""

    turns: int = 8
    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    answer_tokens: int | None = None  # rollout.max_tokens, which the tokens that are left may undercut


@dataclass
class Spent:
    """What an episode has used so far. Time runs from the moment this is made."""

    limits: Limits
    clock: Callable[[], float]
    turns: int = 0
    calls: int = 0
    tokens: int = 0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def over(self) -> str | None:
        """Why there can be no further answer, if there cannot.

        Calls are over only when more were asked for than there were: the results of the last ones are still read."""
        limits = self.limits
        if limits.calls is not None and self.calls > limits.calls:
            return "calls"
        if self.turns >= limits.turns:
            return "turns"
        if self.tokens_left() <= 0:
            return "tokens"
        return "seconds" if self.seconds_left() <= 0 else None

    def answered(self, tokens: int) -> None:
        self.turns += 1
        self.tokens += tokens

    def admit(self, calls: int) -> int:
        """How many of the calls that an answer makes are within the budget; all of them are counted."""
        left = math.inf if self.limits.calls is None else self.limits.calls - self.calls
        self.calls += calls
        return int(min(calls, max(left, 0)))

    def tokens_left(self) -> float:
        return math.inf if self.limits.tokens is None else self.limits.tokens - self.tokens

    def seconds_left(self) -> float:
        return math.inf if self.limits.seconds is None else self.started + self.limits.seconds - self.clock()

    def max_tokens(self) -> int | None:
        """The limit of the next answer where it is another than the usual one."""
        left = self.tokens_left()
        usual = math.inf if self.limits.answer_tokens is None else self.limits.answer_tokens
        return int(left) if left < usual else None
