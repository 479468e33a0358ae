"""Which tasks are left out for a while, because the policy always solves them, or never does.

A group that closes with a mean reward of at least `easy_above` or at most `hard_below` sends its task to rest: the
visits of the next `rest_epochs` epochs are skipped. Groups that failed say nothing of their task.

Invariants
- A visit of epoch e is skipped only if a visit of one of the epochs e - rest_epochs to e - 1 was too easy or too hard.
  What came of its own epoch or a later one never skips it. This holds for visits that are made again too (requeued, or
  after a resume): such a one is skipped if an earlier epoch's group has closed as too easy or too hard meanwhile.
- At most `tasks` visits in a row are skipped. If all of these were, an epoch's worth of visits brought nothing: every
  rest ends there, and the next visit is made.
- Only tasks at rest are remembered: a task is forgotten at the visit it returns with.
- In lockstep, an admission with stamp s knows what came of the groups up to the last one of batch s - 1, and of no
  others. That batch is trained before any engine serves s; batches are filled in admission order, so all those groups
  have closed; and which they are depends on outcomes alone. So who closes first changes nothing. What is heard earlier
  waits. (The learner's own version would not do: within a stamp, a step may be done before or after an admission.)

Rests are folded by their latest end, so in any order they come to the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from outpace.types import Version


@dataclass(frozen=True)
class DifficultySettings:
    easy_above: float | None  # None: no task is too easy
    hard_below: float | None  # None: no task is too hard
    rest_epochs: int


class DifficultyState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps: tasks at rest with the epoch of their return, and how many visits in a row were skipped.

    All that was heard is in it: in lockstep a periodic checkpoint finds nothing outstanding, hence nothing waiting."""

    resting: list[list[int]] = []  # [task, epoch], by task; lists, as JSON has them
    skipped: int = 0


class Difficulty:
    """Without settings nothing is ever skipped and nothing remembered."""

    def __init__(self, settings: DifficultySettings | None, tasks: int, lockstep: bool, state: DifficultyState) -> None:
        self._settings = settings
        self._tasks = tasks
        self._lockstep = lockstep
        self._returns: dict[int, int] = {}  # task -> epoch of its return
        self._skipped = 0  # visits in a row
        self._heard: list[tuple[int, int, int]] = []  # lockstep: (group, task, epoch of return), not yet folded in
        self._trained: deque[tuple[Version, int]] = deque()  # lockstep: (version, last group of the batch that made it)
        if settings is not None:
            self._returns = {task_epoch[0]: task_epoch[1] for task_epoch in state.resting}
            self._skipped = state.skipped

    def state(self) -> DifficultyState:
        returns = dict(self._returns)
        for _, task, epoch in self._heard:
            returns[task] = max(epoch, returns.get(task, 0))
        return DifficultyState([[task, epoch] for task, epoch in sorted(returns.items())], self._skipped)

    @property
    def resting(self) -> int:
        """How many tasks are at rest."""
        return len(self._returns)

    def hear(self, group: int, task: int, epoch: int, reward: float | None) -> None:
        """A group of this task and epoch closed; None: it failed."""
        if self._settings is None or reward is None or not self._is_extreme(reward, self._settings):
            return
        returns = epoch + 1 + self._settings.rest_epochs
        if self._lockstep:
            self._heard.append((group, task, returns))
        else:
            self._rest(task, returns)

    @staticmethod
    def _is_extreme(reward: float, settings: DifficultySettings) -> bool:
        easy = settings.easy_above is not None and reward >= settings.easy_above
        hard = settings.hard_below is not None and reward <= settings.hard_below
        return easy or hard

    def _rest(self, task: int, returns: int) -> None:
        self._returns[task] = max(returns, self._returns.get(task, 0))

    def batch_trained(self, version: Version, last_group: int) -> None:
        """The batch that made `version` is trained; `last_group` was its last in admission order."""
        if self._lockstep and self._settings is not None:
            self._trained.append((version, last_group))

    def catch_up(self, stamp: Version) -> None:
        """Groups are about to be admitted with this stamp: fold in what they may know."""
        last_group = -1
        while self._trained and self._trained[0][0] <= stamp:
            _, last_group = self._trained.popleft()
        known = [word for word in self._heard if word[0] <= last_group]
        if known:
            self._heard = [word for word in self._heard if word[0] > last_group]
        for _, task, returns in known:
            self._rest(task, returns)

    def skips(self, task: int, epoch: int) -> bool:
        """Whether this visit, the next in order, is left out. Ask once per visit."""
        if self._settings is None or not self._is_at_rest(task, epoch, self._settings.rest_epochs):
            self._skipped = 0
            return False
        if self._skipped == self._tasks:
            self._returns.clear()
            self._skipped = 0
            return False
        self._skipped += 1
        return True

    def _is_at_rest(self, task: int, epoch: int, rest_epochs: int) -> bool:
        returns = self._returns.get(task)
        if returns is None:
            return False
        if epoch >= returns:
            del self._returns[task]
        return returns - rest_epochs <= epoch < returns
