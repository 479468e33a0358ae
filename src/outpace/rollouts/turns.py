"""MERGED"""

from __future__ import annotations

import asyncio

from outpace.checkpoint.turn_log import TurnLog
from outpace.checkpoint.turns import Answered, question
from outpace.types import Generation, GroupOrder, Ints, Sampling


class GroupTurns:
    """Recorded answers of one group."""

    def __init__(self, turns: TurnLog | None, order: GroupOrder) -> None:
        """`turns` is None if recording is off."""
        self._log = turns
        self._order = order
        self.episodes = [EpisodeTurns(turns, order, episode) for episode in range(order.size)]

    async def load(self) -> None:
        """Load the answers of an earlier attempt at this group, except those older than its `min_version`."""
        if self._log is None or not self._order.recorded:
            return
        for head, answer in await asyncio.to_thread(self._log.find, self._order.position):
            if head.episode < len(self.episodes) and head.oldest >= self._order.min_version:
                self.episodes[head.episode].add(head, answer)

    def close(self) -> None:
        """Mark the recorded answers of the group as no longer needed."""
        if self._log is not None:
            self._log.close_group(self._order.position)
            for episode in self.episodes:
                episode.close()

    @property
    def reused(self) -> int:
        return sum(episode.reused for episode in self.episodes)


class EpisodeTurns:
    """Recorded answers of one episode."""

    def __init__(self, turns: TurnLog | None, order: GroupOrder, episode: int) -> None:
        self._log = turns
        self._order = order
        self._episode = episode
        self._known: dict[tuple[int, bytes], Generation] = {}  # by request number and request digest
        self.reused = 0

    def add(self, head: Answered, answer: Generation) -> None:
        """Add a recorded answer. If a request was recorded twice, the later answer replaces the earlier one."""
        self._known[head.number, head.asked] = answer

    def recall(self, number: int, prompt: Ints, sampling: Sampling) -> Generation | None:
        """Return the recorded answer of this request, or None."""
        if not self._known:
            return None
        answer = self._known.pop((number, question(prompt, sampling)), None)
        self.reused += answer is not None
        return answer

    def record(self, number: int, prompt: Ints, sampling: Sampling, answer: Generation) -> None:
        if self._log is not None and answer.stop != "aborted":
            self._log.record(self._order, self._episode, number, prompt, sampling, answer)

    def close(self) -> None:
        """Stop recording. Answers of abandoned requests may still arrive, and nothing would delete them later."""
        self._log = None
