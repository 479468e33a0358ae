"""What an earlier start of a run has left, and with what of it the next one goes on.

    checkpoint (or none yet) ─▶ state of the controller, version c ─┐
    journal ─▶ finished groups, recorded answers ───────────────────┼─▶ survivors, compacted to where they now lie
    evals.jsonl ─▶ the newest version whose result is known ────────┘

A run that was killed before its first checkpoint begins anew at version 0, with what the journal has of that version.
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
from outpace.pipeline import survivors
from outpace.pipeline.account import STATE_FILE
from outpace.pipeline.ledger import Ledger
from outpace.pipeline.pacing import CoreSettings
from outpace.pipeline.state import CoreState, state_of
from outpace.pipeline.survivors import NOTHING, Rules, Survivors
from outpace.tasks.fingerprint import Fingerprint, difference
from outpace.tasks.order import Order
from outpace.types import Kept, Version
from outpace.wording import plural

CONFIG_FILE = "config.toml"
TASKS_FILE = "tasks.json"
"""The fingerprint of the tasks that a run began with."""

MAKING = ("model", "rollout", "tools", "environment", "rewards", "judge", "sandbox", "filter", "algorithm")
"""Sections of the config that decide what is in a group: where one has changed, what an earlier start has made is not
what this one would make."""


@dataclass(frozen=True)
class Past:
    """What a start of the run goes on from; of a new run, nothing."""

    checkpoint: Path | None = None
    state: CoreState | None = None
    rng: dict[str, str] = field(default_factory=dict)  # of the workers
    usable: bool = True  # groups are still made and judged as they were
    survivors: Survivors = NOTHING
    evaluated: Version = -1

    @property
    def version(self) -> Version:
        return self.state.version if self.state else 0

    @property
    def accounted(self) -> int:
        """How many visits the run's log must know of."""
        return Ledger(self.state.tasks, None, self.state.ledger).settled if self.state else 0


def past_of(
    run: Path, checkpoint: Path | None, settings: CoreSettings, order: Order, tokenizer: str, usable: bool
) -> Past:
    """Blocks on the disk, and changes nothing there but the journal: if the run can go on in this way, what it cannot
    use any more is deleted. `tokenizer` is the digest of the model's; `usable`: groups are still made and judged as
    they were."""
    memory: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text()) if checkpoint else {}
    if checkpoint and "core" not in memory:
        raise BadInput(f"--resume: {checkpoint} was written by an older version of outpace")
    if memory.get("tokenizer", tokenizer) != tokenizer:
        raise BadInput("--resume: model.path has another tokenizer than the run had")
    state = state_of(memory["core"]) if checkpoint else None
    if state is not None:
        state.check(order)
        if settings.steps is not None and settings.steps < state.version:
            raise BadInput(
                f"--resume: run.steps: the run has {plural(state.version, 'step')} already; give at least that many"
            )
    known = Past(checkpoint, state, memory.get("rng", {}), usable)
    return replace(
        known,
        survivors=_survivors(run / "journal", state, settings, order, usable),
        evaluated=_newest_evaluated(run / "evals.jsonl", known.version),
    )


def same_making(run: Path, config: str) -> bool:
    """Whether groups are still made and judged as the run's last start did, by its config and this one's, as TOML."""
    before, now = tomllib.loads((run / CONFIG_FILE).read_text()), tomllib.loads(config)
    return all(before.get(section) == now.get(section) for section in MAKING)


def check_tasks(run: Path, tasks: Fingerprint, accept: bool) -> bool:
    """Whether these are the tasks that the run began with. Others are refused, or accepted if there are as many."""
    file = run / TASKS_FILE
    if not file.exists():
        return True
    before = msgspec.json.decode(file.read_bytes(), type=Fingerprint)
    changed = difference(before, tasks)
    if changed and before.count != tasks.count:
        raise BadInput(f"--resume: the tasks have changed: {changed}; a run keeps its tasks, so start another one")
    if changed and not accept:
        raise BadInput(f"--resume: the tasks have changed: {changed}; --tasks.changed accept goes on with them")
    return changed is None


def note_tasks(run: Path, tasks: Fingerprint) -> None:
    write_atomically(run / TASKS_FILE, msgspec.json.encode(tasks).decode())


def _survivors(journal: Path, state: CoreState | None, settings: CoreSettings, order: Order, usable: bool) -> Survivors:
    rules = Rules.of(state, settings)
    found = [each for each in survey(journal) if usable and _is_of(order, each.kept)] if journal.is_dir() else []
    by_group = {(each.kept.order.group, each.kept.order.position): each for each in found}
    chosen = survivors.choose((each.kept for each in found), rules)
    finished, pooled = (
        [by_group[kept.order.group, kept.order.position] for kept in some] for some in (chosen.finished, chosen.pooled)
    )
    there = compact(journal, [*finished, *pooled]) if journal.is_dir() else []
    kept = [_at_its_place(each) for each in there]
    recorded = _recorded(journal, kept, rules, usable)
    return Survivors(tuple(kept[: len(finished)]), tuple(kept[len(finished) :]), recorded)


def _is_of(order: Order, kept: Kept) -> bool:
    """Whether its visit is of the task that stands there now."""
    return order.task(kept.order.position) == (kept.order.epoch, kept.order.task)


def _at_its_place(found: Found) -> Kept:
    report = msgspec.structs.replace(found.kept.report, place=found.place)
    return msgspec.structs.replace(found.kept, report=report)


def _recorded(journal: Path, finished: list[Kept], rules: Rules, usable: bool) -> dict[int, Version]:
    if not journal.is_dir():
        return {}
    stamps = {position: known.stamp for position, known in survey_turns(journal, rules.version).items()}
    wanted = survivors.recorded(stamps, finished, rules) if usable else {}
    prune_turns(journal, rules.version, wanted)
    return wanted


def _newest_evaluated(evaluations: Path, version: Version) -> Version:
    known = (line.get("step") for line in read_lines(evaluations))
    return max((step for step in known if isinstance(step, int) and step <= version), default=-1)
