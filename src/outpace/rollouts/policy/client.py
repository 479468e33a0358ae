"""The policy as a rollout sees it: say something, get an answer, with every token accounted for.

    sample    one growing chat  ─┐
    chat      a whole history   ─┼─▶ a turn of the transcript ─▶ request ─▶ engine ─▶ answer, found by its request id
    complete  plain text        ─┘

Invariant: no token is trained under a prefix it was not sampled from. A request sends exactly the ids of the turns
before it and keeps exactly what came back (`outpace.rollouts.policy.transcript`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Protocol

import msgspec
import numpy as np

from outpace.errors import BadInput, PartFailed, RequestFailed, one_line
from outpace.models.chat import Schema, as_messages
from outpace.models.dialect import Dialect
from outpace.protocols import Engine
from outpace.rollouts.policy.conversations import Conversations
from outpace.rollouts.policy.history import Digest, digests
from outpace.rollouts.policy.requests import ClientSettings, Requests
from outpace.rollouts.policy.thread import Thread
from outpace.rollouts.policy.trajectory import TrajectoryBuilder
from outpace.rollouts.policy.transcript import Transcript, Turn
from outpace.runtime.per_loop import PerLoop
from outpace.runtime.turnstile import Turnstile
from outpace.types import (
    Answer,
    Endpoint,
    Generation,
    GroupOrder,
    Ints,
    Message,
    Sampling,
    StopReason,
    Trajectory,
    Version,
)

POLICY = "policy"
"""The role of whoever does not say otherwise."""

Openings = dict[Digest, list[int]]
"""Beginnings of conversations that are rendered already."""

Listener = Callable[[str, Ints], None]
"""Told the id and the prompt of a request as soon as it is under way."""


_turns: PerLoop[Turnstile] = PerLoop()


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
    ) -> None:
        """`openings` is shared by the episodes of a group."""
        self.engine = engine
        self.dialect = dialect
        self.system = settings.system
        self.max_tokens = settings.max_tokens
        self.min_version: Version = order.min_version
        self._doors = doors
        self._transcript = Transcript()
        self._requests = Requests(engine, settings, order, episode)
        self._conversations = Conversations(dialect, {} if openings is None else openings)
        self._main = Thread(self, POLICY)
        self.newest: Answer | None = None
        self.environment: object | None = None

    # ------------------------------------------------------------------------------------------------ to be asked

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[Schema] = (), **overrides: Any
    ) -> str:
        return await self._main.sample(prompt, tools=tools, **overrides)

    def observe(self, text: str) -> None:
        self._main.observe(text)

    def thread(self, role: str = POLICY) -> Thread:
        """Another growing chat of this episode, for a sub-agent or another role."""
        return Thread(self, role)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Schema] = (),
        role: str = POLICY,
        listener: Listener | None = None,
        **overrides: Any,
    ) -> Answer:
        await _turns.get(Turnstile).passed()  # rendering takes a while, and a thousand episodes may be here at once
        sampling = self.sampling(overrides)
        position = self._conversations.place(role, tools, as_messages(list(messages), self.system))
        turn, answer = await self.ask(position.parent, position.observed, role, sampling, tools, listener)
        self._conversations.remember(position, turn, answer)
        return answer

    async def complete(
        self, prompt: str | Sequence[int], *, role: str = POLICY, listener: Listener | None = None, **overrides: Any
    ) -> Answer:
        sampling = self.sampling(overrides)
        ids = self.dialect.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        parent, length = self._transcript.longest_prefix(ids, role)
        return (await self.ask(parent, ids[length:], role, sampling, (), listener))[1]

    async def endpoint(self, role: str = POLICY) -> Endpoint:
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
            self._transcript.role_rewards[role] = _finite(value)
        elif request is not None and role is None:
            self._transcript.rewards[self._answered(request)] = _finite(value)
        else:
            raise ValueError("reward takes a request or a role: whose reward is it?")

    def turn_reward(self, value: float, request: str | Answer) -> None:
        self._transcript.turn_rewards[self._answered(request)] = _finite(value)

    def trajectory(self) -> Trajectory:
        """The chat of `sample` so far."""
        return self._main.trajectory()

    def trajectories(self) -> list[Trajectory]:
        return self._transcript.trajectories()

    # ---------------------------------------------------------------------------------------- for the rest of the room

    @property
    def requests(self) -> list[str]:
        """The ids of all requests, in the order in which they were made."""
        return self._requests.ids

    @property
    def answers(self) -> int:
        return len(self._transcript.turns)

    @property
    def abandoned(self) -> int:
        """Tokens of answers that were given up."""
        return self._requests.abandoned

    @property
    def breaks(self) -> int:
        """How often a conversation could not be continued exactly, and a new trajectory began."""
        return self._conversations.breaks

    def decode(self, tokens: Sequence[int]) -> str:
        return self.dialect.decode(tokens)

    def sampling(self, overrides: dict[str, Any]) -> Sampling:
        return self._requests.sampling(self.dialect.stop_ids, overrides)

    def opening(self, role: str, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        return self._conversations.opening(digests(role, tools, messages)[-1], messages, tools)

    def reopening(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The same for a conversation that cannot be continued exactly."""
        self._conversations.breaks += 1
        return self.dialect.open(messages, tools)

    async def ask(
        self,
        parent: Turn | None,
        observed: Sequence[int],
        role: str,
        sampling: Sampling,
        tools: Sequence[Schema] = (),
        listener: Listener | None = None,
    ) -> tuple[Turn, Answer]:
        """One request: `observed` behind `parent`'s answer, or at the beginning of a trajectory."""
        request_id = self._requests.next_id()
        turn, prompt = self._transcript.begin(request_id, role, parent, observed)
        if listener is not None:
            listener(request_id, prompt)
        turn.generation = await self._requests.send(request_id, prompt, sampling)
        await _turns.get(Turnstile).passed()
        self._transcript.turns.append(turn)
        self.newest = self._answer(turn, turn.generation, prompt.tolist(), tools, sampling.stop_strings)
        return turn, self.newest

    def branch(self, turn: Turn | None, after: Sequence[int], role: str) -> Trajectory:
        """The sequence up to `turn`, and what was observed after it."""
        if turn is not None:
            return self._transcript.branch(turn, after)
        built = TrajectoryBuilder()
        built.observe(after)
        return built.build(role)

    async def abandon(self) -> PartFailed | BadInput | None:
        """The episode is over: close its URLs, free the engine of what it still has running there, and count what that
        had sampled. What came of the URLs that concerns the whole run, if anything, is for the caller to raise."""
        serious = None if self._doors is None else await self._doors.close_session(self)
        await self._requests.abandon()
        return serious

    def _answer(
        self, turn: Turn, generation: Generation, prompt: list[int], tools: Sequence[Schema], stops: Sequence[str]
    ) -> Answer:
        tokens = generation.tokens.tolist()
        parsed = self.dialect.parse(tokens, prompt, tools)
        calls = [
            msgspec.structs.replace(call, id=call.id or f"call_{turn.request_id}_{index}")
            for index, call in enumerate(parsed.calls)
        ]
        return Answer(
            request_id=turn.request_id,
            text=parsed.text,
            content=_without_stop(parsed.content, stops) if generation.stop == "stop" else parsed.content,
            reasoning=parsed.reasoning,
            calls=tuple(calls),
            stop=generation.stop,
            prompt_tokens=len(prompt),
            tokens=_sealed(generation.tokens),
            logprobs=_sealed(generation.logprobs),
            versions=_sealed(generation.versions),
        )

    def _answered(self, request: str | Answer) -> str:
        request_id = request.request_id if isinstance(request, Answer) else request
        if not any(turn.request_id == request_id for turn in self._transcript.turns):
            raise ValueError(f"request {request_id!r} is none that was answered in this episode")
        return request_id


def _without_stop(content: str, stops: Sequence[str]) -> str:
    """As OpenAI's protocol has it: the string that ended an answer is not part of what it says."""
    ends = [stop for stop in stops if content.endswith(stop)]
    return content.removesuffix(max(ends, key=len)) if ends else content


def _sealed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A view that cannot be written through."""
    view = array.view()
    view.flags.writeable = False
    return view


def _finite(value: float) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"a reward is a finite number, not {one_line(repr(value), 60)}")
    return float(value)
