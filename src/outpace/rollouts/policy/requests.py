"""The requests of one episode: their ids, their sampling, and what becomes of those that nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.engines.noise import request_seed
from outpace.errors import RequestFailed
from outpace.protocols import Engine
from outpace.types import Generation, GroupOrder, Ints, Sampling

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
    stop_strings: tuple[str, ...]
    system: str | None
    seed: int


class Requests:
    def __init__(self, engine: Engine, settings: ClientSettings, order: GroupOrder, episode: int) -> None:
        self._engine = engine
        self._settings = settings
        self._order = order
        self._episode = episode
        self._open: dict[str, asyncio.Future[Generation]] = {}  # whose answer nobody has taken yet
        self.ids: list[str] = []
        self.abandoned = 0  # tokens of answers that were given up

    def next_id(self) -> str:
        request_id = f"{self._order.group}.{self._episode}.{len(self.ids)}"
        if self._order.heldout:
            request_id = f"eval-{self._order.min_version}.{request_id}"
        self.ids.append(request_id)
        return request_id

    def sampling(self, stop_ids: Sequence[int], overrides: dict[str, Any]) -> Sampling:
        """As the config says but for `overrides`; in training those that shape the distribution stay as they are.

        The noise is that of the next request to be given an id."""
        settings = self._settings
        if not self._order.heldout:
            _refuse_another_distribution(settings, overrides)
        fields: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "seed": request_seed(settings.seed, self._order.group, self._episode, len(self.ids)),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "stop_ids": list(stop_ids),
            "stop_strings": list(settings.stop_strings),
        }
        return Sampling(**(fields | overrides))

    async def send(self, request_id: str, prompt: Ints, sampling: Sampling) -> Generation:
        order = self._order
        answer = asyncio.ensure_future(
            self._engine.generate(request_id, prompt, sampling, order.min_version, order.pinned)
        )
        self._open[request_id] = answer
        try:
            # Shielded: who gives up on an answer stops waiting, but what was sampled of it is still to be counted.
            generation = await asyncio.shield(answer)
        except asyncio.CancelledError:
            if request_id in self._open:
                await self._give_up({request_id: self._open.pop(request_id)})
            raise
        except BaseException:
            self._open.pop(request_id, None)
            raise
        if self._open.pop(request_id, None) is None:
            raise RequestFailed("the episode has ended without this answer")
        return generation

    async def abandon(self) -> None:
        """Free the engine of whatever this episode still has running there, and count what that had sampled."""
        given_up, self._open = self._open, {}
        await self._give_up(given_up)

    async def _give_up(self, given_up: dict[str, asyncio.Future[Generation]]) -> None:
        running = sorted(request_id for request_id, answer in given_up.items() if not answer.done())
        try:
            if running:
                await self._engine.abort(running)
                await asyncio.wait(given_up.values(), timeout=ABORT_GRACE_S)
        finally:
            self.abandoned += sum(map(_tokens_of, given_up.values()))
            for answer in given_up.values():
                answer.cancel()


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
