"""Runs whose tasks come from a data producer."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import outpace as api
from outpace.controller.ledger import ledger_report
from outpace.errors import ComponentFailed
from outpace.tasks.stream import StreamedTasks
from support import INLINE, as_arguments, naming, read_lines, run_command, start_command

PRODUCER = '''
import os
import time
from pathlib import Path

from outpace import BaseDataProducer


class Questions(BaseDataProducer):
    """Asks the policy what the next question is about."""

    def __init__(self, config, count=4, pause_s=0.0):
        super().__init__(config)
        self.count, self.pause_s = count, pause_s

    def produce(self, model, global_step, *, round, processing_class, **kwargs):
        time.sleep(self.pause_s)
        answers = model.generate([f"say {number}" for number in range(self.count)], max_tokens=3)
        assert processing_class is not None
        return [{"prompt": f"say {answer.text}", "step": global_step} for answer in answers]


class Dying(BaseDataProducer):
    """Its process dies once, in the second round."""

    def __init__(self, config, mark):
        super().__init__(config)
        self.mark = Path(mark)

    def produce(self, model, global_step, *, round, **kwargs):
        if round == 1 and not self.mark.exists():
            self.mark.touch()
            os._exit(3)
        return [{"prompt": f"say {number}"} for number in range(4)]
'''


@pytest.fixture
def producers(tmp_path: Path) -> Path:
    file = tmp_path / "producers.py"
    file.write_text(PRODUCER)
    return file


@pytest.fixture
def values(settings: dict[str, Any], producers: Path) -> dict[str, Any]:
    """Settings of a run with a producer: four prompts, two passes, one step per pass."""
    return {
        **{key: value for key, value in settings.items() if key != "tasks.path"},
        "tasks.producer": f"{producers}:Questions",
        "producer.mini_epochs": 2,
        "run.steps": 4,
        "checkpoint.every": 1,
    }


def used(run: Path) -> list[int]:
    """Visits in the records of a run, in order."""
    lines = read_lines(run / "batches.jsonl")
    return [each["task"] for line in lines for each in [*line["groups"], *line.get("settled", [])]]


@pytest.mark.slow
def test_a_deterministic_run_gives_the_same_bits_also_when_it_is_resumed_and_uses_every_task_once_per_pass(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values |= {**INLINE, "run.deterministic": True, "run.threads": 1, "pacing.max_lag": 1, "producer.max_rollouts": 3}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    summary = api.Trainer(config=values | {"run.dir": str(whole), "run.steps": 20}, quiet=True).train()
    assert summary.steps == 6, "three rounds of two passes over four tasks, four groups per step"
    api.Trainer(config=values | {"run.dir": str(resumed), "run.steps": 3}, quiet=True).train()
    api.Trainer(config=values | {"run.dir": str(resumed), "run.steps": 20}, quiet=True).train(resume=True)
    for run in (whole, resumed):
        assert sorted(used(run)) == list(range(24))
        assert (ledger_report(run)["twice"], ledger_report(run)["never"]) == ([], [])
    assert results(whole) == results(resumed)
    tasks = StreamedTasks(whole / "journal" / "tasks.jsonl")
    assert (len(tasks), tasks.rounds) == (24, 3)
    rounds = [[tasks[visit] for visit in range(start, start + 8)] for start in (0, 8, 16)]
    assert all(each[:4] == each[4:] for each in rounds), "the second pass has the same tasks"
    assert [each[0].columns["step"] for each in rounds] == [0, 2, 4], "a round is asked for when the last is trained"


def results(run: Path) -> Any:
    """What a run was given and what it computed."""
    keys = ("loss/policy", "reward/mean", "grad_norm", "lag/mean")
    steps = [[line[key] for key in keys] for line in read_lines(run / "metrics.jsonl")]
    assert len(steps) == 6
    return steps, used(run), (run / "journal" / "tasks.jsonl").read_bytes()


class Failing(api.BaseDataProducer):
    def produce(self, model: Any, global_step: int, **kwargs: Any) -> Any:
        if global_step:
            raise ConnectionError("no questions today")
        return [{"prompt": f"say {number}"} for number in range(4)]


def test_a_producer_that_raises_ends_the_run_with_a_checkpoint_and_its_traceback(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values |= {**INLINE, "tasks.producer": None, "checkpoint.every": 0}
    producer = Failing(api.ProducerConfig(mini_epochs=2))
    with pytest.raises(ComponentFailed, match=naming("producer", "round 1", "no questions today")) as caught:
        api.Trainer(config=values, producer=producer, quiet=True).train()
    assert "in produce" in caught.value.remote_traceback
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]


DETERMINISTIC = {"run.deterministic": True, "run.threads": 1}
BACKGROUND = {"producer.async_prefetch": True, "producer.prefetch_depth": 2, "producer.sync_warmup_rollouts": 1}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "mode", [pytest.param(DETERMINISTIC, marks=pytest.mark.nightly), BACKGROUND], ids=["deterministic", "background"]
)
def test_a_run_killed_at_ten_random_moments_settles_every_visit_once(
    values: dict[str, Any], tmp_path: Path, mode: dict[str, Any]
) -> None:
    """Ten kills of the whole process group. The result of a deterministic run is that of one without kills."""
    rng = random.Random(7)
    values |= {"producer.max_rollouts": 6, "run.steps": 12, "producer.options": json.dumps({"pause_s": 0.3}), **mode}
    killed = tmp_path / "killed"
    reached = [kill_at_random_moment(killed, values, rng) for _ in range(10)]
    assert len(set(reached)) > 3, f"the kills are spread over the run: {reached}"
    done = run_command("train", *start_of(killed, values))
    assert done.returncode == 0, done.stderr
    tasks = StreamedTasks(killed / "journal" / "tasks.jsonl")
    assert (len(tasks), tasks.rounds) == (48, 6)
    assert sorted(used(killed)) == list(range(48)), "every task once per pass"
    assert (ledger_report(killed)["twice"], ledger_report(killed)["never"]) == ([], [])
    if mode is DETERMINISTIC:
        whole = tmp_path / "whole"
        done = run_command("train", *start_of(whole, values))
        assert done.returncode == 0, done.stderr
        first, second = ((run / "journal" / "tasks.jsonl").read_bytes() for run in (whole, killed))
        assert first == second, "a run that was killed is asked for the same rounds"


def start_of(run: Path, values: dict[str, Any]) -> list[str]:
    begun = (run / "config.toml").exists()
    return ["--resume", str(run)] if begun else as_arguments(values | {"run.dir": str(run)})


def kill_at_random_moment(run: Path, values: dict[str, Any], rng: random.Random) -> int:
    """Start or resume the run and kill it after it has written a few more rounds or steps. Return how much there is."""
    before, more = progress(run), rng.randint(0, 2)
    process = start_command("train", *start_of(run, values), start_new_session=True)
    deadline = time.monotonic() + 120
    while progress(run) < before + more and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(rng.uniform(0.0, 0.5))
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return progress(run)


def progress(run: Path) -> int:
    """Rounds and steps on disk."""
    batches = run / "batches.jsonl"
    steps = batches.read_bytes().count(b"\n") if batches.exists() else 0
    tasks = StreamedTasks(run / "journal" / "tasks.jsonl")
    len(tasks)
    return steps + tasks.rounds


@pytest.mark.slow
def test_a_producer_whose_process_dies_is_restarted_and_asked_for_the_round_again(
    values: dict[str, Any], producers: Path, tmp_path: Path
) -> None:
    values |= {"tasks.producer": f"{producers}:Dying", "producer.options": json.dumps({"mark": str(tmp_path / "mark")})}
    done = run_command("train", *as_arguments(values))
    assert done.returncode == 0, done.stderr
    assert "producer" in done.stdout + done.stderr
    assert (tmp_path / "mark").exists()
    assert sorted(used(tmp_path / "run")) == list(range(16))
