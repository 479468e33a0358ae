"""Arguments of a Python caller become a plan or are refused in one line; nothing is dropped or started."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import outpace
from outpace import register_task
from outpace.checkpoint import commit
from outpace.config.load import make_config
from outpace.config.validation import resolve
from outpace.errors import BadInput
from outpace.models import loading
from outpace.monitoring.summary import SummaryBuilder
from outpace.protocols import TaskSource
from outpace.run.plan import (
    RunPlan,
    UserObjects,
    completed_message,
    completed_summary,
    load_run_config,
    make_plan,
    with_newest_checkpoint,
)
from outpace.runtime import by_value
from outpace.runtime.registry import TASKS
from outpace.tasks.producers import BaseDataProducer
from outpace.trainer import Trainer
from outpace.types import Task
from support import naming, write_config

ROWS = [{"id": f"row{number}", "prompt": f"say {number}"} for number in range(40)]
HELDOUT = [{"id": f"held{number}", "prompt": f"tell {number}"} for number in range(5)]


OWN = {"tasks": ROWS, "eval_tasks": HELDOUT}


def reward(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


def write(file: Path, rows: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    return write(tmp_path / "train.jsonl", ROWS)


@pytest.fixture
def heldout_file(tmp_path: Path) -> Path:
    return write(tmp_path / "test.jsonl", HELDOUT)


def plan_of(config: dict[str, Any] | None = None, **given: Any) -> RunPlan:
    trainer = Trainer("starter", rewards=reward, config=config, **given)
    return make_plan(trainer.config, trainer._objects)


def worker_tasks(plan: RunPlan) -> tuple[TaskSource, TaskSource | None]:
    """The tasks as they reach a worker."""
    train, heldout = by_value.unpickle_objects(plan.code)["tasks"]
    assert (len(train), 0 if heldout is None else len(heldout)) == (plan.tasks.count, plan.heldout)
    return train, heldout


@pytest.mark.parametrize("tasks", ["path", "rows", "source"])
@pytest.mark.parametrize("eval_tasks", ["text", "path", "rows", "source"])
def test_training_and_held_out_tasks_can_be_given_in_any_combination_of_forms(
    tasks: str, eval_tasks: str, train_file: Path, heldout_file: Path
) -> None:
    sources = [[Task(row["id"], row["prompt"]) for row in rows] for rows in (ROWS, HELDOUT)]
    plan = plan_of(
        tasks={"path": train_file, "rows": ROWS, "source": sources[0]}[tasks],
        eval_tasks={"text": str(heldout_file), "path": heldout_file, "rows": HELDOUT, "source": sources[1]}[eval_tasks],
    )
    assert (plan.tasks.count, plan.heldout) == (40, 5), "no training task is held out in addition"
    if tasks == "path" and eval_tasks in ("text", "path"):
        assert (plan.config.tasks.path, plan.config.tasks.eval_path) == (str(train_file), str(heldout_file))
        return
    train, heldout = worker_tasks(plan)
    assert heldout is not None
    assert (train[0].id, heldout[0].id) == ("row0", "held0")


def test_a_registered_task_can_be_evaluated_on_rows() -> None:
    plan = plan_of(tasks="countdown", eval_tasks=HELDOUT)
    train, heldout = worker_tasks(plan)
    assert train[0].id.startswith("countdown/train")
    assert heldout is not None
    assert heldout[4].id == "held4"


def test_without_held_out_tasks_a_share_of_the_rows_is_held_out() -> None:
    plan = plan_of(tasks=ROWS, config={"eval.holdout": 0.25})
    train, heldout = worker_tasks(plan)
    assert heldout is not None
    assert len(train) + len(heldout) == 40


def test_the_eval_path_of_the_config_applies_to_training_rows_too(heldout_file: Path) -> None:
    _, heldout = worker_tasks(plan_of(tasks=ROWS, config={"tasks.eval_path": str(heldout_file)}))
    assert heldout is not None
    assert heldout[0].id == "held0"


def test_the_eval_tasks_argument_overrides_the_eval_path_of_the_config(train_file: Path) -> None:
    plan = plan_of(tasks=train_file, eval_tasks=HELDOUT, config={"tasks.eval_path": "nowhere.jsonl"})
    assert plan.heldout == 5
    assert plan.config.tasks.eval_path is None, "the config of the run does not name an unused path"


def test_a_task_limit_applies_to_training_tasks_only() -> None:
    plan = plan_of(tasks=ROWS, eval_tasks=HELDOUT, config={"tasks.limit": 3})
    assert (plan.tasks.count, plan.heldout) == (3, 5)


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def roll(task: Task, client: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"rewards": "countdown", "tools": [add]}, "rewards, tools"),
        ({"rollout": roll, "rewards": []}, "rollout"),
        ({"tasks": ROWS, "rewards": reward}, "tasks, rewards"),
    ],
)
def test_a_command_cannot_resume_a_run_whose_objects_it_cannot_load(
    given: dict[str, Any], names: str, tmp_path: Path
) -> None:
    trainer = Trainer("starter", **given)
    plan = make_plan(trainer.config, trainer._objects)
    write_config(tmp_path, plan.config, plan.objects)
    with pytest.raises(BadInput, match=naming(str(tmp_path), f"({names})")):
        load_run_config(tmp_path, ["--run.steps=3"])


@pytest.mark.parametrize("name", ["arithmetic", "guess"])
def test_a_command_can_resume_a_run_that_its_config_describes_completely(name: str, tmp_path: Path) -> None:
    plan = make_plan(make_config({"tasks.name": name}), UserObjects())
    write_config(tmp_path, plan.config, plan.objects)
    resumed = make_plan(load_run_config(tmp_path, [f"--run.dir={plan.config.run.dir}"]), UserObjects())
    assert resumed.config == plan.config


def test_a_missing_held_out_file_is_named() -> None:
    with pytest.raises(BadInput, match=r"^tasks\.eval_path: .*nowhere\.jsonl"):
        plan_of(tasks=ROWS, eval_tasks="nowhere.jsonl")


@pytest.mark.parametrize("argument", ["tasks", "eval_tasks"])
def test_a_dataset_with_splits_is_refused_with_the_remedy(argument: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    given = {"tasks": ROWS, argument: datasets.DatasetDict({"train": rows, "test": rows})}
    with pytest.raises(BadInput, match=rf"^{argument}: .*DatasetDict .*train, test.*\['train'\]") as caught:
        plan_of(**given)
    assert "\n" not in str(caught.value)
    plan_of(**{**given, argument: rows})


@pytest.mark.parametrize("argument", ["tasks", "eval_tasks"])
def test_rows_without_a_length_are_refused(argument: str) -> None:
    datasets = pytest.importorskip("datasets")
    streamed = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    for unsized in (streamed, iter(ROWS), (row for row in ROWS)):
        with pytest.raises(BadInput, match=rf"^{argument}: .*{type(unsized).__name__}.*\blength\b") as caught:
            plan_of(**{"tasks": ROWS, argument: unsized})
        assert "\n" not in str(caught.value)


def test_rows_that_cannot_be_indexed_by_number_are_refused() -> None:
    class ByName:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, name: str) -> list[str]:
            return {"prompt": ["hi"]}[name]

    with pytest.raises(BadInput, match=r"^tasks: .*ByName.*\brow 0\b"):
        plan_of(tasks=ByName())


def test_a_model_is_downloaded_once_and_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, toy_model: Path
) -> None:
    fetched: list[str] = []

    def download(name: str) -> Path:
        fetched.append(name)
        return toy_model

    monkeypatch.setattr(loading, "_cached", lambda name: toy_model if fetched else None)
    monkeypatch.setattr(loading, "_ask_hub", lambda name: None)
    monkeypatch.setattr(loading, "_download", download)
    trainer = Trainer("owner/model", tasks=ROWS, rewards=reward)
    plan = make_plan(trainer.config, trainer._objects)
    assert fetched == ["owner/model"]
    assert plan.config.model.path == "owner/model"
    assert loading.resolve_model("owner/model") == toy_model, "as a component would"
    assert fetched == ["owner/model"]


# -------------------------------------------------------------------------------------- checks of servers and weights


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("without_gpu")
def test_the_ipc_transport_without_a_gpu_is_refused() -> None:
    config = {"engine.kind": "vllm", "engine.urls": ["http://h:1"], "weights.transport": "ipc"}
    with pytest.raises(BadInput, match=r'^weights\.transport: .*"ipc".*GPU.*"memory"'):
        plan_of(config, tasks=ROWS)


def test_a_weights_directory_that_cannot_be_created_is_refused_and_planning_creates_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    servers = {"engine.kind": "vllm", "engine.urls": ["http://h:1"]}
    for place in (tmp_path / "file" / "below", Path("/proc/no/such")):
        with pytest.raises(BadInput, match=rf"^weights\.dir: .*{place}"):
            plan_of(servers | {"weights.dir": str(place)}, tasks=ROWS)
    plan_of(servers | {"weights.dir": str(tmp_path / "deep" / "down")}, tasks=ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_python_without_the_server_installed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    bare = {"PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1"}
    for python, why in (
        (str(tmp_path / "python"), os.strerror(errno.ENOENT)),
        (str(write(tmp_path / "not_executable", [])), os.strerror(errno.EACCES)),
        (sys.executable, r"\bsglang\b"),
    ):
        config = {"engine.kind": "sglang", "launch.python": python, "launch.env": bare, "run.device": "cpu"}
        with pytest.raises(BadInput, match=rf"^launch\.python {python}: .*{why}"):
            plan_of(config, tasks=ROWS)


async def test_the_server_check_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"^launch\.python {tmp_path}/python: .*{os.strerror(errno.ENOENT)}"):
        plan_of({"engine.kind": "vllm", "launch.python": str(tmp_path / "python")}, tasks=ROWS)


# ----------------------------------------------------------------------------------------------------- completed runs


def completed_run(directory: Path, steps: int, **ended: Any) -> Path:
    write_config(directory, resolve(make_config({"run.steps": steps})))
    summary = SummaryBuilder()
    summary.step(steps, {})
    built = summary.build(**{"wall_s": 1.0, "train_s": 1.0, "seed": 0, "exit": 0} | ended)
    (directory / "summary.json").write_bytes(msgspec.json.encode(built))
    commit.commit(commit.begin(directory / "checkpoints", steps))
    return directory


def resumed(run: Path, **settings: Any) -> RunPlan:
    plan = plan_of({key.replace("__", "."): value for key, value in settings.items()}, tasks=ROWS)
    return with_newest_checkpoint(plan, run)


def test_a_run_with_all_steps_done_is_recognized_as_completed(tmp_path: Path) -> None:
    plan = resumed(completed_run(tmp_path, 4), run__steps=4)
    done = completed_summary(plan, tmp_path)
    assert done is not None
    assert done.steps == 4
    assert "4 steps" in completed_message(plan)
    assert "--run.steps 8" in completed_message(plan)


@pytest.mark.parametrize(("ended", "steps"), [({}, 5), ({"exit": 3}, 4)])
def test_a_run_with_steps_left_or_a_failed_exit_is_not_completed(
    tmp_path: Path, ended: dict[str, Any], steps: int
) -> None:
    plan = resumed(completed_run(tmp_path, 4, **ended), run__steps=steps)
    assert completed_summary(plan, tmp_path) is None


def test_a_run_killed_after_its_last_checkpoint_but_before_its_summary_is_not_completed(tmp_path: Path) -> None:
    run = completed_run(tmp_path, 4)
    (run / "summary.json").unlink()
    assert completed_summary(resumed(run, run__steps=4), run) is None


def test_an_eval_count_above_the_number_of_held_out_tasks_gives_a_warning() -> None:
    warning = plan_of({"eval.count": 6}, **OWN).eval_warning
    assert all(key in warning for key in ("eval.count", "6", "5 tasks")), warning
    assert plan_of({"eval.count": 5}, **OWN).eval_warning == ""
    assert plan_of({"eval.count": 0}, **OWN).eval_warning == ""
    assert plan_of({"eval.holdout": 0.0}, tasks=ROWS).eval_warning == "", "nothing is held out on purpose"


def test_every_held_out_set_is_evaluated_on_at_most_eval_count_tasks(heldout_file: Path) -> None:
    plan = plan_of({"eval.count": 3, "eval.sets": {"more": str(heldout_file)}}, **OWN)
    assert (plan.heldout, plan.sets, plan.eval_counts) == (5, {"more": 5}, {"": 3, "more": 3})
    alone = plan_of({"eval.holdout": 0.0, "eval.sets": {"more": str(heldout_file)}}, tasks=ROWS)
    assert alone.eval_counts == {"more": 5}
    assert plan_of({"eval.count": 0, "eval.sets": {"more": str(heldout_file)}}, **OWN).eval_counts == {}


def test_a_set_that_the_reward_functions_cannot_grade_is_refused() -> None:
    config = make_config({"tasks.name": "countdown", "eval.sets": {"sums": "arithmetic"}})
    with pytest.raises(BadInput, match=naming("eval.sets", "sums", "numbers, target")):
        make_plan(config, UserObjects())


def test_a_run_that_only_declares_metrics_can_be_resumed_without_python(own_metrics: None) -> None:
    outpace.metric("answer/digits", rule="max")
    plan = make_plan(make_config({"tasks.name": "countdown"}), UserObjects())
    assert plan.objects == ()
    assert list(by_value.unpickle_objects(plan.code)["registered"].metrics) == ["answer/digits"]


class Nothing(BaseDataProducer):
    def produce(self, model: Any, global_step: int, **kwargs: Any) -> Any:
        return []


def test_a_producer_gets_the_declared_metrics(own_metrics: None) -> None:
    outpace.metric("data/score", rule="max")
    plan = plan_of({}, producer=Nothing())
    assert plan.producer_code is not None
    assert list(by_value.unpickle_objects(plan.producer_code)["registered"].metrics) == ["data/score"]


def test_a_registered_task_that_is_only_a_held_out_set_reaches_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TASKS, "registered", {})
    register_task("mine")(lambda config: (ROWS, [Task("held", "say it")]))
    plan = plan_of({"eval.sets": {"own": "mine"}}, **OWN)
    assert plan.sets == {"own": 1}
    assert list(by_value.unpickle_objects(plan.code)["registered"].components["tasks.name"]) == ["mine"]
