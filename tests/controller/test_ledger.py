from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from outpace.controller import ledger as module
from outpace.controller.ledger import Ledger, LedgerState, _count_finalized, counts_by_epoch
from support import naming


def fresh(tasks: int = 3, epochs: int | None = 2) -> Ledger:
    return Ledger(tasks, epochs, LedgerState())


def issue(ledger: Ledger, count: int) -> list[int]:
    return [ledger.issue()[0] for _ in range(count)]


def test_positions_are_issued_in_order_until_all_epochs_are_used_up() -> None:
    ledger = fresh()
    assert ledger.left == 6
    assert issue(ledger, 6) == [0, 1, 2, 3, 4, 5]
    assert ledger.left == 0
    with pytest.raises(AssertionError, match="task"):
        ledger.issue()


def test_without_an_epoch_limit_positions_never_run_out() -> None:
    ledger = fresh(epochs=None)
    assert ledger.left is None
    assert issue(ledger, 7)[-1] == 6


def test_an_epoch_begins_with_its_first_issued_task_and_ends_with_its_last_finalized_one() -> None:
    ledger = fresh()
    assert [ledger.issue()[1] for _ in range(4)] == [True, False, False, True]
    ledger.finish(1)
    assert not ledger.finalize(1, "trained")
    assert not ledger.finalize(0, "filtered")
    assert not ledger.finalize(3, "dropped")
    assert ledger.finalize(2, "failed")


def test_no_visit_is_finalized_twice_or_in_the_wrong_state() -> None:
    ledger = fresh()
    issue(ledger, 2)
    with pytest.raises(AssertionError, match=naming("0", "trained", "running")):
        ledger.finalize(0, "trained")
    ledger = fresh()
    issue(ledger, 2)
    ledger.finish(0)
    ledger.finalize(0, "trained")
    with pytest.raises(AssertionError, match=naming("0", "trained")):
        ledger.finalize(0, "trained")
    with pytest.raises(AssertionError, match=naming("0", "running")):
        ledger.finish(0)
    with pytest.raises(AssertionError, match=naming("2", "failed")):
        ledger.finalize(2, "failed")


def test_a_finished_group_cannot_be_finalized_as_filtered() -> None:
    ledger = fresh()
    issue(ledger, 1)
    ledger.finish(0)
    with pytest.raises(AssertionError, match=naming("0", "filtered", "finished")):
        ledger.finalize(0, "filtered")


def test_requeued_tasks_are_issued_first_and_counted() -> None:
    ledger = fresh()
    issue(ledger, 3)
    ledger.requeue(0)
    ledger.requeue(2)
    assert ledger.left == 5
    assert issue(ledger, 3) == [2, 0, 3]
    assert ledger.counts()["requeued"] == 2


def test_a_restored_ledger_issues_open_positions_first_and_in_order() -> None:
    ledger = fresh(tasks=10)
    issue(ledger, 6)
    ledger.finish(4)
    ledger.finish(1)
    ledger.finalize(1, "trained")
    ledger.finalize(3, "filtered")
    ledger.requeue(5)
    state = msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(ledger.state()))), LedgerState)
    restored = Ledger(10, 2, state)
    assert issue(restored, 6) == [0, 2, 4, 5, 6, 7]
    assert restored.counts() == ledger.counts()
    assert not restored.issue()[1], "the epoch had already begun"


def test_a_ledger_state_is_a_copy_that_later_changes_do_not_affect() -> None:
    ledger = fresh()
    issue(ledger, 2)
    state = ledger.state()
    ledger.finalize(0, "filtered")
    assert state.epochs[0].filtered == 0
    Ledger(3, 2, state).issue()
    assert state.running == [0, 1]


def test_the_counts_of_an_epoch_add_up_to_its_tasks() -> None:
    ledger = fresh(tasks=4)
    issue(ledger, 6)
    ledger.finish(1)
    ledger.finalize(2, "failed")
    first, second = counts_by_epoch(4, ledger.state())
    assert first == {
        "epoch": 0, "planned": 0, "running": 2, "finished": 1, "trained": 0, "filtered": 0, "failed": 1, "dropped": 0,
        "skipped": 0,
    }  # fmt: skip
    assert (second["planned"], second["running"]) == (2, 2)


def test_old_epochs_are_merged_into_one_tally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_EPOCHS", 3)
    ledger = fresh(tasks=1, epochs=None)
    for _ in range(50):
        position, _ = ledger.issue()
        ledger.finalize(position, "filtered")
    assert len(ledger.state().epochs) == 3
    assert ledger.state().earlier.filtered == 47
    assert ledger.counts()["filtered"] == 50


def test_a_skipped_visit_is_accounted_for_and_ends_its_epoch() -> None:
    ledger = fresh(tasks=2)
    issue(ledger, 2)
    assert not ledger.finalize(0, "skipped")
    assert ledger.finalize(1, "filtered")
    assert ledger.counts()["skipped"] == counts_by_epoch(2, ledger.state())[0]["skipped"] == 1
    assert counts_by_epoch(2, ledger.state())[0]["planned"] == 0


def test_visits_finalized_more_than_once_are_found_in_the_records_up_to_the_checkpoint(tmp_path: Path) -> None:
    def entry(task: int, **more: object) -> dict[str, object]:
        return {"task": task, "epoch": 0, **more}

    lines = [
        {"step": 1, "groups": [entry(0), entry(1)], "settled": [entry(2, outcome="failed")], "accounted": 3},
        {"step": 2, "groups": [entry(1), entry(0, replay=True)], "settled": [entry(3)], "accounted": 5},
        {"step": 2, "groups": [], "settled": [entry(2)], "accounted": 6},  # after the checkpoint, like the next line
        {"step": 3, "groups": [entry(0)], "accounted": 7},
    ]
    (tmp_path / "batches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ends = _count_finalized(tmp_path / "batches.jsonl", version=2, accounted=5)
    assert ends == {(0, 0): 1, (0, 1): 2, (0, 2): 1, (0, 3): 1}
