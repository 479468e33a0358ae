"""Entry point of a component process: `python -m outpace.runtime.child FD PARENT`.

Reads the spec from the inherited socket, builds the component, reports that it is ready and serves calls until the
parent closes the socket. A child never outlives its parent: the kernel kills it when the parent dies, and it exits when
the socket closes.

On SIGUSR2 the event loop, if it still runs, writes waits, tasks and thread stacks to the log. On SIGUSR1 faulthandler
writes the stacks from C, whatever Python is doing. That reads frames without the GIL and can crash a process that is
computing, so it is only for a process that did not respond to SIGUSR2.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from typing import Any

from outpace import errors
from outpace.runtime import components as components
from outpace.runtime import diagnostics
from outpace.runtime.async_tools import steady_executor
from outpace.runtime.die_with_parent import die_with_parent
from outpace.runtime.reconnect import reconnecting_proxy
from outpace.runtime.rpc import Channel, RpcFailure, RpcReply, listen, serve_calls

StartupReply = RpcReply | RpcFailure
"""The first frame of a component: it is ready, or why it could not be built."""

STATE_REPORT_HEADER = "waits:"
"""First line of the report that is written on SIGUSR2."""


async def run_component(fd: int) -> None:
    """Build the component that the parent describes, and serve it until the parent closes the socket."""
    asyncio.get_running_loop().set_default_executor(steady_executor())
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    channel = Channel(reader, writer)
    spec = await channel.receive(components.ComponentSpec)
    if spec is None:
        return  # the parent ended before it sent the spec
    diagnostics.set_crash_process(spec.name)
    diagnostics.crash_point("child.started")
    try:
        component = await components.build_component(spec, await _peers(spec))
        if spec.listen:
            await listen(spec.listen, spec.token, component, components.load_object(spec.protocol))
    except Exception as error:  # process boundary: the parent reports it as this component's failure
        channel.send(RpcFailure.of(0, error))
        await channel.finish()
        return
    diagnostics.tune_gc()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _write_stacks)
    diagnostics.crash_point("child.ready")
    channel.send(RpcReply(0, b""))
    watch = asyncio.create_task(_exit_if_broken(component))
    try:
        await serve_calls(component, components.load_object(spec.protocol), channel)
    finally:
        watch.cancel()
        await components.close_component(component)


async def _exit_if_broken(component: object) -> None:
    """Exit immediately, before the replies to calls in flight are sent: callers must see a lost component, which they
    can retry on its successor, and not a failure."""
    if isinstance(component, components.Breakable):
        failure = await component.broken()
        print(failure.remote_traceback, file=sys.stderr)
        print(f"{components.BROKEN_PREFIX}{errors.one_line(failure.message, 1000)}", file=sys.stderr, flush=True)
        os._exit(1)


def _write_stacks() -> None:
    tasks, threads = diagnostics.describe_tasks(), diagnostics.describe_threads()
    report = f"{STATE_REPORT_HEADER}\n{diagnostics.describe_waits()}\ntasks:\n{tasks}\n{threads}"
    print(report, file=sys.stderr, flush=True)


async def _peers(spec: components.ComponentSpec) -> dict[str, Any]:
    protocol = components.load_object(spec.peer_protocol)
    return {name: await reconnecting_proxy(protocol, path, spec.token, name) for name, path in spec.peers.items()}


def main() -> None:
    # If the parent was killed early, its spec is still in the socket and an orphan would build the component.
    die_with_parent(int(sys.argv[2]))
    faulthandler.enable()  # a crash in C code writes its stack to the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Ctrl-C in a terminal, and the signals of many launchers, reach the whole process group, but only the controller
    # handles them. A no-op handler, unlike SIG_IGN, is not inherited by programs started here.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run_component(int(sys.argv[1])))
    logging.shutdown()
    # Do not wait for compute threads that may still be inside a kernel: there is nothing left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
