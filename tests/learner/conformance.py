"""The behavior of every learner backend. A test class derives from `BackendConformance` and says what to build:

class TestMyBackend(BackendConformance):
    backend = MyBackend
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from outpace.checkpoint.journal import JournalWriter, read_record
from outpace.errors import CorruptData
from outpace.learner.backend import OLD_LOGP, LearnerBackend, LearnerSettings
from outpace.learner.learner import LearnerHost
from outpace.types import GroupRecord, Row
from outpace.weights.shared_memory import read_snapshot
from support import kept_of, resolved

Make = Callable[[], LearnerBackend]
MakeRows = Callable[..., list[Row]]
MakeSettings = Callable[..., LearnerSettings]


class BackendConformance:
    backend: Any
    """The class under test, called with `LearnerSettings`."""

    @pytest.fixture
    def settings(self, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> MakeSettings:
        make_llama().save_pretrained(tmp_path / "model")
        made: list[None] = []

        def make(**dotted: Any) -> LearnerSettings:
            made.append(None)
            return LearnerSettings(
                config=resolved({"model.path": str(tmp_path / "model"), "learner.lr": 1e-2, **dotted}),
                read_group=partial(read_record, tmp_path / "journal"),
                snapshots=tmp_path / f"weights{len(made)}",
                incarnation=f"run-{len(made)}",
                threads=1,
            )

        return make

    @pytest.fixture
    def make(self, settings: MakeSettings) -> Make:
        return lambda: self.backend(settings())

    def test_warming_up_changes_nothing(self, make: Make, make_rows: MakeRows) -> None:
        cold, warm = make(), make()
        warm.warm_up()
        for backend in (cold, warm):
            train(backend, make_rows(4))
        assert (warm.version, warm.tokens) == (cold.version, cold.tokens)
        expected = cold.weights()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in warm.weights().items())

    def test_a_new_backend_is_at_version_0(self, make: Make) -> None:
        backend = make()
        assert (backend.version, backend.tokens) == (0, 0)
        assert backend.parameter_count > 0

    def test_a_step_trains_every_masked_token_once_and_makes_one_version(self, make: Make, make_rows: MakeRows) -> None:
        backend, rows = make(), make_rows(5)
        reports = [backend.accumulate(rows[:2]), backend.accumulate(rows[2:])]
        backend.update()
        step = backend.finish_step()
        expected = sum(int(row.mask.sum()) for row in rows)
        assert [report.rows for report in reports] == [2, 3]
        assert sum(report.tokens for report in reports) == step.tokens == backend.tokens == expected
        assert step.version == backend.version == 1
        assert not step.skipped

    def test_lags_are_counted_apart_for_replayed_rows(self, make: Make, make_rows: MakeRows) -> None:
        backend, rows = make(), make_rows(2)
        tokens = sum(int(row.mask.sum()) for row in rows)
        fresh, replayed = backend.accumulate(rows), backend.accumulate(rows, replayed=True)
        assert (fresh.lag_counts, fresh.replay_lag_counts) == ({0: tokens}, {})
        assert (replayed.lag_counts, replayed.replay_lag_counts) == ({}, {0: tokens})

    def test_rows_without_advantages_are_refused(self, make: Make, make_rows: MakeRows) -> None:
        backend, rows = make(), make_rows(2)
        bare = msgspec.structs.replace(rows[0], advantages=np.zeros(0, dtype=np.float32))
        with pytest.raises(ValueError, match="advantages"):
            backend.accumulate([rows[1], bare])

    def test_dropped_gradients_do_not_reach_the_step(self, make: Make, make_rows: MakeRows) -> None:
        backend, rows = make(), make_rows(4)
        backend.accumulate(rows[:2])
        backend.drop_gradients()
        backend.accumulate(rows[2:])
        backend.update()
        assert backend.finish_step().tokens == sum(int(row.mask.sum()) for row in rows[2:])

    def test_scores_are_the_logprobs_of_trained_tokens_and_need_no_advantages(
        self, make: Make, make_rows: MakeRows
    ) -> None:
        backend = make()
        rows = [msgspec.structs.replace(row, advantages=np.zeros(0, dtype=np.float32)) for row in make_rows(3)]
        whole = backend.logprobs([row.tokens for row in rows], 1.0)
        for row, score, logp in zip(rows, backend.score(rows), whole, strict=True):
            assert len(logp) == len(row.tokens) - 1
            np.testing.assert_allclose(score[OLD_LOGP], logp[row.mask[1:]], atol=1e-4)

    def test_names_and_shapes_of_weights_never_change(self, make: Make, make_rows: MakeRows) -> None:
        backend = make()
        before = {name: (tensor.shape, tensor.dtype) for name, tensor in backend.weights().items()}
        train(backend, make_rows(2))
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in backend.weights().items()} == before
        assert before

    def test_a_copied_state_is_that_of_its_version_even_if_training_continues(
        self, make: Make, make_rows: MakeRows, tmp_path: Path
    ) -> None:
        first, second = make(), make()
        train(first, make_rows(3))
        weights = {name: tensor.clone() for name, tensor in first.weights().items()}
        tokens, write = first.tokens, first.copy_state()
        train(first, make_rows(3, seed=1, version=1))
        write(tmp_path)
        second.accumulate(make_rows(2))
        assert second.load_state(tmp_path) == second.version == 1
        assert second.tokens == tokens
        assert all(torch.equal(tensor, weights[name]) for name, tensor in second.weights().items())

    def test_two_backends_with_the_same_state_train_alike(
        self, make: Make, make_rows: MakeRows, tmp_path: Path
    ) -> None:
        first, second = make(), make()
        train(first, make_rows(3))
        first.copy_state()(tmp_path)
        second.load_state(tmp_path)
        for backend in (first, second):
            train(backend, make_rows(3, seed=1, version=1))
        expected = first.weights()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in second.weights().items())

    def test_an_incomplete_state_is_rejected(self, make: Make, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(CorruptData):
            make().load_state(tmp_path / "empty")

    # ------------------------------------------------------------------------------------------- within its host

    @pytest.fixture
    async def host(self, settings: MakeSettings) -> AsyncIterator[Callable[..., LearnerHost[Any]]]:
        hosts: list[LearnerHost[Any]] = []

        def make(**dotted: Any) -> LearnerHost[Any]:
            hosts.append(LearnerHost(settings(**dotted), self.backend))
            return hosts[-1]

        yield make
        for host in hosts:
            await host.close()

    @pytest.mark.parametrize("settings_of_batch", [{}, {"learner.stream": False, "advantage.normalizer": "batch_std"}])
    async def test_journaled_groups_become_versions_snapshots_and_checkpoints(
        self,
        host: Callable[..., LearnerHost[Any]],
        make_rows: MakeRows,
        tmp_path: Path,
        settings_of_batch: dict[str, Any],
    ) -> None:
        writer = JournalWriter(tmp_path / "journal", "worker")
        records = [GroupRecord(group, "task", 0, 0, make_rows(3, seed=group), [0.0, 1.0, 0.0]) for group in range(2)]
        places = [writer.append(kept_of(record.group), record) for record in records]
        writer.close()
        learner = host(**settings_of_batch)
        chunk = await learner.chunk(0, places)
        step = await learner.step(0)
        assert (step.version, step.tokens) == (1, chunk.tokens)
        manifest = await learner.publish([])
        published, weights = read_snapshot(manifest), learner.backend.weights()
        assert manifest.version == 1
        assert all(torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in published.items())
        (tmp_path / "state").mkdir()
        assert not await learner.save(str(tmp_path / "state"), 0)
        assert await learner.save(str(tmp_path / "state"), 1)
        resumed = host(**settings_of_batch)
        assert await resumed.load(str(tmp_path / "state")) == 1
        assert (await resumed.stats()).tokens == step.tokens


def train(backend: LearnerBackend, rows: list[Row]) -> None:
    backend.accumulate(rows)
    backend.update()
    backend.finish_step()
