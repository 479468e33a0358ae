"""Checkpoints that are damaged, do not fit on the disk, or belong to another run.

Tested elsewhere: a kill between any two system calls of a commit (tests/checkpoint/test_commit.py) and at every
crash point of a run (tests/drills); a checkpoint that lacks something the new config needs
(tests/system/test_bad_input.py).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import outpace as api
from faults.watching import Settings, every_task_once, steps_of, visits_of
from outpace.checkpoint import commit
from outpace.errors import BadInput
from support import INLINE, naming, read_lines

pytestmark = pytest.mark.timeout(400)


SHORT = {**INLINE, "run.steps": 4, "eval.holdout": 0.0, "checkpoint.every": 2}
"""Four steps, which is two thirds of an epoch, with a checkpoint every second step."""


@pytest.fixture
def short(settings: Settings) -> Settings:
    return settings | SHORT


@pytest.fixture(scope="module")
def cached_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test caches the run that all tests resume."""
    return tmp_path_factory.mktemp("cached_run") / "run"


@pytest.fixture
def resumable(short: Settings, cached_run: Path, tmp_path: Path) -> Settings:
    """A finished run of these steps in its own directory, with settings to resume it for two more steps."""
    if cached_run.exists():
        shutil.copytree(cached_run, tmp_path / "run")
    else:
        train(short)
        shutil.copytree(tmp_path / "run", cached_run)
    return short | {"run.steps": 6}


def train(config: Settings, resume: bool = False) -> api.Summary:
    return api.Trainer(config=config, quiet=True).train(resume=resume)


# -------------------------------------------------------------------------------------------------- damaged checkpoints


@pytest.mark.parametrize("damage", ["truncated", "without manifest"])
def test_a_run_whose_newest_checkpoint_is_damaged_resumes_from_the_previous_one(
    resumable: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    run = tmp_path / "run"
    newest = run / "checkpoints" / "step-000004"
    if damage == "truncated":
        largest = max(newest.rglob("*"), key=lambda file: file.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    else:
        (newest / commit.MANIFEST).unlink()
    with caplog.at_level(logging.WARNING):
        assert train(resumable, resume=True).steps == 6
    assert "step-000004" in caplog.text
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    assert visits_of(run) == every_task_once(epochs=1)


def test_resuming_a_run_without_an_intact_checkpoint_is_rejected_and_changes_no_file(
    resumable: Settings, tmp_path: Path
) -> None:
    for manifest in (tmp_path / "run" / "checkpoints").glob(f"*/{commit.MANIFEST}"):
        manifest.write_text("{")
    before = sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(BadInput, match=naming("--resume", str(tmp_path / "run"), "run.overwrite")):
        train(resumable, resume=True)
    assert sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*")) == before


# ----------------------------------------------------------------------------------------------------------- full disks


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_skipped_and_reported(
    short: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original: Callable[[Path], Path] = commit.commit

    def fail_once(temporary: Path) -> Path:
        if "step-000004" in temporary.name:
            commit.discard(temporary)
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(temporary)

    monkeypatch.setattr(commit, "commit", fail_once)
    summary = api.Trainer(config=short | {"run.steps": 7}).train()
    assert summary.steps == 7
    output = capsys.readouterr().out
    assert re.search(r"\bstep 4\b.*No space left on device", output), output
    assert sum(line.get("faults/checkpoint_skipped", 0) for line in read_lines(tmp_path / "run/metrics.jsonl")) >= 1
    kept = commit.list_steps(tmp_path / "run" / "checkpoints")
    assert kept[0] == 7
    assert 4 not in kept


# ---------------------------------------------------------------------------------------------------- changes on resume


@pytest.mark.parametrize(
    "changes",
    [
        {"learner.lr": 1e-4, "pacing.max_lag": 1},
        {"rollout.max_tokens": 4, "engine.slots": 8},
        {"rollout.group_size": 2, "pacing.groups_per_step": 2},
        {"checkpoint.every": 1, "supervise.restarts": 0, "run.stall_s": 50.0},
    ],
)
def test_settings_that_may_differ_on_resume_are_accepted(
    resumable: Settings, tmp_path: Path, changes: Settings
) -> None:
    assert train(resumable | changes, resume=True).steps == 6
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


def with_appended_task(lines: list[str]) -> list[str]:
    return [*lines, json.dumps({"id": "t24", "prompt": "say 24"})]


def with_changed_prompt(lines: list[str]) -> list[str]:
    return [*lines[:3], json.dumps({"id": "t3", "prompt": "whisper 3"}), *lines[4:]]


def reversed_tasks(lines: list[str]) -> list[str]:
    return lines[::-1]


def rewrite(tasks: Path, change: Callable[[list[str]], list[str]]) -> None:
    tasks.write_text("".join(line + "\n" for line in change(tasks.read_text().splitlines())))


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (with_appended_task, ("25 tasks", "24")),
        (with_changed_prompt, ("task 3", "'t3'", "--tasks.changed accept")),
        (reversed_tasks, ("task 0", "'t23'", "'t0'", "--tasks.changed accept")),
    ],
)
def test_changed_tasks_are_rejected_with_an_error_that_names_the_difference(
    resumable: Settings, tasks: Path, tmp_path: Path, change: Callable[[list[str]], list[str]], keys: tuple[str, ...]
) -> None:
    before = (tmp_path / "run" / "batches.jsonl").read_bytes()
    rewrite(tasks, change)
    with pytest.raises(BadInput, match=naming("--resume", *keys)) as caught:
        train(resumable, resume=True)
    assert len(str(caught.value).splitlines()) == 1
    assert (tmp_path / "run" / "batches.jsonl").read_bytes() == before


def test_changed_tasks_are_accepted_on_request_if_their_number_is_the_same(
    resumable: Settings, tasks: Path, tmp_path: Path
) -> None:
    rewrite(tasks, with_changed_prompt)
    assert train(resumable | {"tasks.changed": "accept"}, resume=True).steps == 6
    rewrite(tasks, with_appended_task)
    with pytest.raises(BadInput, match="25 tasks"):
        train(resumable | {"tasks.changed": "accept", "run.steps": 7}, resume=True)


def test_another_tokenizer_is_rejected_by_name(resumable: Settings, toy_model: Path, tmp_path: Path) -> None:
    """The same weights with a tokenizer in which two tokens are swapped."""
    other = tmp_path / "other"
    shutil.copytree(toy_model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in (20, 21)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BadInput, match=r"model\.path.*tokenizer"):
        train(resumable | {"model.path": str(other)}, resume=True)
