"""The system calls that a sandboxed program does not get, as a filter for the kernel (seccomp, classic BPF).

A second wall behind the namespaces, and where there are none the only one: no sockets but connected pairs of streams,
which lead nowhere else; no memory that no limit counts; no tracing of other processes; no namespaces or mounts; none of
the doors through which kernels are usually broken into. A refused call answers EPERM, as if for lack of rights;
`clone3` answers ENOSYS, upon which libraries use `clone`, whose flags can be looked at.

Not refused is what goes through files: with the same user and no namespaces, /proc shows what the system lets it show.
"""

from __future__ import annotations

import platform
import struct

EPERM, ENOSYS = 1, 38
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, RETURN, AND, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT = 0x20, 0x06, 0x54, 0x15, 0x35, 0x45
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
"""Offsets in what the kernel shows of a call."""
NAMESPACE_FLAGS = 0x7E020080
AF_UNIX, SOCK_STREAM, KIND_OF_SOCKET = 1, 1, 0xF
CLONE3 = 435

# socket connect | ptrace process_vm_readv process_vm_writev | mount umount2 pivot_root chroot unshare setns
# | add_key request_key keyctl | bpf perf_event_open userfaultfd open_by_handle_at | shmget semget msgget mq_open
# memfd_create | kexec_load init_module finit_module delete_module
_X86 = (41, 42, 101, 310, 311, 165, 166, 155, 161, 272, 308, 248, 249, 250, 321, 298, 323, 304, 29, 64, 68, 240,
        319, 246, 175, 313, 176)  # fmt: skip
_ARM = (198, 203, 117, 270, 271, 40, 39, 41, 51, 97, 268, 217, 218, 219, 280, 241, 282, 265, 194, 190, 186, 180,
        279, 104, 105, 273, 106)  # fmt: skip
# pidfd_getfd | io_uring_setup io_uring_enter io_uring_register | open_tree move_mount fsopen fsconfig fsmount fspick
# mount_setattr | memfd_secret: the same numbers everywhere
_EVERYWHERE = (438, 425, 426, 427, 428, 429, 430, 431, 432, 433, 442, 447)

_MACHINES = {"x86_64": (0xC000003E, 56, 53, _X86), "aarch64": (0xC00000B7, 220, 199, _ARM)}
"""The kernel's name of the architecture, its numbers of `clone` and `socketpair`, and what is refused."""


def compiled(machine: str | None = None) -> bytes:
    """The filter for this machine; empty where its numbers are not known."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return b""
    architecture, clone, socketpair, refused = known
    code = [
        _step(LOAD, ARCHITECTURE),
        _step(IF_EQUAL, architecture, skip_if=1),
        _step(RETURN, KILL),
        _step(LOAD, NUMBER),
        _step(IF_AT_LEAST, 1 << 30, skip_unless=1),  # a second set of numbers for the same calls
        _step(RETURN, REFUSE | EPERM),
        _step(IF_EQUAL, clone, skip_unless=4),
        _step(LOAD, FIRST_ARGUMENT),
        _step(IF_ANY_BIT, NAMESPACE_FLAGS, skip_unless=1),
        _step(RETURN, REFUSE | EPERM),
        _step(RETURN, ALLOW),
        *_only_streams(socketpair),
        _step(IF_EQUAL, CLONE3, skip_unless=1),
        _step(RETURN, REFUSE | ENOSYS),
    ]
    for number in (*refused, *_EVERYWHERE):
        code += [_step(IF_EQUAL, number, skip_unless=1), _step(RETURN, REFUSE | EPERM)]
    return b"".join([*code, _step(RETURN, ALLOW)])


def _only_streams(socketpair: int) -> list[bytes]:
    """A socket of any other kind could send to whoever has an address, connected or not."""
    return [
        _step(IF_EQUAL, socketpair, skip_unless=7),
        _step(LOAD, FIRST_ARGUMENT),
        _step(IF_EQUAL, AF_UNIX, skip_unless=4),
        _step(LOAD, SECOND_ARGUMENT),
        _step(AND, KIND_OF_SOCKET),
        _step(IF_EQUAL, SOCK_STREAM, skip_unless=1),
        _step(RETURN, ALLOW),
        _step(RETURN, REFUSE | EPERM),
    ]


def _step(operation: int, value: int, skip_if: int = 0, skip_unless: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, skip_if, skip_unless, value)
