"""Seccomp filter (classic BPF) of the sandbox: the system calls that a sandboxed program may not make.

Second line of defense behind the namespaces, and the only one without them. Forbidden: sockets, except connected stream
pairs, which cannot reach anything else; memory that escapes the limits; tracing other processes; namespaces and mounts;
system calls commonly used for kernel exploits. A forbidden call fails with EPERM. `clone3` fails with ENOSYS, so that
libraries fall back to `clone`, whose flags a filter can inspect.

Not covered: access through files. With the same user and without namespaces, the program can read /proc as far as the
system permits.
"""

from __future__ import annotations

import platform
import struct

EPERM, ENOSYS = 1, 38
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, RETURN, AND, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT = 0x20, 0x06, 0x54, 0x15, 0x35, 0x45
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
"""Offsets into `struct seccomp_data`."""
NAMESPACE_FLAGS = 0x7E020080
AF_UNIX, SOCK_STREAM, SOCKET_TYPE_MASK = 1, 1, 0xF
CLONE3 = 435

# socket connect | ptrace process_vm_readv process_vm_writev | mount umount2 pivot_root chroot unshare setns
# | add_key request_key keyctl | bpf perf_event_open userfaultfd open_by_handle_at | shmget semget msgget mq_open
# memfd_create | kexec_load init_module finit_module delete_module
_X86 = (41, 42, 101, 310, 311, 165, 166, 155, 161, 272, 308, 248, 249, 250, 321, 298, 323, 304, 29, 64, 68, 240,
        319, 246, 175, 313, 176)  # fmt: skip
_ARM = (198, 203, 117, 270, 271, 40, 39, 41, 51, 97, 268, 217, 218, 219, 280, 241, 282, 265, 194, 190, 186, 180,
        279, 104, 105, 273, 106)  # fmt: skip
# pidfd_getfd | io_uring_setup io_uring_enter io_uring_register | open_tree move_mount fsopen fsconfig fsmount fspick
# mount_setattr | memfd_secret: same numbers on all architectures
_ALL_MACHINES = (438, 425, 426, 427, 428, 429, 430, 431, 432, 433, 442, 447)

_MACHINES = {"x86_64": (0xC000003E, 56, 53, _X86), "aarch64": (0xC00000B7, 220, 199, _ARM)}
"""Per machine: AUDIT_ARCH value, numbers of `clone` and `socketpair`, and the forbidden calls."""


def compile_filter(machine: str | None = None) -> bytes:
    """Return the filter for this machine; empty if its system call numbers are not known."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return b""
    architecture, clone, socketpair, refused = known
    code = [
        _instruction(LOAD, ARCHITECTURE),
        _instruction(IF_EQUAL, architecture, skip_if=1),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER),
        _instruction(IF_AT_LEAST, 1 << 30, skip_unless=1),  # x32 ABI: a second set of numbers for the same calls
        _instruction(RETURN, REFUSE | EPERM),
        _instruction(IF_EQUAL, clone, skip_unless=4),
        _instruction(LOAD, FIRST_ARGUMENT),
        _instruction(IF_ANY_BIT, NAMESPACE_FLAGS, skip_unless=1),
        _instruction(RETURN, REFUSE | EPERM),
        _instruction(RETURN, ALLOW),
        *_allow_stream_pairs(socketpair),
        _instruction(IF_EQUAL, CLONE3, skip_unless=1),
        _instruction(RETURN, REFUSE | ENOSYS),
    ]
    for number in (*refused, *_ALL_MACHINES):
        code += [_instruction(IF_EQUAL, number, skip_unless=1), _instruction(RETURN, REFUSE | EPERM)]
    return b"".join([*code, _instruction(RETURN, ALLOW)])


def _allow_stream_pairs(socketpair: int) -> list[bytes]:
    """Allow only stream pairs: datagram sockets could send to any address, connected or not."""
    return [
        _instruction(IF_EQUAL, socketpair, skip_unless=7),
        _instruction(LOAD, FIRST_ARGUMENT),
        _instruction(IF_EQUAL, AF_UNIX, skip_unless=4),
        _instruction(LOAD, SECOND_ARGUMENT),
        _instruction(AND, SOCKET_TYPE_MASK),
        _instruction(IF_EQUAL, SOCK_STREAM, skip_unless=1),
        _instruction(RETURN, ALLOW),
        _instruction(RETURN, REFUSE | EPERM),
    ]


def _instruction(operation: int, value: int, skip_if: int = 0, skip_unless: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, skip_if, skip_unless, value)
