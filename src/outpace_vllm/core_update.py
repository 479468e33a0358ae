"""Updates that run inside vLLM's engine core, between two steps, as one call.

vLLM's own calls for an update (pause, start, update, finish, resume) go through its API server one after the other.
With hundreds of running requests that server's event loop is busy with their streams, each call waits for it several
times, and nothing is sampled from the first call to the last. Here one call, `/collective_rpc` with the method
`outpace_update`, carries the whole update, and the thread that runs the steps does the rest:

    hold     finish the steps in flight; requests keep their place and their KV cache
    copy     load the weights in every worker
    resume   label the tokens from now on, with `recompute` drop all KV, continue

Sampling continues while the call and its reply are in transit.

Invariants
- The engine core stops for no longer than these three phases, and the reply says how long each took.
- After a failure it stays paused: nothing is sampled from weights that may be incomplete. `/resume` ends that.
- No token is labeled with weights that did not sample it: no step is in flight when weights and label change.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import wraps
from typing import Any

METHOD = "outpace_update"
_MARK = "_outpace_runs_updates"


def run_updates_in_the_engine_core() -> None:
    """Patch vLLM's engine core to run updates. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    plain = EngineCoreProc.collective_rpc
    if hasattr(plain, _MARK):
        return

    @wraps(plain)
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if method == METHOD:
            return run_update(self, **(kwargs or {}))
        return plain(self, method, timeout, args, kwargs)

    setattr(collective_rpc, _MARK, True)
    EngineCoreProc.collective_rpc = collective_rpc


def run_update(
    core: Any, update: dict[str, Any], hold: bool = True, label: str = "", recompute: bool = False
) -> Future[Any]:
    """Run an update and return its phases in seconds, as the only element of a list. Without `hold` sampling continues:
    for updates that load nothing yet."""
    done: Future[Any] = Future()
    began = time.perf_counter()

    def run(holding: Future[Any]) -> None:
        try:
            holding.result()
            held = time.perf_counter()
            _load(core, update)
            copied = time.perf_counter()
            if hold:
                _resume(core, label, recompute)
            ended = time.perf_counter()
            done.set_result([{"hold_s": held - began, "copy_s": copied - held, "resume_s": ended - copied}])
        except Exception as error:  # raised to the caller of the route
            done.set_exception(error)

    holding = core.pause_scheduler("keep", False) if hold else None
    if holding is None:  # nothing is running
        holding = Future()
        holding.set_result(None)
    holding.add_done_callback(run)
    return done


def _load(core: Any, update: dict[str, Any]) -> None:
    core.collective_rpc("start_weight_update")
    core.collective_rpc("update_weights", kwargs={"update_info": update})
    core.collective_rpc("finish_weight_update")


def _resume(core: Any, label: str, recompute: bool) -> None:
    from vllm.v1.engine import EngineCoreRequestType

    if label and hasattr(core, "set_weight_version"):  # not in 0.25
        core.set_weight_version(label)
    if recompute:
        core.reset_prefix_cache(reset_running_requests=True)
    core.resume_scheduler()
    core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))  # the idle loop waits for input
