"""Logprob check on a real vLLM server: it passes if and only if the server has the learner's weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.learner import make_records

from outpace.checkpoint.journal import JournalWriter, read_record
from outpace.config import Config
from outpace.config.validation import resolve
from outpace.controller.logprob_check import PROBE_PROMPTS, LogprobComparison, compare_engine
from outpace.engines.server.build import build_server_engine
from outpace.engines.server.server_engine import ServerEngine
from outpace.learner.backend import LearnerSettings
from outpace.learner.learner import LearnerHost
from outpace.learner.torch_backend import TorchBackend
from outpace.models.loading import load_tokenizer
from outpace.types import Ints, JournalLocation, Version
from servers_support import RunningVllm
from support import kept_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def probe_prompts() -> list[Ints]:
    tokenizer = load_tokenizer("starter")
    texts = [f"Use {n}, {n + 3} and 7 to make {2 * n + 1}." for n in range(PROBE_PROMPTS)]
    return [np.array(tokenizer.encode(text), dtype=np.int32) for text in texts]


class Pair:
    """A learner and the server engine that loads its weights."""

    def __init__(self, engine: ServerEngine, learner: LearnerHost[TorchBackend], place: JournalLocation) -> None:
        self.engine, self.learner, self._place = engine, learner, place

    async def train(self, version: Version, little: bool) -> None:
        """Take a step. With `little`, change few weights, as in bfloat16; a float32 step changes every weight."""
        if not little:
            await self.learner.chunk(version, [self._place])
            await self.learner.step(version)
            return
        core = self.learner.backend
        with torch.no_grad():
            core.parameters["model.norm.weight"].mul_(1.05)
        core.version += 1

    async def update(self) -> bool:
        """Publish and load the weights. Return whether they were published as a delta."""
        manifest = await self.learner.publish([])
        await self.engine.load(manifest, False)
        return manifest.delta is not None

    async def compare(self, version: Version) -> LogprobComparison:
        return await compare_engine(
            self.engine, self.learner, probe_prompts(), version, dtype="float32", temperature=1.0, seed=5, kind="vllm"
        )


@pytest.fixture(params=["whole", "delta"])
async def pair(request: pytest.FixtureRequest, vllm: RunningVllm, tmp_path: Path) -> AsyncIterator[Pair]:
    config = changed(vllm.config, {"weights": {"delta": request.param == "delta"}, "learner": {"lr": 1e-3}})
    journal = JournalWriter(tmp_path / "journal", "worker-0")
    (record,) = make_records(config, 1)
    place = journal.append(kept_of(0, size=config.rollout.group_size), record)
    journal.close()
    learner = LearnerHost(
        LearnerSettings(
            config=config,
            read_group=partial(read_record, tmp_path / "journal"),
            snapshots=tmp_path / "weights",
            incarnation=f"agreement-{request.param}",
            threads=1,
        ),
        TorchBackend,
    )
    engine = await build_server_engine(
        config, "engine-0", 0, url=vllm.url, incarnation=f"agreement-{request.param}", scratch=tmp_path,
        logs=tmp_path, stale=True,
    )  # fmt: skip
    yield Pair(engine, learner, place)
    await engine.close()
    await learner.close()


def changed(config: Config, sections: dict[str, Any]) -> Config:
    updates = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return resolve(config.model_copy(update=updates))


async def test_logprobs_match_after_every_update_and_not_before_it(pair: Pair, request: pytest.FixtureRequest) -> None:
    delta = "delta" in request.node.callspec.id
    await pair.update()
    first = await pair.compare(0)
    assert first.agrees, first.line
    assert first.mean < 1e-4

    await pair.train(0, little=delta)
    behind = await pair.compare(1)
    assert behind.verdict == "weights"
    assert "version 0" in behind.line
    assert "version 1" in behind.line
    unlabelled = await pair.compare(0)  # compares only values, as if the server had the learner's version
    assert unlabelled.verdict in ("dtype", "weights"), unlabelled.line
    assert unlabelled.mean > 100 * first.mean

    assert await pair.update() == delta
    again = await pair.compare(1)
    assert again.agrees, again.line
    assert again.mean < 1e-4
