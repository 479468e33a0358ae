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
import traceback
from typing import Any

import msgspec

from outpace import crash, errors
from outpace.runtime import garbage, stacks
from outpace.runtime import spec as components
from outpace.runtime.lifeline import die_with_parent
from outpace.runtime.peers import peer
from outpace.runtime.rpc import Channel, serve
from outpace.runtime.sockets import listen
from outpace.runtime.threads import steady_executor


class Ready(msgspec.Struct, tag="ready"):
    pid: int


class Broken(msgspec.Struct, tag="broken"):
    """The component could not be built."""

    kind: str
    message: str
    traceback: str


Hello = Ready | Broken

STACKS = "waits:"
"""First line of the report that is written on SIGUSR2."""


async def live(fd: int) -> None:
    """Build the component that the parent describes, and serve it until the parent closes the socket."""
    asyncio.get_running_loop().set_default_executor(steady_executor())
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    channel = Channel(reader, writer)
    spec = await channel.receive(components.PartSpec)
    if spec is None:
        return  # the parent ended before it sent the spec
    crash.be(spec.name)
    crash.reached("child.started")
    try:
        component = await components.build(spec, await _peers(spec))
        if spec.listen:
            await listen(spec.listen, spec.token, component, components.resolve(spec.protocol))
    except Exception as error:  # process boundary: the parent reports it as this component's failure
        await channel.send(Broken(type(error).__name__, str(error), traceback.format_exc()))
        await channel.finish()
        return
    garbage.settle()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _write_stacks)
    crash.reached("child.ready")
    await channel.send(Ready(os.getpid()))
    watch = asyncio.create_task(_exit_if_broken(component))
    try:
        await serve(component, components.resolve(spec.protocol), channel)
    finally:
        watch.cancel()
        await components.close(component)


async def _exit_if_broken(component: object) -> None:
    """Exit immediately, before the replies to calls in flight are sent: callers must see a lost component, which they
    can retry on its successor, and not a failure."""
    if isinstance(component, components.Breakable):
        failure = await component.broken()
        print(failure.remote_traceback, file=sys.stderr)
        print(f"{components.BROKEN}{errors.one_line(failure.message, 1000)}", file=sys.stderr, flush=True)
        os._exit(1)


def _write_stacks() -> None:
    report = f"{STACKS}\n{stacks.waits()}\ntasks:\n{stacks.tasks()}\n{stacks.threads()}"
    print(report, file=sys.stderr, flush=True)


async def _peers(spec: components.PartSpec) -> dict[str, Any]:
    protocol = components.resolve(spec.peer_protocol)
    return {name: await peer(protocol, path, spec.token, name) for name, path in spec.peers.items()}


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
    asyncio.run(live(int(sys.argv[1])))
    logging.shutdown()
    # Do not wait for compute threads that may still be inside a kernel: there is nothing left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
