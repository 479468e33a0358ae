"""MERGED"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from outpace.models.chat import Schema
from outpace.models.dialect import Dialect
from outpace.rollouts.policy.conversations import Conversations
from outpace.rollouts.policy.requests import Request, Requests
from outpace.rollouts.policy.trajectory import OBSERVATION, TrajectoryBuilder
from outpace.rollouts.policy.transcript import Transcript, Turn
from outpace.runtime.per_loop import PerLoop
from outpace.runtime.turnstile import Turnstile
from outpace.types import Answer, Generation, Ints, Trajectory

Listener = Callable[[str, Ints], None]
"""Called with the id and the prompt of a request just before it is sent."""

_fairness: PerLoop[Turnstile] = PerLoop()


async def in_turn() -> None:
    """Yield to the event loop before CPU-heavy work, so that a thousand concurrent episodes do not block it."""
    await _fairness.get(Turnstile).passed()


@dataclass
class Asking:
    """Samples turns for one episode and records them in its transcript. Shared by all its conversations."""

    dialect: Dialect
    system: str | None
    requests: Requests
    conversations: Conversations
    transcript: Transcript = field(default_factory=Transcript)
    newest: Answer | None = None

    def reserve(self, overrides: dict[str, Any]) -> Request:
        return self.requests.reserve(self.dialect.stop_ids, overrides)

    async def ask(
        self,
        request: Request,
        parent: Turn | None,
        observed: Sequence[int],
        role: str,
        tools: Sequence[Schema] = (),
        listener: Listener | None = None,
        source: str = OBSERVATION,
    ) -> tuple[Turn, Answer]:
        """Send one request and record its turn.

        The prompt is `observed` appended to `parent`'s answer, or `observed` alone if `parent` is None. `source` names
        the origin of the observed tokens."""
        turn, prompt = self.transcript.begin(request.id, role, parent, observed, source)
        if listener is not None:
            listener(request.id, prompt)
        turn.generation = await self.requests.send(request, prompt)
        self.transcript.turns.append(turn)  # before the next await: the tokens count even if this is cancelled
        await in_turn()
        self.newest = self._answer(turn, turn.generation, prompt, tools, request.sampling.stop_strings)
        return turn, self.newest

    def branch(self, turn: Turn | None, after: Sequence[int], role: str) -> Trajectory:
        """Return the sequence up to `turn`, followed by the tokens observed `after` it."""
        if turn is not None:
            return self.transcript.branch(turn, after)
        built = TrajectoryBuilder()
        built.observe(after)
        return built.build(role)

    def _answer(
        self, turn: Turn, generation: Generation, prompt: Ints, tools: Sequence[Schema], stops: Sequence[str]
    ) -> Answer:
        parsed = self.dialect.parse(generation.tokens.tolist(), prompt, tools)
        calls = [
            msgspec.structs.replace(call, id=call.id or f"call_{turn.request_id}_{index}")
            for index, call in enumerate(parsed.calls)
        ]
        return Answer(
            request_id=turn.request_id,
            text=parsed.text,
            content=without_stop(parsed.content, stops) if generation.stop == "stop" else parsed.content,
            reasoning=parsed.reasoning,
            calls=tuple(calls),
            stop=generation.stop,
            prompt_tokens=len(prompt),
            tokens=_read_only(generation.tokens),
            logprobs=_read_only(generation.logprobs),
            versions=_read_only(generation.versions),
        )


def without_stop(content: str, stops: Sequence[str]) -> str:
    """Remove the stop string that ended the answer from its content, as the OpenAI protocol requires."""
    ends = [stop for stop in stops if content.endswith(stop)]
    return content.removesuffix(max(ends, key=len)) if ends else content


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a read-only view."""
    view = array.view()
    view.flags.writeable = False
    return view
