"""Curriculum: based on rewards, skips tasks that are too easy or too hard for a while, and repeats unsolved ones.

Skips. If a group's mean reward is at least `easy_above` or at most `hard_below`, its task rests: its visits in the next
`rest_epochs` epochs are skipped. Failed groups have no effect.

Invariants
- A visit of epoch e is skipped only if a visit of one of the epochs e - rest_epochs to e - 1 was too easy or too hard.
  Results of its own or a later epoch never skip it. This holds for repeated visits too (requeued, or after a resume):
  they are skipped if a group of an earlier epoch has meanwhile turned out too easy or too hard.
- At most `tasks` visits in a row are skipped. By then a whole epoch has produced nothing, so all rests end and the next
  visit runs.
- Only resting tasks are stored: the first visit after a rest removes its task.

If a task has several rests, the latest end applies, so the order in which results arrive does not matter.

Re-rolls. If no attempt of a visit solves its task, the visit is repeated later under a new position (`tasks/order.py`).

Invariants
- The re-roll is planned when the visit is finalized. So in every checkpoint, either the visit is open or its re-roll is
  planned, open or finalized: none is lost and none happens twice.
- A visit is repeated at most `max_times` times, and only if it was trained, filtered or failed.
- A re-roll has a min_version at least `after_steps` above that of the visit it repeats, and at least `from_step`. At
  most `max_groups` share a min_version.
- At most `max_waiting` re-rolls wait at an admission; beyond that, those with the lowest min_version are dropped.

In deterministic mode, an admission with min_version s sees the results of the groups up to the last one of batch s - 1,
and no others (`ResultsInOrder`). That batch is trained before any engine serves s, and batches are filled in admission
order, so all those groups have closed, and which groups they are depends on outcomes only. Completion order has no
effect: results of later groups wait. (The learner's own version cannot be used instead: within one min_version, a step
may complete before or after an admission.)
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from operator import itemgetter
from typing import Generic, TypeVar

import msgspec

from outpace.config.algorithm import DifficultyConfig, RerollConfig
from outpace.controller.events import GroupClosed
from outpace.tasks.order import REROLL, reroll_number
from outpace.types import GroupOrder, Version

T = TypeVar("T")


class ResultsInOrder(Generic[T]):
    """Holds the results of closed groups until an admission may see them."""

    def __init__(self, deterministic: bool) -> None:
        self._deterministic = deterministic
        self._pending: list[tuple[int, T]] = []  # (group, result)
        self._trained: deque[tuple[Version, int]] = deque()  # deterministic: (version, its last group)

    @property
    def pending(self) -> list[T]:
        return [result for _, result in self._pending]

    def add(self, group: int, result: T) -> None:
        self._pending.append((group, result))

    def batch_trained(self, version: Version, last_group: int) -> None:
        """Record that a step produced `version`; `last_group` is the last group of its batch in admission order."""
        if self._deterministic:
            self._trained.append((version, last_group))

    def take(self, min_version: Version) -> list[T]:
        """Remove and return the results that groups admitted with this `min_version` may see."""
        last_group = -1
        while self._trained and self._trained[0][0] <= min_version:
            _, last_group = self._trained.popleft()
        taken = [result for group, result in self._pending if group <= last_group or not self._deterministic]
        if taken:
            self._pending = [each for each in self._pending if each[0] > last_group and self._deterministic]
        return taken


class CurriculumState(msgspec.Struct, frozen=True):
    """Checkpointed curriculum state: resting tasks with the epoch of their return, and visits skipped in a row.

    It is complete: in deterministic mode nothing is outstanding at a periodic checkpoint, so no result is waiting."""

    resting: list[list[int]] = []  # [task, epoch], by task; lists because JSON has no tuples
    skipped: int = 0


class Curriculum:
    """Decides which visits to skip. Without settings, it skips nothing and stores nothing."""

    def __init__(
        self, settings: DifficultyConfig | None, tasks: int, deterministic: bool, state: CurriculumState
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._deterministic = deterministic
        self._returns: dict[int, int] = {}  # task -> epoch of its return
        self._skipped = 0  # visits skipped in a row
        self._results: ResultsInOrder[tuple[int, int]] = ResultsInOrder(deterministic)  # (task, epoch of return)
        if settings is not None:
            self._returns = {task_epoch[0]: task_epoch[1] for task_epoch in state.resting}
            self._skipped = state.skipped

    def state(self) -> CurriculumState:
        returns = dict(self._returns)
        for task, epoch in self._results.pending:
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
        self._results.add(group, (task, epoch + 1 + self._settings.rest_epochs))
        if not self._deterministic:
            self.catch_up(0)

    @staticmethod
    def _is_extreme(reward: float, settings: DifficultyConfig) -> bool:
        easy = settings.easy_above is not None and reward >= settings.easy_above
        hard = settings.hard_below is not None and reward <= settings.hard_below
        return easy or hard

    def batch_trained(self, version: Version, last_group: int) -> None:
        """Record that a step produced `version`; `last_group` is the last group of its batch in admission order."""
        self._results.batch_trained(version, last_group)

    def catch_up(self, min_version: Version) -> None:
        """Apply the results that groups admitted with this `min_version` may see."""
        for task, returns in self._results.take(min_version):
            self._returns[task] = max(returns, self._returns.get(task, 0))

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


class RerollState(msgspec.Struct, frozen=True):
    """Checkpointed re-rolls: those that wait, and how many were dropped."""

    waiting: list[list[int]] = []  # [smallest min_version, position], in order; lists because JSON has no tuples
    dropped: int = 0


class RerollQueue:
    """Plans repeated visits and decides which may start. Without settings, it plans none."""

    def __init__(self, settings: RerollConfig | None, deterministic: bool, state: RerollState) -> None:
        self._settings = settings
        self._unsolved: dict[int, tuple[int, Version]] = {}  # position of an open visit -> its group and min_version
        self._results: ResultsInOrder[tuple[Version, int]] = ResultsInOrder(deterministic)
        self._waiting: list[tuple[Version, int]] = []  # (smallest min_version, position), in order
        self._min_version: Version = 0  # for groups admitted now
        self._issued = 0  # re-rolls with this min_version
        self.dropped = state.dropped
        if settings is not None:
            self._waiting = [(entry[0], entry[1]) for entry in state.waiting]

    def state(self) -> RerollState:
        return RerollState([list(entry) for entry in sorted(self._waiting + self._results.pending)], self.dropped)

    @property
    def waiting(self) -> int:
        """Number of re-rolls that are planned and not issued."""
        return len(self._waiting) + len(self._results.pending)

    @property
    def due(self) -> int:
        """Number of re-rolls that may start now."""
        due = bisect_right(self._waiting, self._min_version, key=itemgetter(0))
        limit = None if self._settings is None else self._settings.max_groups
        return due if limit is None else min(due, limit - self._issued)

    def group_closed(self, order: GroupOrder, event: GroupClosed) -> None:
        """Record the result of an open visit. Ignore supplied attempts: a repeat would have the same ones."""
        if self._settings is None or event.supplied or reroll_number(order.position) >= self._settings.max_times:
            return
        if event.outcome == "failed" or (event.best is not None and event.best <= self._settings.solved_above):
            self._unsolved[order.position] = order.group, order.min_version

    def visit_finalized(self, position: int) -> None:
        """Plan the re-roll of a visit if its task was not solved."""
        unsolved = self._unsolved.pop(position, None)
        if unsolved is not None and self._settings is not None:
            group, min_version = unsolved
            due = max(min_version + self._settings.after_steps, self._settings.from_step)
            self._results.add(group, (due, position + REROLL))

    def batch_trained(self, version: Version, last_group: int) -> None:
        self._results.batch_trained(version, last_group)

    def catch_up(self, min_version: Version) -> None:
        """Prepare for admissions with this `min_version`: queue the re-rolls that they may see."""
        if self._settings is None:
            return
        if min_version != self._min_version:
            self._min_version, self._issued = min_version, 0
        for entry in self._results.take(min_version):
            insort(self._waiting, entry)
        excess = max(0, len(self._waiting) - self._settings.max_waiting)
        del self._waiting[:excess]
        self.dropped += excess

    def pop(self) -> int:
        """Remove the next re-roll and return its position. At least one must be due."""
        assert self.due
        self._issued += 1
        return self._waiting.pop(0)[1]
