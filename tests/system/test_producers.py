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


def test_a_resumed_run_uses_every_task_of_every_round_once_per_pass(values: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "produced"
    values |= {"run.dir": str(run), **INLINE, "producer.max_rollouts": 3, "run.steps": 3}
    api.Trainer(config=values, quiet=True).train()
    values |= {"run.steps": 20}
    summary = api.Trainer(config=values, quiet=True).train(resume=True)
    assert summary.steps == 6, "three rounds of two passes over four tasks, four groups per step"
    assert sorted(used(run)) == list(range(24))
    tasks = StreamedTasks(run / "journal" / "tasks.jsonl")
    assert (len(tasks), tasks.rounds) == (24, 3)
    rounds = [[tasks[visit] for visit in range(start, start + 8)] for start in (0, 8, 16)]
    assert all(each[:4] == each[4:] for each in rounds), "the second pass has the same tasks"
    assert [each[0].columns["step"] for each in rounds] == [0, 2, 4], "a round is asked for when the last is trained"
    assert (ledger_report(run)["twice"], ledger_report(run)["never"]) == ([], [])


def test_a_deterministic_producer_in_a_deterministic_run_gives_the_same_bits_twice(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values |= {**INLINE, "run.deterministic": True, "run.threads": 1, "pacing.max_lag": 1}
    results = []
    for name in ("first", "second"):
        api.Trainer(config=values | {"run.dir": str(tmp_path / name)}, quiet=True).train()
        steps = read_lines(tmp_path / name / "metrics.jsonl")
        losses = [(step.get("loss"), step.get("reward"), step.get("grad_norm")) for step in steps]
        results.append((losses, (tmp_path / name / "journal" / "tasks.jsonl").read_bytes(), used(tmp_path / name)))
    assert results[0] == results[1]
    assert len(results[0][0]) >= 4


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


@pytest.mark.slow
def test_a_run_killed_at_ten_random_moments_settles_every_visit_once(values: dict[str, Any], tmp_path: Path) -> None:
    """Ten kills of the whole process group. The result is that of a run without."""
    rng = random.Random(7)
    values |= {"run.deterministic": True, "run.threads": 1, "producer.max_rollouts": 6, "run.steps": 12}
    values |= {"producer.options": '{"pause_s": 0.3}'}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run_command("train", *as_arguments(values | {"run.dir": str(whole)}))
    assert done.returncode == 0, done.stderr
    reached = [kill_at_random_moment(killed, values, rng) for _ in range(10)]
    assert len(set(reached)) > 3, f"the kills are spread over the run: {reached}"
    done = run_command("train", *start_of(killed, values))
    assert done.returncode == 0, done.stderr
    for run in (whole, killed):
        tasks = StreamedTasks(run / "journal" / "tasks.jsonl")
        assert (len(tasks), tasks.rounds) == (48, 6)
        assert sorted(used(run)) == list(range(48)), "every task once per pass"
        assert (ledger_report(run)["twice"], ledger_report(run)["never"]) == ([], [])
    first, second = ((run / "journal" / "tasks.jsonl").read_bytes() for run in (whole, killed))
    assert first == second, "a deterministic run that was killed is asked for the same rounds"


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
