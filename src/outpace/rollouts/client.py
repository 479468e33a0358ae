"""Policy client: samples from the policy for one episode and keeps the exact tokens of every request.

    sample    one growing conversation
    chat      a full message history, continued from earlier answers where possible
    complete  plain text or token ids
    endpoint  the same over HTTP, for clients of the OpenAI or Anthropic protocol

    reserve id and seed ─▶ find the parent turn ─▶ new turn in the transcript ─▶ engine ─▶ answer

Invariants
- No token is trained under a prefix it was not sampled from. A request sends exactly the token ids of the turns before
  it and stores exactly what the engine returned (`outpace.rollouts.transcript`).
- A request gets its id and its sampling seed when it is made, before any await. Scheduling of other episodes does not
  change what is sampled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from outpace.config import Config
from outpace.errors import ComponentFailed, RequestFailed, one_line
from outpace.models.chat import Schema, as_messages
from outpace.models.chat_format import ChatFormat
from outpace.monitoring.metric_table import current_log
from outpace.protocols import Engine
from outpace.rollouts.conversation import (
    Conversation,
    ConversationIndex,
    ConversationPosition,
    Digest,
    RequestListener,
    TurnSampler,
    content_text,
    yield_to_loop,
)
from outpace.rollouts.requests import EpisodeRequests, RecordedTurns
from outpace.types import Answer, Endpoint, GroupOrder, Message, StopReason, Trajectory, Version

if TYPE_CHECKING:
    from outpace.rollouts.gateway.server import Gateway


POLICY = "policy"
"""Default role."""

THREAD_RENDER_CHARS = 65_536
"""Text of at least this many characters is rendered on a thread: tokenizing it would block the event loop."""

RenderedPrompts = dict[Digest, list[int]]
"""Token ids of rendered conversation starts, by exact digest."""


class PolicyClient:
    """Implements `outpace.protocols.ModelClient` for one episode."""

    def __init__(
        self,
        engine: Engine,
        chat_format: ChatFormat,
        config: Config,
        order: GroupOrder,
        episode: int,
        openings: RenderedPrompts | None = None,
        gateway: Gateway | None = None,
        turns: RecordedTurns | None = None,
        any_distribution: bool = False,
    ) -> None:
        """`openings` and `turns` are shared by the episodes of a group. `any_distribution`: requests may change the
        sampling distribution, as in evaluation."""
        self.engine = engine
        self.chat_format = chat_format
        assert config.rollout.max_tokens is not None, "the config must be resolved"
        self.max_tokens = config.rollout.max_tokens
        self.stop_strings = config.rollout.stop
        self.min_version: Version = order.min_version
        self.environment: object | None = None
        self._gateway = gateway
        self._log = current_log()
        self._sampler = TurnSampler(
            chat_format,
            config.model.system_prompt,
            config.model.text_prompts == "verbatim",
            EpisodeRequests(engine, config, order, episode, turns, any_distribution),
            ConversationIndex(chat_format, {} if openings is None else openings),
        )
        self._main = Conversation(self._sampler, POLICY)

    # --------------------------------------------------------------------------------------------------- sampling

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[Schema] = (), **overrides: Any
    ) -> str:
        return await self._main.sample(prompt, tools=tools, **overrides)

    def observe(self, text: str) -> None:
        self._main.observe(text)

    def conversation(self, role: str = POLICY) -> Conversation:
        """Start another conversation in this episode, for a sub-agent or another role."""
        return Conversation(self._sampler, role)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Schema] = (),
        role: str = POLICY,
        listener: RequestListener | None = None,
        **overrides: Any,
    ) -> Answer:
        if not messages:
            raise RequestFailed("chat: messages is empty; pass at least one message")
        request = self._sampler.reserve(overrides)
        position = await self._locate(role, tools, as_messages(list(messages), self._sampler.system))
        turn, answer = await self._sampler.sample_turn(
            request, position.parent, position.observed, role, tools, listener, position.source
        )
        self._sampler.conversations.remember(position, turn, answer)
        return answer

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        role: str = POLICY,
        listener: RequestListener | None = None,
        **overrides: Any,
    ) -> Answer:
        request = self._sampler.reserve(overrides)
        await yield_to_loop()
        if isinstance(prompt, str):
            encode = self.chat_format.encode
            prompt = await asyncio.to_thread(encode, prompt) if len(prompt) >= THREAD_RENDER_CHARS else encode(prompt)
        ids = [int(token) for token in prompt]
        parent, length = self._sampler.transcript.longest_prefix(ids, role)
        return (await self._sampler.sample_turn(request, parent, ids[length:], role, (), listener))[1]

    async def endpoint(self, role: str = POLICY) -> Endpoint:
        self._sampler.requests.check_not_ended()
        if self._gateway is None:
            raise RequestFailed("endpoint: this client has no gateway")
        return await self._gateway.open(self, role)

    @property
    def stop(self) -> StopReason:
        """Stop reason of the newest answer."""
        return "stop" if self.newest is None else self.newest.stop

    # ---------------------------------------------------------------------------------------------------- rewards

    def reward(self, value: float, *, request: str | Answer | None = None, role: str | None = None) -> None:
        if role is not None and request is None:
            self._sampler.transcript.role_rewards[role] = _finite_reward(value)
        elif request is not None and role is None:
            self._sampler.transcript.set_reward(self._answered_id(request), _finite_reward(value))
        else:
            raise ValueError("reward: pass either request or role")

    def turn_reward(self, value: float, request: str | Answer) -> None:
        self._sampler.transcript.turn_rewards[self._answered_id(request)] = _finite_reward(value)

    def log_metric(self, name: str, value: float, weight: float = 1.0) -> None:
        if self._log is not None:
            self._log.log_metric(name, value, weight)

    def trajectory(self) -> Trajectory:
        """Return the conversation of `sample` so far."""
        return self._main.trajectory()

    def trajectories(self) -> list[Trajectory]:
        return self._sampler.transcript.trajectories()

    # --------------------------------------------------------------------------------------------------- accounting

    @property
    def newest(self) -> Answer | None:
        return self._sampler.newest

    @property
    def requests(self) -> list[str]:
        """Ids of all requests, in the order they were made."""
        return self._sampler.requests.ids

    @property
    def answers(self) -> int:
        return len(self._sampler.transcript.turns)

    @property
    def sampled(self) -> int:
        """Number of tokens in all answers."""
        return sum(turn.length for turn in self._sampler.transcript.turns)

    @property
    def abandoned(self) -> int:
        """Number of tokens in abandoned answers."""
        return self._sampler.requests.abandoned

    @property
    def breaks(self) -> int:
        """How often a conversation could not be continued exactly, so that a new trajectory began."""
        return self._sampler.conversations.breaks

    @property
    def silent_roles(self) -> list[str]:
        """Roles that have a reward but no answers."""
        transcript = self._sampler.transcript
        return sorted(transcript.role_rewards.keys() - {turn.role for turn in transcript.turns})

    def decode(self, tokens: Sequence[int]) -> str:
        return self.chat_format.decode(tokens)

    async def abandon(self) -> ComponentFailed | None:
        """End the episode: close its endpoints, abort its in-flight requests and count their tokens.

        Returns the error that must end the run, if one occurred behind the endpoints. The caller must raise it."""
        fatal = None if self._gateway is None else await self._gateway.close_session(self)
        await self._sampler.requests.abandon()
        return fatal

    async def _locate(self, role: str, tools: Sequence[Schema], history: list[Message]) -> ConversationPosition:
        await yield_to_loop()
        locate = self._sampler.conversations.locate
        if sum(len(content_text(message.get("content"))) for message in history) < THREAD_RENDER_CHARS:
            return locate(role, tools, history)
        return await asyncio.to_thread(locate, role, tools, history)

    def _answered_id(self, request: str | Answer) -> str:
        request_id = request.request_id if isinstance(request, Answer) else request
        if not any(turn.request_id == request_id for turn in self._sampler.transcript.turns):
            raise ValueError(f"request {request_id!r} has no answer in this episode")
        return request_id


def _finite_reward(value: float) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"a reward must be a finite number, not {one_line(repr(value), 60)}")
    return float(value)
