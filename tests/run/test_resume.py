"""Resuming a run: what is recovered from disk and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from outpace.checkpoint.journal import JournalWriter, read_record
from outpace.controller.pacing import SchedulerSettings
from outpace.controller.recovery import SchedulerState
from outpace.errors import BadInput
from outpace.monitoring.line_file import LineFile
from outpace.run.resume import ResumePoint, check_tasks, load_resume_point, same_group_config, save_task_fingerprint
from outpace.tasks.fingerprint import fingerprint
from outpace.tasks.order import TaskOrder
from outpace.types import FinishedGroup, GroupOrder, GroupRecord, GroupReport, Task
from support import resolved, write_config

SETTINGS = SchedulerSettings(
    groups_per_step=2, group_size=1, max_lag=1, depth=1.0, chunk_groups=2, max_running=64, on_stale="wait",
    warmup_steps=0, publish_every=1, update="inflight", deterministic=False, steps=None, epochs=1, tasks=6,
    eval_every=0, eval_enabled=True, checkpoint_every=0,
)  # fmt: skip
ORDER = TaskOrder(6, seed=0, shuffle=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was killed before its first checkpoint, with four finished groups, one of version 1."""
    writer = JournalWriter(tmp_path / "journal", "worker-0")
    for group in range(4):
        epoch, task = ORDER.task(group)
        order = GroupOrder(group, task, epoch, min_version=0, size=1, position=group)
        newest = 1 if group == 3 else 0
        report = GroupReport(group, f"t{task}", "finished", rewards=[0.5], newest=newest)
        writer.append(FinishedGroup(order, report), GroupRecord(group, f"t{task}", epoch, 0, [], [0.5]))
    writer.close()
    return tmp_path


def resume_point(
    run: Path, settings: SchedulerSettings = SETTINGS, order: TaskOrder = ORDER, usable: bool = True
) -> ResumePoint:
    return load_resume_point(run, None, settings, order, "digest", usable)


def test_finished_groups_up_to_the_resumed_version_are_recovered_and_readable(run: Path) -> None:
    found = resume_point(run)
    assert found.version == found.accounted == 0
    assert [kept.order.group for kept in found.recovered.finished] == [0, 1, 2]
    for kept in found.recovered.finished:
        assert kept.report.place is not None
        assert read_record(run / "journal", kept.report.place).group == kept.order.group
    assert [kept.order for kept in resume_point(run).recovered.finished] == [
        kept.order for kept in found.recovered.finished
    ]


def test_no_group_is_recovered_under_another_seed(run: Path) -> None:
    other = next(
        order
        for order in (TaskOrder(6, seed, shuffle=True) for seed in range(1, 100))
        if all(ORDER.task(place) != order.task(place) for place in range(3))
    )
    assert resume_point(run, order=other).recovered.finished == ()


def test_no_group_is_recovered_if_the_group_settings_changed(run: Path) -> None:
    assert resume_point(run, usable=False).recovered.finished == ()
    assert resume_point(run).recovered.finished == ()


def test_a_deterministic_run_recovers_no_groups(run: Path) -> None:
    assert resume_point(run, replace(SETTINGS, deterministic=True)).recovered.finished == ()


def test_a_run_without_a_journal_recovers_no_groups(tmp_path: Path) -> None:
    assert resume_point(tmp_path).recovered.finished == ()


def test_the_newest_evaluation_up_to_the_resumed_version_is_read_from_the_log(run: Path) -> None:
    lines = LineFile(run / "evals.jsonl")
    for step in (0, 4):
        lines.append({"step": step, "eval/reward": 0.5})
    lines.close()
    assert resume_point(run).evaluated == 0, "version 4 was rolled back"


def checkpoint_of(run: Path, version: int) -> Path:
    folder = run / "checkpoints" / f"step-{version:06d}"
    folder.mkdir(parents=True)
    state = msgspec.to_builtins(SchedulerState(6, 0, True, version=version), str_keys=True)
    (folder / "controller.json").write_text(json.dumps({"core": state, "tokenizer": "digest"}))
    return folder


def test_resuming_with_fewer_steps_or_another_tokenizer_is_refused_and_keeps_the_journal(run: Path) -> None:
    before = sorted((run / "journal").iterdir())
    checkpoint = checkpoint_of(run, 5)
    with pytest.raises(BadInput, match=r"run\.steps: .*\b5\b"):
        load_resume_point(run, checkpoint, replace(SETTINGS, steps=3), ORDER, "digest", usable=True)
    with pytest.raises(BadInput, match=r"model\.path\b.*tokenizer"):
        load_resume_point(run, checkpoint, SETTINGS, ORDER, "another", usable=True)
    assert sorted((run / "journal").iterdir()) == before


def test_a_changed_reward_changes_the_group_settings_and_a_learning_rate_does_not(tmp_path: Path) -> None:
    write_config(tmp_path, resolved({"rewards.functions": ["a:a"], "learner.lr": 1e-3}))
    assert same_group_config(tmp_path, resolved({"rewards.functions": ["a:a"], "learner.lr": 1e-4}))
    assert not same_group_config(tmp_path, resolved({"rewards.functions": ["b:b"], "learner.lr": 1e-3}))


def test_changed_tasks_can_be_accepted_but_not_a_changed_number_of_tasks(tmp_path: Path) -> None:
    def tasks(*prompts: str) -> list[Task]:
        return [Task(str(number), prompt, {}) for number, prompt in enumerate(prompts)]

    assert check_tasks(tmp_path, fingerprint(tasks("a", "b")), accept=False), "a run that has not begun"
    save_task_fingerprint(tmp_path, fingerprint(tasks("a", "b")))
    assert check_tasks(tmp_path, fingerprint(tasks("a", "b")), accept=False)
    with pytest.raises(BadInput, match=r"\b1\b.*'1'.*--tasks\.changed accept"):
        check_tasks(tmp_path, fingerprint(tasks("a", "c")), accept=False)
    assert not check_tasks(tmp_path, fingerprint(tasks("a", "c")), accept=True)
    with pytest.raises(BadInput, match=r"\b3\b.*\b2\b"):
        check_tasks(tmp_path, fingerprint(tasks("a", "b", "c")), accept=True)
