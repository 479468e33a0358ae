"""Bad data: said in one line where it is the user's, survived where it is the model's.

Shown elsewhere: missing prompts, empty and damaged files, rows of mixed kinds and ids given twice, each with its line
(tests/tasks/test_dataset.py, tests/system/test_bad_input.py); what changed between two runs
(tests/tasks/test_fingerprint.py); a request that fails, whose episode alone is lost (tests/rollouts/test_worker.py,
tests/engines/embedded/test_engine.py); answers all alike within one group (tests/rollouts/test_group_scoring.py).
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outpace as api
from faults.watching import Settings, every_task_once, summary_of, visits_of
from outpace.cli import main
from outpace.errors import ComponentFailed, OutpaceError
from support import as_arguments, naming, read_lines

pytestmark = pytest.mark.timeout(400)

MOODS = """
def moody(prompts, completions, **columns):
    number = int(prompts[0].split()[-1])
    if number % 3 == 0:
        return [1.0] * len(completions)
    if number % 3 == 1:
        return [None] * (len(completions) - 1) + [1.0]
    return [float(len(text)) + place for place, text in enumerate(completions)]
"""

NO_NUMBER = """
import outpace

@outpace.policy_loss
def no_number(tokens):
    return tokens.logp_N * float("nan")
"""

MILLION = """
import json, resource, sys
from outpace.tasks.dataset import open_dataset
from outpace.tasks.fingerprint import fingerprint

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tasks, heldout = open_dataset(sys.argv[1]).split(0.05, 0)
fingerprint(tasks)
print(len(tasks) + len(heldout), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def inline(settings: Settings, **changes: object) -> Settings:
    return settings | {"run.runtime": "inline"} | {key.replace("__", "."): value for key, value in changes.items()}


# ------------------------------------------------------------------------------------------------------------- datasets


@pytest.mark.slow
def test_a_million_rows_cost_some_bytes_each_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "million.jsonl"
    with file.open("w") as lines:
        for number in range(1_000_000):
            lines.write(json.dumps({"id": f"q{number}", "prompt": f"what is {number}? {'x' * 150}"}) + "\n")
    result = subprocess.run(
        [sys.executable, "-c", MILLION, str(file)], capture_output=True, text=True, timeout=300, check=True
    )
    rows, kilobytes = map(int, result.stdout.split())
    assert rows == 1_000_000
    assert kilobytes < 150_000, f"{kilobytes} KB for {file.stat().st_size // 1000} KB of rows"


def test_rows_that_are_not_utf8_cost_one_line_and_leave_nothing(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n')
    assert main(["train", *as_arguments(settings)]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert all(key in said for key in ("tasks.jsonl", "line 2", "UTF-8")), said
    assert not (tmp_path / "run").exists()


def test_text_and_messages_may_be_mixed_in_one_file(settings: Settings, tmp_path: Path) -> None:
    rows = [
        {
            "id": f"t{number}",
            "prompt": [{"role": "user", "content": f"say {number}"}] if number % 2 else f"say {number}",
        }
        for number in range(24)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert api.Trainer(config=inline(settings, run__steps=2), quiet=True).train().steps == 2


# ---------------------------------------------------------------------------------------------------- rewards all alike


def test_groups_that_teach_nothing_hold_no_step_up_and_are_on_record(settings: Settings, tmp_path: Path) -> None:
    """A third is all alike, of another third a single attempt has a reward."""
    (tmp_path / "moods.py").write_text(MOODS)
    config = inline(settings, run__steps=None, run__epochs=2, eval__holdout=0.0, filter__uniform=True)
    config |= {"rewards.functions": [f"{tmp_path}/moods.py:moody"], "pacing.max_failed": 100}
    summary = api.Trainer(config=config, quiet=True).train()
    assert summary.steps == 4, "sixteen groups of 48 are worth training"
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(math.isfinite(value) for line in metrics for value in line.values())
    assert visits_of(tmp_path / "run") == every_task_once(epochs=2)
    outcomes = [
        visit["outcome"] for line in read_lines(tmp_path / "run" / "batches.jsonl") for visit in line["settled"]
    ]
    assert outcomes.count("filtered") >= 16


def test_a_run_in_which_nothing_teaches_says_so_and_ends_where_told(
    settings: Settings, rewards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = inline(settings, filter__uniform=True, pacing__max_filtered=100, run__steps=100)
    config |= {"rewards.functions": [f"{rewards}:always"], "rollout.max_tokens": 1, "rollout.group_size": 2}
    with pytest.raises(ComponentFailed, match=naming("100 groups", "pacing.max_filtered", "rewards", "1")):
        api.Trainer(config=config).train()
    assert re.search(r"\b16 groups\b.*pacing\.max_filtered", capsys.readouterr().out)
    assert summary_of(tmp_path / "run")["exit"] == 4


# ------------------------------------------------------------------------------------------------ numbers that are none


def test_losses_that_are_no_number_change_nothing_are_kept_and_end_the_run(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NO_NUMBER)
    config = inline(settings, run__steps=50, learner__max_bad_steps=3)
    config |= {"algorithm.surrogate": f"{tmp_path}/own.py:no_number"}
    with pytest.raises(OutpaceError, match=naming("3", "steps", "finite")):
        api.Trainer(config=config, quiet=True).train()
    run = tmp_path / "run"
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2]
    assert all("loss/policy" not in line for line in read_lines(run / "metrics.jsonl"))
    assert sorted(path.name for path in (run / "bad_steps").iterdir()) == ["step-000001", "step-000002", "step-000003"]
    assert summary_of(run)["exit"] == 4
