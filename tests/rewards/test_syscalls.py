"""The filter of system calls: in the real sandbox, and step by step for both kinds of machine."""

from __future__ import annotations

import struct
import sys

import pytest

from outpace.rewards.sandbox import SandboxLimits, run_python
from outpace.rewards.syscalls import compile_filter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")


async def test_no_uncounted_memory_and_no_way_to_send_to_strangers() -> None:
    code = """
import os, socket
for attempt in (
    lambda: os.memfd_create('x'),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
):
    try: print(attempt())
    except PermissionError: print('refused')
one, other = socket.socketpair()
one.send(b'heard')
print(other.recv(9).decode())
"""
    result = await run_python(code, limits=SandboxLimits(timeout_s=20.0))
    if not result.isolation.syscalls:
        pytest.skip("there is no filter for this machine")
    assert result.stdout == "refused\n" * 4 + "heard\n", result.stderr


def verdict(machine: str, architecture: int, number: int, *arguments: int) -> int:
    """What the filter answers to a call, reckoned as the kernel does."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("<HBBI", compile_filter(machine)))
    place = held = 0
    while True:
        operation, skip_if, skip_unless, value = steps[place]
        if operation == 0x06:
            return int(value)
        if operation == 0x20:
            (held,) = struct.unpack_from("<I", data, value)
        elif operation == 0x54:
            held &= value
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[operation]
            place += skip_if if holds else skip_unless
        place += 1


ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050001, 0x80000000


@pytest.mark.parametrize(
    ("machine", "architecture", "memfd", "pair", "clone", "read"),
    [("x86_64", 0xC000003E, 319, 53, 56, 0), ("aarch64", 0xC00000B7, 279, 199, 220, 63)],
)
def test_what_the_filter_says_of_each_call(
    machine: str, architecture: int, memfd: int, pair: int, clone: int, read: int
) -> None:
    def says(*call: int) -> int:
        return verdict(machine, architecture, *call)

    assert says(read) == ALLOWED
    assert verdict(machine, 0x40000003, read) == KILLED
    assert [says(number) for number in (memfd, 447, 425, 1 << 30)] == [REFUSED] * 4
    stream, datagram, closed_on_exec = 1, 2, 0o2000000
    assert [says(pair, 1, kind) for kind in (stream, stream | closed_on_exec)] == [ALLOWED] * 2
    assert [says(pair, 1, kind) for kind in (datagram, datagram | closed_on_exec, 5, 3)] == [REFUSED] * 4
    assert says(pair, 30, stream) == REFUSED
    assert (says(clone, 0x11), says(clone, 0x10000011)) == (ALLOWED, REFUSED)
    assert says(435) == 0x00050000 | 38


def test_the_filter_is_known_for_two_kinds_of_machine_and_empty_elsewhere() -> None:
    assert compile_filter("x86_64") != compile_filter("aarch64")
    assert len(compile_filter("x86_64")) % 8 == 0
    assert compile_filter("sparc") == b""
