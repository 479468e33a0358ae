"""Every learner backend passes the conformance suite, and a run completes with a backend of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from learner.conformance import BackendConformance
from outpace.cli import main
from outpace.errors import BadInput
from outpace.learner.torch_backend import TorchBackend
from outpace.run.plan import UserObjects, make_plan
from outpace.runtime.references import load_function
from support import INLINE, as_arguments, naming, read_lines, resolved

EXAMPLE = Path(__file__).parents[2] / "examples" / "null_learner.py"
NULL_LEARNER = f"{EXAMPLE}:NullLearner"
MAX_EXAMPLE_LINES = 150

QUICK: dict[str, Any] = {
    "rollout.group_size": 2,
    "rollout.max_tokens": 16,
    "rollout.workers": 1,
    "pacing.groups_per_step": 2,
    "engine.slots": 8,
    "engine.context": 64,
    "filter.uniform": False,
    "eval.count": 0,
    "checkpoint.every": 2,
    "run.threads": 1,
}


class TestTorchBackend(BackendConformance):
    backend = TorchBackend


class TestNullLearner(BackendConformance):
    backend = staticmethod(load_function(NULL_LEARNER, "learner.backend"))


def test_a_backend_takes_no_more_than_one_short_file() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < MAX_EXAMPLE_LINES


def test_a_run_completes_and_resumes_with_a_backend_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    chosen = {**QUICK, **INLINE, "run.steps": 2, "run.dir": str(run)}
    monkeypatch.chdir(EXAMPLE.parents[1])
    words = as_arguments({**chosen, "learner.backend": "examples/null_learner.py:NullLearner"})
    assert main(["train", "--quiet", *words]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--quiet", "--resume", str(run), "--run.steps=3"]) == 0
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2, 3]


def test_the_file_of_a_backend_is_absolute_in_the_resolved_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parent)
    assert resolved({"learner.backend": "null_learner.py:NullLearner"}).learner.backend == NULL_LEARNER


def test_an_unknown_backend_is_rejected_before_anything_starts() -> None:
    with pytest.raises(BadInput, match=naming("learner.backend", "NoLearner")):
        make_plan(resolved({"learner.backend": f"{EXAMPLE}:NoLearner"}), UserObjects())
