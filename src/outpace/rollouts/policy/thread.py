"""One growing chat with the policy: what is said next is appended, and only that is rendered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from outpace.errors import RequestFailed
from outpace.models.chat import Schema, as_messages
from outpace.models.dialect import Dialect, stand_in_for
from outpace.rollouts.policy.conversations import extension
from outpace.rollouts.policy.transcript import Turn
from outpace.types import Answer, Message, Sampling, StopReason, Trajectory


class Policy(Protocol):
    """What a thread needs of the client it belongs to."""

    @property
    def dialect(self) -> Dialect: ...

    @property
    def system(self) -> str | None: ...

    def sampling(self, overrides: dict[str, Any]) -> Sampling: ...

    def opening(self, role: str, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]: ...

    def reopening(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]: ...

    def branch(self, turn: Turn | None, after: Sequence[int], role: str) -> Trajectory: ...

    async def ask(
        self, parent: Turn | None, observed: Sequence[int], role: str, sampling: Sampling, tools: Sequence[Schema]
    ) -> tuple[Turn, Answer]: ...


class Thread:
    """One sequence takes one request at a time; several threads of an episode run side by side."""

    def __init__(self, client: Policy, role: str) -> None:
        self._client = client
        self.role = role
        self._turn: Turn | None = None
        self._pending: list[int] = []  # observed after the newest answer
        self._messages: list[Message] = []
        self._tools: Sequence[Schema] = ()
        self._plain = False  # text without a template stands in the sequence
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
        sampling = self._client.sampling(overrides)
        if prompt is not None:
            self._hear(prompt, tools)
        self._sampling = True
        try:
            turn, answer = await self._client.ask(self._turn, self._pending, self.role, sampling, self._tools)
        finally:
            self._sampling = False
        self._turn, self._pending, self.newest = turn, [], answer
        self._messages.append(answer.message)
        return answer.text

    def observe(self, text: str) -> None:
        """Append text that the policy did not write, as it is."""
        self._refuse_while_sampling()
        self._pending += self._client.dialect.encode(text)
        self._plain = True

    def trajectory(self) -> Trajectory:
        """The sequence so far."""
        return self._client.branch(self._turn, self._pending, self.role)

    def _hear(self, prompt: str | list[Message], tools: Sequence[Schema]) -> None:
        if self._turn is None and not self._pending:
            self._messages, self._tools = as_messages(prompt, self._client.system), tools
            self._pending = list(self._client.opening(self.role, self._messages, tools))
        elif self._turn is not None and self._messages and not tools:
            new = as_messages(prompt)
            self._go_on(self._turn, new)
            self._messages += new
        else:
            raise RequestFailed("a prompt opens a sequence or follows an answer, and only the first one brings tools")

    def _go_on(self, turn: Turn, new: list[Message]) -> None:
        heard = [stand_in_for(message) for message in self._messages[:-1]]
        found = extension(self._client.dialect, turn, self._pending, heard, new, self._tools)
        if found is not None:
            self._pending += found.ids
            return
        if self._plain:
            raise RequestFailed("this chat cannot be continued exactly, nor be rendered anew: plain text is in it")
        self._turn, self._pending = None, self._client.reopening([*self._messages, *new], self._tools)

    def _refuse_while_sampling(self) -> None:
        if self._sampling:
            raise RequestFailed("the policy is still answering: one sequence takes one request at a time")
