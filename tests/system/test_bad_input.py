"""Bad input: one clear line that names what to change, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.cli import main
from support import INLINE, as_arguments, resolved, write_config

Settings = dict[str, Any]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error line, after checking that it is the only one and that the exit code is 2."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert code == 2
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("outpace: ")
    return lines[0]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--pacing.max_lagg=2"], "pacing.max_lag"),
        (["--pacin.max_lag=2"], "pacing"),
        (["--pacing.max_lag", "two"], "pacing.max_lag"),
        (["--pacing.max_lag=-1"], "pacing.max_lag"),
        (["--learner.lr=fast"], "learner.lr"),
        (["--rollout.group_size=1"], "rollout.group_size"),
        (["--rollout.top_p=0.9"], "rollout.top_p"),
        (["--rollout.top_k=20"], "rollout.top_k"),
        (["--tasks.path=missing.jsonl"], "missing.jsonl"),
        (["--tasks.name=countdwon"], "countdown"),
        (["--rewards.functions=no_such_module:f"], "no_such_module"),
        (["--rewards.functions=json:no_such_function"], "no_such_function"),
        (["--model.path=./no/such/model"], "model.path"),
        (["--weights.every=5", "--pacing.max_lag=1"], "weights.every"),
        (["missing.toml"], "missing.toml"),
        (["--stepps", "3"], "--stepps"),
        (["--preset", "grpo"], "--algorithm.preset"),
        (["--beta", "0.1"], "--kl.coefficient"),
        (["--num-generations=8"], "--rollout.group_size"),
        (["--actor_rollout_ref.rollout.n=8"], "rollout.group_size"),
        (["algorithm.adv_estimator=grpo", "trainer.total_epochs=2"], "--advantage.name"),
        (["learning_rate=1e-5"], "--learner.lr"),
        (["pacing.max_lag=2"], "--pacing.max_lag=2"),
        (["pacing.max_lag", "2"], "--pacing.max_lag"),
        (["--help", "pacing_"], "model, tasks"),
        (["a.toml", "b.toml"], "b.toml"),
        (["--resume"], "outpace train --help"),
        (["--rollout.environment=json:loads"], "rollout.environment: loads"),
        (["--zzzzzz"], "--section.key"),
        (["--run.steps"], "run.steps"),
    ],
)
def test_a_bad_setting_gives_one_line_and_leaves_nothing(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named in refused(["train", *words], capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "expected"),
    [("trian", "did you mean train"), ("zzz", "train, eval, play, show")],
)
def test_an_unknown_command_gives_one_line(word: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused([word, "--run.steps=2"], capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["help"], "outpace --help"),
        (["version"], "outpace --version"),
        (["bench", "engine", "--foo"], "outpace bench engine --help"),
    ],
)
def test_a_wrong_word_for_other_commands_gives_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(words, capsys)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"question": "2+2"}\n', "prompt"),
        ("", "empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n', "x"),
        ("[1, 2]\n", "tasks.path"),
    ],
)
def test_a_bad_dataset_gives_one_line_that_names_the_file(
    content: str, named: str, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    line = refused(["train", *as_arguments({**settings, "tasks.path": str(file)})], capsys)
    assert "bad.jsonl" in line
    assert named in line
    assert not (tmp_path / "run").exists()


def test_a_model_directory_without_weights_gives_one_line(
    settings: Settings, toy_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    (hollow / "config.json").write_bytes((toy_model / "config.json").read_bytes())
    line = refused(["train", *as_arguments({**settings, "model.path": str(hollow)})], capsys)
    assert "model.path" in line
    assert "safetensors" in line
    assert not (tmp_path / "run").exists()


def test_a_broken_model_found_only_by_a_starting_component_gives_one_line_and_leaves_nothing(
    settings: Settings, toy_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes, a component that cannot start is tested in tests/runtime."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in toy_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"not a tensor in sight")
    values = {**settings, "model.path": str(broken), **INLINE}
    assert "model.path" in refused(["train", *as_arguments(values)], capsys)
    assert not (tmp_path / "run").exists()


def test_a_directory_with_content_is_not_overwritten_by_default(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.txt").write_text("mine")
    assert "run.overwrite" in refused(["train", *as_arguments(settings)], capsys)
    assert [path.name for path in run.iterdir()] == ["thesis.txt"]


def test_resuming_where_there_is_no_run_or_no_checkpoint_gives_one_line(
    tmp_path: Path, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(tmp_path / "nothing") in refused(["train", "--resume", str(tmp_path / "nothing")], capsys)
    assert not (tmp_path / "nothing").exists()


def test_a_dry_run_prints_the_resolved_config_and_touches_nothing(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", *as_arguments(settings)]) == 0
    printed = capsys.readouterr().out
    assert "[pacing]" in printed
    assert f"groups_per_step = {json.dumps(settings['pacing.groups_per_step'])}" in printed
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_a_resume_prints_what_would_run_and_touches_nothing(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_config(run, resolved(settings))
    words = ["train", "--resume", str(run), "--dry-run", "--algorithm.preset", "gspo"]
    assert main(words) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert (printed["policy_loss"]["name"], printed["run"]["dir"]) == ("gspo", str(run))
    assert printed["filter"]["uniform"] is False
    assert sorted(path.name for path in run.iterdir()) == ["config.toml", "resolved.toml"]


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"kl.coefficient": 0.1}, ("kl.coefficient", "reference")),
        ({"algorithm.preset": "ppo"}, ("advantage.name", "critic")),
        ({"model.path": "starter"}, ("model.path", "weights")),
    ],
)
def test_a_checkpoint_without_the_state_that_the_new_config_needs_is_refused(
    change: Settings, keys: tuple[str, ...], settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {**settings, **INLINE, "run.steps": 1}
    assert main(["train", "--quiet", *as_arguments(short)]) == 0
    capsys.readouterr()
    line = refused(["train", "--resume", str(tmp_path / "run"), *as_arguments({"run.steps": 2, **change})], capsys)
    assert all(key in line for key in ("--resume", str(tmp_path / "run" / "checkpoints"), *keys)), line


@pytest.mark.parametrize("verb", ["train", "simulate"])
def test_help_for_a_section_shows_that_section_only(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help", "pacing"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "--pacing.max_lag" in out
    assert "--run.seed" not in out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"outpace {outpace.__version__}\n"


def test_help_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "pacing.max_lag" in out
    assert "--resume" in out
