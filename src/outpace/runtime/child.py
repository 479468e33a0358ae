"""Entry point of a component process: `python -m outpace.runtime.child FD PARENT NAME`.

Reads the spec from the inherited socket, builds the component, reports that it is ready and serves calls until the
socket closes. The exit code is 0 if the controller first announced the end of the run, else 1. A child never outlives
its parent: the kernel kills it when the parent dies, and it exits when the socket closes.

The socket is one of a pair with the controller or, in a process of torchrun, a connection to it over TCP
(`outpace.runtime.remote`). PARENT is the controller or torchrun. NAME is for `ps` and `top` only.

On SIGUSR2 the event loop, if it still runs, writes waits, tasks and thread stacks to the log. On SIGUSR1 faulthandler
writes the stacks from C, whatever Python is doing. That reads frames without the GIL and can crash a process that is
computing, so use it only if the process did not respond to SIGUSR2.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from typing import Any, NoReturn

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


CLOSE_S = 5.0
"""How long a component may take to close. A call that hangs, such as one that waits for another rank, would block it
forever."""

CONTROLLER_GONE = "the controller has ended, or its connection is lost"


async def run_component(fd: int) -> int:
    """Build the component that the controller describes, and serve it until the socket closes. Returns the exit
    code."""
    asyncio.get_running_loop().set_default_executor(steady_executor())
    connection = socket.socket(fileno=fd)
    is_private = connection.family == socket.AF_UNIX
    channel = Channel(*await asyncio.open_connection(sock=connection))
    spec = await channel.receive(components.ComponentSpec)
    if spec is None:
        return 1  # the controller ended before it sent the spec
    diagnostics.set_crash_process(spec.name)
    diagnostics.crash_point("child.started")
    try:
        if spec.code and not is_private:
            raise errors.ComponentFailed(spec.name, "got pickled code over TCP")
        building = asyncio.create_task(_build(spec))
        component = await (building if is_private else _unless_controller_ends(building, channel))
        protocol = components.load_object(spec.protocol)
        if spec.listen:
            await listen(spec.listen, spec.token, component, protocol)
    except Exception as error:  # process boundary: the parent reports it as this component's failure
        channel.send(RpcFailure.of(0, error))
        await channel.finish()
        return 1
    diagnostics.tune_gc()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _write_stacks)
    diagnostics.crash_point("child.ready")
    channel.send(RpcReply(0, b""))
    watch = asyncio.create_task(_exit_if_broken(component))
    ended = False
    try:
        ended = await serve_calls(component, protocol, channel)
    finally:
        watch.cancel()
        try:
            async with asyncio.timeout(CLOSE_S):
                await components.close_component(component)
        except TimeoutError:
            _exit(0 if ended else 1)  # without waiting for its threads
    if not ended and not is_private:
        print(CONTROLLER_GONE, file=sys.stderr)
    return 0 if ended else 1


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


async def _build(spec: components.ComponentSpec) -> object:
    return await components.build_component(spec, await _peers(spec))


async def _unless_controller_ends(building: asyncio.Task[object], channel: Channel) -> object:
    """Wait for the component, and exit if the controller ends before it is built. The kernel ends only children of the
    controller then, not this process."""
    ending = asyncio.create_task(channel.receive())  # the controller sends nothing before the component is ready
    await asyncio.wait([building, ending], return_when=asyncio.FIRST_COMPLETED)
    if ending.done():
        print(CONTROLLER_GONE, file=sys.stderr)
        _exit(1)  # without waiting for threads that load the model or wait for other ranks
    ending.cancel()
    await asyncio.wait([ending])
    return building.result()


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
    _exit(asyncio.run(run_component(int(sys.argv[1]))))


def _exit(code: int) -> NoReturn:
    """Exit without waiting for compute threads that may still be inside a kernel: there is nothing left to save."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
