"""One grader process, as the rollout worker sees it: a servant that knows reward functions.

    load, once per function ─▶ call, call, …

Invariant: what comes up is checked again here, whatever was checked there.
"""

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
    def __init__(self, memory_mb: int | None = None) -> None:
        self._servant = Servant(GRADER, memory_mb)
        self._loaded: set[str] = set()

    @property
    def usable(self) -> bool:
        return self._servant.usable

    async def load(self, name: str, source: Source) -> None:
        """Have the function ready in the process; `CallRaised` or `ServantDied` otherwise."""
        if name in self._loaded:
            return
        order = Load(self._servant.next_id(), name, source.reference, source.code)
        try:
            await self._servant.ask(order, LOAD_LIMIT_S)
        except TimeLimitError:
            raise ServantDied("could not start and import the function in time") from None
        self._loaded.add(name)

    async def call(
        self, name: str, arguments: dict[str, list[Any]], count: int, timeout_s: float, first: int = 0
    ) -> Scores:
        """What the function gave: `RewardFailed` if it is unusable; `CallRaised`, `ServantDied`, `TimeLimitError`."""
        body, by_value = packed(arguments)
        order = Ask(self._servant.next_id(), name, count, body, by_value, first)
        answer = await self._servant.ask(order, timeout_s)
        if isinstance(answer, Refused):
            raise RewardFailed(answer.message)
        if not isinstance(answer, Scores) or not _are_scores(answer.values, count):
            raise self._servant.broken("gave an answer that is none")
        return answer

    async def end(self, patience_s: float = 0.0) -> None:
        await self._servant.end(patience_s)


def _are_scores(values: list[float | None], count: int) -> bool:
    return len(values) == count and all(value is None or math.isfinite(value) for value in values)
