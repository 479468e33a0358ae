from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from outpace.checkpoint import commit
from outpace.config.algorithm import RerollConfig
from outpace.controller import ledger as module
from outpace.controller.curriculum import RerollQueue
from outpace.controller.events import GroupClosed
from outpace.controller.ledger import Ledger, LedgerState, counts_by_epoch, ledger_report
from outpace.errors import BadInput
from outpace.tasks.order import REROLL
from outpace.tasks.stream import ENDLESS
from outpace.types import GroupOrder
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


def test_finalized_visits_are_counted_also_after_a_restore() -> None:
    ledger = fresh()
    assert ledger.finalized == 0
    issue(ledger, 5)
    for position in (0, 1, 2, 4):
        ledger.finalize(position, "failed")
    assert ledger.finalized == 4
    restored = Ledger(3, 2, ledger.state())
    assert restored.finalized == 4
    restored.issue()
    restored.finalize(3, "skipped")
    assert restored.finalized == 5


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


def entry(task: int, epoch: int = 0, **more: object) -> dict[str, object]:
    return {"task": task, "epoch": epoch, **more}


def write_run(run: Path, version: int, ledger: Ledger, lines: list[dict[str, object]]) -> Path:
    """Write the files that the report reads: the checkpoint of `version` and batches.jsonl."""
    folder = commit.begin(run / "checkpoints", version)
    core = {"tasks": ledger.tasks, "version": version, "ledger": msgspec.to_builtins(ledger.state())}
    (folder / module.STATE_FILE).write_text(json.dumps({"core": core}))
    commit.commit(folder)
    (run / "batches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_report_counts_every_epoch_and_finds_no_fault_in_a_correct_run(tmp_path: Path) -> None:
    ledger = fresh(tasks=2)
    issue(ledger, 3)
    ledger.finish(0)
    ledger.finalize(0, "trained")
    ledger.finalize(1, "filtered")
    lines = [{"step": 1, "groups": [entry(0)], "settled": [entry(1)], "accounted": 2}]
    counts = {"finished": 0, "failed": 0, "dropped": 0, "skipped": 0}
    assert ledger_report(write_run(tmp_path, 1, ledger, lines)) == {
        "version": 1,
        "tasks": 2,
        "epochs": [
            {"epoch": 0, "planned": 0, "running": 0, "trained": 1, "filtered": 1, **counts},
            {"epoch": 1, "planned": 1, "running": 1, "trained": 0, "filtered": 0, **counts},
        ],
        "rerolls": dict.fromkeys(
            (
                *("planned", "running", "finished", "trained", "filtered", "failed", "dropped", "skipped"),
                "never_started",
            ),
            0,
        ),
        "twice": [],
        "never": [],
    }


def test_the_report_names_visits_finalized_twice_and_visits_of_ended_epochs_that_were_never_finalized(
    tmp_path: Path,
) -> None:
    ledger = fresh(tasks=3)
    issue(ledger, 4)
    for position in (0, 1, 2):
        ledger.finalize(position, "failed")
    lines = [{"step": 4, "groups": [entry(1), entry(0, replay=True)], "settled": [entry(1)], "accounted": 3}]
    report = ledger_report(write_run(tmp_path, 4, ledger, lines))
    assert report["twice"] == ["epoch 0: task 1"]
    assert report["never"] == ["epoch 0: task 0", "epoch 0: task 2"], "the second epoch has not ended"


@pytest.mark.parametrize("states", [("planned", "running"), ("planned", "finished"), ("running", "finished")])
def test_an_epoch_with_open_visits_has_none_that_was_never_finalized(tmp_path: Path, states: tuple[str, str]) -> None:
    ledger = fresh(tasks=2)
    for position, state in zip(issue(ledger, 2), states, strict=True):
        if state == "planned":
            ledger.requeue(position)
        if state == "finished":
            ledger.finish(position)
    report = ledger_report(write_run(tmp_path, 1, ledger, []))
    assert [report["epochs"][0][state] for state in states] == [1, 1]
    assert report["never"] == []


@pytest.mark.parametrize(("issued", "tasks"), [(3, 3), (0, 1)])
def test_the_report_of_a_stream_has_as_many_tasks_as_were_issued(tmp_path: Path, issued: int, tasks: int) -> None:
    ledger = Ledger(ENDLESS, None, LedgerState(), streamed=True)
    ledger.extend(5, ended=False)
    for position in issue(ledger, issued):
        ledger.finalize(position, "dropped")
    lines = [{"step": 1, "groups": [], "settled": [entry(task) for task in range(issued)], "accounted": issued}]
    report = ledger_report(write_run(tmp_path, 1, ledger, lines))
    assert (report["tasks"], report["twice"], report["never"]) == (tasks, [], [])
    assert [row["dropped"] for row in report["epochs"]] == [3][:issued]


def test_a_run_without_a_complete_checkpoint_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no complete checkpoint"):
        ledger_report(tmp_path)


def test_the_report_ignores_records_after_the_checkpoint(tmp_path: Path) -> None:
    ledger = fresh(tasks=5)
    for position in issue(ledger, 5):
        ledger.finalize(position, "failed")
    lines = [
        {"step": 1, "groups": [entry(0), entry(1)], "settled": [entry(2, outcome="failed")], "accounted": 3},
        {"step": 2, "groups": [entry(1), entry(0, replay=True)], "settled": [entry(3)], "accounted": 5},
        {"step": 2, "groups": [], "settled": [entry(2)], "accounted": 6},  # after the checkpoint, like the next line
        {"step": 3, "groups": [entry(0)]},
    ]
    report = ledger_report(write_run(tmp_path, 2, ledger, lines))
    assert (report["twice"], report["never"]) == (["epoch 0: task 1"], ["epoch 0: task 4"])


# ------------------------------------------------------------------------------------------------------------- re-rolls


def with_rerolls(tasks: int = 3, epochs: int | None = 2, streamed: bool = False) -> Ledger:
    return Ledger(tasks, epochs, LedgerState(), streamed=streamed, rerolls=once(LedgerState()))


def once(state: LedgerState) -> RerollQueue:
    return RerollQueue(RerollConfig(max_times=1, after_steps=1), False, state.rerolls)


def leave_unsolved(ledger: Ledger, position: int) -> None:
    """Let all attempts of a running visit fail; its re-roll may start at once."""
    ledger.rerolls.group_closed(GroupOrder(position, 0, 0, 0, 1, position=position), GroupClosed(position, "failed"))
    ledger.finalize(position, "failed")
    ledger.rerolls.catch_up(1)


def test_a_reroll_is_issued_before_new_visits_and_belongs_to_no_epoch() -> None:
    ledger = with_rerolls()
    issue(ledger, 1)
    leave_unsolved(ledger, 0)
    assert ledger.left == 6
    assert ledger.issue() == (REROLL, False)
    assert issue(ledger, 2) == [1, 2]
    ledger.finalize(1, "filtered")
    assert ledger.finalize(2, "filtered"), "the epoch ends without its re-roll"
    assert not ledger.finalize(REROLL, "filtered")
    assert ledger.finalized == 4
    assert ledger.counts()["filtered"] == 3


def test_no_reroll_is_issued_after_the_last_new_visit() -> None:
    ledger = with_rerolls(tasks=2, epochs=1)
    issue(ledger, 2)
    leave_unsolved(ledger, 0)
    assert (ledger.left, ledger.exhausted, ledger.rerolls.due) == (0, True, 1)


def test_rerolls_are_issued_while_a_stream_has_no_new_task() -> None:
    ledger = with_rerolls(ENDLESS, None, streamed=True)
    ledger.extend(1, ended=False)
    issue(ledger, 1)
    leave_unsolved(ledger, 0)
    assert ledger.left == 1
    assert issue(ledger, 1) == [REROLL]
    assert (ledger.left, ledger.exhausted) == (0, False)
    ledger.extend(1, ended=True)
    assert ledger.exhausted


def test_an_open_reroll_is_repeated_or_recovered_after_a_restore_and_a_waiting_one_still_waits() -> None:
    ledger = with_rerolls(tasks=5)
    issue(ledger, 3)
    for position in (0, 1, 2):
        leave_unsolved(ledger, position)
    assert issue(ledger, 2) == [REROLL, REROLL + 1]
    state = msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(ledger.state()))), LedgerState)
    restored = Ledger(5, 2, state, finished={REROLL + 1}, rerolls=once(state))
    assert (restored.cursor, restored.rerolls.waiting, restored.new_epochs) == (3, 1, [])
    restored.rerolls.catch_up(1)
    assert issue(restored, 3) == [REROLL, REROLL + 2, 3]
    restored.finalize(REROLL + 1, "trained")
    assert restored.counts() == ledger.counts() | {"trained": 1}


def test_the_report_shows_rerolls_and_names_one_that_was_finalized_twice(tmp_path: Path) -> None:
    ledger = with_rerolls(tasks=3, epochs=1)
    issue(ledger, 2)
    leave_unsolved(ledger, 0)
    leave_unsolved(ledger, 1)
    issue(ledger, 1)
    ledger.finalize(REROLL, "filtered")
    ends = [entry(0), entry(1), entry(0, reroll=1)]
    lines = [{"step": 1, "groups": [], "settled": ends, "accounted": 3}]
    report = ledger_report(write_run(tmp_path, 1, ledger, lines))
    assert (report["twice"], report["never"]) == ([], [])
    assert {name: count for name, count in report["rerolls"].items() if count} == {"planned": 1, "filtered": 1}
    assert report["epochs"][0]["failed"] == 2
    lines[0]["settled"] = [*ends, entry(0, reroll=1)]
    assert ledger_report(write_run(tmp_path / "twice", 1, ledger, lines))["twice"] == ["epoch 0: task 0, re-roll 1"]


@pytest.mark.parametrize("tasks", [2, ENDLESS])
def test_an_open_reroll_is_not_counted_in_an_epoch(tasks: int) -> None:
    ledger = with_rerolls(tasks=tasks, epochs=None)
    issue(ledger, 1)
    leave_unsolved(ledger, 0)
    issue(ledger, 1)
    assert counts_by_epoch(tasks, ledger.state())[0]["running"] == 0
