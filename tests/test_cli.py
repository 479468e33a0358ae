"""The command line: unexpected errors, closed pipes, help, suggestions and completed runs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from outpace import cli
from support import names, resolved, run_command, write_config


def test_an_unexpected_error_exits_with_4_and_prints_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise ZeroDivisionError("in the middle of it")

    monkeypatch.setattr(cli, "train", fail)
    assert cli.main(["train"]) == 4
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: in the middle of it" in err


def test_a_broken_pipe_other_than_stdout_is_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise BrokenPipeError(32, "of a socket")

    monkeypatch.setattr(cli, "doctor", fail)
    assert cli.main(["doctor"]) == 4
    assert "of a socket" in capsys.readouterr().err


def test_a_closed_stdout_pipe_prints_no_traceback() -> None:
    command = [sys.executable, "-m", "outpace.cli", "train", "--dry-run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert (process.wait(60), err) == (cli.EXIT_BROKEN_PIPE, "")


def test_a_dry_run_prints_a_valid_config_with_the_gpu_of_every_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert cli.main(["train", "--dry-run", "--run.device=cuda"]) == 0
    out = capsys.readouterr().out
    assert "# learner: GPU 4\n# engine-0: GPU 6\n" in out
    assert tomllib.loads(out)["engine"]["kind"] == "embedded"


@pytest.mark.parametrize("verb", ["eval", "play", "serve", "check-logprobs", "doctor"])
def test_help_of_commands_that_accept_settings_mentions_them(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    assert "--section.key" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["serve", "check-logprobs", "fleet"])
def test_a_mistyped_command_is_refused_with_a_suggestion(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb + "x"])
    assert names(capsys.readouterr().err, f"{verb}?")


@pytest.mark.timeout(120)
def test_resuming_a_completed_run_prints_one_line_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    few = [
        "--run.steps=1",
        "--eval.count=0",
        "--pacing.groups_per_step=2",
        "--rollout.max_tokens=4",
        "--filter.uniform=false",
        "--run.runtime=inline",
    ]
    assert cli.main(["train", f"--run.dir={run}", *few, "--quiet"]) == 0
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert cli.main(["train", "--resume", str(run)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{run}: ")
    assert out.endswith("\n")
    assert out.count("\n") == 1
    assert "--run.steps 2" in out
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_a_run_with_server_engines_can_be_resumed_with_the_embedded_engine(tmp_path: Path) -> None:
    servers = {"engine.kind": "vllm", "launch.python": "/no/such/python", "launch.args": ["--flag"]}
    write_config(tmp_path, resolved(servers))
    result = run_command("train", "--resume", str(tmp_path), "--engine.kind", "embedded", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "/no/such/python" not in result.stdout
