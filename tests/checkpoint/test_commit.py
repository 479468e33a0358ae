import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.checkpoint import commit as commits
from outpace.checkpoint.commit import (
    begin,
    clean,
    commit,
    discard,
    newest_complete,
    prune,
    remove_newer,
    step_of,
    verify,
)
from outpace.errors import CorruptData


def make(root: Path, step: int, text: str = "weights") -> Path:
    temporary = begin(root, step)
    (temporary / "model.safetensors").write_text(f"{text} {step}")
    (temporary / "state").mkdir()
    (temporary / "state" / "core.json").write_text("{}")
    return commit(temporary)


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_a_committed_checkpoint_lists_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "checkpoints", 100)
    assert checkpoint.name == "step-000100"
    assert step_of(checkpoint) == 100
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert [(file["path"], file["size"]) for file in manifest["files"]] == [
        ("model.safetensors", 11),
        ("state/core.json", 2),
    ]
    assert verify(checkpoint).step == 100


def test_the_newest_complete_checkpoint_is_found_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5):
        make(tmp_path, step)
    assert newest_complete(tmp_path) == tmp_path / "step-1000000"


def test_an_empty_or_missing_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "missing") is None


def test_a_kill_before_the_commit_keeps_the_older_checkpoint_and_is_cleaned_up(tmp_path: Path) -> None:
    make(tmp_path, 1)
    unfinished = begin(tmp_path, 2)
    (unfinished / "model.safetensors").write_text("half")
    assert newest_complete(tmp_path) == tmp_path / "step-000001"
    clean(tmp_path)
    assert names(tmp_path) == ["step-000001"]


def test_a_kill_between_any_two_system_calls_of_a_commit_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call copies the directory, which is the state that a kill at that call would leave."""
    root = tmp_path / "checkpoints"
    make(root, 1, "old")
    make(root, 2, "replaced")
    states: list[Path] = []

    def keep_state() -> None:
        states.append(tmp_path / f"state-{len(states)}")
        shutil.copytree(root, states[-1])

    for name in ("fsync", "rename"):
        original = getattr(os, name)

        def recorded(*args: object, call: object = original) -> object:
            keep_state()
            result = call(*args)  # type: ignore[operator]
            keep_state()
            return result

        monkeypatch.setattr(os, name, recorded)
    make(root, 2, "new")
    monkeypatch.undo()
    assert len(states) > 10
    for state in states:
        newest = newest_complete(state)
        assert newest is not None
        assert step_of(newest) == 2
        assert (newest / "model.safetensors").read_text() in ("replaced 2", "new 2")
        clean(state)
        make(state, 3)
        assert names(state) == ["step-000001", "step-000002", "step-000003"]


WRITER = """
import sys
from pathlib import Path
from outpace.checkpoint.commit import begin, commit, prune
root, step = Path(sys.argv[1]), int(sys.argv[2])
temporary = begin(root, step)
(temporary / "model.safetensors").write_text(f"new {step}")
commit(temporary)
prune(root, keep=1, best=1)
"""

CRASH_POINTS = {
    "commit.begin": "old",
    "commit.before_manifest": "old",
    "commit.before_rename": "old",
    "commit.set_aside": "old",
    "commit.after_rename": "new",
    "prune.before": "new",
    "prune.middle": "new",
}
"""Crash point of the writer: content of the newest checkpoint afterwards."""


@pytest.mark.parametrize(
    ("point", "step"),
    [(point, 3) for point in CRASH_POINTS] + [(point, 4) for point in CRASH_POINTS if point != "commit.set_aside"],
)
def test_a_writer_killed_at_any_crash_point_leaves_the_newest_complete_checkpoint_intact(
    tmp_path: Path, point: str, step: int
) -> None:
    """Step 3 replaces a checkpoint of the same step; step 4 is new."""
    for earlier in (1, 2, 3):
        make(tmp_path, earlier, "old")
    environment = os.environ | {"OUTPACE_CRASH": f"controller@{point}"}
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(step)]
    assert subprocess.run(command, env=environment, check=False, timeout=60).returncode == -signal.SIGKILL
    newest = newest_complete(tmp_path)
    assert newest is not None
    expected = (step, "new") if CRASH_POINTS[point] == "new" else (3, "old")
    assert (step_of(newest), (newest / "model.safetensors").read_text()) == (
        expected[0],
        f"{expected[1]} {expected[0]}",
    )
    make(tmp_path, 5)
    clean(tmp_path)
    prune(tmp_path, keep=1, best=1)
    assert names(tmp_path) == ["step-000001", "step-000005"]


@pytest.mark.parametrize("step", [1, 2])
def test_an_unfinished_checkpoint_of_a_dead_writer_does_not_block_a_commit(tmp_path: Path, step: int) -> None:
    make(tmp_path, 1)
    (begin(tmp_path, step) / "model.safetensors").write_text("half")
    checkpoint = make(tmp_path, step, "whole")
    assert verify(checkpoint).step == step
    assert (checkpoint / "model.safetensors").read_text() == f"whole {step}"
    clean(tmp_path)
    assert names(tmp_path) == sorted({"step-000001", f"step-00000{step}"})


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_set_aside_by_a_dead_writer_does_not_block_a_commit(tmp_path: Path, named: bool) -> None:
    os.rename(make(tmp_path, 1, "older"), tmp_path / ".replaced-step-000001")
    if named:
        shutil.copytree(tmp_path / ".replaced-step-000001", tmp_path / "step-000001")
    checkpoint = make(tmp_path, 1, "new")
    assert names(tmp_path) == ["step-000001"]
    assert (checkpoint / "model.safetensors").read_text() == "new 1"


def test_begin_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`begin` runs on the event loop, so it must not block."""
    make(tmp_path, 1)
    begin(tmp_path, 2)
    os.rename(tmp_path / "step-000001", tmp_path / ".removed-step-000001")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: pytest.fail("rmtree blocks the event loop"))
    begin(tmp_path, 2)
    begin(tmp_path, 3)


def test_a_reader_during_a_replacement_finds_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 1, "old")
    seen: list[str] = []

    def look(label: str) -> None:
        if label == "commit.set_aside":
            newest = newest_complete(tmp_path)
            assert newest is not None
            assert commits.checkpoint_path(tmp_path, 1) == newest
            assert commits.list_steps(tmp_path) == [1]
            seen.append((newest / "model.safetensors").read_text())

    monkeypatch.setattr(commits.diagnostics, "crash_point", look)
    make(tmp_path, 1, "new")
    assert seen == ["old 1"]
    assert names(tmp_path) == ["step-000001"]
    assert (tmp_path / "step-000001/model.safetensors").read_text() == "new 1"


def test_a_failed_removal_does_not_fail_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 1, "old")
    with monkeypatch.context() as disk:
        disk.setattr(os, "rmdir", refused)
        disk.setattr(os, "unlink", refused)
        assert verify(make(tmp_path, 1, "new")).step == 1
    assert "Device or resource busy" in caplog.text
    assert newest_complete(tmp_path) == tmp_path / "step-000001"
    clean(tmp_path)
    assert names(tmp_path) == ["step-000001"]


def refused(*args: object, **options: object) -> None:
    raise OSError(errno.EBUSY, "Device or resource busy")


@pytest.mark.parametrize("replaces", [True, False])
def test_a_commit_whose_rename_cannot_be_synced_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    make(tmp_path, 1, "old")
    step = 1 if replaces else 2
    synced = commits.fsync_path

    def fails_at_last(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        synced(path)

    with monkeypatch.context() as disk:
        disk.setattr(commits, "fsync_path", fails_at_last)
        with pytest.raises(OSError, match="Input/output"):
            make(tmp_path, step, "new")
    assert names(tmp_path) == ["step-000001"]
    assert (tmp_path / "step-000001/model.safetensors").read_text() == "old 1"


def test_a_kill_during_a_removal_never_leaves_a_partial_checkpoint_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each unlink copies the directory, which is the state that a kill after it would leave."""
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        make(root, step)
    states: list[Path] = []
    unlink = os.unlink

    def recorded(*args: object, **options: object) -> None:
        unlink(*args, **options)  # type: ignore[arg-type]
        states.append(tmp_path / f"state-{len(states)}")
        shutil.copytree(root, states[-1])

    monkeypatch.setattr(os, "unlink", recorded)
    prune(root, keep=1)
    monkeypatch.undo()
    assert len(states) == 6
    for state in states:
        for checkpoint in state.glob("step-*"):
            verify(checkpoint)
        clean(state)
        assert all(name.startswith("step-") for name in names(state))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing file", "missing manifest", "torn manifest"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_older_one_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 1)
    newest = make(tmp_path, 2)
    weights, manifest = newest / "model.safetensors", newest / "manifest.json"
    match damage:
        case "truncated":
            weights.write_text("weig")
        case "flipped":
            weights.write_text("weightz 2")
        case "missing file":
            weights.unlink()
        case "missing manifest":
            manifest.unlink()
        case "torn manifest":
            manifest.write_bytes(manifest.read_bytes()[:20])
    with caplog.at_level(logging.WARNING):
        assert newest_complete(tmp_path) == tmp_path / "step-000001"
    assert "step-000002" in caplog.text
    assert newest.exists()


def test_an_unreadable_checkpoint_falls_back_to_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2)
    checksum = commits._crc32

    def broken(path: Path) -> int:
        if "step-000002" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return checksum(path)

    monkeypatch.setattr(commits, "_crc32", broken)
    assert newest_complete(tmp_path) == tmp_path / "step-000001"


def test_a_file_that_disappears_during_verification_raises_corrupt_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make(tmp_path, 1)
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CorruptData, match=r"model\.safetensors.*No such file"):
        verify(checkpoint)


def test_a_manifest_cannot_name_files_outside_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    manifest = (checkpoint / "manifest.json").read_text().replace("model.safetensors", "../secret")
    (checkpoint / "manifest.json").write_text(manifest)
    with pytest.raises(CorruptData, match=r"manifest\.json.*\.\./secret"):
        verify(checkpoint)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_raises_and_leaves_complete_checkpoints_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2, "kept")
    original = getattr(os, call)

    def full(*args: object) -> object:
        if "unfinished" in str(args[0]) or call == "fsync":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    with monkeypatch.context() as disk:
        disk.setattr(os, call, full)
        for step in (2, 3):
            with pytest.raises(OSError, match="No space"):
                make(tmp_path, step)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert newest_complete(tmp_path) == tmp_path / "step-000002"
    assert (tmp_path / "step-000002/model.safetensors").read_text() == "kept 2"


def test_a_discarded_checkpoint_leaves_nothing_behind(tmp_path: Path) -> None:
    discard(begin(tmp_path, 7))
    assert names(tmp_path) == []


def test_pruning_keeps_the_newest_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    removed = prune(tmp_path, keep=2)
    assert [path.name for path in removed] == ["step-000002", "step-000001"]
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_pruning_also_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    prune(tmp_path, keep=1, best=2)
    assert names(tmp_path) == ["step-000002", "step-000004"]
    prune(tmp_path, keep=1, best=4)
    assert names(tmp_path) == ["step-000004"]


def test_pruning_does_not_keep_a_damaged_best_checkpoint_and_tolerates_a_missing_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    (tmp_path / "step-000001/manifest.json").unlink()
    prune(tmp_path, keep=2, best=1)
    assert names(tmp_path) == ["step-000002", "step-000003"]
    prune(tmp_path, keep=1, best=7)
    assert names(tmp_path) == ["step-000003"]


def test_pruning_does_not_count_a_damaged_checkpoint_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    (tmp_path / "step-000004/manifest.json").unlink()
    (tmp_path / "step-000002/model.safetensors").unlink()
    prune(tmp_path, keep=1)
    assert newest_complete(tmp_path) == tmp_path / "step-000003"
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_a_damaged_newer_checkpoint_does_not_make_pruning_remove_good_ones(tmp_path: Path) -> None:
    for step in (10, 20):
        make(tmp_path, step)
    damaged = tmp_path / "step-000020" / "model.safetensors"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    chosen = newest_complete(tmp_path)
    assert chosen is not None
    remove_newer(tmp_path, step_of(chosen))
    make(tmp_path, 15)
    prune(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000015"]


def test_pruning_does_not_touch_foreign_directories(tmp_path: Path) -> None:
    (tmp_path / "step-best").mkdir()
    make(tmp_path, 1)
    prune(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000001", "step-best"]


def test_steps_are_listed_from_the_newest(tmp_path: Path) -> None:
    assert commits.list_steps(tmp_path / "missing") == []
    for step in (3, 20, 100):
        assert make(tmp_path, step) == commits.checkpoint_path(tmp_path, step)
    assert commits.list_steps(tmp_path) == [100, 20, 3]


def test_checkpoint_names_round_trip() -> None:
    checkpoints = [commits.checkpoint_path("checkpoints", step) for step in (0, 7, 1_234_567)]
    assert [step_of(checkpoint) for checkpoint in checkpoints] == [0, 7, 1_234_567]
