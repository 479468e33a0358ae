"""What this machine offers, and how the parts share it.

A GPU is shared by budgets: servers that were started on it take `launch.gpu_memory` of it each, the learner may take
what is left, and neither ever gives its share up for the other.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from outpace.config import Config
from outpace.errors import BadInput

Transport = Literal["files", "memory", "ipc", "collective"]

GPU_MARGIN = 0.05
"""Of a shared GPU's memory, for what no budget counts: each process's context, and libraries' own workspaces."""

SMALLEST_LEARNER = 0.1
"""With less of a GPU than this, it is not worth starting."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def countable_cores(config: Config) -> int | None:
    """The cores that engine and learner compute on; None when they share an accelerator, whose time is not counted
    for either."""
    return None if uses_gpu(config) else cores()


def engine_threads(config: Config) -> int:
    """Of one engine: they share half the cores, because the learner runs beside them; all of them when the two take
    turns."""
    beside = cores() // 2 if config.pacing.max_lag else cores()
    return config.engine.threads or config.run.threads or max(1, beside // (config.engine.count or 1))


def learner_threads(config: Config) -> int:
    """All cores: its products are the larger ones, and it may use what the engine leaves idle."""
    return config.learner.threads or config.run.threads or cores()


def gpus() -> int:
    """How many GPUs the parts can see, told without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def uses_gpu(config: Config) -> bool:
    return config.run.device == "cuda" or (config.run.device == "auto" and gpus() > 0)


def shares_gpu(config: Config) -> bool:
    """Whether servers that outpace starts are on the learner's own GPU: the only one there is."""
    started_here = config.engine.kind != "embedded" and not config.engine.urls
    return started_here and uses_gpu(config) and gpus() == 1


def transport(config: Config) -> Transport:
    """How weights reach the engines, where the settings leave it open: by the shortest way that surely exists."""
    if config.weights.transport != "auto":
        return config.weights.transport
    if config.engine.kind == "sglang" or config.engine.urls:
        return "files"
    in_files = config.lora.rank > 0 or config.weights.delta  # adapters and deltas are
    return "ipc" if shares_gpu(config) and not in_files else "memory"


def learner_gpu_share(config: Config) -> float:
    """The part of its GPU's memory that the learner may take: all of it, unless servers are on it too."""
    if not shares_gpu(config):
        return 1.0
    servers, each = config.engine.count or 1, config.launch.gpu_memory
    share = 1.0 - servers * each - GPU_MARGIN
    if share < SMALLEST_LEARNER:
        most = (1.0 - GPU_MARGIN - SMALLEST_LEARNER) / servers
        whose = "a server" if servers == 1 else f"each of {servers} servers"
        raise BadInput(
            f"launch.gpu_memory: {each:g} for {whose} leaves too little of the one GPU for the learner; "
            f"set {most:.2f} or less, or start fewer servers"
        )
    return share


def limit_gpu_memory(config: Config, device: str) -> None:
    """Keep the learner, which is this process, within its share. Beyond it an allocation fails here, not a server's."""
    if device.startswith("cuda") and (share := learner_gpu_share(config)) < 1.0:
        import torch

        torch.cuda.set_per_process_memory_fraction(share)


def child_environment(threads: int, gpu: bool = True) -> dict[str, str]:
    """Set before a child loads torch: thread pools cannot be resized for the better later."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread that spins at a barrier takes the core from the other part
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # what the caller can import, a child can
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # so that a task made from the order of a set is the same task in every process
    }
    return environment if gpu else {**environment, "CUDA_VISIBLE_DEVICES": ""}
