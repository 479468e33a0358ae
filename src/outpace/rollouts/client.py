"""Policy client: samples from the policy for one episode and keeps the exact tokens of every request.

    sample    one growing conversation
    chat      a full message history, continued from earlier answers where possible; `chat_samples` samples it n times
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
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from outpace.config import Config
from outpace.errors import ComponentFailed, RequestFailed, one_line
from outpace.models.chat import NO_KWARGS, Schema, TemplateKwargs, as_messages
from outpace.models.chat_format import ChatFormat
from outpace.models.frozen import freeze
from outpace.monitoring.metric_table import current_log
from outpace.protocols import Engine
from outpace.rollouts.answered_chats import AnsweredChat
from outpace.rollouts.conversation import (
    Conversation,
    ConversationIndex,
    ConversationPosition,
    RenderedPrompts,
    RequestListener,
    TurnSampler,
    yield_to_loop,
)
from outpace.rollouts.history_digests import content_text
from outpace.rollouts.requests import EpisodeRequests, RecordedTurns
from outpace.rollouts.transcript import EpisodePart
from outpace.types import Answer, Endpoint, GroupOrder, Message, StopReason, Trajectory, Version

if TYPE_CHECKING:
    from outpace.rollouts.gateway.server import Gateway


POLICY = "policy"
"""Default role."""

THREAD_RENDER_CHARS = 65_536
"""Text of at least this many characters is rendered on a thread: tokenizing it would block the event loop."""


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
        self.attempt = episode
        self.answered: list[AnsweredChat] | None = None  # if set, `chat` appends the answers of all requests made since
        self._gateway = gateway
        self._log = current_log()
        self._openings = {} if openings is None else openings
        self._system = config.model.system_prompt
        self._verbatim = config.model.text_prompts == "verbatim"
        self._begin(EpisodeRequests(engine, config, order, episode, turns, any_distribution))

    def _begin(self, requests: EpisodeRequests) -> None:
        conversations = ConversationIndex(self.chat_format, self._openings)
        self._sampler = TurnSampler(self.chat_format, self._system, self._verbatim, requests, conversations)
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
        must_call: Sequence[str] = (),
        chat_template_kwargs: TemplateKwargs | None = None,
        **overrides: Any,
    ) -> Answer:
        options = {"role": role, "must_call": must_call, "chat_template_kwargs": chat_template_kwargs, **overrides}
        return (await self.chat_samples(1, messages, tools=tools, **options))[0]

    async def chat_samples(
        self,
        n: int,
        messages: Sequence[Message],
        *,
        tools: Sequence[Schema] = (),
        role: str = POLICY,
        must_call: Sequence[str] = (),
        chat_template_kwargs: TemplateKwargs | None = None,
        listener: RequestListener | None = None,
        **overrides: Any,
    ) -> list[Answer]:
        """Sample `n` answers to the same prompt, each with its own request and seed. The last one becomes `newest`."""
        if not messages:
            raise RequestFailed("chat: messages is empty; pass at least one message")
        sampler, answered = self._sampler, self.answered  # captured now: a restart replaces both
        requests = [sampler.reserve(overrides) for _ in range(n)]
        kept = () if answered is None else freeze(list(messages))
        history = as_messages(list(messages), sampler.system)
        template_kwargs = chat_template_kwargs or NO_KWARGS
        position = await _locate(sampler, role, tools, history, template_kwargs)
        forced = sampler.conversations.call_opening(must_call, tools, template_kwargs)

        sampled = await sampler.sample_turns(
            requests, position.parent, position.observed, role, tools, listener, position.source, forced
        )
        for turn, answer in sampled:
            sampler.conversations.remember(position, turn, answer)
            if answered is not None:
                answered.append(AnsweredChat(kept, answer))
        return [answer for _, answer in sampled]

    async def complete(self, prompt: str | Sequence[int], *, role: str = POLICY, **overrides: Any) -> Answer:
        return (await self.complete_samples(1, prompt, role=role, **overrides))[0]

    async def complete_samples(
        self,
        n: int,
        prompt: str | Sequence[int],
        *,
        role: str = POLICY,
        listener: RequestListener | None = None,
        **overrides: Any,
    ) -> list[Answer]:
        """Sample `n` completions of the same prompt, each with its own request and seed."""
        sampler = self._sampler
        requests = [sampler.reserve(overrides) for _ in range(n)]
        await yield_to_loop()
        if isinstance(prompt, str):
            encode = self.chat_format.encode
            prompt = await asyncio.to_thread(encode, prompt) if len(prompt) >= THREAD_RENDER_CHARS else encode(prompt)
        ids = [int(token) for token in prompt]
        parent, length = sampler.transcript.longest_prefix(ids, role)
        sampled = await sampler.sample_turns(requests, parent, ids[length:], role, (), listener)
        return [answer for _, answer in sampled]

    async def endpoint(self, role: str = POLICY, *, key_in_url: bool = False) -> Endpoint:
        self._sampler.requests.check_not_ended()
        if self._gateway is None:
            raise RequestFailed("endpoint: this client has no gateway")
        return await self._gateway.open(self, role, key_in_url)

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

    def trajectories(self, parts: Sequence[EpisodePart] | None = None) -> list[Trajectory]:
        transcript = self._sampler.transcript
        return transcript.trajectories() if parts is None else transcript.split(parts)

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
        """How many times a conversation could not be continued exactly and a new trajectory began."""
        return self._sampler.conversations.breaks

    @property
    def silent_roles(self) -> list[str]:
        """Roles that have a reward but no answers."""
        transcript = self._sampler.transcript
        if not transcript.role_rewards:
            return []
        return sorted(transcript.role_rewards.keys() - {turn.role for turn in transcript.turns})

    def decode(self, tokens: Sequence[int]) -> str:
        return self.chat_format.decode(tokens)

    async def abandon(self) -> ComponentFailed | None:
        """End the episode: close its endpoints, abort its in-flight requests and count their tokens.

        Returns the component failure that a request to an endpoint met, if any. The caller must raise it."""
        fatal = None if self._gateway is None else await self._gateway.close_session(self)
        await self._sampler.requests.abandon()
        return fatal

    async def restart(self) -> ComponentFailed | None:
        """Restart the episode: close its endpoints, abort its in-flight requests, and discard all answers, which are
        counted as abandoned. Returns the same as `abandon`."""
        fatal = None if self._gateway is None else await self._gateway.close_session(self)
        requests = self._sampler.requests
        await requests.abort_all()
        requests.abandoned += self.sampled
        self.answered = None
        self._begin(requests)
        return fatal

    def _answered_id(self, request: str | Answer) -> str:
        request_id = request.request_id if isinstance(request, Answer) else request
        if not any(turn.request_id == request_id for turn in self._sampler.transcript.turns):
            raise ValueError(f"request {request_id!r} has no answer in this episode")
        return request_id


async def _locate(
    sampler: TurnSampler, role: str, tools: Sequence[Schema], history: list[Message], template_kwargs: TemplateKwargs
) -> ConversationPosition:
    await yield_to_loop()
    locate = partial(sampler.conversations.locate, role, tools, history, template_kwargs)
    if sum(len(content_text(message.get("content"))) for message in history) < THREAD_RENDER_CHARS:
        return locate()
    return await asyncio.to_thread(locate)


def _finite_reward(value: float) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"a reward must be a finite number, not {one_line(repr(value), 60)}")
    return float(value)
