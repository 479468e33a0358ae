"""Resume and checkpoint: what a run continues from, and how it writes the next checkpoint.

    checkpoint (or none yet) ─▶ controller state, version c ──┐
    journal ─▶ finished groups, recorded completions ─────────┼─▶ recovered work, compacted in the journal
    evals.jsonl ─▶ newest version with a known result ────────┘

A run killed before its first checkpoint starts over at version 0 and recovers what the journal has for that version.

A checkpoint (`CheckpointWriter`) is one directory with the learner's and the controller's state. It gets its final name
only when it is complete.

Invariants
- `Learner.save` is the next learner call after a checkpoint is ordered, unless it must wait for the previous
  checkpoint: no code before it yields to other tasks.
- If a task is cancelled while a thread works on the directory, it ends only after that thread is done.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tomllib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec

import msgspec

from outpace.checkpoint import commit
from outpace.checkpoint.commit import CHECKPOINTS, best_step
from outpace.checkpoint.journal import compact_journal, survey_journal
from outpace.checkpoint.turn_log import prune_turns, survey_turns
from outpace.config import Config
from outpace.config.load import dump_toml, read_resolved
from outpace.config.sections import CheckpointConfig
from outpace.controller.ledger import STATE_FILE, Ledger
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.recovery import (
    NO_RECOVERED_WORK,
    RecoveredWork,
    SchedulerState,
    choose_recovered,
    decode_state,
    recorded,
    recovery_rule,
)
from outpace.controller.training import ControllerState
from outpace.errors import BadInput, NotSaved, plural
from outpace.monitoring.line_file import read_lines, write_atomically
from outpace.monitoring.run_directory import RunLog
from outpace.protocols import Learner
from outpace.tasks.fingerprint import Fingerprint, difference
from outpace.tasks.order import TaskOrder
from outpace.types import FinishedGroup, Version

TASKS_FILE = "tasks.json"
"""Fingerprint of the tasks that a run started with."""

GROUP_SECTIONS = ("model", "rollout", "tools", "environment", "rewards", "judge", "sandbox", "filter", "advantage")
"""Config sections that determine the content of a group. If one has changed, groups of earlier starts differ from those
this start would produce."""


@dataclass(frozen=True)
class ResumePoint:
    """What a start of the run continues from; empty for a new run."""

    checkpoint: Path | None = None
    state: SchedulerState | None = None
    rng: dict[str, str] = field(default_factory=dict)  # RNG state of each worker
    usable: bool = True  # groups are still produced and scored in the same way
    recovered: RecoveredWork = NO_RECOVERED_WORK
    evaluated: Version = -1

    @property
    def version(self) -> Version:
        return self.state.version if self.state else 0

    @property
    def accounted(self) -> int:
        """Number of finalized visits that the run's log must contain."""
        return Ledger(self.state.tasks, None, self.state.ledger).finalized if self.state else 0


def load_resume_point(
    run: Path, checkpoint: Path | None, settings: SchedulerSettings, order: TaskOrder, tokenizer: str, usable: bool
) -> ResumePoint:
    """Load what a run resumes from. Blocks on disk I/O.

    Changes nothing on disk except the journal: if the run can be resumed, entries it can no longer use are
    deleted. `tokenizer` is the digest of the model's tokenizer; `usable`: groups are still produced and scored in
    the same way."""
    stored: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text()) if checkpoint else {}
    if checkpoint and "core" not in stored:
        raise BadInput(f"--resume: {checkpoint} was written by an older version of outpace; resume with that version")
    if stored.get("tokenizer", tokenizer) != tokenizer:
        raise BadInput("--resume: model.path has a different tokenizer than the run started with")
    state = decode_state(stored["core"]) if checkpoint else None
    if state is not None:
        state.check(order)
        if settings.steps is not None and settings.steps < state.version:
            raise BadInput(
                f"--resume: run.steps: the run already has {plural(state.version, 'step')}; set at least that many"
            )
    known = ResumePoint(checkpoint, state, stored.get("rng", {}), usable)
    return replace(
        known,
        recovered=_recover(run / "journal", state, settings, order, usable),
        evaluated=_newest_evaluated(run / "evals.jsonl", known.version),
    )


def same_group_config(run: Path, config: Config) -> bool:
    """Return whether groups are produced and scored as in the run's last start."""
    before, now = read_resolved(run), tomllib.loads(dump_toml(config))
    return all(before.get(section) == now.get(section) for section in GROUP_SECTIONS)


def check_tasks(run: Path, tasks: Fingerprint, accept: bool) -> bool:
    """Return whether these are the tasks the run started with. Raise `BadInput` if not, unless `accept` and the
    count is the same."""
    file = run / TASKS_FILE
    if not file.exists():
        return True
    before = msgspec.json.decode(file.read_bytes(), type=Fingerprint)
    changed = difference(before, tasks)
    if changed and before.count != tasks.count:
        raise BadInput(f"--resume: the tasks have changed: {changed}; start a new run for them")
    if changed and not accept:
        raise BadInput(f"--resume: the tasks have changed: {changed}; to use the new ones, add --tasks.changed accept")
    return changed is None


def save_task_fingerprint(run: Path, tasks: Fingerprint) -> None:
    write_atomically(run / TASKS_FILE, msgspec.json.encode(tasks).decode())


def _recover(
    journal: Path, state: SchedulerState | None, settings: SchedulerSettings, order: TaskOrder, usable: bool
) -> RecoveredWork:
    if not journal.is_dir():
        return NO_RECOVERED_WORK
    state = state or SchedulerState(order.count, order.seed, order.shuffle)
    use = recovery_rule(state, settings)
    found = survey_journal(journal, lambda each: usable and _is_same_task(order, each) and use(each) is not None)
    chosen = choose_recovered(found, state, settings)
    kept = compact_journal(journal, [*chosen.finished, *chosen.pooled])
    finished = len(chosen.finished)
    visits = _recorded_visits(journal, kept, state, settings) if usable else {}
    prune_turns(journal, state.version, visits)
    return RecoveredWork(tuple(kept[:finished]), tuple(kept[finished:]), visits)


def _is_same_task(order: TaskOrder, kept: FinishedGroup) -> bool:
    """Return whether the group's visit still refers to the same task."""
    return order.task(kept.order.position) == (kept.order.epoch, kept.order.task)


def _recorded_visits(
    journal: Path, finished: list[FinishedGroup], state: SchedulerState, settings: SchedulerSettings
) -> dict[int, Version]:
    found = survey_turns(journal, state.version)
    min_versions = {position: max(head.min_version for head in heads) for position, heads in found.items()}
    return recorded(min_versions, finished, state, settings)


def _newest_evaluated(evaluations: Path, version: Version) -> Version:
    known = (line.get("step") for line in read_lines(evaluations))
    return max((step for step in known if isinstance(step, int) and step <= version), default=-1)


log = logging.getLogger(__name__)

P = ParamSpec("P")


class CheckpointWriter:
    """Writes checkpoints one at a time.

    A checkpoint that falls due while the previous one is being written waits for it, and is skipped if the
    learner has moved on meanwhile. The one after the last step is never skipped."""

    def __init__(self, run: RunLog, learner: Learner, config: CheckpointConfig, tokenizer: str) -> None:
        """`tokenizer` is the tokenizer's digest, by which a resume detects that it changed."""
        self._run = run
        self._root = run.dir / CHECKPOINTS
        self._learner = learner
        self._config = config
        self._tokenizer = tokenizer
        self._saving = asyncio.Lock()

    async def save(self, version: Version, controller_state: Callable[[], Awaitable[ControllerState | None]]) -> bool:
        """Write a checkpoint; return False if it was skipped. Raises `NotSaved` on I/O errors; earlier checkpoints are
        unaffected."""
        async with self._saving:
            try:
                return await self._write(version, controller_state)
            except OSError as error:
                raise NotSaved(f"{self._root}: {error.strerror or error}") from error

    async def _write(self, version: Version, controller_state: Callable[[], Awaitable[ControllerState | None]]) -> bool:
        temporary = commit.begin(self._root, version)  # on this thread: see the module's invariants
        try:
            saved = await self._learner.save(str(temporary.absolute()), version)
            state = await controller_state() if saved else None
            if state is None:
                return False
            await _run_uncancelled(self._commit, temporary, state)
        finally:
            await _run_uncancelled(self._clean_up, temporary)
        await _run_uncancelled(self._prune)
        return True

    def _commit(self, temporary: Path, state: ControllerState) -> None:
        (temporary / STATE_FILE).write_text(json.dumps(state | {"tokenizer": self._tokenizer}))
        self._run.sync()
        commit.commit(temporary)

    def _clean_up(self, temporary: Path) -> None:
        """Remove this and other unfinished checkpoints, which may be what fills the disk."""
        commit.discard(temporary)
        try:
            commit.clean(self._root)
        except OSError as error:  # retried with the next checkpoint
            log.warning("could not remove unfinished checkpoints: %s", error)

    def _prune(self) -> None:
        best = best_step(self._run.dir) if self._config.keep_best else None
        try:
            commit.prune(self._root, self._config.keep, best)
        except OSError as error:  # harmless; retried with the next checkpoint
            log.warning("could not remove old checkpoints: %s", error)


async def _run_uncancelled(work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Run `work` on a thread. A cancellation takes effect only when the thread is done, because it cannot be
    interrupted."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError from running.exception()
    running.result()


def check_not_unfinished(run: Path) -> None:
    """Refuse to replace a run that ended early and has a checkpoint: it may be days of work."""
    try:
        ended = msgspec.json.decode((run / "summary.json").read_bytes(), type=dict[str, Any]).get("exit") == 0
    except (OSError, msgspec.DecodeError):
        ended = False
    if not ended and (step := max(commit.list_steps(run / CHECKPOINTS), default=0)):
        raise BadInput(f"{run} has a run that ended early, with a checkpoint of step {step}; resume it, or delete it")
