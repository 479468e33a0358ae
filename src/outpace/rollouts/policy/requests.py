"""The requests of one episode: their ids, their sampling, and what becomes of those that nobody waits for any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.engines.noise import request_seed
from outpace.errors import OutpaceError, RequestFailed
from outpace.protocols import Engine
from outpace.rollouts.turns import EpisodeTurns
from outpace.types import Generation, GroupOrder, Ints, Sampling

log = logging.getLogger(__name__)

ABORT_GRACE_S = 2.0
"""How long an engine may take to hear of an abort and to hand out what the request had so far."""

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


@dataclass(frozen=True)
class Request:
    """A request that has its id, and with it its noise, but is not sent yet."""

    id: str
    number: int
    sampling: Sampling


class Requests:
    def __init__(
        self,
        engine: Engine,
        settings: ClientSettings,
        order: GroupOrder,
        episode: int,
        turns: EpisodeTurns | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._order = order
        self._episode = episode
        self._turns = turns
        self._open: dict[str, asyncio.Future[Generation]] = {}  # whose answer nobody has taken yet
        self._leaving: set[asyncio.Task[None]] = set()
        self._over = False
        self.ids: list[str] = []
        self.abandoned = 0  # tokens of answers that were given up

    def reserve(self, stop_ids: Sequence[int], overrides: dict[str, Any]) -> Request:
        """Sampled as the config says but for `overrides`; in training those that shape the distribution stay."""
        settings, number = self._settings, len(self.ids)
        draw = self._order.group if self._order.draw is None else self._order.draw
        if not self._order.heldout:
            _refuse_another_distribution(settings, overrides)
        fields: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "seed": request_seed(settings.seed, draw, self._episode, number),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "stop_ids": list(stop_ids),
            "stop_strings": list(settings.stop_strings),
        }
        sampling = Sampling(**(fields | overrides))
        of_evaluation = f"eval-{self._order.min_version}." if self._order.heldout else ""
        self.ids.append(f"{of_evaluation}{self._order.group}.{self._episode}.{number}")
        return Request(self.ids[-1], number, sampling)

    async def send(self, request: Request, prompt: Ints) -> Generation:
        """The answer that an earlier attempt at this episode got, or the engine's."""
        self.refuse_after_the_end()
        if self._turns is None:
            return await self._ask(request, prompt)
        answer = self._turns.recall(request.number, prompt, request.sampling)
        if answer is None:
            answer = await self._ask(request, prompt)
            self._turns.record(request.number, prompt, request.sampling, answer)
        return answer

    async def _ask(self, request: Request, prompt: Ints) -> Generation:
        order = self._order
        asked = self._engine.generate(request.id, prompt, request.sampling, order.min_version, order.pinned)
        answer = asyncio.ensure_future(asked)
        self._open[request.id] = answer
        try:
            # Shielded: who gives up on an answer stops waiting, but what was sampled of it is still to be counted.
            generation = await asyncio.shield(answer)
        except asyncio.CancelledError:
            if self._open.pop(request.id, None) is not None:
                await self._leave({request.id: answer})
            raise
        except BaseException:
            self._open.pop(request.id, None)
            raise
        if self._open.pop(request.id, None) is None:
            raise RequestFailed("the episode has ended without this answer")
        return generation

    async def abandon(self) -> None:
        """Free the engine of whatever this episode still has running there, and count what that had sampled. No further
        request is sent."""
        self._over = True
        given_up, self._open = self._open, {}
        await self._leave(given_up)
        if self._leaving:
            await asyncio.wait(self._leaving)

    def refuse_after_the_end(self) -> None:
        if self._over:
            raise RequestFailed("the episode is over: nobody would train on this")

    async def _leave(self, given_up: dict[str, asyncio.Future[Generation]]) -> None:
        """In a task of its own: whoever is cancelled once more meanwhile must not keep tokens from being counted."""
        if given_up:
            leaving = asyncio.create_task(self._give_up(given_up))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            await asyncio.shield(leaving)

    async def _give_up(self, given_up: dict[str, asyncio.Future[Generation]]) -> None:
        """Within a bound and without a failure: this is how an episode that is over leaves, and whether the engine can
        still be talked to is no concern of it."""
        running = sorted(request_id for request_id, answer in given_up.items() if not answer.done())
        try:
            if running:
                async with asyncio.timeout(ABORT_GRACE_S):
                    await self._engine.abort(running)
                    await asyncio.wait(given_up.values())
        except (TimeoutError, OutpaceError) as error:  # it hangs, is down, or has failed with all that it had
            log.info("what %s had sampled is not known: %s", ", ".join(running), error or "no answer in time")
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
