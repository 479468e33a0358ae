"""The inside of the sandbox: `python -I -S sandboxed.py SPEC_FD REPORT_FD`, a script that imports nothing of outpace.

    keeper: leads the session, makes the namespaces, watches the clock
      └─ first: process 1 of the new process namespace; builds the file system, waits for the program
           └─ program: limits, another user, no way back to privileges, then `exec` of a fresh interpreter

Invariants
- The program has no descriptor of the report: only keeper and first write to it, and neither can be traced or read by
  the program (another user where possible, and not dumpable in any case).
- With a process namespace the end of `first` is the end of everything in it; the kernel sees to that.
- What the system refuses is left out and reported, never assumed. The order is: namespaces as root, else a user
  namespace of one's own, else none.
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
"""What an interpreter and its libraries need of the machine, besides the places where Python itself lies."""
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
    keep_open({0, 1, 2, report_fd, *spec["channel"]})
    try:
        isolation = enter_namespaces(spec)
        first = os.fork()
    except OSError as error:  # half in a namespace there is no way on
        report(report_fd, {"failure": str(error)})
        raise
    if first == 0:
        os._exit(be_first(spec, report_fd, isolation))
    keep_open({report_fd})
    watch(first, spec["timeout_s"], report_fd)


def watch(first: int, timeout_s: float, report_fd: int) -> None:
    """Wait for `first`, kill it when time is up. Returns once it has ended, and with it its namespace."""
    deadline = time.monotonic() + timeout_s
    while os.waitpid(first, os.WNOHANG)[0] == 0:
        left = deadline - time.monotonic()
        if left <= 0:
            report(report_fd, {"timeout": True})
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            return
        signal.sigtimedwait({signal.SIGCHLD}, left)


def be_first(spec: Spec, report_fd: int, isolation: dict[str, bool]) -> int:
    """Process 1 of the namespace, if there is one: starts the program and reaps whatever it leaves."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_DUMPABLE, 0)
        with suppress(OSError):
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        isolation["files"] = isolation["files"] and private_root(spec)
        write_files(spec)
        isolation["user"] = owner(spec) != spec["caller"]
        report(report_fd, {"isolation": isolation})
        program = os.fork()
        if program == 0:
            become_program(spec, isolation, report_fd)
        keep_open({report_fd})
        report(report_fd, {"status": outcome(program)})
        return 0
    except Exception as error:  # nobody else can tell what the system refused
        report(report_fd, {"failure": f"{type(error).__name__}: {error}"})
        return 1


def outcome(program: int) -> int:
    """How the program ended, negative for a signal; orphans that end before it are reaped on the way."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            return os.waitstatus_to_exitcode(status)


def become_program(spec: Spec, isolation: dict[str, bool], report_fd: int) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if isolation["processes"]:
            os.setsid()  # no process outside shares a group with it
        os.chdir(spec["directory"])
        if os.geteuid() == 0:
            change_user(spec["uid"])
        limit(spec, isolation)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        keep_open({0, 1, 2, report_fd, *spec["channel"]})
        os.set_inheritable(report_fd, False)
        for descriptor in spec["channel"]:
            os.set_inheritable(descriptor, True)
        report(report_fd, {"syscalls": filter_syscalls(spec["filter"])})
        os.execve(spec["python"], [spec["python"], "-I", *spec["command"]], spec["environment"])
    except Exception as error:  # as above
        report(report_fd, {"failure": f"{type(error).__name__}: {error}"})
    os._exit(1)


# ---------------------------------------------------------------------------------------------------------- namespaces


def enter_namespaces(spec: Spec) -> dict[str, bool]:
    """Which of them this process, or rather its next child, is in."""
    found = {name: unshare(flag) for name, flag in NAMESPACES.items()} if os.geteuid() == 0 else {}
    if found.get("network") and found["files"] and found["processes"]:
        return found
    if os.geteuid() == 0:
        change_user(spec["uid"])
    prctl(PR_SET_DUMPABLE, 1)  # or the maps below could not be written
    uid, gid = os.geteuid(), os.getegid()
    if unshare(CLONE_NEWUSER):
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        found = {name: found.get(name, False) or unshare(flag) for name, flag in NAMESPACES.items()}
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it
    return {name: found.get(name, False) for name in NAMESPACES}


def unshare(flag: int) -> bool:
    return bool(libc.unshare(flag) == 0)


def private_root(spec: Spec) -> bool:
    """A file system of its own: Python and the system's libraries to read, a small one in memory to write."""
    try:
        mount("none", "/", None, MS_REC | MS_PRIVATE)
        root = spec["directory"]
        mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={spec['disk_mb']}m,nr_inodes=16k,mode=755")
        for place in outermost([*SYSTEM, *spec["readable"]]):
            show(place, root)
        for device in filter(os.path.exists, DEVICES):
            bind(device, root + device)
        for directory, mode in (("/proc", 0o555), ("/dev/shm", 0o1777), ("/tmp", 0o1777), (spec["directory"], 0o700)):
            os.makedirs(root + directory, exist_ok=True)
            os.chmod(root + directory, mode)
        with suppress(OSError):  # refused where parts of /proc are hidden; few programs miss it
            mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)
        os.chdir(root)
        check(libc.pivot_root(b".", b"."), "pivot_root")
        check(libc.umount2(b".", MNT_DETACH), "umount2")
        os.chdir("/")
    except OSError:
        libc.umount2(spec["directory"].encode(), MNT_DETACH)
        return False
    os.chown(spec["directory"], owner(spec), -1)
    return True


def outermost(places: list[str]) -> list[str]:
    """Those that exist and lie in no other one of them."""
    there = sorted({place for place in places if os.path.lexists(place)})
    return [place for place in there if not any(place.startswith(other.rstrip("/") + "/") for other in there)]


def show(place: str, root: str) -> None:
    if os.path.islink(place):
        os.makedirs(os.path.dirname(root + place), exist_ok=True)
        os.symlink(os.readlink(place), root + place)
    else:
        bind(place, root + place)
        kept = os.statvfs(place).f_flag & 0x40F  # a remount must not drop what the mount forbids already
        mount("none", root + place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


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
        os.chown(path, owner(spec), -1)


def owner(spec: Spec) -> int:
    """Who the program will be."""
    return int(spec["uid"]) if os.geteuid() == 0 else os.geteuid()


def change_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def limit(spec: Spec, isolation: dict[str, bool]) -> None:
    seconds = int(spec["timeout_s"]) + 1
    processes = spec["processes"]
    if os.geteuid() == spec["caller"] and not isolation["processes"]:
        processes += tasks_of(os.geteuid())  # the system counts all that the user runs
    for what, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, spec["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_AS, spec["memory_mb"] << 20),
    ):
        hard = resource.getrlimit(what)[1]
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (wanted, wanted))


def tasks_of(uid: int) -> int:
    found = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            if os.stat(f"/proc/{process}").st_uid == uid:
                found += len(os.listdir(f"/proc/{process}/task"))
    return found


class Filter(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))


def filter_syscalls(code: str) -> bool:
    """Install the filter that the parent compiled: hexadecimal, empty where there is none for this machine."""
    body = bytes.fromhex(code)
    program = ctypes.create_string_buffer(body, len(body))
    found = Filter(len(body) // 8, ctypes.addressof(program))
    return bool(body) and libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(found), 0, 0) == 0


# -------------------------------------------------------------------------------------------------------------- basics


def keep_open(descriptors: set[int]) -> None:
    """Close every other one; the standard streams are closed by putting nothing in their place."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in {0, 1, 2} - descriptors:
        os.dup2(nothing, stream)
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
