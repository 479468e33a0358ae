import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from outpace.commands import doctor as doctor_module
from outpace.commands.doctor import (
    GIB,
    TORCH,
    TRANSFORMERS,
    Check,
    cache_folder,
    check_cache,
    check_cpu,
    check_extras,
    check_gpu,
    check_memory,
    check_placement,
    check_server,
    check_shared_memory,
    check_starter,
    check_thread_settings,
    check_threads,
    check_version,
    doctor,
    run_checks,
)
from outpace.config import Config
from outpace.config.load import make_config
from support import names, naming


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0+cpu", "2.13.5"])
def test_supported_versions_of_torch_pass(version: str) -> None:
    assert check_version("torch", version, TORCH).advice == ""


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0", "1.13.1", "3.0"])
def test_unsupported_versions_of_torch_are_reported(version: str) -> None:
    assert names(check_version("torch", version, TORCH).advice, f"{version} 2.11 2.13")


def test_any_newer_transformers_passes() -> None:
    assert check_version("transformers", "6.0.0", TRANSFORMERS).advice == ""
    assert names(check_version("transformers", "5.9.0", TRANSFORMERS).advice, "5.9.0 5.16")
    assert names(check_version("transformers", None, TRANSFORMERS).advice, "transformers 5.16")


def test_too_little_memory_is_reported() -> None:
    enough = check_memory(8 * GIB, 4 * GIB)
    assert names(enough.found, "4.0 8.0 GiB")
    assert not enough.advice
    assert check_memory(8 * GIB, GIB).advice


def test_too_little_shared_memory_is_reported_and_its_absence_is_not() -> None:
    assert "--shm-size" in check_shared_memory(64 * 2**20).advice
    assert not check_shared_memory(GIB).advice
    assert not check_shared_memory(None).advice


@pytest.mark.parametrize(
    ("settings", "fits"),
    [({}, True), ({"run.threads": 2}, True), ({"engine.threads": 3}, False), ({"learner.threads": 3}, False)],
)
def test_more_threads_than_cores_are_reported(settings: dict[str, int], fits: bool) -> None:
    assert (check_threads(make_config(settings), 2).advice == "") == fits


def test_openmp_settings_that_hurt_are_reported() -> None:
    assert not check_thread_settings(2, {}).advice
    assert not check_thread_settings(2, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}).advice
    assert "OMP_NUM_THREADS" in check_thread_settings(2, {"OMP_NUM_THREADS": "16"}).advice
    assert "PASSIVE" in check_thread_settings(2, {"OMP_WAIT_POLICY": "active"}).advice


def test_bfloat16_support_of_the_cpu_is_shown_and_its_lack_is_not_a_problem() -> None:
    able, unable = check_cpu("x86_64", bfloat16=True), check_cpu("aarch64", bfloat16=False)
    assert names(able.found, "x86_64 bfloat16")
    assert "model.dtype" not in able.found
    assert names(unable.found, "aarch64 bfloat16 model.dtype float32")
    assert not able.advice
    assert not unable.advice


def test_missing_extras_are_not_a_problem() -> None:
    assert check_extras({"datasets": True, "smollm2": False}) == Check("Extras", "datasets yes, smollm2 no")


def test_the_cache_folder_follows_the_environment() -> None:
    assert cache_folder({"OUTPACE_CACHE": "/y"}) == Path("/y")
    assert cache_folder({}) == Path.home() / ".cache" / "outpace"


def test_a_cache_folder_that_can_be_created_passes_and_one_blocked_by_a_file_is_reported(tmp_path: Path) -> None:
    assert not check_cache(tmp_path / "not" / "yet").advice
    (tmp_path / "file").touch()
    assert "OUTPACE_CACHE" in check_cache(tmp_path / "file" / "outpace").advice


def test_an_incomplete_starter_is_reported(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    advice = check_starter(tmp_path).advice
    assert names(advice, f"tokenizer.json {tmp_path}")
    assert "config.json" not in advice
    (tmp_path / "tokenizer.json").touch()
    assert not check_starter(tmp_path).advice


def test_all_checks_run_on_this_machine() -> None:
    checks = {check.name: check for check in run_checks(Config())}
    assert {"Python", "torch", "transformers", "Memory", "Shared memory", "Threads", "GPU", "Extras", "Cache"} <= set(
        checks
    )
    assert not checks["torch"].advice
    crowded = run_checks(make_config({"run.threads": 4096}))
    assert next(check for check in crowded if check.name == "Threads").advice


def test_the_placement_is_shown_and_an_impossible_one_is_reported() -> None:
    shown = check_placement(Config(), ["0", "1"])
    assert "learner: GPU 0" in shown.found
    assert "engine-0: GPU 1" in shown.found
    assert not shown.advice
    assert check_placement(make_config({"rollout.gpus": 3}), ["0", "1"]).advice.startswith("rollout.gpus: ")


def test_a_server_that_cannot_be_started_is_reported() -> None:
    launched = make_config({"engine.kind": "vllm", "launch.python": "/no/python"})
    assert check_server(launched).advice.startswith("launch.python ")
    assert not check_server(Config()).advice
    assert not check_server(make_config({"engine.kind": "vllm", "engine.urls": ["http://127.0.0.1:1"]})).advice


def test_gpus_that_are_only_planned_are_not_reported_as_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "CUDA_VISIBLE_DEVICES" in check_gpu(["0", "1"]).found
    assert "CPU" in check_gpu([]).found


def test_a_learner_with_more_gpus_than_this_machine_needs_torchrun() -> None:
    elsewhere = {"engine.kind": "vllm", "engine.urls": ["http://node3:8000"], "engine.count": 1}
    check = check_placement(make_config({**elsewhere, "learner.devices": 4}), ["0", "1"])
    assert "learner-3: GPU 1 of machine 2" in check.found
    assert re.search(naming("learner.devices", "torchrun --nnodes 2 --nproc-per-node 2"), check.advice)
    uneven = check_placement(make_config({**elsewhere, "learner.devices": 3}), ["0", "1"])
    assert uneven.advice.startswith("learner.devices: ")
    assert "machine 2" not in uneven.found


def printed(checks: list[Check], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setattr(doctor_module, "run_checks", lambda config: checks)
    out = io.StringIO()
    return doctor(console=Console(file=out, width=60)), out.getvalue()


def test_the_exit_code_and_advice_follow_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed([Check("Memory", "lots")], monkeypatch)[0] == 0
    code, text = printed([Check("Memory", "lots"), Check("Disk", "[bold]", "buy " * 30 + "one")], monkeypatch)
    assert code == 1
    assert text.splitlines()[-1] == "Disk: " + "buy " * 30 + "one"


def test_importing_the_doctor_loads_no_torch() -> None:
    script = "import sys, outpace.commands.doctor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
