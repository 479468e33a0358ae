"""Asking the policy, with every token accounted for: what all ways to talk to it have in common.

    reserve an id ─▶ where does it stand? ─▶ a turn of the transcript ─▶ request ─▶ engine ─▶ answer, found by its id

A request has its id, and with it its noise, from the moment in which it is asked for: how busy the worker is with other
episodes has no say in what is sampled.
"""

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
"""Told the id and the prompt of a request as soon as it is under way."""

_turns: PerLoop[Turnstile] = PerLoop()


async def in_turn() -> None:
    """Before work that takes a while: a thousand episodes may be here at once, and the loop has other things to do."""
    await _turns.get(Turnstile).passed()


@dataclass
class Asking:
    """One episode's."""

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
        """One request: `observed` behind `parent`'s answer, or at the beginning of a trajectory. `source`: who wrote
        what was observed."""
        turn, prompt = self.transcript.begin(request.id, role, parent, observed, source)
        if listener is not None:
            listener(request.id, prompt)
        turn.generation = await self.requests.send(request, prompt)
        self.transcript.turns.append(turn)  # at once: whoever gives up from here on has still sampled these tokens
        await in_turn()
        self.newest = self._answer(turn, turn.generation, prompt, tools, request.sampling.stop_strings)
        return turn, self.newest

    def branch(self, turn: Turn | None, after: Sequence[int], role: str) -> Trajectory:
        """The sequence up to `turn`, and what was observed after it."""
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
            tokens=_sealed(generation.tokens),
            logprobs=_sealed(generation.logprobs),
            versions=_sealed(generation.versions),
        )


def without_stop(content: str, stops: Sequence[str]) -> str:
    """As OpenAI's protocol has it: the string that ended an answer is not part of what it says."""
    ends = [stop for stop in stops if content.endswith(stop)]
    return content.removesuffix(max(ends, key=len)) if ends else content


def _sealed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A view that cannot be written through."""
    view = array.view()
    view.flags.writeable = False
    return view
