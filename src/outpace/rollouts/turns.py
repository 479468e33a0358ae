"""An episode's recorded answers: written down as they come, and given out again when the group is taken up again.

    Requests ─▶ EpisodeTurns.record ─▶ TurnLog
    Requests ◀─ EpisodeTurns.recall ◀─ GroupTurns.load ◀─ TurnLog

A rollout that is run again is not told so: it asks the same questions and gets the same answers, without the engine,
as far as its environment says the same as before. Where it does not, the prompt is another one, and nothing matches.
"""

from __future__ import annotations

import asyncio

from outpace.checkpoint.turn_log import TurnLog
from outpace.checkpoint.turns import Answered, question
from outpace.types import Generation, GroupOrder, Ints, Sampling


class GroupTurns:
    """The recorded answers of one group."""

    def __init__(self, turns: TurnLog | None, order: GroupOrder) -> None:
        """`turns` is None where nothing is recorded."""
        self._log = turns
        self._order = order
        self.episodes = [EpisodeTurns(turns, order, episode) for episode in range(order.size)]

    async def load(self) -> None:
        """Have at hand what there is of an earlier attempt."""
        if self._log is None or not self._order.recorded:
            return
        for head, answer in await asyncio.to_thread(self._log.find, self._order.position):
            if head.episode < len(self.episodes) and head.oldest >= self._order.min_version:
                self.episodes[head.episode].expect(head, answer)

    def close(self) -> None:
        """The group needs them no more."""
        if self._log is not None:
            self._log.close_group(self._order.position)

    @property
    def reused(self) -> int:
        return sum(episode.reused for episode in self.episodes)


class EpisodeTurns:
    def __init__(self, turns: TurnLog | None, order: GroupOrder, episode: int) -> None:
        self._log = turns
        self._order = order
        self._episode = episode
        self._known: dict[bytes, dict[int, Generation]] = {}  # by what was asked, and by the number of the request
        self.reused = 0

    def expect(self, head: Answered, answer: Generation) -> None:
        """Of one request recorded twice one answer counts: with the same noise it may be nearly the same twice."""
        self._known.setdefault(head.asked, {})[head.number] = answer

    def recall(self, prompt: Ints, sampling: Sampling) -> Generation | None:
        """A recorded answer to this very question. Each is given once: who asks twice wants two answers."""
        if not self._known:
            return None
        answers = self._known.get(question(prompt, sampling))
        if not answers:
            return None
        self.reused += 1
        return answers.pop(min(answers))

    def record(self, number: int, prompt: Ints, sampling: Sampling, answer: Generation) -> None:
        if self._log is not None and answer.stop != "aborted":
            self._log.record(self._order, self._episode, number, prompt, sampling, answer)
