"""A real vLLM server and the learner: they agree when the server has the learner's weights, and only then."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.learner import make_records

from outpace.checkpoint.journal import JournalWriter
from outpace.config import Config
from outpace.config.validation import resolve
from outpace.controller.logprob_check import PROBE_PROMPTS, LogprobComparison, compare_engine
from outpace.engines.server.build import build_server_engine
from outpace.engines.server.server_engine import ServerEngine
from outpace.learner.learner import TorchLearner, TorchLearnerSettings
from outpace.models.loading import load_tokenizer
from outpace.types import Ints, JournalLocation, Version
from servers_support import RunningVllm
from support import kept_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def openings() -> list[Ints]:
    tokenizer = load_tokenizer("starter")
    texts = [f"Use {n}, {n + 3} and 7 to make {2 * n + 1}." for n in range(PROBE_PROMPTS)]
    return [np.array(tokenizer.encode(text), dtype=np.int32) for text in texts]


class Pair:
    """A learner, and a door to the server that it publishes to."""

    def __init__(self, door: ServerEngine, learner: TorchLearner, place: JournalLocation) -> None:
        self.door, self.learner, self._place = door, learner, place

    async def train(self, version: Version, little: bool) -> None:
        """A step; or one that changes `little`, as steps do in bfloat16: in float32 they change every weight."""
        if not little:
            await self.learner.chunk(version, [self._place])
            await self.learner.step(version)
            return
        core = self.learner._core
        with torch.no_grad():
            core.parameters["model.norm.weight"].mul_(1.05)
        core.version += 1

    async def update(self) -> bool:
        """Whether it was told of as a change to the version before."""
        manifest = await self.learner.publish([])
        await self.door.load(manifest, False)
        return manifest.delta is not None

    async def agreement(self, version: Version) -> LogprobComparison:
        return await compare_engine(
            self.door, self.learner, openings(), version, dtype="float32", temperature=1.0, seed=5, kind="vllm"
        )


@pytest.fixture(params=["whole", "delta"])
async def pair(request: pytest.FixtureRequest, vllm: RunningVllm, tmp_path: Path) -> AsyncIterator[Pair]:
    config = changed(vllm.config, {"weights": {"delta": request.param == "delta"}, "learner": {"lr": 1e-3}})
    journal = JournalWriter(tmp_path / "journal", "worker-0")
    (record,) = make_records(config, 1)
    place = journal.append(kept_of(0, size=config.rollout.group_size), record)
    journal.close()
    learner = TorchLearner(
        TorchLearnerSettings(
            config=config,
            journal=tmp_path / "journal",
            snapshots=tmp_path / "weights",
            incarnation=f"agreement-{request.param}",
            threads=1,
        )
    )
    door = await build_server_engine(
        config, "engine-0", 0, url=vllm.url, incarnation=f"agreement-{request.param}", scratch=tmp_path,
        logs=tmp_path, stale=True,
    )  # fmt: skip
    yield Pair(door, learner, place)
    await door.close()
    await learner.close()


def changed(config: Config, sections: dict[str, Any]) -> Config:
    updates = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return resolve(config.model_copy(update=updates))


async def test_they_agree_after_every_update_and_not_before_it(pair: Pair, request: pytest.FixtureRequest) -> None:
    delta = "delta" in request.node.callspec.id
    await pair.update()
    first = await pair.agreement(0)
    assert first.agrees, first.line
    assert first.mean < 1e-4

    await pair.train(0, little=delta)
    behind = await pair.agreement(1)
    assert behind.verdict == "weights"
    assert "version 0" in behind.line
    assert "version 1" in behind.line
    unlabelled = await pair.agreement(0)  # by the numbers alone, as if the server had the learner's version
    assert unlabelled.verdict in ("dtype", "weights"), unlabelled.line
    assert unlabelled.mean > 100 * first.mean

    assert await pair.update() == delta
    again = await pair.agreement(1)
    assert again.agrees, again.line
    assert again.mean < 1e-4
