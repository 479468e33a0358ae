"""What a Python caller hands in becomes a plan, or one line: nothing is dropped and nothing is started."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outpace.checkpoint import commit
from outpace.config.load import dump_toml, make_config
from outpace.config.validation import resolve
from outpace.errors import BadInput
from outpace.models import loading
from outpace.monitoring.summary import SummaryBuilder
from outpace.protocols import TaskSource
from outpace.run.plan import (
    UserObjects,
    completed_message,
    completed_summary,
    load_run_config,
    make_plan,
    with_newest_checkpoint,
)
from outpace.run.session import RunPlan
from outpace.runtime import by_value
from outpace.trainer import Trainer
from outpace.types import Task
from support import naming

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


def carried(plan: RunPlan) -> tuple[TaskSource, TaskSource | None]:
    """The tasks as a worker gets them."""
    train, heldout = by_value.unpickle_objects(plan.code)["tasks"]
    assert (len(train), 0 if heldout is None else len(heldout)) == (plan.tasks.count, plan.heldout)
    return train, heldout


@pytest.mark.parametrize("tasks", ["path", "rows", "source"])
@pytest.mark.parametrize("eval_tasks", ["text", "path", "rows", "source"])
def test_training_and_held_out_tasks_are_given_in_any_two_ways(
    tasks: str, eval_tasks: str, train_file: Path, heldout_file: Path
) -> None:
    sources = [[Task(row["id"], row["prompt"]) for row in rows] for rows in (ROWS, HELDOUT)]
    plan = plan_of(
        tasks={"path": train_file, "rows": ROWS, "source": sources[0]}[tasks],
        eval_tasks={"text": str(heldout_file), "path": heldout_file, "rows": HELDOUT, "source": sources[1]}[eval_tasks],
    )
    assert (plan.tasks.count, plan.heldout) == (40, 5), "nothing of the training tasks is held out as well"
    if tasks == "path" and eval_tasks in ("text", "path"):
        assert (plan.config.tasks.path, plan.config.tasks.eval_path) == (str(train_file), str(heldout_file))
        return
    train, heldout = carried(plan)
    assert heldout is not None
    assert (train[0].id, heldout[0].id) == ("row0", "held0")


def test_a_registered_task_may_be_held_out_by_rows() -> None:
    plan = plan_of(tasks="countdown", eval_tasks=HELDOUT)
    train, heldout = carried(plan)
    assert train[0].id.startswith("countdown/train")
    assert heldout is not None
    assert heldout[4].id == "held4"


def test_without_held_out_tasks_a_share_of_the_rows_is_held_out() -> None:
    plan = plan_of(tasks=ROWS, config={"eval.holdout": 0.25})
    train, heldout = carried(plan)
    assert heldout is not None
    assert len(train) + len(heldout) == 40


def test_the_configs_own_held_out_path_counts_for_rows_too(heldout_file: Path) -> None:
    _, heldout = carried(plan_of(tasks=ROWS, config={"tasks.eval_path": str(heldout_file)}))
    assert heldout is not None
    assert heldout[0].id == "held0"


def test_the_argument_overrides_the_configs_held_out_path(train_file: Path) -> None:
    plan = plan_of(tasks=train_file, eval_tasks=HELDOUT, config={"tasks.eval_path": "nowhere.jsonl"})
    assert plan.heldout == 5
    assert plan.config.tasks.eval_path is None, "the run's config does not name what was not used"


def test_a_limit_is_for_training_alone() -> None:
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
def test_a_command_does_not_go_on_with_a_run_whose_objects_it_cannot_have(
    given: dict[str, Any], names: str, tmp_path: Path
) -> None:
    trainer = Trainer("starter", **given)
    plan = make_plan(trainer.config, trainer._objects)
    (tmp_path / "config.toml").write_text(dump_toml(plan.config, plan.objects))
    with pytest.raises(BadInput, match=naming(str(tmp_path), f"({names})")):
        load_run_config(tmp_path, ["--run.steps=3"])


@pytest.mark.parametrize("name", ["arithmetic", "guess"])
def test_a_command_goes_on_with_a_run_that_its_config_says_all_of(name: str, tmp_path: Path) -> None:
    plan = make_plan(make_config({"tasks.name": name}), UserObjects())
    (tmp_path / "config.toml").write_text(dump_toml(plan.config, plan.objects))
    assert resolve(load_run_config(tmp_path, [f"--run.dir={plan.config.run.dir}"])) == plan.config


def test_a_held_out_file_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInput, match=r"^tasks\.eval_path: .*nowhere\.jsonl"):
        plan_of(tasks=ROWS, eval_tasks="nowhere.jsonl")


@pytest.mark.parametrize("argument", ["tasks", "eval_tasks"])
def test_a_dataset_with_splits_is_refused_with_the_way_out(argument: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    given = {"tasks": ROWS, argument: datasets.DatasetDict({"train": rows, "test": rows})}
    with pytest.raises(BadInput, match=rf"^{argument}: .*DatasetDict .*train, test.*\['train'\]") as caught:
        plan_of(**given)
    assert "\n" not in str(caught.value)
    plan_of(**{**given, argument: rows})


@pytest.mark.parametrize("argument", ["tasks", "eval_tasks"])
def test_rows_that_cannot_be_counted_are_refused(argument: str) -> None:
    datasets = pytest.importorskip("datasets")
    streamed = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    for unsized in (streamed, iter(ROWS), (row for row in ROWS)):
        with pytest.raises(BadInput, match=rf"^{argument}: .*{type(unsized).__name__}.*\blength\b") as caught:
            plan_of(**{"tasks": ROWS, argument: unsized})
        assert "\n" not in str(caught.value)


def test_rows_that_have_no_first_one_by_number_are_refused() -> None:
    class ByName:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, name: str) -> list[str]:
            return {"prompt": ["hi"]}[name]

    with pytest.raises(BadInput, match=r"^tasks: .*ByName.*\brow 0\b"):
        plan_of(tasks=ByName())


def test_a_model_is_fetched_once_and_before_anything_starts(monkeypatch: pytest.MonkeyPatch, toy_model: Path) -> None:
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
    assert loading.resolve_model("owner/model") == toy_model, "as a part would"
    assert fetched == ["owner/model"]


# ------------------------------------------------------------------------------------ servers and weights, beforehand


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("without_gpu")
def test_sharing_the_memory_of_a_gpu_that_is_not_there_is_refused() -> None:
    config = {"engine.kind": "vllm", "engine.urls": ["http://h:1"], "weights.transport": "ipc"}
    with pytest.raises(BadInput, match=r'^weights\.transport: .*"ipc".*GPU.*"memory"'):
        plan_of(config, tasks=ROWS)


def test_a_folder_for_weights_that_cannot_be_made_is_refused_and_one_that_can_is_left_to_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    servers = {"engine.kind": "vllm", "engine.urls": ["http://h:1"]}
    for place in (tmp_path / "file" / "below", Path("/proc/no/such")):
        with pytest.raises(BadInput, match=rf"^weights\.dir: .*{place}"):
            plan_of(servers | {"weights.dir": str(place)}, tasks=ROWS)
    plan_of(servers | {"weights.dir": str(tmp_path / "deep" / "down")}, tasks=ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_python_without_the_server_in_it_is_refused_before_anything_starts(tmp_path: Path) -> None:
    bare = {"PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1"}
    for python, why in (
        (str(tmp_path / "python"), os.strerror(errno.ENOENT)),
        (str(write(tmp_path / "not_executable", [])), os.strerror(errno.EACCES)),
        (sys.executable, r"\bsglang\b"),
    ):
        config = {"engine.kind": "sglang", "launch.python": python, "launch.env": bare, "run.device": "cpu"}
        with pytest.raises(BadInput, match=rf"^launch\.python {python}: .*{why}"):
            plan_of(config, tasks=ROWS)


async def test_servers_are_looked_for_also_where_a_loop_is_running(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"^launch\.python {tmp_path}/python: .*{os.strerror(errno.ENOENT)}"):
        plan_of({"engine.kind": "vllm", "launch.python": str(tmp_path / "python")}, tasks=ROWS)


# ------------------------------------------------------------------------------------------------- nothing left to do


def a_run_that_is_done(directory: Path, steps: int, **ended: Any) -> Path:
    (directory / "config.toml").write_text(dump_toml(resolve(make_config({"run.steps": steps}))))
    summary = SummaryBuilder()
    summary.step(steps, {})
    built = summary.build(**{"wall_s": 1.0, "train_s": 1.0, "seed": 0, "exit": 0} | ended)
    (directory / "summary.json").write_bytes(msgspec.json.encode(built))
    commit.commit(commit.begin(directory / "checkpoints", steps))
    return directory


def resumed(run: Path, **settings: Any) -> RunPlan:
    plan = plan_of({key.replace("__", "."): value for key, value in settings.items()}, tasks=ROWS)
    return with_newest_checkpoint(plan, run)


def test_a_run_whose_steps_are_done_is_known_as_such(tmp_path: Path) -> None:
    plan = resumed(a_run_that_is_done(tmp_path, 4), run__steps=4)
    done = completed_summary(plan, tmp_path)
    assert done is not None
    assert done.steps == 4
    assert "4 steps" in completed_message(plan)
    assert "--run.steps 8" in completed_message(plan)


@pytest.mark.parametrize(("ended", "steps"), [({}, 5), ({"exit": 3}, 4)])
def test_a_run_that_is_to_go_on_or_did_not_end_well_is_not(tmp_path: Path, ended: dict[str, Any], steps: int) -> None:
    plan = resumed(a_run_that_is_done(tmp_path, 4, **ended), run__steps=steps)
    assert completed_summary(plan, tmp_path) is None


def test_a_run_that_was_killed_after_its_last_checkpoint_has_still_to_say_what_it_came_to(tmp_path: Path) -> None:
    run = a_run_that_is_done(tmp_path, 4)
    (run / "summary.json").unlink()
    assert completed_summary(resumed(run, run__steps=4), run) is None


def test_an_evaluation_of_more_tasks_than_are_held_out_is_warned_of() -> None:
    warning = plan_of({"eval.count": 6}, **OWN).eval_warning
    assert all(key in warning for key in ("eval.count", "6", "5 tasks")), warning
    assert plan_of({"eval.count": 5}, **OWN).eval_warning == ""
    assert plan_of({"eval.count": 0}, **OWN).eval_warning == ""
    assert plan_of({"eval.holdout": 0.0}, tasks=ROWS).eval_warning == "", "nothing is held out on purpose"
