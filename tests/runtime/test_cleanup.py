"""Nothing of a run outlives it, not even if nobody was left to tidy up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from outpace.runtime import cleanup_process
from outpace.runtime.cleanup import CleanupProcess, RuntimeDirectory, SessionNote
from outpace.runtime.local import LocalRuntime
from runtime_support import ENVIRONMENT, start_toy

pytestmark = pytest.mark.timeout(120)

CONTROLLER = """
import asyncio, json, os, sys
from pathlib import Path
from outpace.runtime.local import LocalRuntime
from outpace.runtime.cleanup import RuntimeDirectory
from runtime_support import start_toy

async def main(root):
    scratch = RuntimeDirectory(root)
    runtime = LocalRuntime(root / "logs", cleanup=scratch.cleanup)
    toys = [await start_toy(runtime, name) for name in ("one", "two")]
    (scratch.path / "weights").write_bytes(b"w" * 1000)
    (scratch.files / "left").mkdir(mode=0)
    print(json.dumps({
        "family": [await toy.pid() for toy in toys] + [await toy.start_program(60) for toy in toys],
        "guardian": scratch.cleanup.pid,
        "directories": [str(scratch.path), str(scratch.files)],
    }), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await runtime.stop()
    scratch.remove()

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.fixture
def controller(tmp_path: Path) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path)],
        env={**os.environ, **ENVIRONMENT, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.communicate()


def told_by(controller: subprocess.Popen[str]) -> tuple[list[psutil.Process], psutil.Process, list[Path]]:
    assert controller.stdout is not None
    facts = json.loads(controller.stdout.readline())
    family = [psutil.Process(pid) for pid in facts["family"]]
    return family, psutil.Process(facts["guardian"]), [Path(directory) for directory in facts["directories"]]


def until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.02)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_after_sigkill_of_the_controller_no_process_and_no_directory_is_left(
    controller: subprocess.Popen[str],
) -> None:
    family, cleanup, directories = told_by(controller)
    assert all(directory.is_dir() for directory in directories)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        cleanup.send_signal(number)  # as a launcher would that ends everything it finds
    controller.kill()
    until(lambda: gone([*family, cleanup]))
    assert not any(directory.exists() for directory in directories)


def test_after_a_normal_end_neither_is_a_guardian(controller: subprocess.Popen[str]) -> None:
    family, cleanup, directories = told_by(controller)
    controller.communicate("\n")
    assert gone([*family, cleanup])
    assert not any(directory.exists() for directory in directories)


def test_where_the_guardian_was_killed_too_the_next_run_removes_what_is_left(
    controller: subprocess.Popen[str], tmp_path: Path
) -> None:
    family, cleanup, directories = told_by(controller)
    cleanup.kill()
    controller.kill()
    controller.wait()
    until(lambda: gone(family[:2]))  # the kernel's part, where it has one
    assert not gone(family[2:])
    assert all(directory.exists() for directory in directories)
    RuntimeDirectory(tmp_path).remove()
    assert gone(family)
    assert not any(directory.exists() for directory in directories)


@pytest.fixture
def bystander() -> Any:
    """A program of the user's own that happens to run."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


async def test_what_a_dead_part_had_started_ends_with_it_and_nothing_else(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    scratch = RuntimeDirectory(tmp_path)
    runtime = LocalRuntime(tmp_path / "logs", cleanup=scratch.cleanup)
    toys = [await start_toy(runtime, name) for name in ("one", "two")]
    programs = [psutil.Process(await toy.start_program(60)) for toy in toys]
    await runtime.kill("one")
    await runtime.deaths.get()
    await asyncio.to_thread(until, lambda: gone(programs[:1]))
    assert not gone(programs[1:])
    await runtime.restart("one")
    assert await toys[0].attempt() == 1
    await runtime.stop()
    await asyncio.to_thread(scratch.remove)
    assert gone(programs), "what the others had started ends with the run"
    assert bystander.poll() is None


EARLY_DEATH = """
import asyncio, os, signal, sys
from outpace.runtime.local import ComponentProcess
from outpace.runtime.components import ComponentSpec
from pathlib import Path

async def main(root):
    spec = ComponentSpec("toy", "runtime_support:build", "runtime_support:Toy", {"builds": f"{root}/built"})
    process = await ComponentProcess.launch(spec, {}, Path(root) / "log", "wb")
    await process.channel.send(spec)
    process.channel.close()
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1]))
"""


def test_a_child_whose_parent_was_killed_before_it_woke_up_does_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EARLY_DEATH, str(tmp_path)]
    told = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, check=False)
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(told.stdout))
        until(lambda: gone([child]))
    assert not (tmp_path / "built").exists()


def test_nothing_but_its_own_directory_is_touched_where_it_cannot_be_removed_or_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup_process, "PASSES", 2)
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    elsewhere.mkdir(mode=0o755)
    shared.chmod(0o1777)
    ours = shared / "ours"
    ours.mkdir()
    (ours / "link").symlink_to(elsewhere)
    with monkeypatch.context() as stubborn:
        stubborn.setattr("shutil.rmtree", lambda directory, **_: None)
        cleanup_process.remove_directory(str(ours))
    cleanup_process.remove_directory(str(shared / "never was"))
    assert ours.exists()
    cleanup_process.remove_directory(str(ours))
    assert not ours.exists()
    assert [stat.S_IMODE(place.stat().st_mode) for place in (shared, elsewhere)] == [0o1777, 0o755]


def test_a_directory_that_becomes_a_link_at_the_wrong_moment_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, ours = tmp_path / "elsewhere", tmp_path / "ours"
    (elsewhere / "below").mkdir(parents=True)
    (ours / "inner").mkdir(parents=True)
    allow = cleanup_process._set_owner_mode

    def allow_after_a_swap(name: str, within: int | None) -> None:
        if name == "inner":
            (ours / "inner").rmdir()
            (ours / "inner").symlink_to(elsewhere)
        allow(name, within)

    monkeypatch.setattr(cleanup_process, "_set_owner_mode", allow_after_a_swap)
    places = [elsewhere, elsewhere / "below"]
    for place in places:
        place.chmod(0o755)
    cleanup_process._make_removable(str(ours))
    assert (ours / "inner").is_symlink()
    assert [stat.S_IMODE(place.stat().st_mode) for place in places] == [0o755, 0o755]


@pytest.mark.parametrize("has_ended", [True, False])
def test_the_number_of_a_part_that_has_ended_is_forgotten(
    has_ended: bool, bystander: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    cleanup = CleanupProcess(tmp_path / "index")
    mark = cleanup.new_mark()
    cleanup.watch(mark, bystander.pid)
    if has_ended:
        cleanup.sweep(mark)
    cleanup.dismiss()
    assert (bystander.poll() is None) == has_ended


def test_no_two_processes_share_a_mark(tmp_path: Path) -> None:
    cleanup = CleanupProcess(tmp_path / "index")
    marks = [cleanup.new_mark() for _ in range(12)]
    cleanup.dismiss()
    assert not any(one in other for one in marks for other in marks if one is not other)


def test_a_number_that_belongs_to_another_process_by_now_is_left_alone(bystander: subprocess.Popen[bytes]) -> None:
    cleanup_process.kill_run_processes({bystander.pid: "long ago"}, "nobody's mark", "/nowhere")
    assert bystander.poll() is None
    cleanup_process.kill_run_processes(
        {bystander.pid: cleanup_process.process_start_time(bystander.pid)}, "nobody's mark", "/nowhere"
    )
    assert bystander.wait() == -signal.SIGKILL


LEADER = """
import subprocess, time
print(subprocess.Popen(["sleep", "60"], env={}, stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(60)
"""


def test_whoever_has_lost_the_mark_is_found_by_the_session_that_was_noted(tmp_path: Path) -> None:
    """As a server's workers are: stopped, their leader dead, their environment written over."""
    cleanup = CleanupProcess(tmp_path / "index")
    environment = {**os.environ, **cleanup.marked(mark := cleanup.new_mark())}
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    SessionNote(leader.pid, environment)
    assert leader.stdout is not None
    worker = psutil.Process(int(leader.stdout.readline()))
    worker.suspend()
    leader.kill()
    leader.communicate(timeout=20)
    cleanup.sweep(mark)
    psutil.wait_procs([worker], timeout=20)
    gone = not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    cleanup.dismiss()
    assert gone


def test_a_session_whose_number_is_another_process_by_now_is_left_alone(
    bystander: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / f"mark.{bystander.pid}.1").touch()
    assert cleanup_process.recorded_sessions(str(tmp_path), "mark.") == set()
    (tmp_path / f"mark.{bystander.pid}.{cleanup_process.process_start_time(bystander.pid)}").touch()
    assert cleanup_process.recorded_sessions(str(tmp_path), "mark.") == {bystander.pid}
    assert cleanup_process.recorded_sessions(str(tmp_path), "another.") == set()


async def test_a_run_goes_on_without_its_guardian(tmp_path: Path) -> None:
    scratch = RuntimeDirectory(tmp_path)
    os.kill(scratch.cleanup.pid, signal.SIGKILL)
    runtime = LocalRuntime(tmp_path / "logs", cleanup=scratch.cleanup)
    assert await (await start_toy(runtime)).attempt() == 0
    await runtime.stop()
    scratch.remove()
    assert not scratch.path.exists()
