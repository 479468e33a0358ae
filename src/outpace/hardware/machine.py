"""Description of this machine for benchmark records, and the load that other programs put on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess

from outpace.hardware.cores import available_cores, read_usage

PACKAGES = ("torch", "transformers", "trl", "vllm")


def describe_machine() -> dict[str, str | int]:
    """Return CPU model, cores, GPU (empty if there is none) and the versions of Python and the main packages."""
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "gpu": _gpu(),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := _version(name))},
    }


class OtherPrograms:
    """Measures how many cores other programs use on average since construction.

    Counts neither this process nor those of its descendants that have ended."""

    def __init__(self) -> None:
        self._usage, self._own_s = read_usage(()), _own_seconds()

    def cores(self) -> float | None:
        """Return the average number of cores, None if the operating system does not report it."""
        now = read_usage(())
        if now is None or self._usage is None:
            return None
        others_s = now.busy_s - self._usage.busy_s - (_own_seconds() - self._own_s)
        return max(0.0, others_s) / max(now.clock - self._usage.clock, 1e-9)


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cpu_model() -> str:
    """Return lscpu's model name, which also covers ARM, or else the architecture."""
    try:
        done = subprocess.run(["lscpu"], capture_output=True, text=True, check=False)
    except OSError:
        return platform.machine()
    found = [line.partition(":")[2].strip() for line in done.stdout.splitlines() if line.startswith("Model name:")]
    return found[0] if found else platform.machine()


def _gpu() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    names = done.stdout.split("\n")[:-1] if done.returncode == 0 else []
    return f"{len(names)} x {names[0]}" if names else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
