"""What the command line makes of the unforeseen, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from outpace import cli
from outpace.config.load import dump_toml
from support import names, resolved, run_command


def test_what_nobody_has_foreseen_ends_with_4_and_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def burst(*_: object) -> int:
        raise ZeroDivisionError("in the middle of it")

    monkeypatch.setattr(cli, "train", burst)
    assert cli.main(["train"]) == 4
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "ZeroDivisionError: in the middle of it" in said


def test_a_pipe_that_broke_elsewhere_is_unforeseen_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def burst(*_: object) -> int:
        raise BrokenPipeError(32, "of a socket")

    monkeypatch.setattr(cli, "doctor", burst)
    assert cli.main(["doctor"]) == 4
    assert "of a socket" in capsys.readouterr().err


def test_whoever_has_read_enough_sees_no_traceback() -> None:
    command = [sys.executable, "-m", "outpace.cli", "train", "--dry-run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert (process.wait(60), said) == (cli.EXIT_BROKEN_PIPE, "")


def test_a_dry_run_shows_the_gpu_of_every_process_and_is_a_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert cli.main(["train", "--dry-run", "--run.device=cuda"]) == 0
    said = capsys.readouterr().out
    assert "# learner: GPU 4\n# engine-0: GPU 6\n" in said
    assert tomllib.loads(said)["engine"]["kind"] == "embedded"


@pytest.mark.parametrize("verb", ["eval", "play", "serve", "check-logprobs", "doctor"])
def test_the_help_of_commands_that_take_settings_says_so(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    assert "--section.key" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["serve", "check-logprobs", "fleet"])
def test_every_command_is_suggested_to_whoever_mistypes_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb + "x"])
    assert names(capsys.readouterr().err, f"{verb}?")


@pytest.mark.timeout(120)
def test_a_run_that_is_done_says_so_when_it_is_resumed_and_starts_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    few = [
        "--run.steps=1",
        "--eval.count=0",
        "--pacing.groups_per_step=2",
        "--rollout.max_tokens=4",
        "--filter.uniform=false",
        "--run.runtime=inline",
    ]
    assert run_command("train", f"--run.dir={run}", *few, "--quiet").returncode == 0
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    again = run_command("train", "--resume", str(run))
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith(f"{run}: ")
    assert again.stdout.endswith("\n")
    assert again.stdout.count("\n") == 1
    assert "--run.steps 2" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_a_run_with_servers_is_resumed_with_another_kind_of_engine(tmp_path: Path) -> None:
    servers = {"engine.kind": "vllm", "launch.python": "/no/such/python", "launch.args": ["--flag"]}
    (tmp_path / "config.toml").write_text(dump_toml(resolved(servers)))
    answer = run_command("train", "--resume", str(tmp_path), "--engine.kind", "embedded", "--dry-run")
    assert answer.returncode == 0, answer.stderr
    assert "/no/such/python" not in answer.stdout
