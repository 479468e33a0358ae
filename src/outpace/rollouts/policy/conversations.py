"""Which turn a conversation goes on from, and with which ids.

A history that somebody sends is compared with all conversations in which the policy has spoken. The longest part that
is one of these is kept as the ids it was sampled with, and only what is new is rendered. Where the agent put something
else in the place of an answer, or where the dialect cannot go on exactly, the whole history is rendered anew as the
beginning of another trajectory. Both are counted as breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.models.chat import Bridge, Schema
from outpace.models.dialect import Dialect, Said, stand_in_for
from outpace.rollouts.policy.history import Digest, digests, exact_digest, followed_by, marks_of
from outpace.rollouts.policy.transcript import Turn
from outpace.types import Answer, Message

PROMPT = "prompt"
"""The source of what a trajectory begins with."""


def roles_of(messages: Sequence[Message]) -> str:
    return ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))


@dataclass(frozen=True)
class Position:
    """Where a request stands: after `parent`'s answer (None: at the beginning), with `observed` in between.

    `heard` is the conversation so far with stand-ins for what the policy said, `shown` how the dialect wrote it if it
    told; `digest` and `marks` are those of the real one."""

    parent: Turn | None
    observed: Sequence[int]
    heard: tuple[Message, ...]
    digest: Digest
    marks: tuple[Digest, ...]
    shown: str = ""
    source: str = PROMPT  # who wrote what was observed


@dataclass
class _Known:
    """An answer that conversations may go on from. `shown` is kept only until one does: it is the whole text."""

    turn: Turn
    heard: tuple[Message, ...]
    marks: tuple[Digest, ...]
    shown: str
    continued: bool = False


class Conversations:
    def __init__(self, dialect: Dialect, openings: dict[Digest, list[int]]) -> None:
        """`openings` are rendered already; siblings of a group begin with the same prompt and share them."""
        self._dialect = dialect
        self._openings = openings
        self._known: dict[Digest, list[_Known]] = {}
        self._asked: set[Digest] = set()
        self.breaks = 0

    def place(self, role: str, tools: Sequence[Schema], history: Sequence[Message]) -> Position:
        chain, marks = digests(role, tools, history), marks_of(history)
        known, length = self._longest_known(history, chain, marks)
        position = None if known is None else self._continuation(known, length, history, tools, chain, marks)
        if position is None:
            self.breaks += known is not None or self._has_another_answer(history, chain)
            heard = tuple(map(stand_in_for, history))
            position = Position(None, self.opening(history, tools), heard, chain[-1], marks)
        self._asked.add(chain[-1])
        return position

    def opening(self, history: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        digest = exact_digest(tools, history)
        if digest not in self._openings:
            self._openings[digest] = self._dialect.open(history, tools)
        return self._openings[digest]

    def reopening(self, history: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The same for a conversation that cannot be continued exactly."""
        self.breaks += 1
        return self._dialect.open(history, tools)

    def remember(self, position: Position, turn: Turn, answer: Answer) -> None:
        """Later histories that go on from this answer are known by it."""
        message = answer.message
        known = _Known(turn, position.heard, (*position.marks, *marks_of([message])), position.shown)
        self._known.setdefault(followed_by(position.digest, message), []).append(known)

    def _continuation(
        self,
        known: _Known,
        length: int,
        history: Sequence[Message],
        tools: Sequence[Schema],
        chain: Sequence[Digest],
        marks: tuple[Digest, ...],
    ) -> Position | None:
        answered, new = history[length - 1], history[length:]
        found = extension(self._dialect, known.turn, (), known.heard, answered, new, tools, known.shown)
        if found is None:
            return None
        known.continued, known.shown = True, ""
        heard = (*known.heard, stand_in_for(answered), *new)
        return Position(known.turn, found.ids, heard, chain[-1], marks, found.shown, roles_of(new))

    def _has_another_answer(self, history: Sequence[Message], chain: Sequence[Digest]) -> bool:
        """Whether something else stands where an answer was asked for. Examples in a prompt are no answers."""
        followed = zip(chain, history[1:], strict=False)
        return any(message.get("role") == "assistant" and digest in self._asked for digest, message in followed)

    def _longest_known(
        self, history: Sequence[Message], chain: Sequence[Digest], marks: tuple[Digest, ...]
    ) -> tuple[_Known | None, int]:
        for length in range(len(history), 0, -1):
            if history[length - 1].get("role") == "assistant" and chain[length - 1] in self._known:
                answers = sum(message.get("role") == "assistant" for message in history[:length])
                return _meant(self._known[chain[length - 1]], marks[:answers]), length
        return None, 0


def _meant(alike: list[_Known], marks: tuple[Digest, ...]) -> _Known:
    """Of answers that say the same, the one with the ids of calls and the reasoning that were sent back; else one that
    nothing follows yet, so that each goes on in its own trajectory."""
    candidates = [known for known in alike if known.marks == marks] or alike
    return next((known for known in candidates if not known.continued), candidates[0])


def extension(
    dialect: Dialect,
    turn: Turn,
    after: Sequence[int],
    heard: Sequence[Message],
    answered: Message,
    new: Sequence[Message],
    tools: Sequence[Schema],
    shown: str = "",
) -> Bridge | None:
    """How a conversation goes on to `new`, behind a turn's answer and what was observed `after` it.

    None: not exactly possible. `shown` is that of the bridge to this turn, if one led to it."""
    if any(message.get("role") == "assistant" for message in new):
        return None  # words put into the policy's mouth: rendered, they would stand where samples do
    assert turn.generation is not None, "a conversation goes on from an answer"
    answer = np.concatenate([turn.generation.tokens, np.array(after, dtype=np.int32)])
    return dialect.extend(Said(heard, turn.prompt(), answer, answered, shown), new, tools)
