"""The system-call filter: in the real sandbox, and interpreted step by step for both supported architectures."""

from __future__ import annotations

import struct
import sys

import pytest

from outpace.config.sections import SandboxConfig
from outpace.rewards.sandbox import run_python
from outpace.rewards.syscalls import compile_filter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")


async def test_memfd_and_datagram_sockets_are_refused_but_stream_pairs_work() -> None:
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
    result = await run_python(code, limits=SandboxConfig(timeout_s=20.0))
    if not result.isolation.syscalls:
        pytest.skip("no filter for this architecture")
    assert result.stdout == "refused\n" * 4 + "heard\n", result.stderr


def filter_result(machine: str, architecture: int, number: int, *arguments: int) -> int:
    """Interpret the filter as the kernel does and return its result for a call."""
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
def test_the_filter_allows_refuses_or_kills_each_call(
    machine: str, architecture: int, memfd: int, pair: int, clone: int, read: int
) -> None:
    def result_of(*call: int) -> int:
        return filter_result(machine, architecture, *call)

    assert result_of(read) == ALLOWED
    assert filter_result(machine, 0x40000003, read) == KILLED
    assert [result_of(number) for number in (memfd, 447, 425, 1 << 30)] == [REFUSED] * 4
    stream, datagram, closed_on_exec = 1, 2, 0o2000000
    assert [result_of(pair, 1, kind) for kind in (stream, stream | closed_on_exec)] == [ALLOWED] * 2
    assert [result_of(pair, 1, kind) for kind in (datagram, datagram | closed_on_exec, 5, 3)] == [REFUSED] * 4
    assert result_of(pair, 30, stream) == REFUSED
    assert (result_of(clone, 0x11), result_of(clone, 0x10000011)) == (ALLOWED, REFUSED)
    assert result_of(435) == 0x00050000 | 38


def test_the_filter_exists_for_two_architectures_and_is_empty_elsewhere() -> None:
    assert compile_filter("x86_64") != compile_filter("aarch64")
    assert len(compile_filter("x86_64")) % 8 == 0
    assert compile_filter("sparc") == b""
