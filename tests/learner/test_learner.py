from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from outpace.checkpoint.journal import JournalWriter, read_record
from outpace.errors import CorruptData, NotSaved
from outpace.learner import state
from outpace.learner.backend import LearnerSettings
from outpace.learner.learner import LearnerHost
from outpace.learner.torch_backend import TorchBackend
from outpace.protocols import Learner
from outpace.runtime import diagnostics
from outpace.types import GroupRecord, JournalLocation, Row
from outpace.weights.shared_memory import read_snapshot
from support import kept_of, resolved

MakeLlama = Callable[..., LlamaForCausalLM]
MakeRows = Callable[..., list[Row]]
Make = Callable[..., LearnerHost[TorchBackend]]


@pytest.fixture
async def make_learner(make_llama: MakeLlama, tmp_path: Path) -> AsyncIterator[Make]:
    learners: list[LearnerHost[TorchBackend]] = []

    def make(seed: int = 0, dotted: dict[str, Any] | None = None) -> LearnerHost[TorchBackend]:
        settings = LearnerSettings(
            config=resolved({"learner.lr": 1e-2, **(dotted or {})}),
            read_group=partial(read_record, tmp_path / "journal"),
            snapshots=tmp_path / f"weights{len(learners)}",
            incarnation=f"run-{len(learners)}",
            threads=1,
        )
        learners.append(LearnerHost(settings, partial(TorchBackend, model=make_llama(seed))))
        return learners[-1]

    yield make
    for learner in learners:
        await learner.close()


@pytest.fixture
def journalled(make_rows: MakeRows, tmp_path: Path) -> Callable[[int], list[JournalLocation]]:
    """Return a function that journals `groups` groups of four rows each and returns their locations."""

    def write(groups: int) -> list[JournalLocation]:
        writer = JournalWriter(tmp_path / "journal", "worker")
        records = [GroupRecord(g, f"task-{g}", 0, 0, make_rows(4, seed=g), [0.0] * 4) for g in range(groups)]
        locations = [writer.append(kept_of(record.group), record) for record in records]
        writer.close()
        return locations

    return write


async def test_journalled_groups_become_versions_and_snapshots(
    make_learner: Make, journalled: Callable[[int], list[JournalLocation]]
) -> None:
    learner: Learner = make_learner()
    locations = journalled(4)
    chunks = [await learner.chunk(0, locations[:2]), await learner.chunk(0, locations[2:])]
    step = await learner.step(0)
    manifest = await learner.publish([])
    assert (step.version, manifest.version) == (1, 1)
    assert step.tokens == sum(chunk.tokens for chunk in chunks) > 0
    assert step.loss == pytest.approx(sum(chunk.loss_sum for chunk in chunks) / step.tokens)
    assert sum(chunk.rows for chunk in chunks) == 16
    stats = await learner.stats()
    assert (stats.version, stats.tokens, stats.threads) == (1, step.tokens, 1)
    assert stats.busy_s > 0
    assert stats.parameters == sum(spec.nbytes // 4 for spec in manifest.tensors)


async def test_concurrent_calls_run_in_submission_order(
    make_learner: Make, journalled: Callable[[int], list[JournalLocation]]
) -> None:
    locations = journalled(4)

    async def run(learner: LearnerHost[TorchBackend]) -> list[float]:
        calls = [
            learner.chunk(0, locations[:2]),
            learner.chunk(0, locations[2:]),
            learner.step(0),
            learner.publish([]),
            learner.chunk(1, locations),
            learner.step(1),
        ]
        results: list[Any] = await asyncio.gather(*calls)
        return [results[0].loss_sum, results[1].loss_sum, results[2].loss, results[4].loss_sum, results[5].loss]

    assert await run(make_learner()) == await run(make_learner())


async def test_a_snapshot_holds_the_weights_of_its_version_even_if_training_continues(
    make_learner: Make, journalled: Callable[[int], list[JournalLocation]]
) -> None:
    learner = make_learner()
    locations = journalled(2)
    await learner.chunk(0, locations)
    await learner.step(0)
    expected = {name: p.detach().clone() for name, p in learner.backend.parameters.items()}
    manifest, *_ = await asyncio.gather(learner.publish([]), learner.chunk(1, locations), learner.step(1))
    weights = read_snapshot(manifest)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert not torch.equal(expected["model.norm.weight"], learner.backend.parameters["model.norm.weight"])


async def test_the_next_chunk_trains_while_checksums_are_computed(
    make_learner: Make, journalled: Callable[[int], list[JournalLocation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner()
    locations = journalled(1)
    trained = threading.Event()
    seal = learner._writer.seal

    def seal_after_training(draft: Any) -> Any:
        assert trained.wait(60)
        return seal(draft)

    monkeypatch.setattr(learner._writer, "seal", seal_after_training)
    publishing = asyncio.create_task(learner.publish([]))
    await asyncio.sleep(0)
    await learner.chunk(0, locations)
    trained.set()
    assert (await publishing).version == 0


async def test_published_weights_have_the_dtype_of_the_model(make_learner: Make) -> None:
    manifest = await make_learner(dotted={"model.dtype": "bfloat16"}).publish([])
    assert {tensor.dtype for tensor in read_snapshot(manifest).values()} == {torch.bfloat16}


async def test_a_saved_learner_resumes_at_its_version(
    make_learner: Make, journalled: Callable[[int], list[JournalLocation]], tmp_path: Path
) -> None:
    first, second = make_learner(), make_learner(seed=3)
    locations = journalled(2)
    await first.chunk(0, locations)
    await first.step(0)
    (tmp_path / "state").mkdir()
    assert await first.save(str(tmp_path / "state"), first.backend.version)
    assert await second.load(str(tmp_path / "state")) == 1
    results = [await learner.chunk(1, locations) for learner in (first, second)]
    assert results[0].loss_sum == results[1].loss_sum


@pytest.mark.parametrize("stream", [True, False])
async def test_groups_of_the_batch_begun_before_a_load_are_not_trained(
    make_learner: Make, journalled: Callable[[int], list[JournalLocation]], tmp_path: Path, stream: bool
) -> None:
    learner = make_learner(dotted={"learner.stream": stream})
    locations = journalled(4)
    (tmp_path / "state").mkdir()
    assert await learner.save(str(tmp_path / "state"), 0)
    await learner.chunk(0, locations[:3])
    assert await learner.load(str(tmp_path / "state")) == 0
    chunk = await learner.chunk(0, locations[3:])
    assert (await learner.step(0)).tokens == chunk.tokens > 0


async def test_training_continues_while_a_state_is_written(
    make_learner: Make,
    journalled: Callable[[int], list[JournalLocation]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The written state is that at the time of the call: resuming from it gives bitwise equal weights."""
    first, second = make_learner(), make_learner(seed=3)
    locations = journalled(2)
    await first.chunk(0, locations)
    await first.step(0)
    trained = threading.Event()
    write = state.write

    def write_after_training(copied: Any, directory: Path) -> None:
        assert trained.wait(60)
        write(copied, directory)

    monkeypatch.setattr(state, "write", write_after_training)
    saving = asyncio.create_task(first.save(str(tmp_path), 1))
    await asyncio.sleep(0)
    expected = [await first.chunk(1, locations), await first.step(1)]
    assert not saving.done()
    trained.set()
    assert await saving
    assert await second.load(str(tmp_path)) == 1
    found = [await second.chunk(1, locations), await second.step(1)]
    assert [result.loss_sum for result in found[:1]] == [result.loss_sum for result in expected[:1]]
    assert_equal_bits(second, first)


async def test_a_second_state_may_be_saved_while_the_first_is_being_written(
    make_learner: Make,
    journalled: Callable[[int], list[JournalLocation]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = make_learner()
    locations = journalled(2)
    saves_requested = threading.Event()
    write = state.write

    def write_late(copied: Any, directory: Path) -> None:
        assert saves_requested.wait(60)
        write(copied, directory)

    monkeypatch.setattr(state, "write", write_late)
    await learner.chunk(0, locations)
    await learner.step(0)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = asyncio.create_task(learner.save(str(tmp_path / "one"), 1))
    await asyncio.sleep(0)
    await learner.chunk(1, locations)
    await learner.step(1)
    two = asyncio.create_task(learner.save(str(tmp_path / "two"), 2))
    await asyncio.sleep(0)
    await learner.chunk(2, locations)
    saves_requested.set()
    assert await one
    assert await two
    other = make_learner(seed=5)
    assert await other.load(str(tmp_path / "one")) == 1
    await other.chunk(1, locations)
    await other.step(1)
    again = make_learner(seed=6)
    assert await again.load(str(tmp_path / "two")) == 2
    assert_equal_bits(other, again)


async def test_memory_for_state_copies_is_allocated_once_and_not_by_the_training_thread(
    make_learner: Make,
    journalled: Callable[[int], list[JournalLocation]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []
    allocate = state.allocate

    def counted(files: Any) -> Any:
        threads.append(threading.current_thread().name.split("_")[0])
        return allocate(files)

    monkeypatch.setattr(state, "allocate", counted)
    learner = make_learner()
    locations = journalled(1)
    for version in range(3):
        await learner.chunk(version, locations)
        await learner.step(version)
        assert learner.backend.reserved is not None
        await asyncio.wrap_future(learner.backend.reserved)
        assert await learner.save(str(tmp_path), version + 1)
    assert threads == ["reserve"]


async def test_a_saved_state_restores_the_rng_state(make_learner: Make, tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    learner = make_learner()
    assert await learner.save(str(tmp_path), 0)
    expected = draw()
    draw()
    await learner.load(str(tmp_path))
    assert draw() == expected


@pytest.mark.parametrize("file", [state.MODEL_FILE, state.OPTIMIZER_FILE, state.COUNTERS_FILE])
async def test_a_full_disk_fails_the_save_and_not_the_learner(
    make_learner: Make, journalled: Callable[[int], list[JournalLocation]], tmp_path: Path, file: str
) -> None:
    learner = make_learner()
    locations = journalled(1)
    full, roomy = tmp_path / "full", tmp_path / "roomy"
    full.mkdir()
    roomy.mkdir()
    (full / file).symlink_to("/dev/full")
    with pytest.raises(NotSaved, match="full: No space left"):
        await learner.save(str(full), 0)
    await learner.chunk(0, locations)
    assert (await learner.step(0)).version == 1
    assert await learner.save(str(roomy), 1)
    assert await make_learner(seed=4).load(str(roomy)) == 1


async def test_saving_and_loading_reach_the_crash_points_in_order(
    make_learner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []
    monkeypatch.setattr(diagnostics, "crash_point", passed.append)
    learner = make_learner()
    await learner.save(str(tmp_path), 0)
    await learner.load(str(tmp_path))
    await learner.chunk(0, [])
    await learner.step(0)
    await learner.publish([])
    assert passed == [
        *("learner.built", "save.copied", "save.model", "save.optimizer", "save.done", "load.middle"),
        *("chunk.before", "chunk.after", "step.before", "step.after", "publish.copied", "publish.sealed"),
    ]


async def test_the_time_spent_saving_is_in_the_next_step_report(make_learner: Make, tmp_path: Path) -> None:
    learner = make_learner()
    await learner.save(str(tmp_path), 0)
    reports = [await learner.step(version) for version in (0, 1)]
    costs = [{name for name in report.metrics if name.startswith("checkpoint/")} for report in reports]
    assert costs == [{"checkpoint/held_s", "checkpoint/write_s"}, set()]


def assert_equal_bits(one: LearnerHost[TorchBackend], other: LearnerHost[TorchBackend]) -> None:
    for name, parameter in one.backend.parameters.items():
        assert torch.equal(parameter, other.backend.parameters[name]), name


async def test_a_save_of_an_outdated_version_writes_nothing(
    make_learner: Make, journalled: Callable[[int], list[JournalLocation]], tmp_path: Path
) -> None:
    learner = make_learner()
    await learner.chunk(0, journalled(2))
    stepping = asyncio.create_task(learner.step(0))
    await asyncio.sleep(0)  # the step is running, and `stats` still reports version 0
    assert not await learner.save(str(tmp_path), 0)
    assert not await asyncio.to_thread(lambda: list(tmp_path.glob("*.safetensors")))
    await stepping


async def test_a_batch_for_another_version_is_rejected(
    make_learner: Make, journalled: Callable[[int], list[JournalLocation]]
) -> None:
    learner = make_learner()
    with pytest.raises(AssertionError, match=r"\b3\b.*\b0\b"):
        await learner.chunk(3, journalled(1))
    with pytest.raises(AssertionError, match=r"\b1\b"):
        await learner.step(1)


async def test_a_damaged_journal_record_raises_in_the_caller(
    make_learner: Make, journalled: Callable[[int], list[JournalLocation]], tmp_path: Path
) -> None:
    (location,) = journalled(1)
    segment = tmp_path / "journal" / location.segment
    data = bytearray(segment.read_bytes())
    data[location.offset + 40] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptData):
        await make_learner().chunk(0, [location])


async def test_closing_removes_the_snapshots(make_learner: Make, tmp_path: Path) -> None:
    learner = make_learner()
    manifest = await learner.publish([])
    assert os.path.basename(manifest.path) in os.listdir(tmp_path / "weights0")
    await learner.close()
    assert os.listdir(tmp_path / "weights0") == []
