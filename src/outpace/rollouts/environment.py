"""Environments: classes whose public methods are tools, rolled out turn by turn.

    reset(**columns) ─▶ the policy answers ─▶ tool calls? ── none ──▶ get_reward()
                              ▲                   │ run, in order
                              └── tool messages ◀─┘

A class has `reset(**columns) -> str | None`, whose text is appended to the last user message, any number of typed,
documented public methods, which are the tools, and perhaps `get_reward() -> float`. All of them may be asynchronous.

Invariants
- Every episode has an instance of its own.
- What the policy samples is kept verbatim: one episode is one trajectory, whatever tools were called in between.
- A tool call that fails in any way is told to the policy, and the episode goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from outpace.errors import BadInput, one_line
from outpace.models.chat import as_messages
from outpace.protocols import ModelClient, Rollout
from outpace.rewards.registry import accepted
from outpace.rollouts.tools import Call, Tool, ToolError, parse_calls, tools_of
from outpace.runtime import threads
from outpace.types import Episode, Message, Task

REWARD = "environment"
"""The name of the environment's own reward among those of the reward functions."""


@dataclass(frozen=True)
class Limits:
    """When an episode ends although the policy would go on."""

    turns: int = 8


def as_rollout(factory: Callable[[], object], limits: Limits) -> Rollout:
    """A rollout that makes a fresh environment by `factory()` for every episode."""

    async def rollout(task: Task, client: ModelClient) -> Episode:
        environment = await threads.call(factory)
        return await _Play(environment, client, limits).run(task)

    return rollout


def check_environment(factory: Callable[[], object], setting: str) -> None:
    """Raise `BadInput` for what can be known to be wrong before anything starts."""
    if not isinstance(factory, type):
        return  # what a function makes is seen when it is called
    if not callable(getattr(factory, "reset", None)):
        raise BadInput(f"{setting}: {factory.__name__} has no method reset(**columns)")
    tools_of(factory)


def gives_reward(factory: Callable[[], object]) -> bool:
    """Whether the environment judges its episodes itself; of what a function makes, that is believed."""
    return not isinstance(factory, type) or hasattr(factory, "get_reward")


_toolboxes: dict[type, dict[str, Tool]] = {}


def _toolbox(environment: type) -> dict[str, Tool]:
    """Made once per class: describing the tools costs more than an episode should pay."""
    if environment not in _toolboxes:
        _toolboxes[environment] = tools_of(environment)
    return _toolboxes[environment]


@dataclass
class _Play:
    """One episode in one environment."""

    environment: Any
    client: ModelClient
    limits: Limits
    said: list[Message] = field(default_factory=list)  # everything after the prompt
    calls: int = 0
    errors: int = 0

    async def run(self, task: Task) -> Episode:
        tools = _toolbox(type(self.environment))
        prompt: list[Message] = await self._reset(task)
        schemas = [tool.schema for tool in tools.values()]
        answer = await self._answer(prompt, tools=schemas)
        turns, stop = 1, self.client.stop
        while stop == "stop" and (calls := parse_calls(answer)):
            results = [await self._result(tools, call) for call in calls]
            self.said += results
            if turns == self.limits.turns:
                return await self._episode(turns, "turns")
            answer = await self._answer(results)
            turns, stop = turns + 1, self.client.stop
        return await self._episode(turns, stop)

    async def _reset(self, task: Task) -> list[Message]:
        """The task's prompt, with what the environment adds to it."""
        reset = self.environment.reset
        given = {name: task.columns[name] for name in accepted(reset, task.columns)}
        return with_observation(as_messages(task.prompt), await threads.call(reset, **given))

    async def _answer(self, heard: list[Message], **options: Any) -> str:
        text = await self.client.sample(heard, **options)
        self.said.append({"role": "assistant", "content": text})
        return text

    async def _result(self, tools: dict[str, Tool], call: Call | ToolError) -> Message:
        self.calls += 1
        name = {"name": call.name} if isinstance(call, Call) else {}
        try:
            content = await self._run(tools, call)
        except ToolError as error:
            self.errors += 1
            content = f"error: {error}"
        return {"role": "tool", **name, "content": content}

    async def _run(self, tools: dict[str, Tool], call: Call | ToolError) -> str:
        if isinstance(call, ToolError):
            raise call
        if call.name not in tools:
            raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(tools) or 'none'}")
        return await tools[call.name].run(self.environment, call.arguments)

    async def _episode(self, turns: int, stop: str) -> Episode:
        return Episode(
            trajectories=[self.client.trajectory()],
            completion=self.said,
            rewards=await self._rewards(),
            stop=stop,
            metrics={"turns": turns, "tool_calls": self.calls, "tool_errors": self.errors},
        )

    async def _rewards(self) -> dict[str, float]:
        if not hasattr(self.environment, "get_reward"):
            return {}
        reward = await threads.call(self.environment.get_reward)
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise ValueError(f"get_reward returned {one_line(repr(reward), 60)}, not a finite number")
        return {REWARD: float(reward)}


def with_observation(messages: list[Message], text: str | None) -> list[Message]:
    """The messages with `text` at the end of the last one of the user; the given ones are left as they are."""
    if not text:
        return messages
    last = next((index for index in reversed(range(len(messages))) if messages[index].get("role") == "user"), None)
    if last is None:
        return [*messages, {"role": "user", "content": text}]
    content = messages[last].get("content") or ""
    longer = [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
    return [*messages[:last], {**messages[last], "content": longer}, *messages[last + 1 :]]
