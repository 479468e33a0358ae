"""What this machine offers, and how the parts share it."""

from __future__ import annotations

import os
import sys

from outpace.config import Config


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compute_threads(config: Config) -> int:
    """Engine and learner take turns when training is synchronous; otherwise they share the cores."""
    if config.run.threads is not None:
        return config.run.threads
    return cores() if config.pacing.max_lag == 0 else max(1, cores() // 2)


def child_environment(threads: int, gpu: bool = True) -> dict[str, str]:
    """Set before a child loads torch: thread pools cannot be resized for the better later."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread that spins at a barrier takes the core from the other part
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # what the caller can import, a child can
        "PYTHONUNBUFFERED": "1",
    }
    return environment if gpu else {**environment, "CUDA_VISIBLE_DEVICES": ""}
