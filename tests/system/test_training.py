"""The whole system on a toy policy: real processes, real journal, real weights."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import outpace as api
from outpace.cli import main
from outpace.errors import BadInput, ComponentFailed
from outpace.run.plan import load_run_config
from support import INLINE, as_arguments, journalled, naming, read_lines, start_command

Settings = dict[str, Any]


def trained_tasks(run: Path) -> list[tuple[int, str]]:
    groups = [group for line in read_lines(run / "batches.jsonl") for group in line["groups"]]
    return [(group["epoch"], group["task_id"]) for group in groups]


def children_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def on_metrics_page(name: str) -> bool:
    """Whether docs/metrics.md has a row for this metric, by its name or by that of its family."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    names = [each for row in rows for each in re.findall("`([^`]+)`", row)]
    return any(re.fullmatch(re.sub(r"<\w+>", "[^/]+", each.replace(".", r"\.")), name) for each in names)


class WatchRuntimeDirectory(api.Callback):
    """Remembers the runtime directories of this process's runs, recognized by the lock file held open."""

    def __init__(self) -> None:
        self.directories: set[Path] = set()

    def on_batch_end(self, metrics: Any) -> None:
        opened = [Path(file.path) for file in psutil.Process().open_files()]
        self.directories |= {path.parent for path in opened if path.name == "owner.lock"}


def test_synchronous_training_is_the_same_loop_and_never_lags(settings: Settings) -> None:
    summary = api.Trainer(config={**settings, "pacing.max_lag": 0, **INLINE}, quiet=True).train()
    assert (summary.steps, summary.lag_max) == (3, 0)


def test_epochs_visit_every_task_exactly_once_and_the_last_partial_batch_is_trained(
    settings: Settings, tmp_path: Path
) -> None:
    config = {**settings, "run.steps": None, "run.epochs": 2, "tasks.limit": 10, **INLINE}
    events: list[str] = []

    class Watch(api.Callback):
        def on_epoch_start(self, epoch: int) -> None:
            events.append(f"start {epoch}")

        def on_epoch_end(self, epoch: int) -> None:
            events.append(f"end {epoch}")

        async def on_batch_end(self, metrics: Any) -> None:
            events.append("batch")

    summary = api.Trainer(config={**config, "eval.holdout": 0.0}, callbacks=[Watch()], quiet=True).train()
    done = trained_tasks(tmp_path / "run")
    assert sorted(done) == sorted((epoch, f"t{number}") for epoch in range(2) for number in range(10))
    assert summary.steps == 5
    assert events.count("batch") == 5
    assert next(event for event in events if event != "batch") == "start 0"
    assert {"end 0", "end 1"} <= set(events)


@pytest.mark.parametrize("update", ["inflight", "drain"])
def test_weights_can_be_published_every_other_step_in_flight_or_drained(settings: Settings, update: str) -> None:
    every_other = {"weights.every": 2, "weights.update": update, "pacing.max_lag": 2}
    config = {**settings, **every_other, "run.steps": 4, **INLINE}
    loaded: list[int] = []

    class Watch(api.Callback):
        def on_policy_updated(self, version: int) -> None:
            loaded.append(version)

    summary = api.Trainer(config=config, callbacks=[Watch()], quiet=True).train()
    assert summary.steps == 4
    assert summary.lag_max <= 2
    assert set(loaded) <= {0, 2, 4}


def test_warm_up_steps_are_on_policy(settings: Settings, tmp_path: Path) -> None:
    config = {**settings, "pacing.warmup_steps": 3, "run.steps": 5, **INLINE}
    api.Trainer(config=config, quiet=True).train()
    assert [line["lag/max"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")][:3] == [0, 0, 0]


@pytest.mark.slow
def test_a_deterministic_run_is_the_same_in_child_processes_which_leave_only_the_run_directory(
    settings: Settings, tmp_path: Path
) -> None:
    config = {**settings, "run.deterministic": True, "pacing.max_lag": 2, "run.steps": 5, "run.threads": 1}
    config |= {"eval.count": 6, "eval.holdout": 0.3, "run.overwrite": True}
    rows = read_lines(Path(config.pop("tasks.path")))
    local = tmp_path / "run-2"
    (local / "logs").mkdir(parents=True)
    (local / "logs" / "learner.log").write_text("of an earlier run")
    watch, results = WatchRuntimeDirectory(), []
    for runtime in ("inline", "inline", "local"):
        run = tmp_path / f"run-{len(results)}"
        values = {**config, "run.dir": str(run), "run.runtime": runtime}
        api.Trainer(tasks=rows, config=values, callbacks=[watch], quiet=True).train()
        losses = [line["loss/policy"] for line in read_lines(run / "metrics.jsonl")]
        journal = journalled(run / "journal")
        tokens = {group: [row.tokens.tolist() for row in record.rows] for group, record in journal.items()}
        rewards = {group: record.rewards for group, record in journal.items()}
        results.append((losses, (run / "batches.jsonl").read_text(), tokens, rewards))
    assert results[0] == results[1] == results[2]
    metrics, batches = read_lines(local / "metrics.jsonl"), read_lines(local / "batches.jsonl")
    assert {name for line in metrics for name in line if not on_metrics_page(name)} == {"step"}
    assert any("eval/reward" in line for line in metrics)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    assert [line["version"] for line in batches] == [0, 1, 2, 3, 4]
    assert [len(line["groups"]) for line in batches] == [4] * 5
    assert {group["lag"] for line in batches for group in line["groups"]} == {0, 1, 2}
    assert max(line["lag/max"] for line in metrics) == 2
    summary = json.loads((local / "summary.json").read_text())
    assert (summary["steps"], summary["exit"]) == (5, 0)
    assert [result["version"] for result in summary["evals"]] == [0, 5]
    assert {"config.toml", "rollouts", "checkpoints", "journal", "logs", "timeline.json"} <= set(os.listdir(local))
    assert watch.directories
    assert [path for path in watch.directories if path.exists()] == []
    logs = {path.name: path.read_text() for path in (local / "logs").iterdir()}
    assert "of an earlier run" not in logs["learner.log"]
    assert not [name for name, text in logs.items() if "Traceback" in text], "a successful run logs no traceback"


# ------------------------------------------------------------------------------------------------------- failures


@pytest.mark.nightly  # of an engine: tests/faults/test_processes.py
@pytest.mark.parametrize("victim", ["learner", "worker-0"])
def test_a_killed_component_that_is_not_restarted_ends_the_run_with_its_name_and_no_orphans(
    settings: Settings, tmp_path: Path, victim: str
) -> None:
    process = start_command("train", *as_arguments({**settings, "run.steps": 100000, "supervise.restarts": 0}))
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)
    children = children_of(process.pid)
    [pid] = [child.pid for child in children if victim in _log_of(child)]
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 4, (out, err)
    assert re.search(rf"{victim}: .*SIGKILL", err), err
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == 4


def _log_of(child: psutil.Process) -> str:
    """A child's standard error is its own log file, which carries its name."""
    return os.readlink(f"/proc/{child.pid}/fd/2")


@pytest.mark.slow
def test_a_signal_stops_the_run_with_a_checkpoint_and_resume_continues_without_losing_a_task(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal goes to the whole process group, as Ctrl-C in a terminal does."""
    run = tmp_path / "run"
    config = {**settings, "run.steps": None, "run.epochs": 3, "eval.holdout": 0.0, "pacing.groups_per_step": 2}
    words = as_arguments({key: value for key, value in config.items() if value is not None})
    process = start_command("train", *words, start_new_session=True)
    wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") >= 4, process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 3, (out, err)
    assert list((run / "checkpoints").iterdir())
    assert f"outpace train --resume {run}" in err
    stopped_at = json.loads((run / "summary.json").read_text())["steps"]
    assert stopped_at < 36
    assert main(["train", "--resume", str(run), "--run.runtime=inline"]) == 0
    assert f"{run}\n" in capsys.readouterr().out
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl")]
    assert steps == list(range(1, 37)), "every step once, in order, across the stop"
    assert sorted(trained_tasks(run)) == sorted((epoch, f"t{n}") for epoch in range(3) for n in range(24))
    assert main(["ledger", str(run)]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert [row["trained"] for row in ledger["epochs"]] == [24, 24, 24]
    assert ledger["twice"] == ledger["never"] == []


def test_a_reward_that_always_raises_ends_the_run_with_its_exception(settings: Settings, rewards: Path) -> None:
    config = {**settings, "rewards.functions": [f"{rewards}:broken"], "pacing.max_failed": 6, **INLINE}
    with pytest.raises(ComponentFailed, match=naming("6 groups", "pacing.max_failed", "no reward today")) as caught:
        api.Trainer(config=config, quiet=True).train()
    assert 'raise RuntimeError("no reward today")' in caught.value.remote_traceback


def test_a_run_in_which_every_group_is_filtered_ends_at_max_filtered(settings: Settings, rewards: Path) -> None:
    config = {
        **settings,
        "rewards.functions": [f"{rewards}:always"],
        "filter.uniform": True,
        "pacing.max_filtered": 20,
        **INLINE,
    }
    with pytest.raises(ComponentFailed, match=naming("20 groups", "pacing.max_filtered", "rewards", "1")):
        api.Trainer(config=config, quiet=True).train()


def test_a_callback_that_raises_ends_the_run_with_its_own_traceback(settings: Settings) -> None:
    class Bad(api.Callback):
        def on_batch_end(self, metrics: Any) -> None:
            raise ValueError("not today")

    with pytest.raises(ComponentFailed, match=naming("on_batch_end", "ValueError: not today")) as caught:
        api.Trainer(config={**settings, **INLINE, "run.steps": 50}, callbacks=[Bad()], quiet=True).train()
    assert "in on_batch_end" in caught.value.remote_traceback


@pytest.mark.parametrize("setting", ["run.seed", "model.path"])
def test_a_refused_resume_leaves_the_run_unchanged(settings: Settings, tmp_path: Path, setting: str) -> None:
    config = {**settings, **INLINE, "run.steps": 2}
    api.Trainer(config=config, quiet=True).train()
    run = tmp_path / "run"
    before = {path.name: path.read_bytes() for path in run.glob("*.*")}
    other = {"run.seed": 5, "model.path": "starter"}[setting]
    with pytest.raises(BadInput, match=naming("--resume", setting)):
        api.Trainer(config={**config, "run.steps": 4, setting: other}, quiet=True).train(resume=True)
    assert {path.name: path.read_bytes() for path in run.glob("*.*")} == before
    assert api.Trainer(config={**config, "run.steps": 4}, quiet=True).train(resume=True).steps == 4


def test_bad_input_does_not_delete_the_run_that_would_be_overwritten(
    settings: Settings, toy_model: Path, tmp_path: Path
) -> None:
    config = {**settings, **INLINE, "run.steps": 2, "run.overwrite": True}
    api.Trainer(config=config, quiet=True).train()
    run = tmp_path / "run"
    before = {path.name: path.read_bytes() for path in run.glob("*.*")}
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in toy_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadInput, match=r"model\.path"):
        api.Trainer(config={**config, "model.path": str(broken)}, quiet=True).train()
    assert {path.name: path.read_bytes() for path in run.glob("*.*")} == before
    assert list((run / "checkpoints").iterdir())


def test_groups_dropped_as_stale_are_waste_and_not_failures(settings: Settings) -> None:
    config = {**settings, "pacing.on_stale": "drop", "pacing.max_lag": 1, "pacing.max_failed": 2, "run.steps": 6}
    config |= {**INLINE, "rollout.max_tokens": 40, "pacing.depth": 3.0, "pacing.max_running": 200}
    assert api.Trainer(config=config, quiet=True).train().steps == 6


def test_a_second_run_on_the_same_directory_is_refused_naming_the_first(settings: Settings, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_command("train", *as_arguments({**settings, "run.steps": 100000}))
    wait_for((run / "run.lock").exists, process)
    with pytest.raises(BadInput, match=naming("run.dir", str(run), str(process.pid))):
        api.Trainer(config={**settings, "run.overwrite": True}, quiet=True).train()
    process.kill()
    process.communicate()


# ------------------------------------------------------------------------------------------------ the Python API


SCRIPT = """
import asyncio
import outpace
from outpace.algorithms.losses import Tokens

OFFSET = 0.5

@outpace.register_task("counting")
def counting(config):
    return [outpace.Task(f"count/{{n}}", f"count {{n}}") for n in range(24)], None

@outpace.register_reward("digits")
def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) + OFFSET for text in completions]

@outpace.advantage
def above_worst(peers):
    return peers.returns_G - peers.returns_G.min()

@outpace.policy_loss(old_policies=("rollout",))
def plain(tokens: Tokens):
    return -tokens.advantages_N * tokens.logp_N

def letters(prompts, completions, **columns):
    return [sum(c.isalpha() for c in text) + OFFSET for text in completions]

async def twice(task, client):
    await client.sample(task.prompt)
    client.observe("again")
    await client.sample()

async def in_a_loop():
    return outpace.Trainer(rewards=[letters, "digits"], rollout=twice, config={config!r}, quiet=True).train()

print(asyncio.run(in_a_loop()).steps)
"""


@pytest.mark.slow
def test_functions_and_registered_names_of_a_script_work_in_every_process_and_inside_a_running_loop(
    settings: Settings, tmp_path: Path
) -> None:
    config = {key: value for key, value in settings.items() if key not in ("tasks.path", "rewards.functions")}
    config |= {"tasks.name": "counting", "advantage.name": "above_worst", "policy_loss.name": "plain"}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(config=config))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "3"
    with pytest.raises(BadInput, match=r"\(rewards, rollout, registered names\)"):
        load_run_config(Path(settings["run.dir"]), [])


async def test_train_async_leaves_the_loop_free(settings: Settings) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.02)
            ticks += 1

    ticking = asyncio.create_task(tick())
    summary = await api.Trainer(config={**settings, **INLINE}, quiet=True).train_async()
    ticking.cancel()
    assert summary.steps == 3
    assert ticks > 5
