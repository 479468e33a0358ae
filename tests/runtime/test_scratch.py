from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from outpace.runtime.scratch import Scratch


def test_what_a_killed_run_left_is_removed_by_the_next_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal; from pathlib import Path; from outpace.runtime.scratch import Scratch;"
        "scratch = Scratch(Path(sys.argv[1])); os.kill(scratch.guardian.pid, signal.SIGKILL);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    living = Scratch(tmp_path)
    another = Scratch(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, another.path.name}
    living.remove()
    another.remove()
    assert list(tmp_path.iterdir()) == []


def test_it_is_private(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    assert os.stat(scratch.path).st_mode & 0o777 == 0o700
    scratch.remove()
