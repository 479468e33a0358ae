"""A small verifiers environment for the tests: sums, an agent that sends one request, two rewards.

The agent runs in this process and calls its endpoint over HTTP, as a separate program would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import aiohttp
import verifiers.v1 as vf

__all__ = ["Asking", "TinySums"]

COUNT = 40


class Sum(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        if self.data.answer == "13":
            raise ValueError("this one cannot be judged")
        replies = [node.message for node in trace.nodes if node.message.role == "assistant"]
        return float(replies[-1].content == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0


class TinySums(vf.Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        for number in range(COUNT):
            yield SumTask(Sum(prompt=f"What is {number} + 1?", answer=str(number + 1)), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *rest: Any) -> Any:
        _, prompt = self.resolve_prompt(rest[1])
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as session,
            session.post(f"{endpoint}/chat/completions", json=body) as response,
        ):
            text = await response.text()
        return vf.ProgramResult(exit_code=0 if response.status == 200 else 1, stdout=text, stderr=text)
