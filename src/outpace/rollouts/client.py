"""The policy as a rollout sees it: say something, get an answer, with every token accounted for.

Invariant: no token is trained under a prefix it was not sampled from. The client owns the one growing sequence, sends
exactly that as the prompt of each request and appends exactly what came back; while a request is under way the
sequence cannot change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.engines.noise import request_seed
from outpace.errors import RequestFailed
from outpace.models.chat import STAND_IN, Schema, as_messages, bridge, render
from outpace.protocols import Engine
from outpace.rollouts.trajectory import TrajectoryBuilder
from outpace.types import Generation, GroupOrder, Message, Sampling, StopReason, Trajectory, Version

ABORT_GRACE_S = 2.0
"""How long an engine may take to hand out what an aborted request had so far."""

SHAPES_THE_DISTRIBUTION = ("temperature", "top_p", "top_k")


@dataclass(frozen=True)
class ClientSettings:
    """What every request of this worker has in common."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    system: str | None
    seed: int


class PolicyClient:
    """Implements `outpace.protocols.ModelClient` for one episode."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        settings: ClientSettings,
        order: GroupOrder,
        episode: int,
        openings: dict[str, list[int]] | None = None,
    ) -> None:
        """`openings` is shared by the episodes of a group: prompts that are rendered already."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._order = order
        self._episode = episode
        self._sequence = TrajectoryBuilder()
        self._heard: list[Message] = []  # the conversation up to the newest answer, which it leaves out
        self._tools: Sequence[Schema] = ()
        self._openings = {} if openings is None else openings
        self._sampling = False
        self._open: dict[str, asyncio.Future[Generation]] = {}  # requests whose answer nobody has taken yet
        self.abandoned = 0  # tokens of answers that were given up
        self.requests: list[str] = []
        self.completions: list[str] = []
        self.stop: StopReason = "stop"

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[Schema] = (), **overrides: Any
    ) -> str:
        """Let the policy answer, to `prompt` or, without one, right after the sequence as it stands.

        A first prompt opens the sequence and may show `tools`; a later one goes on with the chat, by the model's
        template. `overrides` are fields of `Sampling`; in training, those that shape the distribution stay as they are.
        """
        sampling = self._fields(overrides)
        self._refuse_while_sampling()
        if prompt is not None:
            self._hear(prompt, tools)
        generation = await self._request(sampling)
        self._sequence.sampled(generation)
        self.stop = generation.stop
        text = str(self._tokenizer.decode(generation.tokens.tolist(), skip_special_tokens=True))
        self.completions.append(text)
        return text

    def observe(self, text: str) -> None:
        self._refuse_while_sampling()
        self._sequence.observe(self._tokenizer.encode(text, add_special_tokens=False))

    def trajectory(self) -> Trajectory:
        return self._sequence.build()

    @property
    def min_version(self) -> Version:
        """The oldest version that may have sampled a token of this episode."""
        return self._order.min_version

    async def abandon(self) -> None:
        """Free the engine of whatever this episode still has running there, and count what that had sampled."""
        given_up, self._open = self._open, {}
        running = sorted(request_id for request_id, answer in given_up.items() if not answer.done())
        try:
            if running:
                await self._engine.abort(running)
                await asyncio.wait(given_up.values(), timeout=ABORT_GRACE_S)
        finally:
            self.abandoned += sum(map(_tokens_of, given_up.values()))
            for answer in given_up.values():
                answer.cancel()

    # ---------------------------------------------------------------------------------------------- the conversation

    def _hear(self, prompt: str | list[Message], tools: Sequence[Schema]) -> None:
        if not len(self._sequence):
            self._sequence.observe(self._opening(prompt, tools))
            self._heard, self._tools = as_messages(prompt, self._settings.system), tools
        elif self._heard and self.completions and not tools:
            said = as_messages(prompt)
            self._sequence.observe(self._between(bridge(self._tokenizer, self._heard, said, self._tools)))
            self._heard += [STAND_IN, *said]
        else:
            raise RequestFailed("a prompt opens a sequence or follows an answer, and only the first one brings tools")

    def _opening(self, prompt: str | list[Message], tools: Sequence[Schema]) -> Sequence[int]:
        """Siblings of a group open with the same prompt: it is rendered once for all of them."""
        if tools or not isinstance(prompt, str):
            return render(self._tokenizer, prompt, self._settings.system, tools)
        if prompt not in self._openings:
            self._openings[prompt] = render(self._tokenizer, prompt, self._settings.system)
        return self._openings[prompt]

    def _between(self, ids: list[int]) -> list[int]:
        """The bridge without the end of turn that the policy has sampled already."""
        stops = self._settings.stop_ids
        return ids[1:] if self._sequence.last in stops and ids and ids[0] in stops else ids

    # --------------------------------------------------------------------------------------------------- the request

    def _refuse_while_sampling(self) -> None:
        if self._sampling:
            raise RequestFailed("the policy is still answering: one sequence takes one request at a time")

    async def _request(self, sampling: Sampling) -> Generation:
        request_id = f"{self._order.group}.{self._episode}.{len(self.requests)}"
        if self._order.heldout:
            request_id = f"eval-{self._order.min_version}.{request_id}"
        self.requests.append(request_id)
        answer = asyncio.ensure_future(
            self._engine.generate(
                request_id, self._sequence.prefix(), sampling, self._order.min_version, self._order.pinned
            )
        )
        self._open[request_id] = answer
        self._sampling = True
        try:
            # Shielded: who gives up on an answer stops waiting, but what was sampled of it is still to be counted.
            generation = await asyncio.shield(answer)
        finally:
            self._sampling = False
        if self._open.pop(request_id, None) is None:
            raise RequestFailed("the episode has ended without this answer")
        return generation

    def _fields(self, overrides: dict[str, Any]) -> Sampling:
        settings = self._settings
        if not self._order.heldout:
            _refuse_another_distribution(settings, overrides)
        fields: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "seed": request_seed(settings.seed, self._order.group, self._episode, len(self.requests)),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "stop_ids": list(settings.stop_ids),
            "stop_strings": list(settings.stop_strings),
        }
        return Sampling(**(fields | overrides))


def _refuse_another_distribution(settings: ClientSettings, overrides: dict[str, Any]) -> None:
    for name in SHAPES_THE_DISTRIBUTION:
        trained = getattr(settings, name)
        if overrides.get(name, trained) != trained:
            raise RequestFailed(
                f"{name} = {overrides[name]} is not the learner's rollout.{name} = {trained}: "
                "in training every answer is sampled as the config says"
            )


def _tokens_of(answer: asyncio.Future[Generation]) -> int:
    """How many tokens an answer that nobody waits for brought, if it came at all."""
    if not answer.done() or answer.cancelled() or answer.exception() is not None:
        return 0
    return len(answer.result().tokens)
