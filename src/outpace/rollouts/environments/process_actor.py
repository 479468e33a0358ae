"""An actor in a process of its own, which can be killed.

Invariants
- The process starts and imports the class as soon as the actor exists; that time does not count for any episode.
- What comes up is checked again here, whatever was checked there.
- After a call that has not come back the process is not used again, and ends with all it has started.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from outpace.errors import BadInput
from outpace.models.chat import Schema
from outpace.rollouts.environments.instance import Unusable
from outpace.rollouts.environments.stage_child import (
    MAX_RESULT,
    Answer,
    Call,
    Leave,
    Load,
    Made,
    Make,
    Refused,
    Reset,
    Returned,
    Reward,
)
from outpace.rollouts.tools.functions import ToolError
from outpace.runtime.code import Source
from outpace.runtime.limits import TimeLimitError
from outpace.runtime.servant import LOAD_LIMIT_S, CallRaised, Kind, Servant, ServantDied
from outpace.runtime.servant_child import Numbered
from outpace.runtime.values import packed

ENVIRONMENT = Kind("outpace.rollouts.environments.stage_child", Answer, "an environment", max_answer=2 * MAX_RESULT)


class ProcessActor:
    def __init__(self, source: Source, setting: str, memory_mb: int | None = None) -> None:
        """`setting` is where the class was named."""
        self._servant = Servant(ENVIRONMENT, memory_mb)
        self._loading = asyncio.create_task(self._load(source, setting))
        self.instance: object | None = None
        self.made = False
        self.tools: Mapping[str, Schema] = {}
        self.judges = False

    @property
    def usable(self) -> bool:
        if not self._loading.done():
            return True
        return not self._loading.cancelled() and self._loading.exception() is None and self._servant.usable

    async def make(self, timeout_s: float) -> None:
        await asyncio.shield(self._loading)
        answer = await self._ask(Make(self._servant.next_id()), timeout_s)
        if not isinstance(answer, Made):
            raise self._nonsense()
        self.tools, self.judges, self.made = answer.tools, answer.judges, True

    async def reset(self, columns: dict[str, Any], timeout_s: float) -> str | None:
        try:
            body, by_value = packed(columns)
        except BadInput as error:
            raise Unusable(f"needs environment.isolation = thread: {error}") from error
        text = self._value(await self._ask(Reset(self._servant.next_id(), body, by_value), timeout_s))
        if text is not None and not isinstance(text, str):
            raise self._nonsense()
        return text

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        try:
            body, by_value = packed(arguments)
        except BadInput:
            raise ToolError(f"{name}: the arguments are nested too deeply") from None
        answer = await self._ask(Call(self._servant.next_id(), name, body, by_value), timeout_s)
        if isinstance(answer, Refused):
            raise ToolError(answer.message)
        return self._value(answer)

    async def reward(self, timeout_s: float) -> float:
        reward = self._value(await self._ask(Reward(self._servant.next_id()), timeout_s))
        if not isinstance(reward, float) or not math.isfinite(reward):
            raise self._nonsense()
        return reward

    async def leave(self, timeout_s: float) -> None:
        self.made = False
        await self._ask(Leave(self._servant.next_id()), timeout_s)

    async def end(self, patience_s: float = 0.0) -> None:
        self._loading.cancel()
        await asyncio.wait({self._loading})
        if not self._loading.cancelled():
            self._loading.exception()  # whoever waited for it has raised it
        await self._servant.end(patience_s)

    async def _load(self, source: Source, setting: str) -> None:
        order = Load(self._servant.next_id(), source.reference, source.code, setting)
        try:
            await self._servant.ask(order, LOAD_LIMIT_S)
        except TimeLimitError:
            raise ServantDied("could not start and import the class in time") from None
        except CallRaised as error:
            raise _as_input(error) from error

    async def _ask(self, order: Numbered, timeout_s: float) -> Any:
        if not self.usable:
            raise ServantDied("is not used any more")
        try:
            return await self._servant.ask(order, timeout_s)
        except CallRaised as error:
            if isinstance(order, Make):
                raise _as_input(error) from error
            raise

    def _value(self, answer: Any) -> Any:
        if isinstance(answer, Refused):
            raise Unusable(answer.message)
        if not isinstance(answer, Returned):
            raise self._nonsense()
        return answer.value

    def _nonsense(self) -> ServantDied:
        return self._servant.broken("gave an answer that is none")


def _as_input(error: CallRaised) -> Exception:
    """A class that cannot be an environment is the same mistake wherever it is found."""
    return BadInput(error.message) if error.kind == BadInput.__name__ else error
