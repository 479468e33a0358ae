"""MERGED"""

from __future__ import annotations

import math
from typing import Any

from outpace.errors import RewardFailed
from outpace.rewards.arguments import packed
from outpace.rewards.grader import Answer, Ask, Load, Refused, Scores
from outpace.runtime.code import Source
from outpace.runtime.limits import TimeLimitError
from outpace.runtime.servant import LOAD_LIMIT_S, Kind, Servant, ServantDied

GRADER = Kind("outpace.rewards.grader", Answer, "a reward function")


class Grader:
    """Handle of one grader process."""

    def __init__(self, memory_mb: int | None = None) -> None:
        self._process = Servant(GRADER, memory_mb)
        self._loaded: set[str] = set()

    @property
    def usable(self) -> bool:
        return self._process.usable

    async def load(self, name: str, source: Source) -> None:
        """Load the function in the process unless it is loaded. Raises `CallRaised` or `ServantDied`."""
        if name in self._loaded:
            return
        request = Load(self._process.next_id(), name, source.reference, source.code)
        try:
            await self._process.ask(request, LOAD_LIMIT_S)
        except TimeLimitError:
            raise ServantDied("did not start and import the function in time") from None
        self._loaded.add(name)

    async def call(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int = 0
    ) -> Scores:
        """Call the function. Raises `RewardFailed` (invalid scores), `CallRaised`, `ServantDied`, `TimeLimitError`."""
        body, by_value = packed(arguments)
        request = Ask(self._process.next_id(), name, count, body, by_value, first)
        answer = await self._process.ask(request, timeout_s)
        if isinstance(answer, Refused):
            raise RewardFailed(answer.message)
        if not isinstance(answer, Scores) or not _are_scores(answer.values, count):
            raise self._process.broken("sent an invalid answer")
        return answer

    async def end(self, patience_s: float = 0.0) -> None:
        await self._process.end(patience_s)


def _are_scores(values: list[float | None], count: int) -> bool:
    return len(values) == count and all(value is None or math.isfinite(value) for value in values)
