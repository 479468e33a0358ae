"""A step with non-finite gradients is skipped and its groups are saved for inspection."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import LlamaForCausalLM

from outpace.checkpoint.journal import JournalWriter, read_record
from outpace.errors import OutpaceError
from outpace.learner import learner as learner_module
from outpace.learner.backend import LearnerSettings
from outpace.learner.learner import MAX_SAVED_BAD_STEPS, LearnerHost
from outpace.learner.torch_backend import TorchBackend
from outpace.types import GroupRecord, JournalLocation, Row
from support import kept_of, resolved

MakeRows = Callable[..., list[Row]]


@pytest.fixture
async def make_learner(
    make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> AsyncIterator[Callable[..., Any]]:
    learners: list[LearnerHost[TorchBackend]] = []

    def make(**dotted: Any) -> LearnerHost[TorchBackend]:
        settings = LearnerSettings(
            config=resolved({"learner.lr": 1e-2, "learner.max_bad_steps": 3} | dotted),
            read_group=partial(read_record, tmp_path / "run" / "journal"),
            bad_steps=tmp_path / "run" / "bad_steps",
            snapshots=tmp_path / "weights",
            incarnation="a",
            threads=1,
        )
        learners.append(LearnerHost(settings, partial(TorchBackend, model=make_llama())))
        return learners[-1]

    yield make
    for learner in learners:
        await learner.close()


@pytest.fixture
def locations(make_rows: MakeRows, tmp_path: Path) -> dict[str, JournalLocation]:
    """Journal locations of a good group (7) and of a group with NaN advantages (8)."""
    good = GroupRecord(7, "task-7", 0, 0, make_rows(3, seed=1), [0.0, 1.0, 1.0])
    rows = make_rows(3, seed=2)
    advantages = np.where(rows[1].mask, np.float32(math.nan), np.float32(0.0))
    rows[1] = msgspec.structs.replace(rows[1], advantages=advantages)
    bad = GroupRecord(8, "task-8", 0, 0, rows, [0.0, 1.0, 1.0])
    writer = JournalWriter(tmp_path / "run" / "journal", "worker")
    found = {name: writer.append(kept_of(record.group), record) for name, record in (("good", good), ("bad", bad))}
    writer.close()
    return found


@pytest.mark.parametrize("stream", [True, False])
async def test_the_groups_of_a_skipped_step_are_saved(
    make_learner: Callable[..., LearnerHost[TorchBackend]],
    locations: dict[str, JournalLocation],
    tmp_path: Path,
    stream: bool,
) -> None:
    learner = make_learner(**{"learner.stream": stream})
    await learner.chunk(0, [locations["good"]])
    assert not (await learner.step(0)).skipped
    await learner.chunk(1, [locations["good"]])
    await learner.chunk(1, [locations["bad"]])
    report = await learner.step(1)
    assert report.skipped
    assert report.metrics["faults/kept_groups"] == 2
    (folder,) = (tmp_path / "run" / "bad_steps").iterdir()
    assert folder.name == "step-000002"
    good, bad = json.loads((folder / "groups.json").read_text())
    assert (good["group"], good["task_id"], bad["group"], bad["task_id"]) == (7, "task-7", 8, "task-8")
    assert [row["not_finite"]["advantages"] for row in good["rows"]] == [0, 0, 0]
    assert [row["not_finite"]["advantages"] > 0 for row in bad["rows"]] == [False, True, False]
    rows = load_file(folder / "rows.safetensors")
    assert len(rows["7/0/tokens"]) == good["rows"][0]["tokens"]
    assert np.isnan(rows["8/1/advantages"]).any()


async def test_too_many_bad_steps_end_the_run_with_an_error_that_names_the_saved_groups(
    make_learner: Callable[..., LearnerHost[TorchBackend]], locations: dict[str, JournalLocation], tmp_path: Path
) -> None:
    learner = make_learner()
    for version in range(2):
        await learner.chunk(version, [locations["bad"]])
        await learner.step(version)
    await learner.chunk(2, [locations["bad"]])
    with pytest.raises(OutpaceError, match=r"^\D*\b3\b.*run/bad_steps\b"):
        await learner.step(2)
    kept = sorted(folder.name for folder in (tmp_path / "run" / "bad_steps").iterdir())
    assert kept == ["step-000001", "step-000002", "step-000003"]


async def test_only_the_first_bad_steps_are_saved(
    make_learner: Callable[..., LearnerHost[TorchBackend]], locations: dict[str, JournalLocation], tmp_path: Path
) -> None:
    learner = make_learner(**{"learner.max_bad_steps": 100})
    reports = []
    for version in range(MAX_SAVED_BAD_STEPS + 2):
        await learner.chunk(version, [locations["bad"]])
        reports.append(await learner.step(version))
    assert [report.metrics.get("faults/kept_groups", 0) for report in reports] == [1] * MAX_SAVED_BAD_STEPS + [0, 0]
    assert len(list((tmp_path / "run" / "bad_steps").iterdir())) == MAX_SAVED_BAD_STEPS


async def test_a_failure_to_save_a_bad_step_does_not_fail_the_run(
    make_learner: Callable[..., LearnerHost[TorchBackend]], locations: dict[str, JournalLocation], tmp_path: Path
) -> None:
    (tmp_path / "run" / "bad_steps").write_text("not a folder")
    learner = make_learner()
    await learner.chunk(0, [locations["bad"]])
    report = await learner.step(0)
    assert report.skipped
    assert "faults/kept_groups" not in report.metrics


@pytest.mark.parametrize("error", [ValueError("unsupported dtype"), KeyError("F4"), MemoryError()])
async def test_an_unexpected_exception_while_saving_a_bad_step_is_logged_and_does_not_fail_the_run(
    make_learner: Callable[..., LearnerHost[TorchBackend]],
    locations: dict[str, JournalLocation],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def fails(path: Path, tensors: object) -> None:
        raise error

    monkeypatch.setattr(learner_module, "write_tensors", fails)
    learner = make_learner()
    await learner.chunk(0, [locations["bad"]])
    assert (await learner.step(0)).skipped
    assert repr(error) in caplog.text
