"""CPU cores: how many threads each component computes with.

Thread counts are either fixed by the settings or follow the load. `CoreSharing` does the latter for engines and the
learner, which share the cores of one machine. Thread pools that together exceed the cores stall at their barriers;
pools sized for the worst case leave cores idle. So the thread count is chosen anew before every unit of work (a decode
step, a layer of a forward or backward pass), from three inputs:

    ThreadCounts     a small memory-mapped file with one row per compute process: pid, threads in use (0 while idle)
    other programs   cores used by anything else on the machine, from /proc, averaged over about a second
    role             an engine takes an equal share of the cores, at most as many as speed up its step;
                     the learner takes the cores that busy engines leave, or all cores if that measures faster

Slightly too many threads can pay off, because the OS scheduler then gives the process a larger share of the cores: for
a learner that is busy most of the time and so limits the run, and for both roles next to another busy program. Whether
it pays off depends on the machine and the model, so both options are measured: mostly the faster one is used, and
occasionally the other one.

Invariants
- A row is two aligned 64-bit integers, so a reader never sees a partial write. A process writes only its own row, and
  clears the rows of processes that died.
- Thread counts change results in the last bits, so deterministic runs use fixed counts.

GPUs are in `outpace.hardware.placement`.
"""

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
    """Return the cores that engines and learner compute on, or None if they use a GPU: GPU time is not attributed."""
    return None if uses_gpu(config) else cores()


def shares_cores(config: Config, own: int | None) -> bool:
    """Return whether a component's thread count follows the load. `own` is the count set in its config section.
    Deterministic runs use fixed counts, because thread counts change the last bits; so do runs on a GPU."""
    fixed = own or config.run.threads or config.run.deterministic or uses_gpu(config)
    return not fixed


def engine_threads(config: Config) -> int:
    """Return the maximum number of compute threads of one engine."""
    if config.engine.threads or config.run.threads:
        return config.engine.threads or config.run.threads or 1
    if config.engine.kind == "embedded" and shares_cores(config, None):
        return cores()
    # With fixed counts the engines share half of the cores, because the learner runs at the same time. With max_lag = 0
    # they alternate with the learner and share all cores.
    beside = cores() // 2 if config.pacing.max_lag else cores()
    return max(1, beside // (config.engine.count or 1))


def learner_threads(config: Config) -> int:
    """Return the maximum number of compute threads of the learner."""
    return config.learner.threads or config.run.threads or cores()


def check_dtype(dtype: str, setting: str, on_cpu: bool) -> None:
    """Reject bfloat16 on a CPU without support: torch is slow there, and a vLLM server crashes at startup."""
    if dtype == "bfloat16" and on_cpu and not supports_bfloat16():
        raise BadInput(f"{setting}: this CPU does not support bfloat16; set float32 or run on a GPU")


def child_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a child process. They must be set before it loads torch, because thread pools
    cannot be resized well later."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread spinning at a barrier takes the core away from other components
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # same imports as the parent
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # tasks that depend on set iteration order must be equal in every process
    }
