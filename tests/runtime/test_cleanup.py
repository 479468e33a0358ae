"""No process, directory or shared memory outlives a run, even if the run is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from outpace.runtime import cleanup_process
from outpace.runtime.cleanup import CleanupProcess, RuntimeDirectory, SessionNote
from outpace.runtime.local import LocalRuntime
from outpace.runtime.process_table import process_start_time
from runtime_support import ENVIRONMENT, is_gone, start_toy, until

pytestmark = pytest.mark.timeout(120)

CONTROLLER = """
import asyncio, json, os, sys
from pathlib import Path
from outpace.runtime.local import LocalRuntime
from outpace.runtime.cleanup import RuntimeDirectory
from runtime_support import start_toy

async def main(root):
    runtime_dir = RuntimeDirectory(root)
    runtime = LocalRuntime(root / "logs", cleanup=runtime_dir.cleanup)
    toys = [await start_toy(runtime, name) for name in ("one", "two")]
    (runtime_dir.path / "weights").write_bytes(b"w" * 1000)
    (runtime_dir.files / "left").mkdir(mode=0)
    print(json.dumps({
        "tree": [await toy.pid() for toy in toys] + [await toy.start_program(60) for toy in toys],
        "cleanup": runtime_dir.cleanup.pid,
        "directories": [str(runtime_dir.path), str(runtime_dir.files)],
    }), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await runtime.stop()
    runtime_dir.remove()

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


def read_facts(controller: subprocess.Popen[str]) -> tuple[list[psutil.Process], psutil.Process, list[Path]]:
    assert controller.stdout is not None
    facts = json.loads(controller.stdout.readline())
    tree = [psutil.Process(pid) for pid in facts["tree"]]
    return tree, psutil.Process(facts["cleanup"]), [Path(directory) for directory in facts["directories"]]


def gone(processes: list[psutil.Process]) -> bool:
    return all(is_gone(process.pid) for process in processes)


def test_after_sigkill_of_the_controller_no_process_and_no_directory_is_left(
    controller: subprocess.Popen[str],
) -> None:
    tree, cleanup, directories = read_facts(controller)
    assert all(directory.is_dir() for directory in directories)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        cleanup.send_signal(number)  # as a launcher does that signals every process it finds
    controller.kill()
    until(lambda: gone([*tree, cleanup]))
    assert not any(directory.exists() for directory in directories)


def test_after_a_normal_end_no_process_directory_or_cleanup_process_is_left(controller: subprocess.Popen[str]) -> None:
    tree, cleanup, directories = read_facts(controller)
    controller.communicate("\n")
    assert gone([*tree, cleanup])
    assert not any(directory.exists() for directory in directories)


def test_if_the_cleanup_process_is_killed_too_the_next_run_removes_what_is_left(
    controller: subprocess.Popen[str], tmp_path: Path
) -> None:
    tree, cleanup, directories = read_facts(controller)
    cleanup.kill()
    controller.kill()
    controller.wait()
    until(lambda: gone(tree[:2]))  # killed by the kernel with their parent
    assert not gone(tree[2:])
    assert all(directory.exists() for directory in directories)
    RuntimeDirectory(tmp_path).remove()
    assert gone(tree)
    assert not any(directory.exists() for directory in directories)


@pytest.fixture
def bystander() -> Any:
    """An unrelated program of the user."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


async def test_programs_started_by_a_dead_component_are_killed_and_others_are_not(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    runtime_dir = RuntimeDirectory(tmp_path)
    runtime = LocalRuntime(tmp_path / "logs", cleanup=runtime_dir.cleanup)
    toys = [await start_toy(runtime, name) for name in ("one", "two")]
    programs = [psutil.Process(await toy.start_program(60)) for toy in toys]
    await runtime.kill("one")
    await runtime.deaths.get()
    await asyncio.to_thread(until, lambda: gone(programs[:1]))
    assert not gone(programs[1:])
    await runtime.restart("one")
    assert await toys[0].attempt() == 1
    await runtime.stop()
    await asyncio.to_thread(runtime_dir.remove)
    assert gone(programs), "programs of other components end with the run"
    assert bystander.poll() is None


EARLY_DEATH = """
import asyncio, os, signal, sys
from outpace.runtime.child_process import ChildProcess
from outpace.runtime.components import ComponentSpec
from pathlib import Path

async def main(root):
    spec = ComponentSpec("toy", "runtime_support:build", "runtime_support:Toy", {"builds": f"{root}/built"})
    with open(Path(root) / "log", "wb") as log:
        child = await ChildProcess.start("outpace.runtime.child", environment={}, output=log)
    child.channel.send(spec)
    child.channel.close()
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1]))
"""


def test_a_child_whose_parent_was_killed_before_the_child_started_does_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EARLY_DEATH, str(tmp_path)]
    result = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, check=False)
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(result.stdout))
        until(lambda: gone([child]))
    assert not (tmp_path / "built").exists()


def test_removing_a_directory_that_is_stubborn_or_gone_touches_no_other_directory(
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


def test_a_directory_replaced_by_a_symlink_during_removal_is_not_followed(
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


LEADER = """
import subprocess, time
print(subprocess.Popen(["sleep", "60"], env={}, stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(60)
"""


def test_processes_that_lost_the_mark_are_found_by_their_recorded_session(tmp_path: Path) -> None:
    """Like the workers of a server: stopped, their leader dead, their environment overwritten."""
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
    until(lambda: gone([worker]))
    cleanup.dismiss()


def test_a_recorded_session_id_reused_by_another_process_is_left_alone(
    bystander: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / f"mark.{bystander.pid}.1").touch()
    (tmp_path / f"another.{bystander.pid}.{process_start_time(bystander.pid)}").touch()
    (tmp_path / "mark.not a pid.1").touch()
    cleanup_process.kill_run_processes("mark.", str(tmp_path))
    assert bystander.poll() is None
    cleanup_process.kill_run_processes("another.", str(tmp_path))
    assert bystander.wait() == -signal.SIGKILL
    assert [note.name for note in tmp_path.iterdir()] == ["mark.not a pid.1"], "notes of dead sessions are removed"


async def test_a_run_continues_without_its_cleanup_process(tmp_path: Path) -> None:
    runtime_dir = RuntimeDirectory(tmp_path)
    os.kill(runtime_dir.cleanup.pid, signal.SIGKILL)
    runtime = LocalRuntime(tmp_path / "logs", cleanup=runtime_dir.cleanup)
    assert await (await start_toy(runtime)).attempt() == 0
    await runtime.stop()
    runtime_dir.remove()
    assert not runtime_dir.path.exists()
