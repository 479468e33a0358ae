"""What trackers receive from a run directory: positions, roll-backs, failures, and blocked trackers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.monitoring.reporter import (
    BLOCKED_S,
    BOOTSTRAP,
    Delivery,
    ReportOrder,
    find_problems,
)
from outpace.monitoring.run_directory import RunLog
from outpace.monitoring.run_follower import (
    BATCH,
    LineTail,
    Position,
    RunFollower,
    due_tables,
    read_masked_config,
    table_rows,
)
from outpace.monitoring.trackers import TrackedRun, flat_config, markdown_table
from reporting.recording_tracker import calls, steps
from support import names

TRACKER = f"{Path(__file__).with_name('recording_tracker.py')}:RecordingTracker"
SOURCE = Path(__file__).parents[2] / "src" / "outpace"


class Recorded:
    """A tracker that records its calls, and raises while `down` is set."""

    def __init__(self) -> None:
        self.started: list[TrackedRun] = []
        self.steps: list[int] = []
        self.evals: list[int] = []
        self.tables: list[int] = []
        self.finished: list[Mapping[str, Any] | None] = []
        self.active: list[bool] = []
        self.times: dict[int, float] = {}
        self.closed = 0
        self.down = ""
        self.bad_table = 0  # step of a table that raises
        self.settle_s = 0.0

    def start(self, run: TrackedRun) -> str:
        self.started.append(run)
        self._check()
        return run.run_id or "id-1"

    def metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._check()
        self.times[step] = at
        (self.evals if "eval/reward" in values else self.steps).append(step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._check()
        if step == self.bad_table:
            raise ValueError("not a table")
        self.tables.append(step)

    def flush(self) -> None:
        self._check()

    def finish(self, summary: Mapping[str, Any] | None, active: bool) -> None:
        self._check()
        self.finished.append(summary)
        self.active.append(active)

    def close(self) -> None:
        self.closed += 1

    def _check(self) -> None:
        if self.down:
            raise ConnectionError(self.down)


class Rig:
    """A run directory, a tracker, and a delivery with a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.log = RunLog.claim(folder)
        self.log.start()
        self.run = folder
        self.tracker = Recorded()
        self.lines: list[str] = []
        self.now = 0.0
        self.order = ReportOrder(str(folder), ["recorded"], "project", "name", tables_every=2, finish_s=30.0)
        self.delivery = self.new_delivery()

    def new_delivery(self) -> Delivery:
        return Delivery("recorded", lambda: self.tracker, self.order, self.lines.append, lambda: self.now)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.log.step(step, {"reward/mean": 0.5, "eval/reward": 0.1, "time/total_s": float(step)})

    def table(self, step: int) -> None:
        (self.run / "rollouts" / f"step-{step:06d}.jsonl").write_text(json.dumps(ATTEMPT | {"step": step}) + "\n")

    def resume(self, step: int) -> None:
        """End this start of the run, and begin another from the checkpoint of that step."""
        self.log.close()
        self.log = RunLog.claim(self.run, resume=True)
        self.log.start()
        self.log.roll_back(step)

    def summary(self, steps: int) -> None:
        (self.run / "summary.json").write_text(json.dumps({"steps": steps, "exit": 0}))

    def drain(self, ended: bool = False) -> None:
        while self.delivery.advance(ended) == 0.0 and not self.delivery.done:
            pass


ATTEMPT = {
    "outcome": "trained",
    "group": 3,
    "attempt": 0,
    "task": 7,
    "task_id": "t7",
    "epoch": 0,
    "reward": 1.5,
    "rewards": {"number": 1.0, "form": 0.5},
    "advantage": 0.25,
    "oldest": 4,
    "newest": 5,
    "trajectories": [
        {
            "turns": [
                {"source": "prompt", "text": "2+2=", "tokens": [1]},
                {"source": "assistant", "text": "4", "tokens": [2], "sampled": True},
                {"source": "tool", "text": "[ok]", "tokens": [3]},
                {"source": "assistant", "text": " done", "tokens": [4], "sampled": True},
            ]
        }
    ],
}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "run")
    yield rig
    rig.delivery.close()
    rig.log.close()


def test_a_tracker_gets_every_step_evaluation_and_due_table_once_and_the_summary_at_the_end(rig: Rig) -> None:
    rig.log.evaluation(0, {"eval/reward": 0.2})
    rig.steps(1, 3)
    for step in (1, 2, 3):
        rig.table(step)
    rig.drain()
    rig.steps(4, 4)
    rig.log.evaluation(4, {"eval/reward": 0.4})
    rig.drain()
    assert (rig.tracker.steps, rig.tracker.evals, rig.tracker.tables) == ([1, 2, 3, 4], [0, 4], [1, 3])
    assert rig.tracker.finished == []
    rig.summary(4)
    rig.drain(ended=True)
    assert rig.delivery.done
    assert rig.tracker.finished == [{"steps": 4, "exit": 0}]
    assert [(run.run_id, run.project, run.name) for run in rig.tracker.started] == [(None, "project", "name")]
    assert rig.lines == []


def test_a_finished_run_is_not_sent_again(rig: Rig) -> None:
    rig.steps(1, 2)
    rig.summary(2)
    rig.drain(ended=True)
    rig.delivery.close()
    rig.delivery = rig.new_delivery()
    rig.drain(ended=True)
    assert rig.delivery.done
    assert (len(rig.tracker.started), len(rig.tracker.finished)) == (1, 1)


def test_steps_that_a_resumed_run_repeats_are_sent_again_under_the_same_run_id(rig: Rig) -> None:
    rig.steps(1, 7)
    rig.drain()
    rig.resume(4)
    rig.steps(5, 6)
    rig.drain()
    assert rig.tracker.steps == [1, 2, 3, 4, 5, 6, 7, 5, 6]
    assert [(run.run_id, run.step) for run in rig.tracker.started] == [(None, 0), ("id-1", 4)]


def test_a_roll_back_is_noticed_even_if_the_file_has_grown_past_the_old_position(rig: Rig) -> None:
    rig.steps(1, 5)
    rig.drain()
    rig.resume(2)
    rig.steps(3, 9)  # nothing was reported during this start
    rig.drain()
    assert rig.tracker.steps == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9]


def test_two_resumes_in_between_go_back_to_the_earlier_one(rig: Rig) -> None:
    rig.steps(1, 8)
    rig.drain()
    rig.resume(3)
    rig.steps(4, 6)
    rig.resume(6)
    rig.steps(7, 7)
    rig.drain()
    assert rig.tracker.steps == [*range(1, 9), 4, 5, 6, 7]


def test_a_tracker_that_was_down_gets_what_it_missed_and_is_reported_once(rig: Rig) -> None:
    rig.steps(1, 2)
    rig.drain()
    rig.tracker.down = "no route to host"
    rig.steps(3, 5)
    pauses = [rig.delivery.advance(ended=False) for _ in range(8)]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert len(rig.lines) == 1
    assert names(rig.lines[0], "recorded ConnectionError")
    assert "no route to host" in rig.lines[0]
    rig.tracker.down = ""
    rig.drain()
    assert rig.tracker.steps == [1, 2, 3, 4, 5]
    assert len(rig.lines) == 2
    rig.drain()
    assert len(rig.lines) == 2


def test_what_a_tracker_has_not_settled_is_sent_again_after_a_failure(rig: Rig) -> None:
    rig.tracker.settle_s = 10.0
    rig.steps(1, 2)
    rig.drain()
    rig.now = 11.0
    rig.steps(3, 4)
    rig.drain()
    rig.tracker.down = "killed"
    rig.steps(5, 5)
    rig.delivery.advance(ended=False)
    rig.tracker.down = ""
    rig.drain()
    assert rig.tracker.steps == [1, 2, 3, 4, 3, 4, 5]


def test_a_killed_reporter_continues_from_what_is_on_disk(rig: Rig) -> None:
    rig.steps(1, 3)
    rig.drain()
    rig.delivery.close()  # as the system does when the process ends
    rig.delivery = rig.new_delivery()
    rig.steps(4, 4)
    rig.drain()
    assert rig.tracker.steps == [1, 2, 3, 4]
    assert rig.tracker.started[-1].run_id == "id-1"


def test_a_second_process_does_not_send_to_the_same_tracker(rig: Rig) -> None:
    rig.drain()
    other = rig.new_delivery()
    assert other.advance(ended=False) > 0
    assert "another process" in rig.lines[0]
    rig.order = replace(rig.order, follow=False, active=True)
    other = rig.new_delivery()
    other.advance(ended=True)
    assert (other.done, other.failed) == (True, False)
    assert "the run itself" in rig.lines[1]


def test_the_command_gives_up_after_the_first_error(rig: Rig) -> None:
    rig.order = replace(rig.order, follow=False)
    rig.delivery = rig.new_delivery()
    rig.tracker.down = "unauthorized"
    rig.delivery.advance(ended=True)
    assert rig.delivery.done
    assert rig.delivery.failed
    assert names(rig.lines[0], "unauthorized outpace report --to")


def test_a_blocked_tracker_is_reported_once_and_again_when_it_answers(rig: Rig) -> None:
    rig.drain()
    rig.delivery.busy_since = 0.0  # in a call, which another thread watches
    rig.now = BLOCKED_S - 1
    rig.delivery.report_blocked()
    assert rig.lines == []
    rig.now = BLOCKED_S + 1
    rig.delivery.report_blocked()
    rig.delivery.report_blocked()
    assert len(rig.lines) == 1
    rig.drain()
    assert len(rig.lines) == 2


def test_an_active_run_is_not_ended_in_the_tracker(rig: Rig) -> None:
    rig.order = replace(rig.order, follow=False, active=True)
    rig.delivery = rig.new_delivery()
    rig.steps(1, 1)
    rig.drain(ended=True)
    assert (rig.tracker.finished, rig.tracker.active) == ([None], [True])
    assert rig.delivery.position.ended == ""


def test_a_killed_run_ends_without_a_summary_once(rig: Rig) -> None:
    rig.steps(1, 1)
    rig.drain(ended=True)
    rig.delivery.close()
    rig.delivery = rig.new_delivery()
    rig.drain(ended=True)
    assert (rig.tracker.finished, rig.tracker.active) == ([None], [False])
    assert len(rig.tracker.started) == 1


def test_a_summary_that_has_changed_is_sent_again(rig: Rig) -> None:
    for count in (2, 3, 3):
        rig.summary(count)
        rig.drain(ended=True)
        rig.delivery.close()
        rig.delivery = rig.new_delivery()
    assert [summary and summary["steps"] for summary in rig.tracker.finished] == [2, 3]


def test_a_start_that_failed_is_repeated_with_the_same_id(rig: Rig) -> None:
    rig.tracker.down = "down"
    rig.delivery.advance(ended=False)
    rig.delivery.close()  # also by another process
    rig.delivery = rig.new_delivery()
    rig.delivery.advance(ended=False)
    rig.tracker.down = ""
    rig.drain()
    assert [run.run_id for run in rig.tracker.started] == [None] * 3
    assert len({run.new_id for run in rig.tracker.started}) == 1


def test_a_tracker_that_does_not_continue_the_run_names_the_file_to_remove(rig: Rig) -> None:
    rig.drain()
    rig.delivery.close()
    rig.delivery = rig.new_delivery()
    rig.tracker.down = "no such run"
    rig.delivery.advance(ended=False)
    assert names(rig.lines[0], "recorded.json")
    assert "no such run" in rig.lines[0]


def test_a_table_that_fails_is_left_out_and_does_not_hold_up_the_metrics(rig: Rig) -> None:
    rig.tracker.bad_table = 1
    for step in range(1, 6):
        rig.steps(step, step)
        rig.table(step)
        rig.delivery.advance(ended=False)
        rig.delivery.advance(ended=False)
    rig.drain()
    assert rig.tracker.steps == [1, 2, 3, 4, 5]
    assert rig.tracker.tables == [3, 5]
    assert len([line for line in rig.lines if "left out" in line]) == 1
    assert rig.tracker.closed == 3


def test_the_command_leaves_out_a_table_that_fails(rig: Rig) -> None:
    rig.tracker.bad_table = 1
    rig.steps(1, 3)
    for step in (1, 3):
        rig.table(step)
    rig.order = replace(rig.order, follow=False)
    rig.delivery = rig.new_delivery()
    while not rig.delivery.done:
        rig.delivery.advance(ended=True)
    assert (rig.tracker.steps, rig.tracker.tables, rig.delivery.failed) == ([1, 2, 3], [3], False)


def test_an_empty_table_is_not_sent(rig: Rig) -> None:
    rig.steps(1, 3)
    (rig.run / "rollouts" / "step-000001.jsonl").touch()
    rig.table(3)
    rig.drain()
    assert rig.tracker.tables == [3]


def test_steps_have_the_time_of_their_start_of_the_run(rig: Rig) -> None:
    rig.steps(1, 5)
    starts = [{"step": 0, "time": 1000.0, "seconds": 0.0}, {"step": 4, "time": 500_000.0, "seconds": 5.5}]
    (rig.run / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    rig.log.evaluation(2, {"eval/reward": 0.2})
    rig.drain()
    assert rig.tracker.times == {1: 1001.0, 2: 1002.0, 3: 1003.0, 4: 1004.0, 5: 499_999.5}


def test_without_starts_the_last_step_has_the_time_of_the_file(rig: Rig) -> None:
    rig.steps(1, 3)
    (rig.run / "starts.jsonl").unlink()
    os.utime(rig.run / "metrics.jsonl", (5000.0, 5000.0))
    rig.drain()
    assert rig.tracker.times == {1: 4998.0, 2: 4999.0, 3: 5000.0}


def test_files_of_a_killed_process_are_removed(rig: Rig) -> None:
    left = rig.run / "trackers" / ".recorded.json.x1"
    left.parent.mkdir()
    left.touch()
    rig.drain()
    assert not left.exists()


def test_a_state_file_that_cannot_be_written_costs_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outpace.monitoring.reporter.write_atomically", full)
    rig.steps(1, 3)
    rig.drain()
    assert rig.tracker.steps == [1, 2, 3]
    assert rig.lines == []


def test_an_unreadable_state_file_is_named(rig: Rig) -> None:
    (rig.run / "trackers").mkdir()
    (rig.run / "trackers" / "recorded.json").write_text("{")
    rig.delivery.advance(ended=False)
    rig.delivery.advance(ended=False)
    assert "recorded.json" in rig.lines[0]
    assert rig.tracker.started == []


def test_secrets_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "resolved.toml").write_text("""
        format = 2
        [launch]
        port = 1
        env = {TOKEN = "x"}
        args = ["--api-key", "x", "--hf-token=x", "--dtype", "half"]
        [tools]
        mcp = ["https://user:x@host/mcp?code=x", "serve --password x --fast API_KEY=x"]
        [tasks]
        path = "s3://key:x@bucket/tasks"
    """)
    assert read_masked_config(tmp_path) == {
        "format": 2,
        "launch": {
            "port": 1,
            "env": {"TOKEN": "***"},
            "args": ["--api-key", "***", "--hf-token=***", "--dtype", "half"],
        },
        "tools": {"mcp": ["https://***@host/mcp?***", "serve --password *** --fast API_KEY=***"]},
        "tasks": {"path": "s3://***@bucket/tasks"},
    }


def test_the_remedy_names_the_class_of_a_tracker_of_ones_own(rig: Rig) -> None:
    rig.order = replace(rig.order, trackers=["my_trackers.py:recorded"], follow=False)
    rig.delivery = rig.new_delivery()
    rig.tracker.down = "down"
    rig.delivery.advance(ended=False)
    assert rig.lines[0].endswith("--to my_trackers.py:recorded")


def test_a_long_run_is_read_in_batches(rig: Rig) -> None:
    rig.steps(1, 2 * BATCH + 10)
    follower = RunFollower(rig.run, 10)
    items = follower.next_records(Position())
    assert [item.step for item in items] == list(range(1, BATCH + 1))
    assert follower.next_records(items[-1].after)[0].step == BATCH + 1


@pytest.mark.parametrize("ended", [False, True])
def test_a_tracker_that_reconnects_after_many_steps_gets_the_rest(rig: Rig, ended: bool) -> None:
    rig.steps(1, 3 * BATCH)
    rig.drain()
    rig.tracker.down = "down"
    rig.steps(3 * BATCH + 1, 3 * BATCH + 5)
    rig.delivery.advance(ended=False)
    rig.tracker.down = ""
    rig.drain(ended)
    assert rig.delivery.done == ended
    assert rig.tracker.steps == list(range(1, 3 * BATCH + 6))


def test_evaluations_and_tables_wait_for_the_metrics_of_their_step(rig: Rig) -> None:
    rig.steps(1, 2)
    rig.table(1)
    rig.table(3)
    rig.log.evaluation(1, {"eval/reward": 0.1})
    rig.log.evaluation(3, {"eval/reward": 0.3})
    rig.drain()
    assert (rig.tracker.evals, rig.tracker.tables) == ([1], [1])
    rig.steps(3, 3)
    rig.drain()
    assert (rig.tracker.evals, rig.tracker.tables) == ([1, 3], [1, 3])


@given(data=st.data())
def test_every_step_of_the_final_run_arrives_last_whatever_is_resumed_when(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.monitoring.run_follower.BATCH", 2)
        send_with_faults(data, tmp_path_factory)


def send_with_faults(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    rig = Rig(tmp_path_factory.mktemp("run") / "run")
    reached = 0
    for _ in range(data.draw(st.integers(1, 4))):
        new = data.draw(st.integers(0, 4))
        rig.steps(reached + 1, reached + new)
        reached += new
        if data.draw(st.booleans()):
            rig.drain()
        if data.draw(st.booleans()):
            rig.tracker.down = "down"
            rig.delivery.advance(ended=False)
            rig.tracker.down = ""
        if data.draw(st.booleans()):
            reached = data.draw(st.integers(0, reached))
            rig.resume(reached)
    rig.drain(ended=True)
    rig.delivery.close()
    rig.log.close()
    assert rig.delivery.done
    assert set(range(1, reached + 1)) <= set(rig.tracker.steps)
    last = {step: index for index, step in enumerate(rig.tracker.steps)}
    order = [last[step] for step in range(1, reached + 1)]
    assert order == sorted(order)


def test_an_incomplete_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = LineTail(file)
    assert list(tail.records()) == []
    file.write_text('{"step": 1}\n{"st')
    assert list(tail.records()) == [{"step": 1}]
    with file.open("a") as more:
        more.write('ep": 2}\nnot json\n{"step": 3}\n')
    assert list(tail.records()) == [{"step": 2}, {"step": 3}]


@pytest.mark.parametrize(
    ("recorded", "sent", "newest", "ended", "due"),
    [
        ([1, 2, 3, 11], 0, 12, False, [1, 11]),
        ([1], 1, 5, False, []),
        ([11], 0, 12, False, []),  # step 1 is still being written
        ([11], 0, 21, False, [11]),  # it was lost
        ([11], 0, 12, True, [11]),
        ([21, 31], 11, 31, False, [21, 31]),
        ([21], 13, 22, False, [21]),  # after a roll-back to step 13
        ([1, 11], 1, 10, True, []),  # the step has no metrics
    ],
)
def test_tables_are_sent_in_order_and_a_missing_one_is_waited_for(
    recorded: list[int], sent: int, newest: int, ended: bool, due: list[int]
) -> None:
    assert list(due_tables(recorded, sent, 10, newest, ended)) == due


def test_a_row_has_prompt_completion_rewards_advantage_and_versions(tmp_path: Path) -> None:
    file = tmp_path / "step-000006.jsonl"
    file.write_text(json.dumps(ATTEMPT | {"step": 6}) + "\n")
    assert list(table_rows(file)) == [
        {
            "step": 6,
            "task_id": "t7",
            "prompt": "2+2=",
            "completion": "4[ok] done",
            "reward": 1.5,
            "reward/number": 1.0,
            "reward/form": 0.5,
            "advantage": 0.25,
            "oldest_version": 4,
            "newest_version": 5,
        }
    ]


def test_rows_of_a_table_have_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "step-000006.jsonl"
    attempts = [ATTEMPT | {"rewards": {"form": 0.5}}, ATTEMPT | {"rewards": {"number": float("nan")}, "reward": None}]
    attempts[0]["extra"], attempts[1]["extra"] = {"goal": 4, "mixed": 4, "step": 9}, {"mixed": "four", "goal": 0.5}
    file.write_text("".join(json.dumps(attempt) + "\n" for attempt in attempts))
    rows = table_rows(file)
    assert [list(row) for row in rows] == [list(rows[0])] * 2
    assert [(row["reward"], row["reward/form"], row["reward/number"]) for row in rows] == [
        (1.5, 0.5, None),
        (None, None, None),
    ]
    assert [(row["goal"], row["mixed"], row["step"]) for row in rows] == [(4, "4", None), (0.5, "four", None)]


def test_the_config_is_flattened_with_lists_and_tables_as_json() -> None:
    config = {"format": 2, "run": {"steps": 3, "dir": "x"}, "rewards": {"functions": ["a", "b"]}}
    assert flat_config(config) == {"format": 2, "run.steps": 3, "run.dir": "x", "rewards.functions": '["a", "b"]'}


def test_a_markdown_table_escapes_bars_and_line_breaks() -> None:
    table = markdown_table([{"prompt": "a|b", "reward": 0.123456}, {"prompt": "c\nd", "reward": None}])
    assert table.splitlines() == ["| prompt | reward |", "| --- | --- |", "| a\\|b | 0.1235 |", "| c<br>d | None |"]


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.monitoring.reporter.find_spec", lambda name: None)
    (line,) = find_problems(["wandb"], "")
    assert names(line, "run.report_to wandb outpace[wandb]")
    (line,) = find_problems(["wandb"], "/opt/python")
    assert names(line, "run.report_to wandb report.python /opt/python")


def test_the_reporter_needs_no_installed_package(tmp_path: Path) -> None:
    order = ReportOrder(str(tmp_path), ["nowhere.py:Tracker"], "project", "name", 10, 1.0).to_json()
    command = [sys.executable, "-I", "-S", "-c", BOOTSTRAP, str(SOURCE), "check", order, ""]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert names(done.stdout, "run.report_to nowhere.py")


def test_the_command_does_not_start_a_run_that_the_tracker_has(tmp_path: Path) -> None:
    log = RunLog.claim(tmp_path / "run")
    log.start()
    log.step(1, {"reward/mean": 0.5})
    log.close()
    (log.dir / "summary.json").write_text('{"steps": 1}')
    order = ReportOrder(str(log.dir), [TRACKER], "project", "name", tables_every=2, finish_s=None, follow=False)
    for _ in range(2):
        command = [sys.executable, "-P", "-c", BOOTSTRAP, str(SOURCE), "report", order.to_json()]
        subprocess.run(command, stdin=subprocess.DEVNULL, cwd=tmp_path, check=True)
    assert [each["call"] for each in calls(log.dir)] == ["start", "metrics", "finish"]
    assert (log.dir / "trackers" / "working_directory").read_text() == str(tmp_path)


def test_a_tracker_that_imports_for_ever_does_not_hold_up_the_others(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(600)\n")
    log = RunLog.claim(tmp_path / "run")
    log.start()
    log.step(1, {"reward/mean": 0.5})
    log.close()
    trackers = [f"{tmp_path}/stuck.py:Stuck", TRACKER]
    order = ReportOrder(str(log.dir), trackers, "project", "name", tables_every=2, finish_s=60.0)
    command = [sys.executable, "-P", "-c", BOOTSTRAP, str(SOURCE), "report", order.to_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            while not steps(log.dir):
                assert process.poll() is None
                time.sleep(0.05)
        finally:
            process.kill()
