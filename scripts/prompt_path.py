"""Which files of outpace one prompt enters: `python scripts/prompt_path.py [--list]`, in the repository root.

Runs the demo with one group per step and records, in every process and thread, each source file of outpace that a
function call enters on behalf of the third group, between its admission and the end of its gradient:

    calls below the functions in ROOTS, in the tasks and threads that these start, and in the threads that compute for
    engine and learner

With `--all`, also what runs beside it: supervision, metrics, weight updates.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path("src/outpace").resolve()

ROOTS = {
    ("controller/groups.py", "run"),
    ("controller/training.py", "chunk"),
    ("rollouts/worker.py", "run"),
    ("engines/embedded/engine.py", "generate"),
    ("engines/embedded/engine.py", "_compute"),
    ("learner/learner.py", "chunk"),
    ("learner/learner.py", "_chunk"),
}
"""Where the work on a group begins in each process and thread. Of the events of the controller, that of the group."""

HOOK = """
import contextvars, mmap, os, sys, threading

source = os.environ["PROMPT_PATH_SOURCE"] + "/"
directory = os.environ["PROMPT_PATH_DIRECTORY"]
roots = ROOTS_LITERAL
follow_all = bool(os.environ["PROMPT_PATH_ALL"])
with open(os.path.join(directory, "window"), "r+b") as file:
    window = mmap.mmap(file.fileno(), 1)  # 0: before, 1: from admission to gradient, 2: after
log = os.open(os.path.join(directory, f"{os.getpid()}.files"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
seen, admitted = set(), set()
following = contextvars.ContextVar("following", default=False)


def is_followed(frame):
    if follow_all or following.get():
        return True
    while frame is not None:
        code = frame.f_code
        if (code.co_filename.removeprefix(source), code.co_name) in roots:
            following.set(True)  # and every task and thread started from here
            return True
        if code.co_name == "_handle" and code.co_filename.endswith("controller/driver.py"):
            return type(frame.f_locals["event"]).__name__ == "GroupClosed"
        frame = frame.f_back
    return False


def record(frame, event, argument):
    code = frame.f_code
    if event == "call":
        if window[0] == 0 and code.co_name == "run" and code.co_filename.endswith("controller/groups.py"):
            admitted.add(frame.f_locals["order"].group)
            window[0] = len(admitted) == 3
        if window[0] == 1 and code.co_filename not in seen and code.co_filename.startswith(source):
            if is_followed(frame):
                seen.add(code.co_filename)
                os.write(log, (code.co_filename + "\\n").encode())
    elif event == "return" and code.co_name == "accumulate" and code.co_filename.endswith("learner/core.py"):
        window[0] = 2 if window[0] else 0


threading.setprofile(record)
sys.setprofile(record)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="also print the files")
    parser.add_argument("--all", action="store_true", help="also count what runs beside the prompt")
    options = parser.parse_args()
    if not SOURCE.is_dir():
        sys.exit(f"{SOURCE}: no such directory; run this in the repository root")
    with tempfile.TemporaryDirectory() as directory:
        files = entered_files(Path(directory), options.all)
    print(f"{len(files)} files of outpace from admission to gradient")
    if options.list:
        print(*files, sep="\n")


def entered_files(directory: Path, everything: bool) -> list[str]:
    (directory / "window").write_bytes(b"\0")
    (directory / "sitecustomize.py").write_text(HOOK.replace("ROOTS_LITERAL", repr(ROOTS)))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{directory}{os.pathsep}{SOURCE.parent}",
        "PROMPT_PATH_SOURCE": str(SOURCE),
        "PROMPT_PATH_DIRECTORY": str(directory),
        "PROMPT_PATH_ALL": "1" if everything else "",
    }
    command = [sys.executable, "-m", "outpace.cli", "train", "examples/demo.toml", "--quiet"]
    settings = ["--run.dir", str(directory / "run"), "--run.steps", "4", "--eval.every", "0", "--pacing.max_lag", "0"]
    settings += ["--pacing.groups_per_step", "1", "--pacing.max_running", "1", "--filter.uniform", "false"]
    done = subprocess.run([*command, *settings], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or (directory / "window").read_bytes() != b"\2":
        sys.exit(f"the run failed (exit code {done.returncode}): {done.stdout[-500:]}{done.stderr[-2000:]}")
    paths = {line for log in directory.glob("*.files") for line in log.read_text().splitlines()}
    return sorted(str(Path(path).relative_to(SOURCE)) for path in paths)


if __name__ == "__main__":
    main()
