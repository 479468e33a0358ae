"""A real vLLM server gets its weights from a learner that is sharded over several processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import outpace as api
from outpace.commands.logprob_check import measure

PYTHON = os.environ.get("OUTPACE_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="OUTPACE_VLLM_PYTHON names no Python with vLLM"),
]

VLLM = ("--engine.kind=vllm", "--run.device=cpu", f"--launch.python={PYTHON}", "--launch.env=VLLM_CPU_KVCACHE_SPACE=1")


def test_a_server_has_the_weights_that_four_ranks_publish(tmp_path: Path) -> None:
    settings = {"run.dir": str(tmp_path / "run"), "run.steps": 2, "eval.count": 0}
    api.Trainer(config=settings, quiet=True).train()
    found = measure(tmp_path / "run", [*VLLM, "--learner.devices=4"])
    assert [result.agrees for result in found.values()] == [True]
    assert all(result.mean < 1e-4 for result in found.values())
