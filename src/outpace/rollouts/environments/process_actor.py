"""MERGED"""

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
        """`setting` is the setting that named the class."""
        self._process = Servant(ENVIRONMENT, memory_mb)
        self._loading = asyncio.create_task(self._load(source, setting))
        self.instance: object | None = None
        self.made = False
        self.tools: Mapping[str, Schema] = {}
        self.judges = False

    @property
    def usable(self) -> bool:
        if not self._loading.done():
            return True
        return not self._loading.cancelled() and self._loading.exception() is None and self._process.usable

    async def make(self, timeout_s: float) -> None:
        await asyncio.shield(self._loading)
        answer = await self._request(Make(self._process.next_id()), timeout_s)
        if not isinstance(answer, Made):
            raise self._invalid_reply()
        self.tools, self.judges, self.made = answer.tools, answer.judges, True

    async def reset(self, columns: dict[str, Any], timeout_s: float) -> str | None:
        try:
            body, by_value = packed(columns)
        except BadInput as error:
            raise Unusable(f"requires environment.isolation = thread: {error}") from error
        text = self._value(await self._request(Reset(self._process.next_id(), body, by_value), timeout_s))
        if text is not None and not isinstance(text, str):
            raise self._invalid_reply()
        return text

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        try:
            body, by_value = packed(arguments)
        except BadInput:
            raise ToolError(f"{name}: the arguments are nested too deeply") from None
        answer = await self._request(Call(self._process.next_id(), name, body, by_value), timeout_s)
        if isinstance(answer, Refused):
            raise ToolError(answer.message)
        return self._value(answer)

    async def reward(self, timeout_s: float) -> float:
        reward = self._value(await self._request(Reward(self._process.next_id()), timeout_s))
        if not isinstance(reward, float) or not math.isfinite(reward):
            raise self._invalid_reply()
        return reward

    async def drop(self, timeout_s: float) -> None:
        self.made = False
        await self._request(Leave(self._process.next_id()), timeout_s)

    async def end(self, patience_s: float = 0.0) -> None:
        self._loading.cancel()
        await asyncio.wait({self._loading})
        if not self._loading.cancelled():
            self._loading.exception()  # mark as retrieved: `make` has raised it
        await self._process.end(patience_s)

    async def _load(self, source: Source, setting: str) -> None:
        request = Load(self._process.next_id(), source.reference, source.code, setting)
        try:
            await self._process.ask(request, LOAD_LIMIT_S)
        except TimeLimitError:
            raise ServantDied("did not start and import the class in time") from None
        except CallRaised as error:
            raise _as_bad_input(error) from error

    async def _request(self, request: Numbered, timeout_s: float) -> Any:
        if not self.usable:
            raise ServantDied("is no longer usable")
        try:
            return await self._process.ask(request, timeout_s)
        except CallRaised as error:
            if isinstance(request, Make):
                raise _as_bad_input(error) from error
            raise

    def _value(self, answer: Any) -> Any:
        if isinstance(answer, Refused):
            raise Unusable(answer.message)
        if not isinstance(answer, Returned):
            raise self._invalid_reply()
        return answer.value

    def _invalid_reply(self) -> ServantDied:
        return self._process.broken("sent an invalid answer")


def _as_bad_input(error: CallRaised) -> Exception:
    """Turn a `BadInput` raised in the process back into a `BadInput` here."""
    return BadInput(error.message) if error.kind == BadInput.__name__ else error
