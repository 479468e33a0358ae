"""Curriculum: skip tasks for a while that the policy always or never solves.

A group whose mean reward is at least `easy_above` or at most `hard_below` puts its task to rest: the visits of the next
`rest_epochs` epochs are skipped. Failed groups say nothing about their task.

Invariants
- A visit of epoch e is skipped only if a visit of one of the epochs e - rest_epochs to e - 1 was too easy or too hard.
  Results of its own or a later epoch never skip it. This holds for repeated visits too (requeued, or after a resume):
  they are skipped if a group of an earlier epoch has meanwhile turned out too easy or too hard.
- At most `tasks` visits in a row are skipped. After that, a whole epoch produced nothing: all rests end and the next
  visit runs.
- Only resting tasks are remembered: a task is forgotten at the visit it returns with.
- In deterministic mode, an admission with min_version s sees the results of the groups up to the last one of batch
  s - 1, and no others. That batch is trained before any engine serves s, and batches are filled in admission order, so
  all those groups have closed and which they are depends on outcomes only. Completion order has no effect; results
  that arrive earlier wait. (The learner's own version would not do: within one min_version, a step may complete
  before or after an admission.)

Rests are merged by their latest end, so the order in which they arrive does not matter.
"""

from __future__ import annotations

from collections import deque

import msgspec

from outpace.config.algorithm import DifficultyConfig
from outpace.types import Version


class CurriculumState(msgspec.Struct, frozen=True):
    """Checkpointed curriculum state: resting tasks with the epoch of their return, and visits skipped in a row.

    It is complete: in deterministic mode nothing is outstanding at a periodic checkpoint, so no result is waiting."""

    resting: list[list[int]] = []  # [task, epoch], by task; lists, as JSON has them
    skipped: int = 0


class Curriculum:
    """Decides which visits to skip. Without settings it skips nothing and remembers nothing."""

    def __init__(
        self, settings: DifficultyConfig | None, tasks: int, deterministic: bool, state: CurriculumState
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._deterministic = deterministic
        self._returns: dict[int, int] = {}  # task -> epoch of its return
        self._skipped = 0  # visits in a row
        self._pending: list[tuple[int, int, int]] = []  # deterministic: (group, task, epoch of return), not yet applied
        self._trained: deque[tuple[Version, int]] = deque()  # deterministic: (version, its last group)
        if settings is not None:
            self._returns = {task_epoch[0]: task_epoch[1] for task_epoch in state.resting}
            self._skipped = state.skipped

    def state(self) -> CurriculumState:
        returns = dict(self._returns)
        for _, task, epoch in self._pending:
            returns[task] = max(epoch, returns.get(task, 0))
        return CurriculumState([[task, epoch] for task, epoch in sorted(returns.items())], self._skipped)

    @property
    def resting(self) -> int:
        """Number of resting tasks."""
        return len(self._returns)

    def record(self, group: int, task: int, epoch: int, reward: float | None) -> None:
        """Record the mean reward of a closed group of this task and epoch; None if the group failed."""
        if self._settings is None or reward is None or not self._is_extreme(reward, self._settings):
            return
        returns = epoch + 1 + self._settings.rest_epochs
        if self._deterministic:
            self._pending.append((group, task, returns))
        else:
            self._rest(task, returns)

    @staticmethod
    def _is_extreme(reward: float, settings: DifficultyConfig) -> bool:
        easy = settings.easy_above is not None and reward >= settings.easy_above
        hard = settings.hard_below is not None and reward <= settings.hard_below
        return easy or hard

    def _rest(self, task: int, returns: int) -> None:
        self._returns[task] = max(returns, self._returns.get(task, 0))

    def batch_trained(self, version: Version, last_group: int) -> None:
        """Record that the batch that made `version` is trained; `last_group` was its last in admission order."""
        if self._deterministic and self._settings is not None:
            self._trained.append((version, last_group))

    def catch_up(self, min_version: Version) -> None:
        """Apply the results that groups admitted with this `min_version` may see."""
        last_group = -1
        while self._trained and self._trained[0][0] <= min_version:
            _, last_group = self._trained.popleft()
        visible = [result for result in self._pending if result[0] <= last_group]
        if visible:
            self._pending = [result for result in self._pending if result[0] > last_group]
        for _, task, returns in visible:
            self._rest(task, returns)

    def should_skip(self, task: int, epoch: int) -> bool:
        """Return whether to skip this visit, the next in order. Call exactly once per visit: it counts skips."""
        if self._settings is None or not self._is_resting(task, epoch, self._settings.rest_epochs):
            self._skipped = 0
            return False
        if self._skipped == self._tasks:
            self._returns.clear()
            self._skipped = 0
            return False
        self._skipped += 1
        return True

    def _is_resting(self, task: int, epoch: int, rest_epochs: int) -> bool:
        returns = self._returns.get(task)
        if returns is None:
            return False
        if epoch >= returns:
            del self._returns[task]
        return returns - rest_epochs <= epoch < returns
