"""`outpace show`."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from outpace.cli import main
from outpace.commands.show import show
from outpace.config.load import EMPTY_RESOLVED
from outpace.errors import BadInput
from outpace.monitoring.rollout_files import RecordedAttempt, RecordedTrajectory, RecordedTurn, RolloutWriter
from outpace.monitoring.run_directory import BatchGroup, RunLog, UntrainedVisit


def attempt(group: int, answer: str, number: int = 0, **changes: Any) -> RecordedAttempt:
    turns = [
        RecordedTurn("prompt", f"<|user|>reach {group}<|end|>", [1]),
        RecordedTurn("assistant", answer, [2], True, [-0.5], changes.get("newest", 3), 0.5),
    ]
    values: dict[str, Any] = {"outcome": "trained", "task": group, "task_id": f"t{group}", "epoch": 0} | changes
    return RecordedAttempt(group=group, attempt=number, trajectories=[RecordedTrajectory(turns)], **values)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = RunLog.claim(tmp_path / "run")
    log.start("")
    log.batch(1, 0, [BatchGroup("t0", 0, 0, 0, 1, group=0)], [UntrainedVisit(1, 0, "filtered", "", "t1", group=1)], 2)
    log.close()
    writer = RolloutWriter(log.dir, 10**6)
    numbers = {"reward": 1.25, "rewards": {"correct": 1.0, "polite": 0.25}, "advantage": 0.5}
    writer.step(1, [attempt(0, "first answer", step=1, oldest=2, newest=3, **numbers)])
    writer.step(2, [attempt(2, "second answer", step=2), attempt(2, "another one", 1, step=2)])
    writer.untrained("filtered", 1, [attempt(1, "dull answer", outcome="filtered", reason="all rewards are 0")])
    writer.untrained("failed", 3, [attempt(3, "unjudged answer", outcome="failed", reason="reward broken: boom")])
    return log.dir


def shown(run: Path, **wanted: Any) -> str:
    out = io.StringIO()
    show(run, file=out, **wanted)
    return out.getvalue()


def test_the_newest_step_is_shown_unless_another_is_given(run: Path) -> None:
    assert "second answer" in shown(run)
    assert "another one" in shown(run)
    assert "first answer" not in shown(run)
    assert "first answer" in shown(run, step=1)


def test_an_attempt_is_shown_with_all_its_numbers(run: Path) -> None:
    text = shown(run, step=1)
    for part in ("step 1", "group 0", "task t0", "attempt 0", "trained", "reward 1.25", "correct 1", "polite 0.25"):
        assert part in text
    for part in ("advantage 0.5", "[prompt] <|user|>reach 0<|end|>", "[assistant] first answer"):
        assert part in text
    assert re.search(r"versions? 2\D+3\b", text)


def test_a_prompt_that_all_attempts_share_is_shown_once(run: Path) -> None:
    assert shown(run, step=2).count("reach 2") == 1


def test_groups_that_were_not_trained_on_are_counted_and_shown_on_request(run: Path) -> None:
    assert "1 filtered" in shown(run, step=1)
    assert "dull answer" not in shown(run, step=1)
    filtered = shown(run, outcome="filtered")
    assert "dull answer" in filtered
    assert "all rewards are 0" in filtered
    assert "reward broken: boom" in shown(run, outcome="failed")


def test_a_task_is_shown_by_id_or_index_whatever_its_outcome(run: Path) -> None:
    assert "unjudged answer" in shown(run, task="t3")
    assert "dull answer" in shown(run, task="1")


def test_a_run_without_a_step_shows_its_newest_groups(tmp_path: Path) -> None:
    log = RunLog.claim(tmp_path / "run")
    log.start("")
    writer = RolloutWriter(log.dir, 10**6)
    for group in range(9):
        writer.untrained("failed", group, [attempt(group, f"answer {group}", outcome="failed", reason="boom")])
    text = shown(log.dir)  # while the run holds its directory
    log.close()
    assert "answer 8" in text
    assert "answer 0" not in text
    assert "failed: boom" in text


def test_control_characters_of_a_model_do_not_reach_the_terminal(run: Path) -> None:
    nasty = "\x1b[2Jgone\x1b]0;title\x07 \x9b1m over\rwritten \u202eback [red]markup[/red]\nnext\tline"
    RolloutWriter(run, 10**6).step(3, [attempt(4, nasty, step=3, task_id="\x1b[31mt")])
    text = shown(run)
    assert not [each for each in text if each not in "\n" and not each.isprintable()]
    assert "[red]markup[/red]" in text
    assert "next" in text.splitlines()[-4:][0] + text
    assert len([line for line in text.splitlines() if "written" in line or "next" in line]) == 2


def test_long_text_is_cut_unless_the_limit_is_zero(run: Path) -> None:
    RolloutWriter(run, 10**6).step(3, [attempt(4, "x" * 5000, step=3)])
    assert shown(run).count("x") < 2100
    assert shown(run, max_chars=0).count("x") >= 5000


@pytest.mark.parametrize(
    "wanted", [{"step": 9}, {"task": "missing"}, {"outcome": "dropped"}, {"step": 2, "outcome": "failed"}]
)
def test_a_request_for_something_not_recorded_is_refused_in_one_line(run: Path, wanted: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as refused:
        shown(run, **wanted)
    assert str(run) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_run_that_records_no_rollouts_names_the_setting(tmp_path: Path) -> None:
    log = RunLog.claim(tmp_path / "run")
    log.start(resolved=EMPTY_RESOLVED + "[run]\nsave_rollouts = 0\n")
    log.close()
    with pytest.raises(BadInput, match=r"run\.save_rollouts"):
        shown(log.dir)


def test_the_command_prints_plain_text_and_one_line_for_a_bad_request(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(run), "--failed"]) == 0
    out = capsys.readouterr().out
    assert "unjudged answer" in out
    assert "\x1b" not in out
    assert main(["show", str(run / "nowhere")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["show", str(run), "--step", "9"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
