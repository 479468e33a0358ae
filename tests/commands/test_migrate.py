"""A run of outpace 0.1 that was killed after step 3, with a checkpoint of step 2 (`run_0_1_0`)."""

from __future__ import annotations

import shutil
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from outpace.cli import main
from outpace.config.load import RUN_FORMAT, load_config, read_resolved
from outpace.config.validation import resolve
from outpace.controller.ledger import ledger_report
from outpace.errors import BadInput
from outpace.monitoring.run_directory import LOCK_FILE, RunLock
from support import names, read_lines

FIXTURE = Path(__file__).parent / "run_0_1_0"
TASKS = 16


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the run directory. Its config refers to files by absolute paths, which are those of the copy."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("/run_0_1_0", str(tmp_path)))
    return tmp_path / "run"


@pytest.mark.parametrize("command", [["train", "--resume"], ["eval"], ["check-logprobs"]])
def test_a_run_of_an_earlier_version_is_refused_in_one_line(
    run: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(run)]) == BadInput.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, f"outpace migrate {run}")


def test_migration_renames_the_settings_and_keeps_those_that_differ_from_the_defaults(run: Path) -> None:
    assert main(["migrate", str(run)]) == 0
    chosen = tomllib.loads((run / "config.toml").read_text())
    assert chosen["algorithm"] == {"preset": "grpo", "minibatches": 2}
    assert chosen["policy_loss"] == {"clip_low": 0.1}
    assert chosen["rollout"] == {"group_size": 2, "max_tokens": 8}
    assert not {"advantage", "correction", "governor", "sandbox"} & set(chosen)
    assert tomllib.loads((run / "resolved.toml").read_text())["format"] == RUN_FORMAT
    resolved = read_resolved(run)
    assert (resolved["policy_loss"]["name"], resolved["policy_loss"]["old_policy"]) == ("ppo", "recomputed")
    config = resolve(load_config(run / "config.toml"))
    assert {name: config.model_dump()[name] | keys for name, keys in resolved.items()} == config.model_dump()


def test_an_override_of_a_migrated_run_brings_its_own_defaults(run: Path) -> None:
    main(["migrate", str(run)])
    config = resolve(load_config(run / "config.toml", ["--policy_loss.name", "gspo"]))
    assert config.policy_loss.model_extra == {"clip_low": 3e-4, "clip_high": 4e-4}


def test_migration_can_be_repeated_also_after_an_interruption(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["migrate", str(run)])
    files = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert main(["migrate", str(run)]) == 0
    (run / "resolved.toml").unlink()  # interrupted before it was written
    assert main(["migrate", str(run)]) == 0
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == files


def test_an_active_run_and_other_directories_are_not_migrated(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "config.toml").read_bytes()
    lock = RunLock(run / LOCK_FILE)
    assert main(["migrate", str(run)]) == BadInput.exit_code
    lock.release()
    assert main(["migrate", str(run.parent / "model")]) == BadInput.exit_code
    assert ((run / "config.toml").read_bytes(), (run / "resolved.toml").exists()) == (before, False)


@pytest.mark.parametrize("text", ["[params]\ntheme = 'x' # keep\n", "title = 'blog'\n", "[run]\nsteps = "])
def test_a_config_of_another_program_or_a_damaged_one_is_left_as_it_is(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert main(["migrate", str(tmp_path)]) == BadInput.exit_code
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.toml": text}


def test_a_run_with_names_that_only_its_program_registers_keeps_its_group_settings(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().replace('surrogate = "ppo"', 'surrogate = "mine"'))
    assert main(["migrate", str(run)]) == 0
    assert read_resolved(run)["filter"]["tolerance"] == 1e-6


def test_a_migrated_run_resumes_with_no_visit_skipped_or_doubled(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained_before = read_lines(run / "batches.jsonl")[:2]  # up to the checkpoint
    main(["migrate", str(run)])
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    report = ledger_report(run)
    assert (report["twice"], report["never"]) == ([], [])
    batches = read_lines(run / "batches.jsonl")
    assert batches[:2] == trained_before
    visits = Counter(visit["task"] for line in batches for visit in [*line["groups"], *line["settled"]])
    assert visits == dict.fromkeys(range(TASKS), 1)
    metrics = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert all(line["completions/mean_length"] > 0 for line in metrics)
