"""Inside the sandbox: `python -I -S sandboxed.py SPEC_FD REPORT_FD`. Standalone script; imports nothing from outpace.

    supervisor: leads the session, creates the namespaces, enforces the timeout
      └─ init: process 1 of the new PID namespace; builds the file system, waits for the program
           └─ program: limits, separate user, no privileges to regain, then `exec` of a fresh interpreter

Invariants
- The program has no file descriptor of the report: only this script writes to it. The program can neither trace nor
  read supervisor and init (separate user if possible, and never dumpable).
- In a PID namespace, the kernel kills every process when `init` exits.
- Isolation that the system refuses is skipped and reported, never assumed. Order: namespaces as root, else a user
  namespace, else none.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH, SECCOMP_MODE_FILTER, CLONE_NEWUSER = 2, 2, 0x10000000
NAMESPACES = {"network": 0x40000000, "files": 0x00020000, "processes": 0x20000000, "ipc": 0x08000000}

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
"""System paths that an interpreter and its libraries need, besides Python's own directories."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
OPEN_FILES = 256

Spec = dict[str, Any]
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    spec_fd, report_fd = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(spec_fd, "rb") as file:
        spec = json.load(file)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    os.umask(0o022)
    close_all_except({0, 1, 2, report_fd, *spec["channel"]})
    try:
        isolation = enter_namespaces(spec)
        init = os.fork()
    except OSError as error:  # a partly created set of namespaces is unusable
        report(report_fd, {"failure": str(error)})
        raise
    if init == 0:
        os._exit(run_init(spec, report_fd, isolation))
    close_all_except({report_fd})
    watch(init, spec["timeout_s"], report_fd)


def watch(init: int, timeout_s: float, report_fd: int) -> None:
    """Wait for init and kill it at the timeout. Returns once it has exited, and its namespace with it."""
    deadline = time.monotonic() + timeout_s
    while os.waitpid(init, os.WNOHANG)[0] == 0:
        left = deadline - time.monotonic()
        if left <= 0:
            report(report_fd, {"timeout": True})
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)
            return
        signal.sigtimedwait({signal.SIGCHLD}, left)


def run_init(spec: Spec, report_fd: int, isolation: dict[str, bool]) -> int:
    """Run as process 1 of the PID namespace, if there is one: start the program and reap its orphans."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_DUMPABLE, 0)
        with suppress(OSError):
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        isolation["files"] = isolation["files"] and private_root(spec)
        write_files(spec)
        isolation["user"] = program_uid(spec) != spec["caller"]
        report(report_fd, {"isolation": isolation})
        program = os.fork()
        if program == 0:
            exec_program(spec, isolation, report_fd)
        close_all_except({report_fd})
        report(report_fd, {"status": wait_for_program(program)})
        return 0
    except Exception as error:  # only this process knows what the system refused
        report(report_fd, {"failure": f"{type(error).__name__}: {error}"})
        return 1


def wait_for_program(program: int) -> int:
    """Wait for the program; return its exit code, negative for a signal. Reaps orphans on the way."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            return os.waitstatus_to_exitcode(status)


def exec_program(spec: Spec, isolation: dict[str, bool], report_fd: int) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if isolation["processes"]:
            os.setsid()  # shares no process group with the outside
        os.chdir(spec["directory"])
        if os.geteuid() == 0:
            change_user(spec["uid"])
        set_limits(spec, isolation)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        close_all_except({0, 1, 2, report_fd, *spec["channel"]})
        os.set_inheritable(report_fd, False)
        for descriptor in spec["channel"]:
            os.set_inheritable(descriptor, True)
        report(report_fd, {"syscalls": filter_syscalls(spec["filter"])})
        os.execve(spec["python"], [spec["python"], "-I", *spec["command"]], spec["environment"])
    except Exception as error:  # see run_init
        report(report_fd, {"failure": f"{type(error).__name__}: {error}"})
    os._exit(1)


# ---------------------------------------------------------------------------------------------------------- namespaces


def enter_namespaces(spec: Spec) -> dict[str, bool]:
    """Create the namespaces; return which ones the next child will be in."""
    found = {name: unshare(flag) for name, flag in NAMESPACES.items()} if os.geteuid() == 0 else {}
    if found.get("network") and found["files"] and found["processes"]:
        return found
    if os.geteuid() == 0:
        change_user(spec["uid"])
    prctl(PR_SET_DUMPABLE, 1)  # required to write the maps below
    uid, gid = os.geteuid(), os.getegid()
    if unshare(CLONE_NEWUSER):
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        found = {name: found.get(name, False) or unshare(flag) for name, flag in NAMESPACES.items()}
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # cleared by the change of user
    return {name: found.get(name, False) for name in NAMESPACES}


def unshare(flag: int) -> bool:
    return bool(libc.unshare(flag) == 0)


def private_root(spec: Spec) -> bool:
    """Pivot to a private root: Python and the system libraries read-only, plus a small tmpfs to write to."""
    try:
        mount("none", "/", None, MS_REC | MS_PRIVATE)
        root = spec["directory"]
        mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={spec['disk_mb']}m,nr_inodes=16k,mode=755")
        for path in outermost([*SYSTEM, *spec["readable"]]):
            bind_read_only(path, root)
        for device in filter(os.path.exists, DEVICES):
            bind(device, root + device)
        for directory, mode in (("/proc", 0o555), ("/dev/shm", 0o1777), ("/tmp", 0o1777), (spec["directory"], 0o700)):
            os.makedirs(root + directory, exist_ok=True)
            os.chmod(root + directory, mode)
        with suppress(OSError):  # refused if parts of /proc are masked; few programs need it
            mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)
        os.chdir(root)
        check(libc.pivot_root(b".", b"."), "pivot_root")
        check(libc.umount2(b".", MNT_DETACH), "umount2")
        os.chdir("/")
    except OSError:
        libc.umount2(spec["directory"].encode(), MNT_DETACH)
        return False
    os.chown(spec["directory"], program_uid(spec), -1)
    return True


def outermost(paths: list[str]) -> list[str]:
    """Return the existing paths that are not inside another one of them."""
    found = sorted({path for path in paths if os.path.lexists(path)})
    return [path for path in found if not any(path.startswith(other.rstrip("/") + "/") for other in found)]


def bind_read_only(path: str, root: str) -> None:
    if os.path.islink(path):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(os.readlink(path), root + path)
    else:
        bind(path, root + path)
        locked = os.statvfs(path).f_flag & 0x40F  # a remount must keep the existing restrictions of the mount
        mount("none", root + path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | locked)


def bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    mount(source, target, None, MS_BIND | MS_REC)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    what, where, how, more = (part.encode() if part else None for part in (source, target, kind, options))
    check(libc.mount(what, where, how, ctypes.c_ulong(flags), more), f"mount {target}")


# -------------------------------------------------------------------------------------------------------------- limits


def write_files(spec: Spec) -> None:
    for name, text in spec["files"].items():
        path = os.path.join(spec["directory"], name)
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
        os.chown(path, program_uid(spec), -1)


def program_uid(spec: Spec) -> int:
    """Return the user id that the program will run as."""
    return int(spec["uid"]) if os.geteuid() == 0 else os.geteuid()


def change_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def set_limits(spec: Spec, isolation: dict[str, bool]) -> None:
    seconds = int(spec["timeout_s"]) + 1
    processes = spec["processes"]
    if os.geteuid() == spec["caller"] and not isolation["processes"]:
        processes += thread_count(os.geteuid())  # RLIMIT_NPROC counts all threads of the user
    for what, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, spec["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_AS, spec["memory_mb"] << 20),
    ):
        hard = resource.getrlimit(what)[1]
        capped = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (capped, capped))


def thread_count(uid: int) -> int:
    found = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has exited
            if os.stat(f"/proc/{process}").st_uid == uid:
                found += len(os.listdir(f"/proc/{process}/task"))
    return found


class SockFprog(ctypes.Structure):
    """`struct sock_fprog` of the kernel: number of instructions and pointer to them."""

    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))


def filter_syscalls(code: str) -> bool:
    """Install the seccomp filter that the parent compiled (hexadecimal; empty if unsupported on this machine)."""
    body = bytes.fromhex(code)
    program = ctypes.create_string_buffer(body, len(body))
    found = SockFprog(len(body) // 8, ctypes.addressof(program))
    return bool(body) and libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(found), 0, 0) == 0


# -------------------------------------------------------------------------------------------------------------- basics


def close_all_except(descriptors: set[int]) -> None:
    """Close all other file descriptors; standard streams are redirected to /dev/null instead."""
    null = os.open("/dev/null", os.O_RDWR)
    for stream in {0, 1, 2} - descriptors:
        os.dup2(null, stream)
    bounds = [2, *sorted(each for each in descriptors if each > 2), os.sysconf("SC_OPEN_MAX")]
    for low, high in pairwise(bounds):
        os.closerange(low + 1, high)


def report(descriptor: int, what: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(what).encode() + b"\n")


def prctl(option: int, value: int) -> None:
    check(libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def check(answer: int, what: str) -> None:
    if answer != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
