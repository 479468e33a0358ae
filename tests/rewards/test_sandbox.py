"""Misbehaving programs in the real sandbox."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from outpace.config.sections import SandboxConfig
from outpace.rewards import sandbox
from outpace.rewards.sandbox import SANDBOX_SCRIPT, Isolation, SandboxFailed, SandboxResult, run_python
from outpace.rewards.syscalls import compile_filter
from outpace.runtime.process_table import MARK_VARIABLE
from rewards_support import forbid_namespaces, open_to_all, readable_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

LIMITS = SandboxConfig(timeout_s=20.0)
SHORT = SandboxConfig(timeout_s=1.0)


async def run(code: str, limits: SandboxConfig = LIMITS, **more: Any) -> SandboxResult:
    return await run_python(code, limits=limits, **more)


def leftovers() -> list[str]:
    return [each for each in os.listdir(tempfile.gettempdir()) if each.startswith("outpace-sandbox-")]


@pytest.fixture(autouse=True)
def check_no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    os.chmod(tmp_path, 0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert leftovers() == []
    assert [child for child in psutil.Process().children(recursive=True) if _is_python(child)] == []


def _is_python(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and str(SANDBOX_SCRIPT) in process.cmdline()
    except psutil.Error:
        return False


# --------------------------------------------------------------------------------------------------- ordinary programs


async def test_a_program_reads_its_input_and_prints() -> None:
    result = await run("import sys\nprint(input()[::-1])\nprint('no', file=sys.stderr)", stdin="abc\n")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("ok", 0, "cba\n", "no\n")
    assert not result.truncated


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("raise ValueError", "error", 1),
        ("raise SystemExit(7)", "error", 7),
        ("def f(:", "error", 1),
        ("import os; os.abort()", "killed", -6),
        ("import os; os.kill(os.getpid(), 9)", "killed", -9),
        ("'\ud800'", "error", 1),
        ("import numpy; print(numpy.zeros(2).sum())", "ok", 0),
        ("import multiprocessing as m; assert m.Pool(2).map(abs, [-1, 2]) == [1, 2]", "ok", 0),
        ("import asyncio; asyncio.run(asyncio.sleep(0))", "ok", 0),
    ],
)
async def test_the_result_reports_how_a_program_ended(code: str, status: str, exit_code: int) -> None:
    result = await run(code)
    assert (result.status, result.exit_code) == (status, exit_code), result.stderr


async def test_concurrent_programs_do_not_block_the_event_loop() -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    beating = asyncio.create_task(beat())
    results = await asyncio.gather(*(run(f"print({number})") for number in range(6)))
    beating.cancel()
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(6)]
    assert beats > 100


async def test_unread_input_is_harmless() -> None:
    assert (await run("pass", stdin="x" * 3_000_000)).status == "ok"


# -------------------------------------------------------------------------------------------------------------- limits


async def test_run_time_is_limited() -> None:
    result = await run("print('begun', flush=True)\nwhile True: pass", SHORT)
    assert (result.status, result.exit_code, result.stdout) == ("timeout", None, "begun\n")


async def test_a_sleeping_program_that_ignores_signals_is_killed() -> None:
    code = "import signal, time\nfor s in (1, 2, 13, 14, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(600)"
    assert (await run(code, SHORT)).status == "timeout"


async def test_memory_is_limited() -> None:
    assert (await run("x = bytearray(10 << 30)")).status == "memory"


async def test_a_fork_bomb_is_limited() -> None:
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    running = asyncio.create_task(run(code, SandboxConfig(timeout_s=2.0, processes=8)))
    most = 0
    while not running.done():
        most = max(most, len(psutil.Process().children(recursive=True)))
        await asyncio.sleep(0.02)
    assert (await running).status in ("timeout", "killed")
    assert 1 < most < 30
    assert (await run("print(1)")).status == "ok"


async def test_threads_count_toward_the_process_limit() -> None:
    code = "import threading\nfor _ in range(99): threading.Thread(target=threading.Event().wait, daemon=True).start()"
    assert "can't start new thread" in (await run(code)).stderr


async def test_endless_output_is_truncated_while_the_program_runs() -> None:
    limits = SandboxConfig(timeout_s=1.0, output_kb=4)
    result = await run("while True: print('y' * 1000)", limits)
    assert (result.status, result.truncated, len(result.stdout)) == ("timeout", True, 4096)


async def test_stderr_is_truncated_as_well() -> None:
    limits = SandboxConfig(timeout_s=20.0, output_kb=1)
    result = await run("import sys\nsys.stderr.write('e' * 200_000)\nprint('done')", limits)
    assert (result.status, result.truncated, result.stdout) == ("ok", True, "done\n")
    assert result.stderr == "e" * 1024


async def test_file_size_is_limited() -> None:
    result = await run("open('big', 'wb').write(bytes(4 << 20))", SandboxConfig(timeout_s=20.0, file_mb=1))
    assert result.exit_code == 1
    assert "File too large" in result.stderr


# ----------------------------------------------------------------------------------------------------------- visibility


async def test_the_environment_of_the_caller_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_KEY", "swordfish")
    code = (
        "import glob, os\nprint(dict(os.environ))\n"
        "for name in glob.glob('/proc/*/environ'):\n"
        "    try: print(open(name, 'rb').read())\n"
        "    except OSError: pass"
    )
    result = await run(code)
    assert result.status == "ok"
    if result.isolation.user or result.isolation.processes:
        assert "swordfish" not in result.stdout
    names = names_in(result.stdout.splitlines()[0])
    assert names - {MARK_VARIABLE, "LC_CTYPE"} == {"PATH", "LANG", "HOME", "TMPDIR"}


def names_in(shown: str) -> set[str]:
    return set(json.loads(shown.replace("'", '"')))


async def test_only_the_standard_streams_are_open() -> None:
    code = """
import os
for number in range(3, 1000):
    try: print(os.fstat(number))
    except OSError: pass
"""
    result = await run(code)
    assert (result.status, result.stdout) == ("ok", "")


async def test_there_is_no_network() -> None:
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        result = await run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    assert result.exit_code == 1
    assert result.isolation.network or result.isolation.syscalls


async def test_home_and_checkout_are_neither_visible_nor_deletable(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o777)
    (precious / "thesis").write_text("years of work")
    code = (
        "import os, shutil, sys\n"
        f"for place in ({str(precious)!r}, {str(Path.home())!r}, {str(SANDBOX_SCRIPT.parent)!r}):\n"
        "    print(os.path.exists(place + '/thesis'), os.path.exists(place + '/sandboxed.py'))\n"
        f"shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)\n"
    )
    result = await run(code)
    if not result.isolation.files:
        pytest.skip("mount namespaces are not available on this system")
    assert result.stdout == "False False\n" * 3
    assert (precious / "thesis").read_text() == "years of work"


async def test_the_working_directory_is_writable_and_private() -> None:
    code = (
        "import os, stat\nopen('note', 'w').write('x')\n"
        "print(oct(stat.S_IMODE(os.stat('.').st_mode)), os.path.samefile('.', os.environ['HOME']))"
    )
    assert (await run(code)).stdout == "0o700 True\n"


async def test_privileges_cannot_be_gained() -> None:
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "print(libc.unshare(0x10000000), libc.ptrace(16, os.getppid(), 0, 0), libc.setuid(0))\n"
        "print([line for line in open('/proc/self/status') if line.startswith(('CapEff', 'NoNewPrivs'))])"
    )
    result = await run(code)
    assert result.stdout.splitlines()[0] == "-1 -1 -1"
    assert "0000000000000000" in result.stdout
    assert "NoNewPrivs:\\t1" in result.stdout


async def test_the_report_cannot_be_forged() -> None:
    code = (
        "import glob, os\n"
        "for number in (*range(3, 200), *glob.glob('/proc/*/fd/*')):\n"
        "    try:\n"
        "        where = number if isinstance(number, int) else os.open(number, os.O_WRONLY)\n"
        "        if where > 2: os.write(where, b'{\"status\": 0}\\n')\n"
        "    except OSError: pass\n"
        "os._exit(1)"
    )
    assert (await run(code)).exit_code == 1


# -------------------------------------------------------------------------------------------------------------- cleanup


async def test_processes_left_behind_by_a_program_are_killed(tmp_path: Path) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve('/usr/bin/env', ['env', 'sleep', '4242'], {})
    os._exit(0)
os.wait()
time.sleep(0.3)
"""
    assert (await run(code)).status == "ok"
    assert [process for process in psutil.process_iter() if "4242" in _command_line(process)] == []


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("namespaces", [True, False])
async def test_a_cancelled_run_leaves_nothing_running(
    namespaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not namespaces:
        forbid_namespaces(monkeypatch, tmp_path)
    name = f"cancelled-{secrets.token_hex(8)}"
    running = asyncio.create_task(run("import os, time; os.fork(); time.sleep(3141)", arguments=[name]))
    await asyncio.to_thread(_wait_for_two, name)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert programs_of(name) == []


def _wait_for_two(name: str) -> None:
    while len(programs_of(name)) < 2:
        time.sleep(0.01)


def programs_of(argument: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if argument in _command_line(process)]


async def test_a_sandbox_that_fails_to_start_raises_sandbox_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tmp_path / "dead.py"
    dead.write_text("import sys\nsys.exit('no such luck')")
    monkeypatch.setattr(sandbox, "SANDBOX_SCRIPT", dead)
    with pytest.raises(SandboxFailed, match="no such luck"):
        await run("print(1)")


async def test_a_timeout_during_sandbox_setup_raises_sandbox_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(SANDBOX_SCRIPT.read_text().replace("        write_files(spec)\n", "        time.sleep(60)\n"))
    monkeypatch.setattr(sandbox, "SANDBOX_SCRIPT", slow)
    with pytest.raises(SandboxFailed):
        await run("print(1)", SHORT)


async def test_a_missing_interpreter_raises_sandbox_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    start = sandbox._SandboxRun._spec
    monkeypatch.setattr(sandbox._SandboxRun, "_spec", lambda *given: {**start(*given), "python": "/no/such/python"})
    with pytest.raises(SandboxFailed, match="FileNotFoundError"):
        await run("print(1)")


# ------------------------------------------------------------------------------------- systems with weaker isolation


def refuse_unshare() -> None:
    """Make this process behave as in a container that forbids namespaces."""
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 272), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("<HBBI", *step) for step in steps)
    body = ctypes.create_string_buffer(code, len(code))

    class Filter(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))

    assert ctypes.CDLL(None).prctl(22, 2, ctypes.byref(Filter(len(steps), ctypes.addressof(body))), 0, 0) == 0


@pytest.fixture
def run_sandbox_script(tmp_path: Path) -> Callable[[int, bool, str], tuple[dict[str, Any], str]]:
    """Run the sandbox script as a given user, with or without namespaces; return its report and its output."""
    if os.geteuid() != 0 or os.uname().machine != "x86_64":
        pytest.skip("needs root to switch users")
    script = tmp_path / "sandboxed.py"
    shutil.copy(SANDBOX_SCRIPT, script)
    open_to_all(tmp_path)

    def run(uid: int, forbidden: bool, code: str) -> tuple[dict[str, Any], str]:
        home = tmp_path / f"home-{uid}-{forbidden}"
        home.mkdir(mode=0o700)
        os.chown(home, uid or 1_500_000_000, -1)
        python = readable_python()
        spec = {
            "timeout_s": 20, "memory_mb": 512, "processes": 16, "file_mb": 16, "disk_mb": 80, "uid": 1_500_000_000,
            "caller": uid, "directory": str(home), "files": {"program.py": code}, "channel": [], "python": python,
            "command": ["program.py"], "filter": compile_filter().hex(), "readable": ["/usr"], "environment": {},
        }  # fmt: skip

        def become() -> None:
            if forbidden:
                refuse_unshare()
            if uid:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)

        reading, writing = os.pipe()
        memory = os.memfd_create("spec")
        os.write(memory, json.dumps(spec).encode())
        os.lseek(memory, 0, os.SEEK_SET)
        ended = subprocess.run(
            [python, "-I", "-S", str(script), str(memory), str(writing)],
            pass_fds=[memory, writing], preexec_fn=become, capture_output=True, text=True, env={}, check=True, cwd="/",
        )  # fmt: skip
        for descriptor in (writing, memory):
            os.close(descriptor)
        with os.fdopen(reading) as report:
            return {key: value for line in report for key, value in json.loads(line).items()}, ended.stdout

    return run


LOOK = """
import os, signal, socket
try:
    socket.socket()
    print("network")
except OSError:
    pass
children = []
try:
    while len(children) < 40:
        children.append(os.fork())
        if children[-1] == 0:
            while True:
                signal.pause()
except OSError:
    os.write(1, b"limited ")
for child in children:
    os.kill(child, signal.SIGKILL)
print(os.getuid())
"""


@pytest.mark.parametrize("uid", [0, 65534])
@pytest.mark.parametrize("forbidden", [False, True])
def test_root_and_ordinary_users_get_the_isolation_their_system_permits(
    run_sandbox_script: Any, uid: int, forbidden: bool
) -> None:
    report, output = run_sandbox_script(uid, forbidden, LOOK)
    isolation = Isolation(**report["isolation"], syscalls=report["syscalls"])
    assert report["status"] == 0
    assert output == f"limited {uid or 1_500_000_000}\n"
    assert isolation.user == (uid == 0)
    assert isolation.syscalls
    if forbidden:
        assert not any((isolation.network, isolation.files, isolation.processes))
        assert any("files" in words for words in isolation.missing())
        assert any("own user" in words for words in isolation.missing()) == (uid != 0)
    elif isolation.files:
        assert isolation.missing() == []


async def test_without_namespaces_the_process_tree_is_killed_and_missing_isolation_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forbid_namespaces(monkeypatch, tmp_path, same_user=True)
    sandbox._warn_once.cache_clear()
    code = "import os, subprocess\nfor new in (True, False): subprocess.Popen(['sleep', '4243'], start_new_session=new)"
    results = [await run(code) for _ in range(2)]
    assert [(result.status, result.isolation.processes) for result in results] == [("ok", False)] * 2
    assert [process for process in psutil.process_iter() if "4243" in _command_line(process)] == []
    warnings = [record.getMessage() for record in caplog.records if record.name == sandbox.__name__]
    assert sum("files" in warning for warning in warnings) == 1
