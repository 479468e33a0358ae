"""Run a function on several gloo ranks, each a fresh process with one thread.

Every rank initializes the default process group, so the function may use collectives and device meshes. The ranks meet
in a file of a temporary directory. No rank leaves before all have finished, and when one fails, the others are killed:
the error of the rank that failed first is raised, not the broken connections that follow from it.
"""

from __future__ import annotations

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
from typing import Any, TypeVar

from outpace.runtime.die_with_parent import die_with_parent

Result = TypeVar("Result")

TIMEOUT_S = 240.0
"""Of all ranks together, with the imports of their processes."""

EXIT_S = 20.0
"""How long ranks that have finished may take to exit."""


def run_ranks(function: Callable[[int], Result], size: int, timeout_s: float = TIMEOUT_S) -> list[Result]:
    """Call `function(rank)` on each of `size` ranks and return their results in order.

    `function` is a top-level function of a module, or a `functools.partial` of one; its result is pickled. An exception
    of a rank is raised here with the traceback of the rank as a note."""
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection[Any, Any]] = []
    patience_s = 0.0
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        try:
            for rank in range(size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_run_rank,
                    args=(function, rank, size, Path(directory) / "rendezvous", timeout_s, there),
                    name=f"rank {rank}",
                    daemon=True,
                )
                connections.append(here)
                with there:
                    process.start()
                processes.append(process)
            results = _collect(processes, connections, timeout_s)
            patience_s = EXIT_S
        finally:
            for connection in connections:
                connection.close()  # ends the ranks, which have all finished or are killed
            for process in processes:
                process.join(patience_s)
                process.kill()
                process.join()
    return results


def _collect(processes: list[SpawnProcess], connections: list[Connection[Any, Any]], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    until = time.monotonic() + timeout_s
    while missing := [connection for rank, connection in enumerate(connections) if rank not in results]:
        ready = wait(missing, timeout=max(0.0, until - time.monotonic()))
        if not ready:
            waiting = ", ".join(str(rank) for rank in range(len(processes)) if rank not in results)
            raise TimeoutError(f"no result from rank {waiting} within {timeout_s:g} s")
        for connection in ready:
            assert isinstance(connection, multiprocessing.connection.Connection)
            rank = connections.index(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                processes[rank].join(EXIT_S)
                code = processes[rank].exitcode
                raise RuntimeError(f"rank {rank} of {len(processes)} died with exit code {code}") from None
            if not succeeded:
                raise value
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _run_rank(
    function: Callable[[int], Any],
    rank: int,
    size: int,
    rendezvous: Path,
    timeout_s: float,
    parent: Connection[Any, Any],
) -> None:
    die_with_parent()
    with parent:
        try:
            message = pickle.dumps((True, _call(function, rank, size, rendezvous, timeout_s)))
        except BaseException as error:  # boundary: every error, also a skipped test, is raised in the parent
            message = _failure(error, rank)
        parent.send_bytes(message)
        with suppress(EOFError, OSError):
            parent.recv_bytes()  # returns when the parent has the results of all ranks, or kills them
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def _call(function: Callable[[int], Any], rank: int, size: int, rendezvous: Path, timeout_s: float) -> Any:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return function(rank)


def _failure(error: BaseException, rank: int) -> bytes:
    text = "".join(traceback.format_exception(error))
    error.add_note(f"on rank {rank}:\n{text}")
    try:
        message = pickle.dumps((False, error))
        pickle.loads(message)
    except Exception:  # boundary: exceptions may contain anything
        return pickle.dumps((False, RuntimeError(f"on rank {rank}:\n{text}")))
    return message
