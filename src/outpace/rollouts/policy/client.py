"""The policy as a rollout sees it: say something, get an answer, with every token accounted for.

    sample    one growing chat
    chat      a whole history, which goes on from what was said before
    complete  plain text
    endpoint  all of these for somebody who speaks OpenAI's protocol

Invariant: no token is trained under a prefix it was not sampled from. A request sends exactly the ids of the turns
before it and keeps exactly what came back (`outpace.rollouts.policy.transcript`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Protocol

from outpace.errors import BadInput, PartFailed, RequestFailed, one_line
from outpace.models.chat import Schema, as_messages
from outpace.models.dialect import Dialect
from outpace.protocols import Engine
from outpace.rollouts.policy.asking import Asking, Listener, in_turn
from outpace.rollouts.policy.conversations import Conversations, Position
from outpace.rollouts.policy.history import Digest, text_of
from outpace.rollouts.policy.requests import ClientSettings, Requests
from outpace.rollouts.policy.thread import Thread
from outpace.rollouts.turns import EpisodeTurns
from outpace.types import Answer, Endpoint, GroupOrder, Message, StopReason, Trajectory, Version

POLICY = "policy"
"""The role of whoever does not say otherwise."""

LONG = 65_536
"""Texts of so many characters are rendered on a thread: tokenising them takes longer than the loop can wait."""

Openings = dict[Digest, list[int]]
"""Beginnings of conversations that are rendered already."""


class Doors(Protocol):
    """Where an episode gets URLs of its own."""

    async def open(self, client: PolicyClient, role: str) -> Endpoint: ...

    async def close_session(self, client: PolicyClient) -> PartFailed | BadInput | None:
        """End them all; says what went wrong behind them that no other attempt could do better, if anything did."""
        ...

    async def close(self) -> None: ...


class PolicyClient:
    """Implements `outpace.protocols.ModelClient` for one episode."""

    def __init__(
        self,
        engine: Engine,
        dialect: Dialect,
        settings: ClientSettings,
        order: GroupOrder,
        episode: int,
        openings: Openings | None = None,
        doors: Doors | None = None,
        turns: EpisodeTurns | None = None,
    ) -> None:
        """`openings` is shared by the episodes of a group. `turns`: what is recorded of this one."""
        self.engine = engine
        self.dialect = dialect
        self.max_tokens = settings.max_tokens
        self.stop_strings = settings.stop_strings
        self.min_version: Version = order.min_version
        self.environment: object | None = None
        self._doors = doors
        self._asking = Asking(
            dialect,
            settings.system,
            Requests(engine, settings, order, episode, turns),
            Conversations(dialect, {} if openings is None else openings),
        )
        self._main = Thread(self._asking, POLICY)

    # ------------------------------------------------------------------------------------------------ to be asked

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[Schema] = (), **overrides: Any
    ) -> str:
        return await self._main.sample(prompt, tools=tools, **overrides)

    def observe(self, text: str) -> None:
        self._main.observe(text)

    def thread(self, role: str = POLICY) -> Thread:
        """Another growing chat of this episode, for a sub-agent or another role."""
        return Thread(self._asking, role)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Schema] = (),
        role: str = POLICY,
        listener: Listener | None = None,
        **overrides: Any,
    ) -> Answer:
        if not messages:
            raise RequestFailed("a history has at least one message")
        request = self._asking.reserve(overrides)
        position = await self._place(role, tools, as_messages(list(messages), self._asking.system))
        turn, answer = await self._asking.ask(
            request, position.parent, position.observed, role, tools, listener, position.source
        )
        self._asking.conversations.remember(position, turn, answer)
        return answer

    async def complete(
        self, prompt: str | Sequence[int], *, role: str = POLICY, listener: Listener | None = None, **overrides: Any
    ) -> Answer:
        request = self._asking.reserve(overrides)
        await in_turn()
        if isinstance(prompt, str):
            encode = self.dialect.encode
            prompt = await asyncio.to_thread(encode, prompt) if len(prompt) >= LONG else encode(prompt)
        ids = [int(token) for token in prompt]
        parent, length = self._asking.transcript.longest_prefix(ids, role)
        return (await self._asking.ask(request, parent, ids[length:], role, (), listener))[1]

    async def endpoint(self, role: str = POLICY) -> Endpoint:
        self._asking.requests.refuse_after_the_end()
        if self._doors is None:
            raise RequestFailed("this client has no gateway to offer an endpoint on")
        return await self._doors.open(self, role)

    @property
    def stop(self) -> StopReason:
        """Why the newest answer ended."""
        return "stop" if self.newest is None else self.newest.stop

    # ---------------------------------------------------------------------------------------------------- to be judged

    def reward(self, value: float, *, request: str | Answer | None = None, role: str | None = None) -> None:
        if role is not None and request is None:
            self._asking.transcript.role_rewards[role] = _finite(value)
        elif request is not None and role is None:
            self._asking.transcript.give(self._answered(request), _finite(value))
        else:
            raise ValueError("reward takes a request or a role: whose reward is it?")

    def turn_reward(self, value: float, request: str | Answer) -> None:
        self._asking.transcript.turn_rewards[self._answered(request)] = _finite(value)

    def trajectory(self) -> Trajectory:
        """The chat of `sample` so far."""
        return self._main.trajectory()

    def trajectories(self) -> list[Trajectory]:
        return self._asking.transcript.trajectories()

    # ---------------------------------------------------------------------------------------- for the rest of the room

    @property
    def newest(self) -> Answer | None:
        return self._asking.newest

    @property
    def requests(self) -> list[str]:
        """The ids of all requests, in the order in which they were made."""
        return self._asking.requests.ids

    @property
    def answers(self) -> int:
        return len(self._asking.transcript.turns)

    @property
    def sampled(self) -> int:
        """Tokens of all answers."""
        return sum(turn.length for turn in self._asking.transcript.turns)

    @property
    def abandoned(self) -> int:
        """Tokens of answers that were given up."""
        return self._asking.requests.abandoned

    @property
    def breaks(self) -> int:
        """How often a conversation could not be continued exactly, and a new trajectory began."""
        return self._asking.conversations.breaks

    @property
    def silent_roles(self) -> list[str]:
        """Roles that were given a reward and have never spoken."""
        transcript = self._asking.transcript
        return sorted(transcript.role_rewards.keys() - {turn.role for turn in transcript.turns})

    def decode(self, tokens: Sequence[int]) -> str:
        return self.dialect.decode(tokens)

    async def abandon(self) -> PartFailed | BadInput | None:
        """The episode is over: close its URLs, free the engine of what it still has running there, and count what that
        had sampled. What came of the URLs that concerns the whole run, if anything, is for the caller to raise."""
        serious = None if self._doors is None else await self._doors.close_session(self)
        await self._asking.requests.abandon()
        return serious

    async def _place(self, role: str, tools: Sequence[Schema], history: list[Message]) -> Position:
        await in_turn()
        place = self._asking.conversations.place
        if sum(len(text_of(message.get("content"))) for message in history) < LONG:
            return place(role, tools, history)
        return await asyncio.to_thread(place, role, tools, history)

    def _answered(self, request: str | Answer) -> str:
        request_id = request.request_id if isinstance(request, Answer) else request
        if not any(turn.request_id == request_id for turn in self._asking.transcript.turns):
            raise ValueError(f"request {request_id!r} is none that was answered in this episode")
        return request_id


def _finite(value: float) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"a reward is a finite number, not {one_line(repr(value), 60)}")
    return float(value)
