"""Conversations of an episode: continue a chat from the exact token ids it was sampled with.

`Conversation` is one growing chat: new messages are appended, and only they are rendered. `ConversationIndex` does the
same for agents that send the full history with every request:

    history ─▶ digest of every prefix ─▶ longest prefix that ends in a known answer ─▶ keep its ids, render the rest

If the agent replaced an answer, or the chat format cannot continue exactly, the whole history is rendered again as the
start of another trajectory. Both cases count as breaks.

Prefixes are compared by a chain of digests, one per message. Two messages are equal if they have the same meaning:
tool-call ids, empty fields, white space around an answer, key order in arguments and omitted reasoning do not matter.
The token ids are always those of the original.
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
"""Source of the first tokens of a trajectory."""


def roles_of(messages: Sequence[Message]) -> str:
    return ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))


@dataclass(frozen=True)
class Position:
    """Position of a request: after `parent`'s answer (None: at the start), with the tokens `observed` in between.

    `context` is the conversation so far, with placeholders for the policy's answers. `shown` is its rendered text, if
    the chat format provided it. `digest` and `marks` belong to the real conversation."""

    parent: Turn | None
    observed: Sequence[int]
    context: tuple[Message, ...]
    digest: Digest
    marks: tuple[Digest, ...]
    shown: str = ""
    source: str = PROMPT  # origin of the observed tokens


@dataclass
class _KnownAnswer:
    """An answer that a conversation may continue from. `shown` is the full text, so it is dropped once one does."""

    turn: Turn
    context: tuple[Message, ...]
    marks: tuple[Digest, ...]
    shown: str
    continued: bool = False


class Conversations:
    """Finds the answer that a message history continues from."""

    def __init__(self, dialect: Dialect, openings: dict[Digest, list[int]]) -> None:
        """`openings` caches rendered starts; the episodes of a group begin with the same prompt and share it."""
        self._dialect = dialect
        self._openings = openings
        self._known: dict[Digest, list[_KnownAnswer]] = {}
        self._requested: set[Digest] = set()
        self.breaks = 0

    def place(self, role: str, tools: Sequence[Schema], history: Sequence[Message]) -> Position:
        """Return the position of a request with this history. Counts a break if it cannot be continued exactly."""
        chain, marks = digests(role, tools, history), marks_of(history)
        known, length = self._longest_known(history, chain, marks)
        position = None if known is None else self._continuation(known, length, history, tools, chain, marks)
        if position is None:
            self.breaks += known is not None or self._replaces_answer(history, chain)
            context = tuple(map(stand_in_for, history))
            position = Position(None, self.opening(history, tools), context, chain[-1], marks)
        self._requested.add(chain[-1])
        return position

    def opening(self, history: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        digest = exact_digest(tools, history)
        if digest not in self._openings:
            self._openings[digest] = self._dialect.open(history, tools)
        return self._openings[digest]

    def reopening(self, history: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """Render a conversation that cannot be continued exactly, and count a break."""
        self.breaks += 1
        return self._dialect.open(history, tools)

    def remember(self, position: Position, turn: Turn, answer: Answer) -> None:
        """Add an answer, so that later histories can continue from it."""
        message = answer.message
        known = _KnownAnswer(turn, position.context, (*position.marks, *marks_of([message])), position.shown)
        self._known.setdefault(followed_by(position.digest, message), []).append(known)

    def _continuation(
        self,
        known: _KnownAnswer,
        length: int,
        history: Sequence[Message],
        tools: Sequence[Schema],
        chain: Sequence[Digest],
        marks: tuple[Digest, ...],
    ) -> Position | None:
        answered, new = history[length - 1], history[length:]
        found = extension(self._dialect, known.turn, (), known.context, answered, new, tools, known.shown)
        if found is None:
            return None
        known.continued, known.shown = True, ""
        context = (*known.context, stand_in_for(answered), *new)
        return Position(known.turn, found.ids, context, chain[-1], marks, found.shown, roles_of(new))

    def _replaces_answer(self, history: Sequence[Message], chain: Sequence[Digest]) -> bool:
        """Whether the history replaces an answer sampled here. Assistant messages in few-shot prompts do not count."""
        followed = zip(chain, history[1:], strict=False)
        return any(message.get("role") == "assistant" and digest in self._requested for digest, message in followed)

    def _longest_known(
        self, history: Sequence[Message], chain: Sequence[Digest], marks: tuple[Digest, ...]
    ) -> tuple[_KnownAnswer | None, int]:
        for length in range(len(history), 0, -1):
            if history[length - 1].get("role") == "assistant" and chain[length - 1] in self._known:
                answers = sum(message.get("role") == "assistant" for message in history[:length])
                return _best_match(self._known[chain[length - 1]], marks[:answers]), length
        return None, 0


def _best_match(alike: list[_KnownAnswer], marks: tuple[Digest, ...]) -> _KnownAnswer:
    """Choose among answers with equal content: prefer matching call ids and reasoning, then one that is not continued
    yet, so that each continues in its own trajectory."""
    candidates = [known for known in alike if known.marks == marks] or alike
    return next((known for known in candidates if not known.continued), candidates[0])


def extension(
    dialect: Dialect,
    turn: Turn,
    after: Sequence[int],
    context: Sequence[Message],
    answered: Message,
    new: Sequence[Message],
    tools: Sequence[Schema],
    shown: str = "",
) -> Bridge | None:
    """Render `new` messages after a turn's answer and the tokens observed `after` it.

    Returns None if the conversation cannot be continued exactly. `shown` is the text of the previous continuation, if
    there was one."""
    if any(message.get("role") == "assistant" for message in new):
        return None  # rendered assistant messages would look like sampled answers
    assert turn.generation is not None, "only an answered turn can be continued"
    answer = np.concatenate([turn.generation.tokens, np.array(after, dtype=np.int32)])
    return dialect.extend(Said(context, turn.prompt(), answer, answered, shown), new, tools)
