"""Which turn a conversation goes on from, and with which ids.

A history that somebody sends is compared with all conversations in which the policy has spoken. The longest part that
is one of these is kept as the ids it was sampled with, and only what is new is rendered. Where nothing matches although
the policy has spoken in it (the agent changed its past), or where the dialect cannot go on exactly, the whole history
is rendered anew as the beginning of another trajectory. Both are counted as breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.models.chat import Bridge, Schema
from outpace.models.dialect import Dialect, Said, stand_in_for
from outpace.rollouts.policy.history import Digest, digests, followed_by
from outpace.rollouts.policy.transcript import Turn
from outpace.types import Answer, Message


@dataclass(frozen=True)
class Position:
    """Where a request stands: after `parent`'s answer (None: at the beginning), with `observed` in between.

    `heard` is the conversation so far with stand-ins for what the policy said, `shown` how the dialect wrote it if it
    told; `digest` is that of the real one."""

    parent: Turn | None
    observed: Sequence[int]
    heard: tuple[Message, ...]
    digest: Digest
    shown: str = ""


@dataclass(frozen=True)
class _Known:
    turn: Turn
    heard: tuple[Message, ...]
    shown: str


class Conversations:
    def __init__(self, dialect: Dialect, openings: dict[Digest, list[int]]) -> None:
        """`openings` are rendered already; siblings of a group begin with the same prompt and share them."""
        self._dialect = dialect
        self._openings = openings
        self._known: dict[Digest, list[_Known]] = {}
        self._continued: set[int] = set()
        self.breaks = 0

    def place(self, role: str, tools: Sequence[Schema], history: Sequence[Message]) -> Position:
        chain = digests(role, tools, history)
        known, length = self._longest_known(history, chain)
        if known is not None:
            found = extension(self._dialect, known.turn, (), known.heard, history[length:], tools, known.shown)
            if found is not None:
                self._continued.add(id(known.turn))
                heard = (*known.heard, stand_in_for(history[length - 1]), *history[length:])
                return Position(known.turn, found.ids, heard, chain[-1], found.shown)
        self.breaks += any(message.get("role") == "assistant" for message in history)
        heard = tuple(map(stand_in_for, history))
        return Position(None, self.opening(chain[-1], history, tools), heard, chain[-1])

    def opening(self, digest: Digest, history: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        if digest not in self._openings:
            self._openings[digest] = self._dialect.open(history, tools)
        return self._openings[digest]

    def remember(self, position: Position, turn: Turn, answer: Answer) -> None:
        """Later histories that go on from this answer are known by it."""
        known = _Known(turn, position.heard, position.shown)
        self._known.setdefault(followed_by(position.digest, answer.message), []).append(known)

    def _longest_known(self, history: Sequence[Message], chain: Sequence[Digest]) -> tuple[_Known | None, int]:
        for length in range(len(history), 0, -1):
            if history[length - 1].get("role") == "assistant" and chain[length - 1] in self._known:
                return self._unclaimed(self._known[chain[length - 1]]), length
        return None, 0

    def _unclaimed(self, alike: list[_Known]) -> _Known:
        """Of answers that say the same, one that nothing follows yet: so each goes on in its own trajectory."""
        return next((known for known in alike if id(known.turn) not in self._continued), alike[0])


def extension(
    dialect: Dialect,
    turn: Turn,
    after: Sequence[int],
    heard: Sequence[Message],
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
    return dialect.extend(Said(heard, turn.prompt(), answer, shown), new, tools)
