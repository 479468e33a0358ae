"""One growing chat with the policy: what is said next is appended, and only that is rendered."""

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
class _Stand:
    """Where a chat stands: behind `turn`, with `pending` observed since. `plain`: text without a template is in it."""

    turn: Turn | None = None
    pending: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    tools: Sequence[Schema] = ()
    plain: bool = False
    source: str = OBSERVATION  # who wrote what is pending


class Thread:
    """One sequence takes one request at a time; several threads of an episode run side by side.

    A request that comes to nothing leaves the chat as it was before: it can be made again."""

    def __init__(self, asking: Asking, role: str) -> None:
        self._asking = asking
        self.role = role
        self._stand = _Stand()
        self._sampling = False
        self.newest: Answer | None = None

    @property
    def stop(self) -> StopReason:
        """Why the newest answer ended."""
        return "stop" if self.newest is None else self.newest.stop

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[Schema] = (), **overrides: Any
    ) -> str:
        """Let the policy answer, to `prompt` or, without one, right after the sequence as it stands.

        A first prompt opens the sequence and may show `tools`; a later one goes on with the chat, by the model's
        template. `overrides` are fields of `Sampling`; in training, those that shape the distribution stay as they are.
        """
        self._refuse_while_sampling()
        request = self._asking.reserve(overrides)
        self._sampling = True
        try:
            await in_turn()
            stand = self._stand if prompt is None else self._heard(prompt, tools)
            turn, answer = await self._asking.ask(
                request, stand.turn, stand.pending, self.role, stand.tools, source=stand.source
            )
        finally:
            self._sampling = False
        messages = (*stand.messages, answer.message)
        self._stand = replace(stand, turn=turn, pending=(), messages=messages, source=OBSERVATION)
        self.newest = answer
        return answer.text

    def observe(self, text: str) -> None:
        """Append text that the policy did not write, as it is."""
        self._refuse_while_sampling()
        pending = (*self._stand.pending, *self._asking.dialect.encode(text))
        self._stand = replace(self._stand, pending=pending, plain=True)

    def trajectory(self) -> Trajectory:
        """The sequence so far."""
        return self._asking.branch(self._stand.turn, self._stand.pending, self.role)

    def _heard(self, prompt: str | list[Message], tools: Sequence[Schema]) -> _Stand:
        stand = self._stand
        if stand.turn is None and not stand.pending:
            messages = as_messages(prompt, self._asking.system)
            opening = self._asking.conversations.opening(messages, tools)
            return _Stand(None, tuple(opening), tuple(messages), tools, source=PROMPT)
        if stand.turn is not None and stand.messages and not tools:
            return self._gone_on(stand, stand.turn, as_messages(prompt))
        raise RequestFailed("a prompt opens a sequence or follows an answer, and only the first one brings tools")

    def _gone_on(self, stand: _Stand, turn: Turn, new: list[Message]) -> _Stand:
        *before, answered = stand.messages
        heard = [stand_in_for(message) for message in before]
        found = extension(self._asking.dialect, turn, stand.pending, heard, answered, new, stand.tools)
        messages = (*stand.messages, *new)
        if found is not None:
            pending = (*stand.pending, *found.ids)
            return replace(stand, pending=pending, messages=messages, source=roles_of(new))
        if stand.plain:
            raise RequestFailed("this chat cannot be continued exactly, nor be rendered anew: plain text is in it")
        opening = self._asking.conversations.reopening(messages, stand.tools)
        return replace(stand, turn=None, pending=tuple(opening), messages=messages, source=PROMPT)

    def _refuse_while_sampling(self) -> None:
        if self._sampling:
            raise RequestFailed("the policy is still answering: one sequence takes one request at a time")
