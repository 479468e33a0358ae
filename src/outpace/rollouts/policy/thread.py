"""MERGED"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.errors import RequestFailed
from outpace.models.chat import Schema, as_messages
from outpace.models.dialect import stand_in_for
from outpace.rollouts.policy.asking import Asking, in_turn
from outpace.rollouts.policy.conversations import PROMPT, extension, roles_of
from outpace.rollouts.policy.trajectory import OBSERVATION
from outpace.rollouts.policy.transcript import Turn
from outpace.types import Answer, Message, StopReason, Trajectory


@dataclass(frozen=True)
class _ConversationState:
    """State of a conversation: `turn` is its last answer, `pending` the tokens observed since. `plain` means that it
    contains text outside the chat template."""

    turn: Turn | None = None
    pending: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    tools: Sequence[Schema] = ()
    plain: bool = False
    source: str = OBSERVATION  # origin of the pending tokens


class Thread:
    """One growing chat with the policy.

    A conversation allows one request at a time; several conversations of an episode can run concurrently. A failed
    request leaves the conversation unchanged, so it can be repeated."""

    def __init__(self, sampler: Asking, role: str) -> None:
        self._asking = sampler
        self.role = role
        self._state = _ConversationState()
        self._sampling = False
        self.newest: Answer | None = None

    @property
    def stop(self) -> StopReason:
        """Stop reason of the newest answer."""
        return "stop" if self.newest is None else self.newest.stop

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[Schema] = (), **overrides: Any
    ) -> str:
        """Sample an answer to `prompt`, or continue the sequence as it is if there is no prompt.

        The first prompt starts the sequence and may pass `tools`; later prompts are appended with the chat template.
        `overrides` are fields of `Sampling`; in training, temperature, top_p and top_k cannot be changed."""
        self._refuse_while_sampling()
        request = self._asking.reserve(overrides)
        self._sampling = True
        try:
            await in_turn()
            state = self._state if prompt is None else self._with_prompt(prompt, tools)
            turn, answer = await self._asking.ask(
                request, state.turn, state.pending, self.role, state.tools, source=state.source
            )
        finally:
            self._sampling = False
        messages = (*state.messages, answer.message)
        self._state = replace(state, turn=turn, pending=(), messages=messages, source=OBSERVATION)
        self.newest = answer
        return answer.text

    def observe(self, text: str) -> None:
        """Append text verbatim that the policy did not sample."""
        self._refuse_while_sampling()
        pending = (*self._state.pending, *self._asking.dialect.encode(text))
        self._state = replace(self._state, pending=pending, plain=True)

    def trajectory(self) -> Trajectory:
        """Return the sequence so far."""
        return self._asking.branch(self._state.turn, self._state.pending, self.role)

    def _with_prompt(self, prompt: str | list[Message], tools: Sequence[Schema]) -> _ConversationState:
        state = self._state
        if state.turn is None and not state.pending:
            messages = as_messages(prompt, self._asking.system)
            opening = self._asking.conversations.opening(messages, tools)
            return _ConversationState(None, tuple(opening), tuple(messages), tools, source=PROMPT)
        if state.turn is not None and state.messages and not tools:
            return self._continued(state, state.turn, as_messages(prompt))
        raise RequestFailed("a prompt must start a conversation or follow an answer; only the first may pass tools")

    def _continued(self, state: _ConversationState, turn: Turn, new: list[Message]) -> _ConversationState:
        *before, answered = state.messages
        context = [stand_in_for(message) for message in before]
        found = extension(self._asking.dialect, turn, state.pending, context, answered, new, state.tools)
        messages = (*state.messages, *new)
        if found is not None:
            pending = (*state.pending, *found.ids)
            return replace(state, pending=pending, messages=messages, source=roles_of(new))
        if state.plain:
            raise RequestFailed("the conversation cannot be continued exactly, nor rendered again after observe()")
        opening = self._asking.conversations.reopening(messages, state.tools)
        return replace(state, turn=None, pending=tuple(opening), messages=messages, source=PROMPT)

    def _refuse_while_sampling(self) -> None:
        if self._sampling:
            raise RequestFailed("a request is still running; a conversation allows one request at a time")
