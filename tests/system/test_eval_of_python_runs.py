"""`outpace eval` on runs that a Python program started with its own objects."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import outpace as api
from outpace.cli import main
from outpace.commands.evaluate import evaluate_model
from outpace.config.load import make_config
from outpace.errors import BadInput
from outpace.monitoring.line_file import read_lines
from outpace.run.objects import SavedObjects, reference_of
from outpace.run.plan import load_run_with_objects, make_plan
from support import INLINE, naming, write_config

Settings = dict[str, Any]

ROWS = [
    {"id": f"row{number}", "prompt": f"say {number}", "answer": "3", "wanted": [number, None, "ä"]}
    for number in range(12)
]
HELDOUT = [
    {"id": f"held{number}", "prompt": f"tell {number}", "answer": "3", "wanted": [number]} for number in range(5)
]

SCRIPT = """
import json, pathlib, sys
import outpace

def wanted_length(completions, wanted, **columns):
    assert all(isinstance(each, list) for each in wanted)
    return [len(text) / 100 for text in completions]

def train():
    rows, heldout, settings = json.loads(pathlib.Path(sys.argv[1]).read_text())
    outpace.Trainer(tasks=rows, eval_tasks=heldout, rewards=wanted_length, config=settings, quiet=True).train()

{guard}train()
"""


def top_level(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


async def careful(task: api.Task, client: Any) -> None:
    await client.sample(task.prompt, temperature=0.0)


@pytest.fixture
def small(settings: Settings) -> Settings:
    own = {key: value for key, value in settings.items() if key not in ("tasks.path", "rewards.functions")}
    return {**own, "run.steps": 1, "filter.uniform": False, **INLINE}


def run_script(directory: Path, small: Settings, guard: str) -> Path:
    script = directory / "mine" / "my_training.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(guard=guard))
    (directory / "given.json").write_text(json.dumps([ROWS, HELDOUT, small]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), str(directory / "given.json")])
        runpy.run_path(str(script), run_name="__main__")
    return Path(small["run.dir"])


@pytest.mark.slow
def test_a_run_of_a_script_with_rows_and_a_function_is_evaluated(
    small: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELDOUT[:2]))
    sets = {"more": str(tmp_path / "more.jsonl")}
    evaluation = {"eval.count": 4, "eval.attempts": 2, "eval.k": [1, 2], "eval.sets": sets, "eval.max_tokens": 6}
    run = run_script(tmp_path, small | evaluation, 'if __name__ == "__main__": ')
    capsys.readouterr()
    completions = tmp_path / "completions.jsonl"
    assert main(["eval", str(run), "--completions", str(completions)]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert (measured["eval/count"], measured["eval/failed"]) == (4, 0), "the tasks that the run itself evaluates"
    last = json.loads((run / "summary.json").read_text())["evals"][-1]
    assert measured["eval/reward"] == pytest.approx(last["reward"], abs=0.02)
    own = list(read_lines(run / "evals.jsonl"))[-1]
    assert measured.keys() - {"model"} == own.keys() - {"step", "eval/version", "eval/version_newest"}
    assert measured.keys() >= {
        "eval/stderr",
        "eval/p50",
        "eval/pass@2",
        "eval/more/reward",
        "eval/reward/wanted_length/p90",
    }
    for lines in (read_lines(completions), read_lines(run / "rollouts/evals/step-000001.jsonl")):
        kept = [(line["heldout_set"], line["task_id"], line["attempt"]) for line in lines]
        assert kept == [
            (name, f"held{task}", attempt) for name, count in (("", 4), ("more", 2))
            for task in range(count) for attempt in range(2)
        ]  # fmt: skip


def test_a_script_that_trains_when_it_is_imported_is_refused_and_starts_nothing(
    small: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_script(tmp_path, {**small, "eval.count": 4}, "")
    assert main(["eval", str(run)]) == 2
    output = capsys.readouterr().err
    assert "my_training.py" in output
    assert len(output.splitlines()) == 1


def test_an_object_that_cannot_be_imported_again_is_named(small: Settings) -> None:
    short = lambda completions, **_: [1.0 / (1 + len(text)) for text in completions]  # noqa: E731
    trainer = api.Trainer(tasks=ROWS, eval_tasks=HELDOUT, rewards=short, config=small, quiet=True)
    trainer.train()
    with pytest.raises(BadInput, match=naming("rewards", "lambda", "trainer.evaluate")):
        evaluate_model(Path(small["run.dir"]), [])


def test_objects_are_restored_as_they_were_given(small: Settings) -> None:
    config = {**small, "eval.count": 3}
    api.Trainer(tasks=ROWS, eval_tasks=HELDOUT, rewards=[top_level, "number"], config=config, quiet=True).train()
    _, objects = load_run_with_objects(Path(small["run.dir"]), [])
    assert list(objects.eval_tasks or []) == HELDOUT[:3]
    loaded, named = objects.rewards
    assert callable(loaded)
    assert (loaded.__name__, named) == ("top_level", "number")


@pytest.mark.parametrize("count", [0, 3])
def test_a_run_without_held_out_tasks_is_not_evaluated_on_other_tasks(small: Settings, count: int) -> None:
    config = {**small, "eval.count": count, "eval.holdout": 0}
    api.Trainer(tasks=ROWS, rewards=top_level, config=config, quiet=True).train()
    with pytest.raises(BadInput, match=r"^tasks\.eval_path: "):
        load_run_with_objects(Path(small["run.dir"]), ["--eval.count=4"])


def test_a_run_of_python_objects_is_evaluated_on_held_out_tasks_that_its_config_names(
    small: Settings, tmp_path: Path
) -> None:
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELDOUT))
    run = tmp_path / "objects"
    run.mkdir()
    write_config(run, make_config({**small, "eval.count": 3}), ["tasks", "rewards", "eval_rollout"])
    references = {"rewards": [f"{__name__}:top_level"], "eval_rollout": f"{__name__}:careful"}
    SavedObjects(references).write(run)
    for setting, name in (("--eval.sets=more=", "more"), ("--tasks.eval_path=", "")):
        config, objects = load_run_with_objects(run, [f"{setting}{tmp_path / 'more.jsonl'}"])
        assert getattr(objects.eval_rollout, "__name__", "") == "careful"
        assert make_plan(config, objects).eval_counts == {name: 3}


def test_only_objects_that_another_process_can_import_have_a_reference() -> None:
    assert reference_of(top_level) == f"{__name__}:top_level"
    assert reference_of(json.dumps) == "json:dumps"
    assert reference_of("countdown") == "countdown"
    assert reference_of(lambda: None) is None
    assert reference_of(test_an_object_that_cannot_be_imported_again_is_named.__call__) is None
