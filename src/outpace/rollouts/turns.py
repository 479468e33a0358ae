"""An episode's recorded answers: written down as they come, and given out again when the group is taken up again.

    Requests ─▶ EpisodeTurns.record ─▶ TurnLog
    Requests ◀─ EpisodeTurns.recall ◀─ GroupTurns.load ◀─ TurnLog

A rollout that is run again is not told so: it asks the same questions in the same order and gets the same answers,
without the engine, as far as its environment says the same as before. Where it does not, the prompt is another one, and
nothing matches.

Invariant: an answer is given to the request that it was sampled for, or to none. Its noise belongs to the episode and
the number of the request; given by the question alone, the answers that came early would stand in for the long ones.
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
            for episode in self.episodes:
                episode.close()

    @property
    def reused(self) -> int:
        return sum(episode.reused for episode in self.episodes)


class EpisodeTurns:
    def __init__(self, turns: TurnLog | None, order: GroupOrder, episode: int) -> None:
        self._log = turns
        self._order = order
        self._episode = episode
        self._known: dict[tuple[int, bytes], Generation] = {}  # by the number of the request, and by what was asked
        self.reused = 0

    def expect(self, head: Answered, answer: Generation) -> None:
        """Of one request recorded twice one answer counts: with the same noise it may be nearly the same twice."""
        self._known[head.number, head.asked] = answer

    def recall(self, number: int, prompt: Ints, sampling: Sampling) -> Generation | None:
        """The recorded answer of this very request."""
        if not self._known:
            return None
        answer = self._known.pop((number, question(prompt, sampling)), None)
        self.reused += answer is not None
        return answer

    def record(self, number: int, prompt: Ints, sampling: Sampling, answer: Generation) -> None:
        if self._log is not None and answer.stop != "aborted":
            self._log.record(self._order, self._episode, number, prompt, sampling, answer)

    def close(self) -> None:
        """What still comes, of requests that were being given up, is of no more use: nobody would tidy it up."""
        self._log = None
