"""The policy as a rollout sees it: say something, get an answer, with every token accounted for.

Invariant: no token is trained under a prefix it was not sampled from. The client owns the one growing sequence, sends
exactly that as the prompt of each request and appends exactly what came back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.engines.noise import request_seed
from outpace.errors import RequestFailed
from outpace.models.chat import render
from outpace.protocols import Engine
from outpace.rollout.trajectory import TrajectoryBuilder
from outpace.types import GroupOrder, Message, Sampling, Trajectory


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
        self, engine: Engine, tokenizer: Any, settings: ClientSettings, order: GroupOrder, episode: int
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._order = order
        self._episode = episode
        self._sequence = TrajectoryBuilder()
        self._open: set[str] = set()
        self.requests: list[str] = []
        self.completions: list[str] = []
        self.stop = "stop"

    async def sample(self, prompt: str | list[Message] | None = None, **overrides: Any) -> str:
        """Put `prompt` before the policy and let it answer; `overrides` are fields of `Sampling`."""
        if prompt is not None:
            if len(self._sequence):
                raise RequestFailed("a prompt opens a sequence; continue one with observe(text), then sample()")
            self._sequence.observe(render(self._tokenizer, prompt, self._settings.system))
        generation = await self._request(self._sampling(overrides))
        self._sequence.sampled(generation)
        self.stop = generation.stop
        text = str(self._tokenizer.decode(generation.tokens.tolist(), skip_special_tokens=True))
        self.completions.append(text)
        return text

    def observe(self, text: str) -> None:
        self._sequence.observe(self._tokenizer.encode(text, add_special_tokens=False))

    def trajectory(self) -> Trajectory:
        return self._sequence.build()

    async def abandon(self) -> None:
        """Free the engine of whatever this episode still has running there."""
        if self._open:
            await self._engine.abort(sorted(self._open))

    async def _request(self, sampling: Sampling) -> Any:
        request_id = f"{self._order.group}.{self._episode}.{len(self.requests)}"
        if self._order.heldout:
            request_id = f"eval-{self._order.min_version}.{request_id}"
        self.requests.append(request_id)
        self._open.add(request_id)
        generation = await self._engine.generate(
            request_id, self._sequence.prefix(), sampling, self._order.min_version, self._order.pinned
        )
        self._open.discard(request_id)
        return generation

    def _sampling(self, overrides: dict[str, Any]) -> Sampling:
        settings = self._settings
        fields: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "seed": request_seed(settings.seed, self._order.group, self._episode, len(self.requests)),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "stop_ids": list(settings.stop_ids),
            "stop_strings": list(settings.stop_strings),
        }
        return Sampling(**{**fields, **overrides})
