"""Requests of one episode: reserve ids and seeds, send to the engine, and abandon what is still in flight at the end.

While a group is unfinished, its answers are logged so that a restarted group does not sample them again. A restarted
rollout runs from the beginning and sends the same requests in the same order. Each request whose prompt is unchanged
gets its recorded answer without calling the engine. If the environment behaves differently, nothing matches.

    EpisodeRequests ─▶ RecordedTurns.record ─▶ TurnLog
    EpisodeRequests ◀─ RecordedTurns.recall ◀─ RecordedTurns.load ◀─ TurnLog

Invariants
- The tokens of an abandoned request are counted even if its caller is cancelled, provided that the engine answers
  within `ABORT_GRACE_S`.
- A recorded answer is used only for the request it was sampled for, identified by the episode and the request number.
  Matching by prompt alone would bias sampling toward short answers, which are recorded first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from outpace.checkpoint.turn_log import TurnLog, digest_request
from outpace.config import Config
from outpace.config.sections import RolloutConfig
from outpace.errors import OutpaceError, RequestFailed
from outpace.protocols import Engine
from outpace.runtime.async_tools import uncancelled
from outpace.runtime.rng import request_seed
from outpace.types import Generation, GroupOrder, Ints, Sampling

log = logging.getLogger(__name__)

ABORT_GRACE_S = 2.0
"""How long to wait for an engine to abort requests and return what they have sampled."""

DISTRIBUTION_SETTINGS = ("temperature", "top_p", "top_k")


class ReservedRequest(NamedTuple):
    """A request with its id and sampling seed, not sent yet."""

    id: str
    number: int
    sampling: Sampling


class RecordedTurns:
    """Recorded answers of one group. `log` is None if recording is off."""

    def __init__(self, log: TurnLog | None, order: GroupOrder) -> None:
        self._log = log
        self._order = order
        self._known: dict[tuple[int, int, bytes], Generation] = {}  # by episode, request number and request digest
        self.reused = 0
        self.closed = False

    async def load(self) -> None:
        """Load the answers of an earlier attempt at this group, except those older than its `min_version`. If a request
        was recorded twice, the later answer is used."""
        if self._log is None or not self._order.recorded:
            return
        for head, answer in await asyncio.to_thread(self._log.find, self._order.position):
            if head.oldest >= self._order.min_version:
                self._known[head.episode, head.number, head.request_digest] = answer

    def recall(self, episode: int, number: int, prompt: Ints, sampling: Sampling) -> Generation | None:
        """Return the recorded answer of this request, or None."""
        if not self._known:
            return None
        answer = self._known.pop((episode, number, digest_request(prompt, sampling)), None)
        self.reused += answer is not None
        return answer

    def record(self, episode: int, number: int, prompt: Ints, sampling: Sampling, answer: Generation) -> None:
        if self._log is not None and answer.stop != "aborted":
            self._log.record(self._order, episode, number, prompt, sampling, answer)

    def close(self) -> None:
        """Mark the recorded answers as no longer needed, and stop recording: answers of abandoned requests may still
        arrive, and nothing would delete them later."""
        log, self._log, self.closed = self._log, None, True
        if log is not None:
            log.close_group(self._order.position)


class EpisodeRequests:
    def __init__(
        self,
        engine: Engine,
        config: Config,
        order: GroupOrder,
        episode: int,
        turns: RecordedTurns | None = None,
        any_distribution: bool = False,
    ) -> None:
        """For a held-out order, `config` comes from `evaluation_config`."""
        self._engine = engine
        self._rollout = config.rollout
        self._seed = config.run.seed
        self._any_distribution = any_distribution or order.heldout
        self._order = order
        self._episode = episode
        self._turns = turns
        self._open: dict[str, asyncio.Future[Generation]] = {}  # answers not yet returned to a caller
        self._aborting: set[asyncio.Task[None]] = set()
        self._ended = False
        self.ids: list[str] = []
        self.abandoned = 0  # tokens in abandoned answers

    def reserve(self, stop_ids: Sequence[int], overrides: dict[str, Any]) -> ReservedRequest:
        """Assign the next id and seed. `overrides` replace sampling settings; for tokens to train on, temperature,
        top_p and top_k must stay as configured."""
        rollout, number = self._rollout, len(self.ids)
        draw = self._order.group if self._order.draw is None else self._order.draw
        if overrides and not self._any_distribution:
            _check_distribution(rollout, overrides)
        assert rollout.max_tokens is not None, "the config must be resolved"
        sampling = Sampling(
            max_tokens=rollout.max_tokens,
            seed=request_seed(self._seed, draw, self._episode, number),
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_ids=list(stop_ids),
            stop_strings=list(rollout.stop),
        )
        if overrides:
            sampling = msgspec.structs.replace(sampling, **overrides)
        prefix = f"eval-{self._order.min_version}." if self._order.heldout else ""
        self.ids.append(f"{prefix}{self._order.group}.{self._episode}.{number}")
        return ReservedRequest(self.ids[-1], number, sampling)

    async def send(self, request: ReservedRequest, prompt: Ints) -> Generation:
        """Return the recorded answer of an earlier attempt at this episode, or sample one from the engine."""
        self.check_not_ended()
        if self._turns is None:
            return await self._generate(request, prompt)
        answer = self._turns.recall(self._episode, request.number, prompt, request.sampling)
        if answer is None:
            answer = await self._generate(request, prompt)
            self._turns.record(self._episode, request.number, prompt, request.sampling, answer)
        return answer

    async def _generate(self, request: ReservedRequest, prompt: Ints) -> Generation:
        order = self._order
        generating = self._engine.generate(request.id, prompt, request.sampling, order.min_version, order.pinned)
        answer = asyncio.ensure_future(generating)
        self._open[request.id] = answer
        try:
            # Not cancelled with this task: the request is aborted below, and its tokens are still counted.
            generation = await uncancelled(answer)
        except asyncio.CancelledError:
            if self._open.pop(request.id, None) is not None:
                await self._abort({request.id: answer})
            raise
        except BaseException:
            self._open.pop(request.id, None)
            raise
        if self._open.pop(request.id, None) is None:
            raise RequestFailed("the episode ended before this request was answered")
        return generation

    async def abandon(self) -> None:
        """Abort all in-flight requests of the episode and count their tokens. Later requests are refused."""
        self._ended = True
        await self.abort_all()

    async def abort_all(self) -> None:
        """Abort all in-flight requests and count their tokens."""
        if self._open:
            abandoned_requests, self._open = self._open, {}
            await self._abort(abandoned_requests)
        if self._aborting:
            await asyncio.wait(self._aborting)

    def check_not_ended(self) -> None:
        if self._ended:
            raise RequestFailed("the episode is over; it accepts no more requests")

    async def _abort(self, abandoned_requests: dict[str, asyncio.Future[Generation]]) -> None:
        """Abort requests in a separate task, so that a second cancellation cannot prevent counting their tokens."""
        aborting = asyncio.create_task(self._abort_and_count(abandoned_requests))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)
        await asyncio.shield(aborting)

    async def _abort_and_count(self, abandoned_requests: dict[str, asyncio.Future[Generation]]) -> None:
        """Abort the requests and count their tokens. Bounded in time, and never raises an engine error: the episode is
        already over."""
        running = sorted(request_id for request_id, answer in abandoned_requests.items() if not answer.done())
        try:
            if running:
                async with asyncio.timeout(ABORT_GRACE_S):
                    await self._engine.abort(running)
                    await asyncio.wait(abandoned_requests.values())
        except (TimeoutError, OutpaceError) as error:  # the engine hangs, is down or has failed
            log.info("cannot count the tokens of requests %s: %s", ", ".join(running), error or "no answer in time")
        finally:
            self.abandoned += sum(map(_tokens_of, abandoned_requests.values()))
            for answer in abandoned_requests.values():
                answer.cancel()


def _check_distribution(rollout: RolloutConfig, overrides: dict[str, Any]) -> None:
    for name in DISTRIBUTION_SETTINGS:
        trained = getattr(rollout, name)
        if overrides.get(name, trained) != trained:
            raise RequestFailed(
                f"{name} = {overrides[name]} differs from rollout.{name} = {trained}; "
                "in training, requests cannot change it"
            )


def _tokens_of(answer: asyncio.Future[Generation]) -> int:
    """Return the number of tokens of an abandoned answer, or 0 if it never arrived."""
    if not answer.done() or answer.cancelled() or answer.exception() is not None:
        return 0
    return len(answer.result().tokens)
