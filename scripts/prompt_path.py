"""Which files of outpace one prompt enters: `python scripts/prompt_path.py [--list]`, in the repository root.

Runs the demo with one group per step and records, in every process and thread, each source file of outpace that a
function call enters between the admission of the third group and the end of its gradient. Start-up, the first weight
update and shutdown do not count; everything else that runs meanwhile (supervision, metrics, files) does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path("src/outpace").resolve()

HOOK = """
import mmap, os, sys, threading

source = os.environ["PROMPT_PATH_SOURCE"]
directory = os.environ["PROMPT_PATH_DIRECTORY"]
with open(os.path.join(directory, "window"), "r+b") as file:
    window = mmap.mmap(file.fileno(), 1)  # 0: before, 1: from admission to gradient, 2: after
log = os.open(os.path.join(directory, f"{os.getpid()}.files"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
seen, admitted = set(), set()


def record(frame, event, argument):
    code = frame.f_code
    if event == "call":
        if window[0] == 0 and code.co_name == "run" and code.co_filename.endswith("controller/groups.py"):
            admitted.add(frame.f_locals["order"].group)
            window[0] = len(admitted) == 3
        if window[0] == 1 and code.co_filename not in seen and code.co_filename.startswith(source):
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
    options = parser.parse_args()
    if not SOURCE.is_dir():
        sys.exit(f"{SOURCE}: no such directory; run this in the repository root")
    with tempfile.TemporaryDirectory() as directory:
        files = entered_files(Path(directory))
    print(f"{len(files)} files of outpace from admission to gradient")
    if options.list:
        print(*files, sep="\n")


def entered_files(directory: Path) -> list[str]:
    (directory / "window").write_bytes(b"\0")
    (directory / "sitecustomize.py").write_text(HOOK)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{directory}{os.pathsep}{SOURCE.parent}",
        "PROMPT_PATH_SOURCE": str(SOURCE),
        "PROMPT_PATH_DIRECTORY": str(directory),
    }
    command = [sys.executable, "-m", "outpace.cli", "train", "examples/demo.toml", "--quiet"]
    settings = ["--run.dir", str(directory / "run"), "--run.steps", "4", "--eval.every", "0", "--pacing.max_lag", "0"]
    settings += ["--pacing.groups_per_step", "1", "--pacing.max_running", "1"]
    done = subprocess.run([*command, *settings], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or (directory / "window").read_bytes() != b"\2":
        sys.exit(f"the run failed (exit code {done.returncode}): {done.stdout[-500:]}{done.stderr[-2000:]}")
    paths = {line for log in directory.glob("*.files") for line in log.read_text().splitlines()}
    return sorted(str(Path(path).relative_to(SOURCE)) for path in paths)


if __name__ == "__main__":
    main()
