"""GPU placement for every number of GPUs. No test needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.config import Config
from outpace.errors import BadInput
from outpace.hardware.cores import (
    ComputeUnits,
    compute_units,
    learner_shares_cores,
    learner_threads,
    shares_cores,
)
from outpace.hardware.placement import (
    Placement,
    assign_gpus,
    assign_servers,
    listed_gpus,
    placement_of,
    planned_placement,
    torch_has_cuda,
)
from outpace.run.build import ComponentSpecs
from outpace.runtime.components import Resources
from outpace.runtime.torchrun import TorchrunProcess
from support import names


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if torch were built with CUDA, whatever build is installed."""
    monkeypatch.setattr("outpace.hardware.placement.torch_has_cuda", lambda: True)


def config(**values: Any) -> Config:
    """The config of a run with launched vLLM servers, with overrides `values` (section__key=value)."""
    sections: dict[str, dict[str, Any]] = {"run": {"device": "auto"}, "engine": {"kind": "vllm"}}
    for key, value in values.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    return Config.model_validate(sections)


def placed(gpus: int, **values: Any) -> Placement:
    return assign_gpus(config(**values), [str(index) for index in range(gpus)])


def on(placement: Placement) -> list[str]:
    return ["+".join(engine.gpus) for engine in placement.engines]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "embedded"])
@pytest.mark.parametrize(
    ("gpus", "engines", "expected"),
    [
        (0, 1, [""]),
        (0, 2, ["", ""]),
        (1, 1, ["0"]),
        (1, 3, ["0", "0", "0"]),
        (2, 1, ["1"]),
        (2, 2, ["1", "1"]),
        (4, 1, ["1"]),
        (4, 2, ["1", "2"]),
        (4, 3, ["1", "2", "3"]),
        (4, 5, ["1", "2", "3", "1", "2"]),
        (8, 7, ["1", "2", "3", "4", "5", "6", "7"]),
    ],
)
def test_the_learner_gets_the_first_gpu_and_engines_cycle_through_the_others(
    kind: str, gpus: int, engines: int, expected: list[str]
) -> None:
    placement = placed(gpus, engine__kind=kind, engine__count=engines)
    assert placement.learner.gpus == (["0"] if gpus else [])
    assert on(placement) == expected


@pytest.mark.parametrize(
    ("gpus", "engines", "args", "expected"),
    [
        (4, 1, ["--tensor-parallel-size", "2"], ["1+2"]),
        (8, 3, ["-tp", "2"], ["1+2", "3+4", "5+6"]),
        (8, 2, ["--tensor_parallel_size=2", "--pipeline-parallel-size", "2"], ["1+2+3+4", "1+2+3+4"]),
        (8, 1, ["-tp=2", "--data-parallel-size", "3"], ["1+2+3+4+5+6"]),
        (2, 1, ["-tp", "2"], ["0+1"]),
        (8, 2, ["-tp", "8"], ["0+1+2+3+4+5+6+7"] * 2),
    ],
)
def test_a_server_with_parallelism_gets_that_many_gpus(
    gpus: int, engines: int, args: list[str], expected: list[str]
) -> None:
    assert on(placed(gpus, engine__count=engines, launch__args=args)) == expected


def test_data_parallel_attention_of_sglang_needs_no_extra_gpus() -> None:
    args = ["--tp", "2", "--dp", "2", "--enable-dp-attention"]
    assert on(placed(4, engine__kind="sglang", launch__args=args)) == ["1+2"]


@pytest.mark.parametrize(
    ("gpus", "values", "key"),
    [
        (2, {"launch__args": ["-tp", "4"]}, "launch.args"),
        (2, {"launch__args": ["-tp", "two"]}, "launch.args"),
        (2, {"launch__args": ["-tp"]}, "launch.args"),
        (0, {"run__device": "cuda"}, "run.device"),
        (1, {"rollout__gpus": 2}, "rollout.gpus"),
        (0, {"rollout__gpus": 1}, "rollout.gpus"),
        (4, {"launch__args": ["-tp", "2"], "launch__env": {"CUDA_VISIBLE_DEVICES": "3"}}, "launch.env"),
        (4, {"launch__args": ["-tp", "2"], "weights__transport": "ipc"}, "weights.transport"),
        (1, {"launch__gpu_memory": 0.9}, "launch.gpu_memory"),
        (1, {"launch__gpu_memory": 0.45, "engine__count": 2}, "launch.gpu_memory"),
        (2, {"launch__gpu_memory": 0.6, "engine__count": 2}, "launch.gpu_memory"),
    ],
)
def test_too_few_gpus_and_too_large_memory_budgets_are_refused_by_setting_name(
    gpus: int, values: dict[str, Any], key: str
) -> None:
    with pytest.raises(BadInput) as refused:
        placed(gpus, **values)
    assert str(refused.value).startswith(f"{key}: ")
    assert "\n" not in str(refused.value)


def test_the_memory_budget_suggested_in_a_refusal_fits() -> None:
    with pytest.raises(BadInput, match=r"\b0\.42\b"):
        placed(1, launch__gpu_memory=0.45, engine__count=2)
    placed(1, launch__gpu_memory=0.42, engine__count=2)


@pytest.mark.parametrize(
    ("gpus", "values", "learner", "server"),
    [
        (1, {}, 0.55, 0.4),
        (1, {"engine__count": 2}, 0.55, 0.2),
        (1, {"engine__count": 2, "launch__gpu_memory": 0.4}, 0.15, 0.4),
        (2, {}, 1.0, 0.9),
        (2, {"engine__count": 3}, 1.0, 0.3),
        (2, {"launch__gpu_memory": 0.5}, 1.0, 0.5),
        (2, {"launch__args": ["-tp", "2"]}, 0.55, 0.4),
        (1, {"engine__kind": "embedded"}, 1.0, 1.0),
        (1, {"engine__urls": ["http://elsewhere:1"]}, 1.0, 1.0),
    ],
)
def test_processes_on_one_gpu_share_its_memory(
    gpus: int, values: dict[str, Any], learner: float, server: float
) -> None:
    placement = placed(gpus, **values)
    assert placement.learner.memory == pytest.approx(learner)
    assert placement.engines[0].memory == pytest.approx(server)


def test_unevenly_distributed_servers_split_the_memory_of_each_gpu_separately() -> None:
    placement = placed(3, engine__count=3)
    assert on(placement) == ["1", "2", "1"]
    assert [engine.memory for engine in placement.engines] == pytest.approx([0.45, 0.9, 0.45])


@pytest.mark.parametrize(
    ("gpus", "values", "transport"),
    [
        (1, {}, "ipc"),
        (1, {"engine__count": 2}, "ipc"),
        (2, {}, "memory"),
        (2, {"launch__args": ["-tp", "2"]}, "memory"),
        (0, {}, "memory"),
        (1, {"run__device": "cpu"}, "memory"),
        (1, {"engine__kind": "embedded"}, "memory"),
        (1, {"engine__kind": "sglang"}, "files"),
        (1, {"engine__urls": ["http://elsewhere:1"]}, "files"),
        (1, {"lora__rank": 8}, "memory"),
        (1, {"weights__delta": True}, "memory"),
        (1, {"weights__transport": "collective"}, "collective"),
    ],
)
def test_cuda_ipc_is_used_only_for_servers_on_the_learner_gpu(
    gpus: int, values: dict[str, Any], transport: str
) -> None:
    assert placed(gpus, **values).transport == transport


def test_servers_with_ipc_transport_are_placed_on_the_learner_gpu() -> None:
    placement = placed(4, weights__transport="ipc")
    assert on(placement) == ["0"]
    assert placement.learner.memory < 1


@pytest.mark.parametrize(
    ("gpus", "values", "workers", "engines"),
    [
        (0, {}, [], [""]),
        (4, {}, [], ["1"]),
        (4, {"rollout__gpus": 1, "engine__count": 3}, ["3"], ["1", "2", "1"]),
        (4, {"rollout__gpus": 1, "launch__args": ["-tp", "3"]}, ["3"], ["1+2+3"]),
        (2, {"rollout__gpus": 1}, ["1"], ["1"]),
        (1, {"rollout__gpus": 1}, ["0"], ["0"]),
        (2, {"rollout__gpus": 1, "run__device": "cpu"}, ["0"], [""]),
    ],
)
def test_rollout_workers_get_separate_gpus_if_there_are_enough(
    gpus: int, values: dict[str, Any], workers: list[str], engines: list[str]
) -> None:
    placement = placed(gpus, **values)
    assert placement.workers == workers
    assert on(placement) == engines


def test_gpus_set_by_the_user_for_servers_take_precedence_and_the_learner_uses_another_gpu() -> None:
    placement = placed(4, launch__env={"CUDA_VISIBLE_DEVICES": "0"}, engine__count=2)
    assert placement.learner.gpus == ["1"]
    assert on(placement) == ["0", "0"]
    assert on(placed(1, launch__env={"CUDA_VISIBLE_DEVICES": ""})) == [""]


def test_the_inline_runtime_uses_one_gpu() -> None:
    assert on(placed(4, engine__kind="embedded", run__runtime="inline", engine__count=2)) == ["0", "0"]


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("3, 1", ["3", "1"]),
        ("0,-1,1", ["0"]),
        ("2,2", ["2"]),
        ("GPU-aa,GPU-bb", ["GPU-aa", "GPU-bb"]),
        ("MIG-cc", ["MIG-cc"]),
    ],
)
def test_cuda_visible_devices_is_parsed_as_cuda_parses_it(variable: str, gpus: list[str]) -> None:
    assert listed_gpus(variable) == gpus


@pytest.mark.parametrize("visible", ["5,3,7", "GPU-5,GPU-3,GPU-7"])
def test_child_processes_see_only_their_own_gpus(visible: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    first, second, third = visible.split(",")
    specs = ComponentSpecs(config(engine__count=2), tmp_path, tmp_path)
    assert specs.learners()[0].resources.gpus == [first]
    assert [spec.resources.gpus for spec in specs.engines()] == [[second], [third]]
    assert [spec.resources.gpus for spec in specs.workers()] == [[]]
    with_gpu = ComponentSpecs(config(rollout__gpus=1), tmp_path, tmp_path)
    assert [spec.resources.gpus for spec in with_gpu.workers()] == [[third]]


def test_decisions_that_depend_on_all_gpus_are_made_before_child_processes_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    spec = ComponentSpecs(config(), tmp_path, tmp_path).learners()[0]
    assert spec.resources == Resources(learner_threads(config()), ["0"], 1.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert Config.model_validate(spec.settings["config"]).weights.transport == "memory"


def test_on_a_cpu_cuda_visible_devices_is_left_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    specs = ComponentSpecs(config(run__device="cpu", engine__count=1), tmp_path, tmp_path)
    assert [spec.resources.gpus for spec in [*specs.learners(), *specs.engines()]] == [None, None]
    assert placement_of(config(run__device="cpu")).learner.gpus == []


def test_a_cpu_build_of_torch_sees_no_gpu_unless_the_config_requests_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("outpace.hardware.placement.torch_has_cuda", lambda: False)
    assert placement_of(config()).learner.gpus == []
    assert placement_of(config(run__device="cuda")).learner.gpus == ["0"]


def test_the_cuda_build_of_torch_is_detected_without_importing_it() -> None:
    import torch

    assert torch_has_cuda() == (torch.version.cuda is not None)


def test_a_run_on_external_servers_has_no_gpu_for_a_launched_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    specs = ComponentSpecs(config(engine__urls=["http://h:1"], engine__count=1), tmp_path, tmp_path)
    specs.engines()
    with pytest.raises(BadInput, match=r"^engine\.urls: "):
        specs.joining_engine("", ["engine-0"])
    assert specs.joining_engine("http://h:2", ["engine-0"])


def test_a_joining_server_gets_a_free_gpu() -> None:
    placement = placed(3)
    assert placement.assign_joining_engine(placement.engines).gpus == ["2"]
    with pytest.raises(BadInput, match=r"^launch\.gpu_memory: "):
        placement.assign_joining_engine([*placement.engines, placement.assign_joining_engine(placement.engines)])


def test_a_joining_server_takes_the_memory_budget_of_a_server_that_left() -> None:
    placement = placed(1)
    with pytest.raises(BadInput, match=r"^launch\.gpu_memory: "):
        placement.assign_joining_engine(placement.engines)
    assert placement.assign_joining_engine([]) == placement.engines[0]


def test_a_joining_embedded_engine_gets_the_gpu_with_the_fewest_engines() -> None:
    placement = placed(3, engine__kind="embedded", engine__count=3)
    assert on(placement) == ["1", "2", "1"]
    assert placement.assign_joining_engine(placement.engines).gpus == ["2"]
    assert placed(0).assign_joining_engine([]).gpus == []


def printed(gpus: int, **values: Any) -> list[str]:
    return list(placed(gpus, **values).lines(config(**values)))


def test_the_placement_is_printed_per_process() -> None:
    learner, *engines, workers, weights = printed(2, engine__count=2, rollout__gpus=1)
    assert learner == "learner: GPU 0"
    assert len(engines) == 2
    for number, engine in enumerate(engines):
        assert engine.startswith(f"engine-{number}: GPU 1")
        assert names(engine, "45%")
    assert names(workers, "workers GPU 1")
    assert names(weights, "weights memory")
    assert printed(0)[:2] == ["learner: CPU", "engine-0: CPU"]


# --------------------------------------------------------------------------------------------------- a sharded learner


def ranks(placement: Placement) -> list[str]:
    return ["+".join(learner.gpus) for learner in placement.learners]


@pytest.mark.parametrize(
    ("gpus", "values", "learners", "engines"),
    [
        (8, {"learner__devices": 4, "engine__count": 4}, ["0", "1", "2", "3"], ["4", "5", "6", "7"]),
        (3, {"learner__devices": 2, "engine__count": 2}, ["0", "1"], ["2", "2"]),
        (3, {"learner__devices": 2, "engine__kind": "embedded"}, ["0", "1"], ["2"]),
        (8, {"learner__devices": 4, "launch__args": ["-tp", "2"], "engine__count": 2}, list("0123"), ["4+5", "6+7"]),
        (8, {"learner__devices": 2, "launch__args": ["-tp", "2", "-dp", "3"]}, ["0", "1"], ["2+3+4+5+6+7"]),
        (4, {"learner__devices": 4, "engine__urls": ["http://elsewhere:1"]}, list("0123"), [""]),
        (0, {"learner__devices": 3}, ["", "", ""], [""]),
        (4, {"learner__devices": 2, "run__device": "cpu"}, ["", ""], [""]),
        (4, {"learner__devices": 2, "launch__env": {"CUDA_VISIBLE_DEVICES": "0,1"}}, ["2", "3"], ["0+1"]),
        (2, {"learner__devices": 2, "launch__env": {"CUDA_VISIBLE_DEVICES": ""}}, ["0", "1"], [""]),
    ],
)
def test_every_process_of_a_sharded_learner_gets_one_gpu_and_engines_get_the_others(
    gpus: int, values: dict[str, Any], learners: list[str], engines: list[str]
) -> None:
    placement = placed(gpus, **values)
    assert ranks(placement) == learners
    assert on(placement) == engines
    assert {learner.memory for learner in placement.learners} == {1.0}


@pytest.mark.parametrize(
    ("gpus", "values"),
    [
        (2, {"learner__devices": 4}),
        (2, {"learner__devices": 4, "engine__urls": ["http://elsewhere:1"]}),
        (4, {"learner__devices": 4}),
        (4, {"learner__devices": 4, "engine__kind": "embedded"}),
        (4, {"learner__devices": 3, "launch__args": ["-tp", "2"]}),
        (4, {"learner__devices": 2, "launch__env": {"CUDA_VISIBLE_DEVICES": "0,1,2"}}),
        (2, {"learner__devices": 2, "launch__env": {"CUDA_VISIBLE_DEVICES": "0,1"}}),
    ],
)
def test_a_sharded_learner_is_refused_if_it_leaves_no_gpu_for_an_engine(gpus: int, values: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"^learner\.devices: ") as refused:
        placed(gpus, **values)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "values", "workers"),
    [
        (4, {"learner__devices": 2, "rollout__gpus": 1}, ["3"]),
        (3, {"learner__devices": 2, "rollout__gpus": 1}, ["2"]),
        (5, {"learner__devices": 4, "rollout__gpus": 1, "engine__urls": ["http://elsewhere:1"]}, ["4"]),
    ],
)
def test_rollout_workers_share_no_gpu_with_a_sharded_learner_if_there_is_another(
    gpus: int, values: dict[str, Any], workers: list[str]
) -> None:
    placement = placed(gpus, **values)
    assert placement.workers == workers
    assert not set(workers) & set(ranks(placement))


@pytest.mark.parametrize(
    ("gpus", "values"),
    [
        (1, {"learner__offload": True}),
        (4, {"learner__offload": True}),
        (4, {"learner__devices": 2}),
        (4, {"learner__devices": 2, "learner__offload": True}),
    ],
)
def test_a_sharded_learner_never_sends_weights_by_cuda_ipc(gpus: int, values: dict[str, Any]) -> None:
    assert placed(gpus, **values).transport == "memory"


def test_a_learner_on_one_gpu_that_offloads_may_share_it_with_a_server() -> None:
    placement = placed(1, learner__offload=True)
    assert (ranks(placement), on(placement)) == (["0"], ["0"])
    assert placement.learner.memory == pytest.approx(0.55)


def test_a_server_that_joins_gets_no_gpu_of_a_sharded_learner() -> None:
    placement = placed(4, learner__devices=2)
    assert on(placement) == ["2"]
    assert placement.assign_joining_engine(placement.engines).gpus == ["3"]


@pytest.mark.parametrize(
    ("gpus", "values", "expected"),
    [
        (8, {"engine__count": 8}, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (8, {"engine__count": 2, "launch__args": ["-tp", "4"]}, ["0+1+2+3", "4+5+6+7"]),
        (8, {"engine__count": 1, "launch__args": ["-tp", "8"]}, ["0+1+2+3+4+5+6+7"]),
        (2, {"engine__count": 3}, ["0", "1", "0"]),
        (0, {"engine__count": 2}, ["", ""]),
    ],
)
def test_servers_on_a_machine_without_a_learner_get_all_gpus(
    gpus: int, values: dict[str, Any], expected: list[str]
) -> None:
    servers = assign_servers(config(**values), [str(index) for index in range(gpus)])
    assert ["+".join(server.gpus) for server in servers] == expected
    if gpus == 8:
        assert {server.memory for server in servers} == {0.9}


def test_a_server_that_needs_more_gpus_than_the_machine_has_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^launch\.args: "):
        assign_servers(config(launch__args=["-tp", "4"]), ["0", "1"])


def test_the_threads_of_the_learner_are_divided_among_its_processes() -> None:
    assert learner_threads(config(learner__threads=8, learner__devices=4)) == 2
    assert learner_threads(config(run__threads=8, learner__devices=3)) == 2
    assert learner_threads(config(learner__threads=2, learner__devices=4)) == 1


def test_only_a_learner_that_is_not_sharded_shares_cores_with_engines() -> None:
    on_cpu = {"run__device": "cpu", "engine__kind": "embedded"}
    assert learner_shares_cores(config(**on_cpu))
    assert not learner_shares_cores(config(**on_cpu, learner__devices=2))
    assert not learner_shares_cores(config(**on_cpu, learner__offload=True))
    assert shares_cores(config(**on_cpu, learner__devices=2), None), "engines still follow the load"


def test_the_work_of_a_sharded_learner_counts_for_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    args = {"engine__count": 2, "launch__args": ["-tp", "2"]}
    assert compute_units(config(learner__devices=4, **args)) == ComputeUnits(8, True, per_engine=2, per_learner=4)


def test_the_printed_placement_says_what_computes_where() -> None:
    values = {
        "learner__devices": 2,
        "engine__count": 2,
        "launch__args": ["-tp", "2"],
        "kl__coefficient": 0.1,
        "rollout__gpus": 1,
        "judge__base_url": "http://user:secret@judge:8000/v1",
    }
    lines = dict(line.split(": ", 1) for line in printed(7, **values))
    assert (lines["learner"], lines["learner-1"]) == ("GPU 0", "GPU 1")
    assert names(lines["reference model"], "GPUs 0, 1 learner")
    assert names(lines["engine-0"], "GPUs 2, 3 tensor-parallel 2")
    assert names(lines["engine-1"], "GPUs 4, 5 tensor-parallel 2")
    assert names(lines["rollout workers and reward functions"], "GPU 6")
    assert names(lines["judge"], "judge:8000")
    assert "secret" not in lines["judge"]
    assert lines["weights"] == "memory"


def test_the_printed_placement_names_servers_that_are_already_running() -> None:
    lines = printed(1, engine__urls=["http://one:8000", "http://two:8000"])
    assert names(lines[1], "engine-0 one:8000")
    assert names(lines[2], "engine-1 two:8000")


def test_on_several_machines_each_gives_its_first_gpus_to_the_learner() -> None:
    chosen = config(learner__devices=8)
    placement = assign_gpus(chosen, ["0", "1", "2", "3", "4", "5"], ranks=4)
    assert [each.gpus for each in placement.learners] == [["0"], ["1"], ["2"], ["3"]]
    assert on(placement) == ["4"]
    lines = list(placement.lines(chosen))
    assert lines[3] == "learner-3: GPU 3"
    assert lines[4] == "learner-4: GPU 0 of machine 2"
    assert lines[7] == "learner-7: GPU 3 of machine 2"


def test_a_plan_for_more_gpus_than_there_are_assumes_machines_like_this_one() -> None:
    chosen = config(learner__devices=16, engine__urls=["http://node3:8000"])
    lines = list(planned_placement(chosen, [str(index) for index in range(8)]).lines(chosen))
    assert lines[15] == "learner-15: GPU 7 of machine 2"


def test_too_few_gpus_for_the_processes_of_torchrun_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = TorchrunProcess(0, 16, 0, 8, "node1", 29500)
    monkeypatch.setattr("outpace.hardware.placement.torchrun_process", lambda: torchrun)
    chosen = config(learner__devices=16, engine__urls=["http://node3:8000"])
    with pytest.raises(BadInput, match=r"^learner\.devices: "):
        planned_placement(chosen, ["0", "1", "2", "3"])


def test_a_learner_on_several_machines_counts_all_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = TorchrunProcess(0, 8, 0, 4, "node1", 29500)
    monkeypatch.setattr("outpace.hardware.placement.torchrun_process", lambda: torchrun)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    assert compute_units(config(learner__devices=8)) == ComputeUnits(9, True, per_engine=1, per_learner=8)
    assert learner_threads(config(learner__devices=8, learner__threads=8)) == 2


def test_the_ranks_of_other_machines_are_processes_of_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torchrun = TorchrunProcess(0, 4, 0, 2, "node1", 29500)
    for module in ("hardware.placement", "run.build"):
        monkeypatch.setattr(f"outpace.{module}.torchrun_process", lambda: torchrun)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    specs = ComponentSpecs(config(learner__devices=4), tmp_path, tmp_path, learner_code=b"pickled").learners()
    assert [spec.remote for spec in specs] == [None, 1, 2, 3]
    assert [spec.name for spec in specs] == ["learner", "learner-1", "learner-2", "learner-3"]
    assert all(spec.resources.gpus for spec in specs)
