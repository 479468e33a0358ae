"""Resume and checkpoint: what a run continues from, and how it writes the next checkpoint.

    checkpoint (or none yet) ─▶ controller state, version c ──┐
    journal ─▶ finished groups, recorded completions ─────────┼─▶ recovered work, compacted in the journal
    evals.jsonl ─▶ newest version with a known result ────────┘

A run that was killed before its first checkpoint starts over at version 0, with what the journal holds of that version.

A checkpoint (`CheckpointWriter`) is one directory with the learner's and the controller's state. It gets its final name
only when it is complete.

Invariants
- `Learner.save` is the very next learner call after a checkpoint was ordered, unless it had to wait for the previous
  checkpoint: nothing before it yields to other tasks.
- A task that is cancelled while a thread works on the directory ends only after that thread is done.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from outpace.checkpoint.survey import Found, compact, survey
from outpace.checkpoint.turns import prune_turns, survey_turns
from outpace.errors import BadInput
from outpace.observe.linefile import read_lines, write_atomically
from outpace.pipeline.account import STATE_FILE
from outpace.pipeline.ledger import Ledger
from outpace.pipeline.pacing import CoreSettings
from outpace.pipeline.state import CoreState, state_of
from outpace.pipeline.survivors import NOTHING, Rules, Survivors, choose, recorded
from outpace.tasks.fingerprint import Fingerprint, difference
from outpace.tasks.order import Order
from outpace.types import Kept, Version
from outpace.wording import plural

CONFIG_FILE = "config.toml"
TASKS_FILE = "tasks.json"
"""Fingerprint of the tasks that a run started with."""

MAKING = ("model", "rollout", "tools", "environment", "rewards", "judge", "sandbox", "filter", "algorithm")
"""Config sections that decide what is in a group. If one has changed, groups of an earlier start differ from what
this one would produce."""


@dataclass(frozen=True)
class Past:
    """What a start of the run continues from; empty for a new run."""

    checkpoint: Path | None = None
    state: CoreState | None = None
    rng: dict[str, str] = field(default_factory=dict)  # RNG state of each worker
    usable: bool = True  # groups are still produced and scored in the same way
    survivors: Survivors = NOTHING
    evaluated: Version = -1

    @property
    def version(self) -> Version:
        return self.state.version if self.state else 0

    @property
    def accounted(self) -> int:
        """Number of finalized visits that the run's log must contain."""
        return Ledger(self.state.tasks, None, self.state.ledger).settled if self.state else 0


def past_of(
    run: Path, checkpoint: Path | None, settings: CoreSettings, order: Order, tokenizer: str, usable: bool
) -> Past:
    """Load what a run resumes from. Blocks on disk I/O.

    Changes nothing on disk except the journal: if the run can be resumed, entries it can no longer use are
    deleted. `tokenizer` is the digest of the model's tokenizer; `usable`: groups are still produced and scored in
    the same way."""
    stored: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text()) if checkpoint else {}
    if checkpoint and "core" not in stored:
        raise BadInput(f"--resume: {checkpoint} was written by an older version of outpace; resume with that version")
    if stored.get("tokenizer", tokenizer) != tokenizer:
        raise BadInput("--resume: model.path has a different tokenizer than the run started with")
    state = state_of(stored["core"]) if checkpoint else None
    if state is not None:
        state.check(order)
        if settings.steps is not None and settings.steps < state.version:
            raise BadInput(
                f"--resume: run.steps: the run already has {plural(state.version, 'step')}; set at least that many"
            )
    known = Past(checkpoint, state, stored.get("rng", {}), usable)
    return replace(
        known,
        survivors=_recover(run / "journal", state, settings, order, usable),
        evaluated=_newest_evaluated(run / "evals.jsonl", known.version),
    )


def same_making(run: Path, config: str) -> bool:
    """Return whether groups are produced and scored as in the run's last start. `config` is this start's config as
    TOML."""
    before, now = tomllib.loads((run / CONFIG_FILE).read_text()), tomllib.loads(config)
    return all(before.get(section) == now.get(section) for section in MAKING)


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


def note_tasks(run: Path, tasks: Fingerprint) -> None:
    write_atomically(run / TASKS_FILE, msgspec.json.encode(tasks).decode())


def _recover(journal: Path, state: CoreState | None, settings: CoreSettings, order: Order, usable: bool) -> Survivors:
    rules = Rules.of(state, settings)
    found = [each for each in survey(journal) if usable and _is_same_task(order, each.kept)] if journal.is_dir() else []
    by_group = {(each.kept.order.group, each.kept.order.position): each for each in found}
    chosen = choose((each.kept for each in found), rules)
    finished, pooled = (
        [by_group[kept.order.group, kept.order.position] for kept in some] for some in (chosen.finished, chosen.pooled)
    )
    moved = compact(journal, [*finished, *pooled]) if journal.is_dir() else []
    kept = [_with_place(each) for each in moved]
    visits = _recorded_visits(journal, kept, rules, usable)
    return Survivors(tuple(kept[: len(finished)]), tuple(kept[len(finished) :]), visits)


def _is_same_task(order: Order, kept: Kept) -> bool:
    """Return whether the group's visit still refers to the same task."""
    return order.task(kept.order.position) == (kept.order.epoch, kept.order.task)


def _with_place(found: Found) -> Kept:
    report = msgspec.structs.replace(found.kept.report, place=found.place)
    return msgspec.structs.replace(found.kept, report=report)


def _recorded_visits(journal: Path, finished: list[Kept], rules: Rules, usable: bool) -> dict[int, Version]:
    if not journal.is_dir():
        return {}
    min_versions = {position: known.stamp for position, known in survey_turns(journal, rules.version).items()}
    visits = recorded(min_versions, finished, rules) if usable else {}
    prune_turns(journal, rules.version, visits)
    return visits


def _newest_evaluated(evaluations: Path, version: Version) -> Version:
    known = (line.get("step") for line in read_lines(evaluations))
    return max((step for step in known if isinstance(step, int) and step <= version), default=-1)
