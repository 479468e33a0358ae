"""Run a function on several ranks, each a process of its own with one thread: on the CPU over gloo, or each on a GPU of
its own over NCCL.

The processes are kept for the next call, because starting one takes seconds of imports. Each call has its own default
process group, so the function may use collectives and device meshes; the ranks meet in a file of a temporary directory.
When a rank fails, all processes are killed: the error of the rank that failed first is raised, not the broken
connections that follow from it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from outpace.runtime.die_with_parent import die_with_parent

Result = TypeVar("Result")

TIMEOUT_S = 280.0
"""Of all ranks together, with the imports of their processes."""


class Call(NamedTuple):
    """What a process is told to run."""

    function: Callable[[int], Any]
    rank: int
    size: int
    rendezvous: Path
    timeout_s: float
    device: str
    may_die: bool


class RankProcess:
    """One process that runs calls, one after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(there,), daemon=True)
        with there:
            self.process.start()

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


_processes: list[RankProcess] = []


def run_ranks(
    function: Callable[[int], Result],
    size: int,
    timeout_s: float = TIMEOUT_S,
    device: Literal["cpu", "cuda"] = "cpu",
    may_die: bool = False,
) -> list[Result]:
    """Call `function(rank)` on each of `size` ranks and return their results in order.

    `function` is a top-level function of a module, or a `functools.partial` of one; its result is pickled. An exception
    of a rank is raised here with the traceback of the rank as a note. With `may_die` the result of a rank whose process
    has ended is None."""
    _processes.extend(RankProcess() for _ in range(size - len(_processes)))
    chosen = _processes[:size]
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        try:
            for rank, each in enumerate(chosen):
                call = Call(function, rank, size, Path(directory) / "rendezvous", timeout_s, device, may_die)
                each.connection.send_bytes(pickle.dumps(call))
            results = _collect(chosen, timeout_s, may_die)
        except BaseException:
            stop_ranks()
            raise
    if may_die:
        stop_ranks()
    return results


def stop_ranks() -> None:
    """End the processes that are kept."""
    while _processes:
        _processes.pop().kill()


atexit.register(stop_ranks)


def _collect(processes: list[RankProcess], timeout_s: float, may_die: bool) -> list[Any]:
    results: dict[int, Any] = {}
    ranks: dict[Any, int] = {each.connection: rank for rank, each in enumerate(processes)}
    until = time.monotonic() + timeout_s
    while missing := [connection for connection, rank in ranks.items() if rank not in results]:
        ready = wait(missing, timeout=max(0.0, until - time.monotonic()))
        if not ready:
            waiting = ", ".join(str(rank) for rank in ranks.values() if rank not in results)
            raise TimeoutError(f"no result from rank {waiting} within {timeout_s:g} s")
        for connection in ready:
            rank = ranks[connection]
            try:
                succeeded, value = pickle.loads(processes[rank].connection.recv_bytes())
            except EOFError:
                if may_die:
                    results[rank] = None
                    continue
                processes[rank].process.join(timeout_s)
                code = processes[rank].process.exitcode
                raise RuntimeError(f"rank {rank} of {len(processes)} died with exit code {code}") from None
            if not succeeded:
                raise value
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _serve(parent: Connection[Any, Any]) -> None:
    die_with_parent()
    import torch

    torch.set_num_threads(1)
    with parent, suppress(EOFError, OSError):
        while True:
            call: Call = pickle.loads(parent.recv_bytes())
            try:
                message = pickle.dumps((True, _run(call)))
            except BaseException as error:  # boundary: every error, also a skipped test, is raised in the parent
                message = _failure(error, call.rank)
            parent.send_bytes(message)


def _run(call: Call) -> Any:
    import torch
    from torch import distributed

    on_gpu = call.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(call.rank)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{call.rendezvous}",
        rank=call.rank,
        world_size=call.size,
        timeout=timedelta(seconds=call.timeout_s / 2),  # the ranks give up before the test does
    )
    result = call.function(call.rank)
    if call.may_die:
        return result
    distributed.barrier()  # no rank leaves before all have finished
    distributed.destroy_process_group()
    return result


def _failure(error: BaseException, rank: int) -> bytes:
    text = "".join(traceback.format_exception(error))
    error.add_note(f"on rank {rank}:\n{text}")
    try:
        message = pickle.dumps((False, error))
        pickle.loads(message)
    except Exception:  # boundary: exceptions may contain anything
        return pickle.dumps((False, RuntimeError(f"on rank {rank}:\n{text}")))
    return message
