"""Rollouts recorded by a real run, whether it trains, is killed and resumed, or never trains."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.cli import main
from outpace.monitoring.rollout_files import recorded_steps, untrained_groups
from support import INLINE, as_arguments, read_lines, start_command

Settings = dict[str, Any]

SOME_DULL = '''
def some_dull(prompts, completions, **columns):
    """On every other task, all completions get the same reward."""
    dull = int(prompts[0].split()[-1]) % 2
    return [0.0 if dull else len(set(text)) / 10 + index / 100 for index, text in enumerate(completions)]
'''


def wait_for(condition: Callable[[], bool], is_running: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert is_running()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_and_resumed_run_records_under_each_step_only_its_groups_and_each_once(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "some_dull.py").write_text(SOME_DULL)
    settings |= {
        "rewards.functions": [f"{tmp_path / 'some_dull.py'}:some_dull"],
        "filter.uniform": True,
        "run.steps": 8,
        "run.save_rollouts": 2,
        "checkpoint.every": 3,
        "model.system_prompt": "Be brief.",
        **INLINE,
    }
    run = Path(settings["run.dir"])
    process = start_command("train", *as_arguments(settings))
    wait_for(lambda: max(recorded_steps(run), default=0) >= 4, lambda: process.poll() is None)
    process.kill()
    process.communicate()
    assert main(["train", "--resume", str(run)]) == 0

    batches = {line["step"]: line for line in read_lines(run / "batches.jsonl") if line["groups"]}
    assert recorded_steps(run) == list(range(1, 9)) == sorted(batches)
    for step, line in batches.items():
        attempts = list(outpace.read_rollouts(run, step=step, outcome="trained"))
        trained = {group["group"]: group for group in line["groups"]}
        assert len({attempt.group for attempt in attempts}) == 2
        assert {attempt.group for attempt in attempts} <= trained.keys()
        for group in {attempt.group for attempt in attempts}:
            oldest = min(attempt.oldest for attempt in attempts if attempt.group == group)
            assert oldest == line["version"] - trained[group]["lag"]
        for attempt in attempts:
            assert attempt.task_id == trained[attempt.group]["task_id"]
            assert attempt.newest <= line["version"]
            assert attempt.prompt.startswith("<|system|>Be brief.<|end|><|user|>say ")
            assert attempt.trajectories[0].mask.sum() > 0
    assert max(Counter((each.step, each.group, each.attempt) for each in outpace.read_rollouts(run)).values()) == 1
    untrained = {each["group"] for line in read_lines(run / "batches.jsonl") for each in line.get("settled", [])}
    assert untrained & untrained_groups(run).keys(), "no filtered group was recorded"
    ever_trained = {group["group"] for line in batches.values() for group in line["groups"]}
    assert not ever_trained & untrained_groups(run).keys(), "groups sampled again after the resume are recorded twice"
    assert all(re.search(r"rewards\b.*\b0\b", each.reason) for each in outpace.read_rollouts(run, outcome="filtered"))


@pytest.mark.parametrize(
    ("reward", "changes", "outcome", "reason"),
    [
        ("always", {"filter.uniform": True, "pacing.max_filtered": 40}, "filtered", r"rewards\b.*\b1\b"),
        ("broken", {"pacing.max_failed": 40}, "failed", "no reward today"),
    ],
)
def test_a_run_that_never_trains_warns_early_with_the_reason_and_records_its_completions(
    settings: Settings, rewards: Path, reward: str, changes: Settings, outcome: str, reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = Path(settings["run.dir"])
    settings |= {"rewards.functions": [f"{rewards}:{reward}"], "run.steps": 50, **INLINE, **changes}
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(main, ["train", *as_arguments(settings)])
        wait_for(lambda: run.is_dir() and len(untrained_groups(run)) >= 2, lambda: not ended.done())
        assert main(["show", str(run)]) == 0, "also while the run is active"
        assert ended.result(timeout=170) == 4
    out = capsys.readouterr().out
    (warning,) = [line for line in out.splitlines() if f"outpace show {run}" in line]
    assert re.search(reason, warning)
    for part in (outcome, "say "):
        assert part in warning
    attempts = list(outpace.read_rollouts(run, outcome=outcome))
    assert len({attempt.group for attempt in attempts}) >= 40
    assert all(re.search(reason, attempt.reason) for attempt in attempts)
    assert all(attempt.trajectories[0].turns[-1].sampled for attempt in attempts)
    capsys.readouterr()
    assert main(["show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"{outcome}: " in shown
    assert re.search(reason, shown)
    assert "[assistant]" in shown
