"""Checkpoints of a run: saved while it trains, cancelled at any moment, ordered before later learner calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace.checkpoint import commit
from outpace.config.sections import CheckpointConfig
from outpace.errors import NotSaved
from outpace.monitoring.run_directory import RunLog
from outpace.run.resume import CheckpointWriter

pytestmark = pytest.mark.timeout(120)


class Learner:
    """Writes two files per save and counts the saves."""

    def __init__(self) -> None:
        self.save_calls = 0
        self.moved_on = False

    def save(self, directory: str, version: int) -> Any:
        self.save_calls += 1
        return self._write(Path(directory), version)

    async def _write(self, directory: Path, version: int) -> bool:
        for name in ("model", "optimizer"):
            (directory / name).write_text(f"{name} {version}")
        return not self.moved_on


async def controller_state() -> dict[str, Any]:
    return {"core": {}}


@pytest.fixture
def learner() -> Learner:
    return Learner()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def checkpoints(learner: Learner, root: Path) -> Iterator[CheckpointWriter]:
    run = RunLog.claim(root.parent)
    run.start("")
    root.mkdir(exist_ok=True)
    yield CheckpointWriter(run, learner, CheckpointConfig(keep=2), "digest")  # type: ignore[arg-type]
    run.close()


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


async def test_only_the_newest_checkpoints_are_kept(checkpoints: CheckpointWriter, root: Path) -> None:
    for version in (1, 2, 3):
        assert await checkpoints.save(version, controller_state)
    assert entries(root) == ["step-000002", "step-000003"]
    assert commit.newest_complete(root) == root / "step-000003"


async def test_a_save_reaches_the_learner_before_any_later_call(
    checkpoints: CheckpointWriter, learner: Learner, root: Path
) -> None:
    commit.begin(root, 1)
    saving = asyncio.create_task(checkpoints.save(1, controller_state))
    await asyncio.sleep(0)
    assert learner.save_calls == 1, "the save is sent within one loop iteration, before any later call"
    assert await saving


async def test_a_save_after_the_learner_has_moved_on_leaves_nothing(
    checkpoints: CheckpointWriter, learner: Learner, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner.moved_on = True
    assert not await checkpoints.save(1, controller_state)
    assert entries(root) == []
    assert caplog.records == []


async def test_unfinished_checkpoints_of_earlier_starts_are_removed(checkpoints: CheckpointWriter, root: Path) -> None:
    for step in (1, 7):
        (commit.begin(root, step) / "model").write_text("half")
    (root / ".removed-step-000000").mkdir()
    assert await checkpoints.save(1, controller_state)
    assert entries(root) == ["step-000001"]
    assert (root / "step-000001" / "model").read_text() == "model 1"


async def test_leftovers_on_a_full_disk_are_removed_so_that_the_next_save_succeeds(
    checkpoints: CheckpointWriter, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(temporary: Path) -> Path:
        raise OSError(28, "No space left on device")

    commit.begin(root, 7)
    with monkeypatch.context() as disk:
        disk.setattr(commit, "commit", full)
        with pytest.raises(NotSaved, match="No space left"):
            await checkpoints.save(1, controller_state)
    assert entries(root) == []
    assert await checkpoints.save(2, controller_state)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_save_cancelled_during_its_commit_leaves_a_whole_checkpoint(
    checkpoints: CheckpointWriter, root: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def reached(label: str) -> None:
        if label == "commit.before_rename":
            inside.set()
            assert go_on.wait(30)

    monkeypatch.setattr(commit.diagnostics, "crash_point", reached)
    saving = asyncio.create_task(checkpoints.save(1, controller_state))
    await asyncio.to_thread(inside.wait, 30)
    for _ in range(times):
        saving.cancel()
        await asyncio.sleep(0.01)
    assert not saving.done(), "a thread still works in the directory"
    assert len(list((root / ".unfinished-step-000001").iterdir())) == 4
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert entries(root) == ["step-000001"]
    commit.verify(root / "step-000001")
