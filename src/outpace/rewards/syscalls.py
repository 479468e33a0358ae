"""The system calls that a sandboxed program does not get, as a filter for the kernel (seccomp, classic BPF).

A second wall behind the namespaces, and where there are none the only one: no sockets, no look into other processes,
no namespaces or mounts, none of the doors through which kernels are usually broken into. A refused call answers EPERM,
as if for lack of rights; `clone3` answers ENOSYS, upon which libraries use `clone`, whose flags can be looked at.
"""

from __future__ import annotations

import platform
import struct

EPERM, ENOSYS = 1, 38
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, RETURN, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in what the kernel shows of a call."""
NAMESPACE_FLAGS = 0x7E020080
CLONE3 = 435

# socket connect | ptrace process_vm_readv process_vm_writev | mount umount2 pivot_root chroot unshare setns
# | add_key request_key keyctl | bpf perf_event_open userfaultfd open_by_handle_at | shmget semget msgget
# | kexec_load init_module finit_module delete_module
_X86 = (41, 42, 101, 310, 311, 165, 166, 155, 161, 272, 308, 248, 249, 250, 321, 298, 323, 304, 29, 64, 68,
        246, 175, 313, 176)  # fmt: skip
_ARM = (198, 203, 117, 270, 271, 40, 39, 41, 51, 97, 268, 217, 218, 219, 280, 241, 282, 265, 194, 190, 186,
        104, 105, 273, 106)  # fmt: skip
# pidfd_getfd | io_uring_setup io_uring_enter io_uring_register | open_tree move_mount fsopen fsconfig fsmount fspick
# mount_setattr: the same numbers everywhere
_EVERYWHERE = (438, 425, 426, 427, 428, 429, 430, 431, 432, 433, 442)

_MACHINES = {"x86_64": (0xC000003E, 56, _X86), "aarch64": (0xC00000B7, 220, _ARM)}
"""The kernel's name of the architecture, its number of `clone`, and what is refused."""


def compiled(machine: str | None = None) -> bytes:
    """The filter for this machine; empty where its numbers are not known."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return b""
    architecture, clone, refused = known
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
        _step(IF_EQUAL, CLONE3, skip_unless=1),
        _step(RETURN, REFUSE | ENOSYS),
    ]
    for number in (*refused, *_EVERYWHERE):
        code += [_step(IF_EQUAL, number, skip_unless=1), _step(RETURN, REFUSE | EPERM)]
    return b"".join([*code, _step(RETURN, ALLOW)])


def _step(operation: int, value: int, skip_if: int = 0, skip_unless: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, skip_if, skip_unless, value)
