"""Bad data: a one-line error for bad input of the user, no failure for bad output of the model.

Tested elsewhere: missing prompts, empty and damaged files, rows of mixed types and duplicate ids, each with its line
(tests/tasks/test_dataset.py, tests/system/test_bad_input.py); tasks that changed between two runs
(tests/tasks/test_fingerprint.py); a failed request that loses only its own episode (tests/rollouts/test_worker.py,
tests/engines/embedded/test_engine.py); identical completions within one group (tests/rollouts/test_group_scoring.py).
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
from support import INLINE, as_arguments, naming, read_lines

pytestmark = pytest.mark.timeout(400)

MIXED_REWARDS = """
def mixed(prompts, completions, **columns):
    number = int(prompts[0].split()[-1])
    if number % 3 == 0:
        return [1.0] * len(completions)
    if number % 3 == 1:
        return [None] * (len(completions) - 1) + [1.0]
    return [float(len(text)) + place for place, text in enumerate(completions)]
"""

NAN_LOSS = """
import outpace

@outpace.policy_loss
def nan_loss(tokens):
    return tokens.logp_N * float("nan")
"""

MEASURE_ROWS = """
import json, resource, sys
from outpace.tasks.dataset import open_dataset
from outpace.tasks.fingerprint import fingerprint

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tasks, heldout = open_dataset(sys.argv[1]).split(0.05, 0)
fingerprint(tasks)
print(len(tasks) + len(heldout), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def inline(settings: Settings, **changes: object) -> Settings:
    return settings | INLINE | {key.replace("__", "."): value for key, value in changes.items()}


# ------------------------------------------------------------------------------------------------------------- datasets


@pytest.mark.slow
def test_a_million_rows_take_a_bounded_number_of_bytes_each(tmp_path: Path) -> None:
    file = tmp_path / "million.jsonl"
    with file.open("w") as lines:
        for number in range(1_000_000):
            lines.write(json.dumps({"id": f"q{number}", "prompt": f"what is {number}? {'x' * 150}"}) + "\n")
    result = subprocess.run(
        [sys.executable, "-c", MEASURE_ROWS, str(file)], capture_output=True, text=True, timeout=300, check=True
    )
    rows, kilobytes = map(int, result.stdout.split())
    assert rows == 1_000_000
    assert kilobytes < 150_000, f"{kilobytes} KB for {file.stat().st_size // 1000} KB of rows"


def test_rows_that_are_not_utf8_give_a_one_line_error_and_leave_nothing_behind(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n')
    assert main(["train", *as_arguments(settings)]) == 2
    output = capsys.readouterr().err.strip()
    assert len(output.splitlines()) == 1
    assert all(key in output for key in ("tasks.jsonl", "line 2", "UTF-8")), output
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


# -------------------------------------------------------------------------------------------------------- equal rewards


def test_filtered_groups_delay_no_step_and_are_recorded(settings: Settings, tmp_path: Path) -> None:
    """A third of the groups has equal rewards; in another third only one attempt has a reward."""
    (tmp_path / "mixed.py").write_text(MIXED_REWARDS)
    config = inline(settings, run__steps=None, run__epochs=2, eval__holdout=0.0, filter__uniform=True)
    config |= {"rewards.functions": [f"{tmp_path}/mixed.py:mixed"], "pacing.max_failed": 100}
    summary = api.Trainer(config=config, quiet=True).train()
    assert summary.steps == 4, "sixteen of 48 groups are trainable"
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(math.isfinite(value) for line in metrics for value in line.values())
    assert visits_of(tmp_path / "run") == every_task_once(epochs=2)
    outcomes = [
        visit["outcome"] for line in read_lines(tmp_path / "run" / "batches.jsonl") for visit in line["settled"]
    ]
    assert outcomes.count("filtered") >= 16


def test_a_run_whose_groups_are_all_filtered_warns_and_ends_at_pacing_max_filtered(
    settings: Settings, rewards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = inline(settings, filter__uniform=True, pacing__max_filtered=100, run__steps=100)
    config |= {"rewards.functions": [f"{rewards}:always"], "rollout.max_tokens": 1, "rollout.group_size": 2}
    with pytest.raises(ComponentFailed, match=naming("100 groups", "pacing.max_filtered", "rewards", "1")):
        api.Trainer(config=config).train()
    assert re.search(r"\b16 groups\b.*pacing\.max_filtered", capsys.readouterr().out)
    assert summary_of(tmp_path / "run")["exit"] == 4


# --------------------------------------------------------------------------------------------------- non-finite numbers


def test_non_finite_losses_update_no_weights_save_their_batches_and_end_the_run(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(NAN_LOSS)
    config = inline(settings, run__steps=50, learner__max_bad_steps=3)
    config |= {"policy_loss.name": f"{tmp_path}/own.py:nan_loss"}
    with pytest.raises(OutpaceError, match=naming("3", "steps", "finite")):
        api.Trainer(config=config, quiet=True).train()
    run = tmp_path / "run"
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2]
    assert all("loss/policy" not in line for line in read_lines(run / "metrics.jsonl"))
    assert sorted(path.name for path in (run / "bad_steps").iterdir()) == ["step-000001", "step-000002", "step-000003"]
    assert summary_of(run)["exit"] == 4
