"""The inside of a child process: `python -m outpace.runtime.child FD PARENT`.

Reads its spec from the inherited socket, builds its part, says it is ready and answers calls until the parent closes
the socket. A child never outlives its parent: the kernel kills it when the parent dies, and a closed socket ends it.

On SIGUSR2 its loop, if it still runs, writes waits, tasks and stacks of threads to its log. On SIGUSR1 the stacks are
written in C, whatever Python is doing. That reads frames without the GIL and can crash a process that computes, so it
is for a process that did not answer SIGUSR2.
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
from outpace.runtime import spec as parts
from outpace.runtime.lifeline import die_with_parent
from outpace.runtime.peers import peer
from outpace.runtime.rpc import Channel, serve
from outpace.runtime.sockets import listen
from outpace.runtime.threads import steady_executor


class Ready(msgspec.Struct, tag="ready"):
    pid: int


class Broken(msgspec.Struct, tag="broken"):
    """The part could not be built."""

    kind: str
    message: str
    traceback: str


Hello = Ready | Broken

STACKS = "waits:"
"""The first line of what a loop writes on SIGUSR2."""


async def live(fd: int) -> None:
    asyncio.get_running_loop().set_default_executor(steady_executor())
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    channel = Channel(reader, writer)
    spec = await channel.receive(parts.PartSpec)
    if spec is None:
        return  # the parent went away before it said what we are
    crash.be(spec.name)
    crash.reached("child.started")
    try:
        part = await parts.build(spec, await _peers(spec))
        if spec.listen:
            await listen(spec.listen, spec.token, part, parts.resolve(spec.protocol))
    except Exception as error:  # a boundary: the parent reports it as this part's failure
        await channel.send(Broken(type(error).__name__, str(error), traceback.format_exc()))
        await channel.finish()
        return
    garbage.settle()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _write_stacks)
    crash.reached("child.ready")
    await channel.send(Ready(os.getpid()))
    watch = asyncio.create_task(_leave_if_broken(part))
    try:
        await serve(part, parts.resolve(spec.protocol), channel)
    finally:
        watch.cancel()
        await parts.close(part)


async def _leave_if_broken(part: object) -> None:
    """At once, before the answers to what was under way are written: whoever has asked is to see a lost part, whose
    successor can be asked again, and not a failure."""
    if isinstance(part, parts.Breakable):
        failure = await part.broken()
        print(failure.remote_traceback, file=sys.stderr)
        print(f"{parts.BROKEN}{errors.one_line(failure.message, 1000)}", file=sys.stderr, flush=True)
        os._exit(1)


def _write_stacks() -> None:
    report = f"{STACKS}\n{stacks.waits()}\ntasks:\n{stacks.tasks()}\n{stacks.threads()}"
    print(report, file=sys.stderr, flush=True)


async def _peers(spec: parts.PartSpec) -> dict[str, Any]:
    protocol = parts.resolve(spec.peer_protocol)
    return {name: await peer(protocol, path, spec.token, name) for name, path in spec.peers.items()}


def main() -> None:
    # What a parent that was killed early has sent is still there to be read: an orphan would build its part.
    die_with_parent(int(sys.argv[2]))
    faulthandler.enable()  # a crash in C says where it was, in the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A terminal's Ctrl-C reaches the whole process group, and so does what many a launcher sends. Only the controller
    # decides what it means. A handler, unlike SIG_IGN, is not inherited by the programs that are started here.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(live(int(sys.argv[1])))
    logging.shutdown()
    # Compute threads may still be inside a kernel: the work is done and nothing of it is left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
