"""Policy client: samples from the policy for one episode and keeps the exact tokens of every request.

    sample    one growing conversation
    chat      a full message history, continued from earlier answers where possible
    complete  plain text or token ids
    endpoint  the same over HTTP, for clients of the OpenAI or Anthropic protocol

    reserve id and seed ─▶ find the parent turn ─▶ new turn in the transcript ─▶ engine ─▶ answer

Invariants
- No token is trained under a prefix it was not sampled from. A request sends exactly the token ids of the turns before
  it and stores exactly what the engine returned (`outpace.rollout.transcript`).
- A request gets its id and its sampling seed when it is made, before any await. Scheduling of other episodes does not
  change what is sampled.
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
"""Default role."""

THREAD_RENDER_CHARS = 65_536
"""Text of at least this many characters is rendered on a thread: tokenizing it would block the event loop."""

Openings = dict[Digest, list[int]]
"""Token ids of rendered conversation starts, by exact digest."""


class Doors(Protocol):
    """Opens HTTP endpoints for episodes; implemented by the gateway."""

    async def open(self, client: PolicyClient, role: str) -> Endpoint: ...

    async def close_session(self, client: PolicyClient) -> PartFailed | BadInput | None:
        """Close all endpoints of the client. Returns the error that must end the run, if one occurred behind them."""
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
        """`openings` is shared by the episodes of a group. `turns` are the recorded answers of this episode."""
        self.engine = engine
        self.dialect = dialect
        self.max_tokens = settings.max_tokens
        self.stop_strings = settings.stop_strings
        self.min_version: Version = order.min_version
        self.environment: object | None = None
        self._endpoints = doors
        self._asking = Asking(
            dialect,
            settings.system,
            Requests(engine, settings, order, episode, turns),
            Conversations(dialect, {} if openings is None else openings),
        )
        self._main = Thread(self._asking, POLICY)

    # --------------------------------------------------------------------------------------------------- sampling

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[Schema] = (), **overrides: Any
    ) -> str:
        return await self._main.sample(prompt, tools=tools, **overrides)

    def observe(self, text: str) -> None:
        self._main.observe(text)

    def thread(self, role: str = POLICY) -> Thread:
        """Start another conversation in this episode, for a sub-agent or another role."""
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
            raise RequestFailed("chat: messages is empty; pass at least one message")
        request = self._asking.reserve(overrides)
        position = await self._locate(role, tools, as_messages(list(messages), self._asking.system))
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
            prompt = await asyncio.to_thread(encode, prompt) if len(prompt) >= THREAD_RENDER_CHARS else encode(prompt)
        ids = [int(token) for token in prompt]
        parent, length = self._asking.transcript.longest_prefix(ids, role)
        return (await self._asking.ask(request, parent, ids[length:], role, (), listener))[1]

    async def endpoint(self, role: str = POLICY) -> Endpoint:
        self._asking.requests.refuse_after_the_end()
        if self._endpoints is None:
            raise RequestFailed("endpoint: this client has no gateway")
        return await self._endpoints.open(self, role)

    @property
    def stop(self) -> StopReason:
        """Stop reason of the newest answer."""
        return "stop" if self.newest is None else self.newest.stop

    # ---------------------------------------------------------------------------------------------------- rewards

    def reward(self, value: float, *, request: str | Answer | None = None, role: str | None = None) -> None:
        if role is not None and request is None:
            self._asking.transcript.role_rewards[role] = _finite_reward(value)
        elif request is not None and role is None:
            self._asking.transcript.give(self._answered_id(request), _finite_reward(value))
        else:
            raise ValueError("reward: pass either request or role")

    def turn_reward(self, value: float, request: str | Answer) -> None:
        self._asking.transcript.turn_rewards[self._answered_id(request)] = _finite_reward(value)

    def trajectory(self) -> Trajectory:
        """Return the conversation of `sample` so far."""
        return self._main.trajectory()

    def trajectories(self) -> list[Trajectory]:
        return self._asking.transcript.trajectories()

    # --------------------------------------------------------------------------------------------------- accounting

    @property
    def newest(self) -> Answer | None:
        return self._asking.newest

    @property
    def requests(self) -> list[str]:
        """Ids of all requests, in the order they were made."""
        return self._asking.requests.ids

    @property
    def answers(self) -> int:
        return len(self._asking.transcript.turns)

    @property
    def sampled(self) -> int:
        """Number of tokens in all answers."""
        return sum(turn.length for turn in self._asking.transcript.turns)

    @property
    def abandoned(self) -> int:
        """Number of tokens in abandoned answers."""
        return self._asking.requests.abandoned

    @property
    def breaks(self) -> int:
        """How often a conversation could not be continued exactly, so that a new trajectory began."""
        return self._asking.conversations.breaks

    @property
    def silent_roles(self) -> list[str]:
        """Roles that have a reward but no answers."""
        transcript = self._asking.transcript
        return sorted(transcript.role_rewards.keys() - {turn.role for turn in transcript.turns})

    def decode(self, tokens: Sequence[int]) -> str:
        return self.dialect.decode(tokens)

    async def abandon(self) -> PartFailed | BadInput | None:
        """End the episode: close its endpoints, abort its in-flight requests and count their tokens.

        Returns the error that must end the run, if one occurred behind the endpoints. The caller must raise it."""
        fatal = None if self._endpoints is None else await self._endpoints.close_session(self)
        await self._asking.requests.abandon()
        return fatal

    async def _locate(self, role: str, tools: Sequence[Schema], history: list[Message]) -> Position:
        await in_turn()
        place = self._asking.conversations.place
        if sum(len(text_of(message.get("content"))) for message in history) < THREAD_RENDER_CHARS:
            return place(role, tools, history)
        return await asyncio.to_thread(place, role, tools, history)

    def _answered_id(self, request: str | Answer) -> str:
        request_id = request.request_id if isinstance(request, Answer) else request
        if not any(turn.request_id == request_id for turn in self._asking.transcript.turns):
            raise ValueError(f"request {request_id!r} has no answer in this episode")
        return request_id


def _finite_reward(value: float) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"a reward must be a finite number, not {one_line(repr(value), 60)}")
    return float(value)
