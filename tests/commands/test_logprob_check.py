"""`outpace check-logprobs`, with real components."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from outpace.checkpoint.commit import CHECKPOINTS, begin, commit
from outpace.commands import logprob_check as command
from outpace.commands.logprob_check import check_logprobs, measure, print_table
from outpace.controller.logprob_check import LogprobComparison
from outpace.errors import BadInput
from outpace.learner import state
from outpace.learner.core import LearnerCore
from outpace.models.loading import load_model
from support import names, resolved, write_config, write_resolved

GOOD = LogprobComparison("agrees", "within the rounding of float32 (…)", tokens=256, mean=1e-6, high=3e-6, largest=2e-5)
RAW = LogprobComparison(
    "raw", "its logprobs are those before the temperature is applied; start the server with --flag", 256, 0.1
)
SILENT = LogprobComparison("answers", "it gave no answer within 120 s; see the server's log")


def test_the_table_shows_the_numbers_and_the_remedies_below() -> None:
    output = io.StringIO()
    print_table({"engine-0": GOOD, "engine-1": RAW, "engine-2": SILENT}, Console(file=output, width=80))
    lines = [line.split() for line in output.getvalue().splitlines()]
    assert lines[1] == ["engine-0", "agrees", "256", "1e-06", "3e-06", "2e-05"]
    assert lines[3] == ["engine-2", "answers", "0"]
    assert f"engine-1: {RAW.line}" in output.getvalue()


@pytest.mark.parametrize(
    ("found", "code"), [({"engine-0": GOOD}, 0), ({"engine-0": GOOD, "engine-1": RAW}, 2), ({"engine-0": SILENT}, 2)]
)
def test_the_exit_code_is_0_only_if_all_engines_agree(
    found: dict[str, LogprobComparison], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: found)
    assert check_logprobs(None, []) == code


@pytest.mark.slow  # two processes with models; below with a checkpoint, in tests/controller without processes
def test_the_built_in_engine_and_the_learner_agree_on_the_starter() -> None:
    found = measure(None, ["--run.threads=1"])
    assert found["engine-0"].agrees, found["engine-0"].line
    assert found["engine-0"].tokens == 256
    assert names(found["engine-0"].line, "256 version 0")


def write_run(directory: Path, version: int) -> None:
    """Write a run with a checkpoint whose weights differ from those of the base model."""
    config = resolved({"run.threads": 1})
    write_config(directory, config)
    core = LearnerCore(load_model(config.model.path, dtype="float32", device="cpu"), config)
    core.version = version
    with torch.no_grad():
        for parameter in core.parameters.values():
            parameter.mul_(1.1)
    temporary = begin(directory / CHECKPOINTS, version)
    state.save(core, temporary)
    commit(temporary)


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_run_is_compared(tmp_path: Path) -> None:
    write_run(tmp_path, version=2)
    found = measure(tmp_path, [])
    assert found["engine-0"].agrees, found["engine-0"].line
    assert names(found["engine-0"].line, "256 version 2")


def test_a_directory_without_a_run_or_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"/nothing\b"):
        measure(tmp_path / "nothing", [])
    write_resolved(tmp_path)
    with pytest.raises(BadInput, match="checkpoint"):
        measure(tmp_path, [])


def test_launch_settings_without_an_engine_kind_imply_vllm(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"launch\.python .*/python\b.*No such file"):
        measure(None, [f"--launch.python={tmp_path / 'python'}"])
    with pytest.raises(BadInput, match=r"launch\.python .*\bsglang\b"):
        measure(None, ["--engine.kind=sglang", "--launch.start_s=5"])
