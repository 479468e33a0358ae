"""The cores of this machine and how processes share them. GPUs are in `outpace.placement`."""

from __future__ import annotations

import os
import sys

from outpace.config import Config
from outpace.cpu import supports_bfloat16
from outpace.errors import BadInput
from outpace.placement import uses_gpu


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def countable_cores(config: Config) -> int | None:
    """The cores that engine and learner compute on; None when they share an accelerator, whose time is not counted
    for either."""
    return None if uses_gpu(config) else cores()


def shares_cores(config: Config, own: int | None) -> bool:
    """Whether a component's thread count follows the load. `own`: the count that its section sets. A deterministic run
    keeps fixed counts, because they change the last bits; so does one that computes on a GPU."""
    fixed = own or config.run.threads or config.run.deterministic or uses_gpu(config)
    return not fixed


def engine_threads(config: Config) -> int:
    """The most compute threads of one engine."""
    if config.engine.threads or config.run.threads:
        return config.engine.threads or config.run.threads or 1
    if config.engine.kind == "embedded" and shares_cores(config, None):
        return cores()
    # Engines share half of the cores with fixed counts, because the learner runs beside them; all where they alternate.
    beside = cores() // 2 if config.pacing.max_lag else cores()
    return max(1, beside // (config.engine.count or 1))


def learner_threads(config: Config) -> int:
    """The most compute threads of the learner."""
    return config.learner.threads or config.run.threads or cores()


def check_dtype(dtype: str, setting: str, on_cpu: bool) -> None:
    """Refuse bfloat16 on a CPU that has none: torch computes it slowly there, and a vLLM server dies at start."""
    if dtype == "bfloat16" and on_cpu and not supports_bfloat16():
        raise BadInput(f"{setting}: this CPU does not support bfloat16; use float32, or run on a GPU")


def child_environment(threads: int) -> dict[str, str]:
    """Set before a child loads torch: thread pools cannot be resized for the better later."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread that spins at a barrier takes the core from the other part
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # what the caller can import, a child can
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # so that a task made from the order of a set is the same task in every process
    }
