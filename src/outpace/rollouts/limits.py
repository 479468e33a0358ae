"""MERGED"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """Budgets of one episode; None means no limit. Each budget's stop reason has the name of its field."""

    turns: int = 8
    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    answer_tokens: int | None = None  # rollout.max_tokens; the remaining `tokens` may allow less


@dataclass
class Spent:
    """Budget used by one episode. The time starts when this object is created."""

    limits: Limits
    clock: Callable[[], float]
    turns: int = 0
    calls: int = 0
    tokens: int = 0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def over(self) -> str | None:
        """Return the stop reason if no further answer is allowed, else None.

        The call budget ends the episode only once it is exceeded, so the policy still sees the last allowed results."""
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
        """Count the calls of an answer, and return how many of them are within the budget."""
        left = math.inf if self.limits.calls is None else self.limits.calls - self.calls
        self.calls += calls
        return int(min(calls, max(left, 0)))

    def tokens_left(self) -> float:
        return math.inf if self.limits.tokens is None else self.limits.tokens - self.tokens

    def seconds_left(self) -> float:
        return math.inf if self.limits.seconds is None else self.started + self.limits.seconds - self.clock()

    def max_tokens(self) -> int | None:
        """Return the token limit of the next answer if it is below rollout.max_tokens, else None."""
        left = self.tokens_left()
        usual = math.inf if self.limits.answer_tokens is None else self.limits.answer_tokens
        return int(left) if left < usual else None
