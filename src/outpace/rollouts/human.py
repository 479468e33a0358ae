"""A person in the model's seat: the client of an episode whose answers are typed.

    rollout ─ chat, sample, complete ─▶ HumanClient ─ scene: what is new, the tools ─▶ person ─▶ text and calls

Whatever a rollout may ask of a policy it may ask here; there are no tokens, so trajectories are empty and limits on
tokens do not bite. A person who gives up or leaves ends the episode as being cancelled would.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outpace.errors import RequestFailed
from outpace.models.chat import Schema, as_messages
from outpace.rollouts.policy.trajectory import TrajectoryBuilder
from outpace.types import Answer, Endpoint, Message, StopReason, ToolCall, Trajectory
from outpace.wording import plural


@dataclass(frozen=True)
class Scene:
    """What the person sees when it is their turn: `new` is what came since the last turn of this role."""

    role: str
    messages: Sequence[Message]
    new: Sequence[Message]
    tools: Sequence[Schema]


@dataclass(frozen=True)
class Typed:
    """An answer: what is said, and what is called, by name and arguments."""

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


class Person(Protocol):
    async def answer(self, scene: Scene) -> Typed | None:
        """None: they do not go on with this episode."""
        ...

    def hear(self, text: str) -> None:
        """Something that a rollout appends without asking for an answer."""
        ...


class HumanClient:
    """Implements `outpace.protocols.ModelClient`, and what `outpace.rollouts.episodes` asks of a client."""

    min_version = 0
    breaks = 0
    environment: object | None = None

    def __init__(self, person: Person, system: str | None = None) -> None:
        self._person = person
        self._system = system
        self._one_at_a_time = asyncio.Lock()  # a rollout may ask twice at once, and there is one keyboard
        self._heard: dict[str, list[Message]] = {}  # by role, up to the newest answer
        self._main: list[Message] = []
        self._tools: Sequence[Schema] = ()
        self.requests: list[str] = []
        self.newest: Answer | None = None
        self.gave_up = False
        self._roles: dict[str, str] = {}  # by request
        self._rewards: dict[str, float] = {}  # of the conversation of a role
        self._turn_rewards: dict[str, float] = {}  # by request

    @property
    def answers(self) -> int:
        return len(self.requests)

    @property
    def silent_roles(self) -> list[str]:
        """Roles that were given a reward and have never spoken."""
        return sorted(self._rewards.keys() - set(self._roles.values()))

    @property
    def stop(self) -> StopReason:
        return "stop" if self.newest is None else self.newest.stop

    # ------------------------------------------------------------------------------------------------ to be asked

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Schema] = (), role: str = "policy", **overrides: Any
    ) -> Answer:
        async with self._one_at_a_time:
            history = as_messages(list(messages), self._system)
            scene = Scene(role, history, self._new(role, history), tools)
            typed = await self._person.answer(scene)
            if typed is None:
                self.gave_up = True
                raise asyncio.CancelledError
            self.newest = self._answer(typed)
            self._roles[self.newest.request_id] = role
            self._heard[role] = [*history, self.newest.message]
            return self.newest

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[Schema] = (), **overrides: Any
    ) -> str:
        self._main += [] if prompt is None else as_messages(prompt)
        self._tools = tools or self._tools
        answer = await self.chat(self._main, tools=self._tools, **overrides)
        self._main.append(answer.message)
        return answer.text

    def observe(self, text: str) -> None:
        self._person.hear(text)

    async def complete(self, prompt: str | Sequence[int], *, role: str = "policy", **overrides: Any) -> Answer:
        text = prompt if isinstance(prompt, str) else f"[{plural(len(prompt), 'token')}]"
        return await self.chat([{"role": "text", "content": text}], role=role, **overrides)

    async def endpoint(self, role: str = "policy") -> Endpoint:
        raise RequestFailed("a person has no URL: play a rollout that takes a client")

    async def abandon(self) -> None:
        """Nothing runs that could be freed."""

    # ---------------------------------------------------------------------------------------------------- to be judged

    def reward(self, value: float, *, request: str | Answer | None = None, role: str | None = None) -> None:
        if request is not None and role is None:
            role = self._roles[self._answered(request)]
        elif request is not None or role is None:
            raise ValueError("reward takes a request or a role: whose reward is it?")
        self._rewards[role] = float(value)

    def turn_reward(self, value: float, request: str | Answer) -> None:
        self._turn_rewards[self._answered(request)] = float(value)

    @property
    def own_rewards(self) -> dict[str, float]:
        """What the rollout gave to roles and to single answers, by name."""
        return {**self._rewards, **self._turn_rewards}

    def rewarded(self) -> list[Trajectory]:
        """What a trajectory would bring along for each role that has spoken; there are no tokens in them."""
        turns: dict[str, list[float]] = {role: [] for role in self._roles.values()}
        for request, value in self._turn_rewards.items():
            turns[self._roles[request]].append(value)
        return [TrajectoryBuilder().build(role, self._rewards.get(role), given) for role, given in turns.items()]

    def trajectory(self) -> Trajectory:
        return TrajectoryBuilder().build()

    def trajectories(self) -> list[Trajectory]:
        return []

    def _new(self, role: str, history: list[Message]) -> list[Message]:
        heard = self._heard.get(role, [])
        return history[len(heard) :] if history[: len(heard)] == heard else history

    def _answered(self, request: str | Answer) -> str:
        request_id = request.request_id if isinstance(request, Answer) else request
        if request_id not in self._roles:
            raise ValueError(f"request {request_id!r} is none that was answered in this episode")
        return request_id

    def _answer(self, typed: Typed) -> Answer:
        request_id = f"answer-{len(self.requests)}"
        self.requests.append(request_id)
        calls = [
            ToolCall(f"call_{request_id}_{index}", name, json.dumps(arguments, ensure_ascii=False))
            for index, (name, arguments) in enumerate(typed.calls)
        ]
        none = np.zeros(0, dtype=np.int32)
        return Answer(
            request_id=request_id,
            text=typed.text,
            content=typed.text,
            reasoning="",
            calls=tuple(calls),
            stop="stop",
            prompt_tokens=0,
            tokens=none,
            logprobs=none.astype(np.float32),
            versions=none,
        )
