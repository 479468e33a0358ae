"""TRL's asynchronous script samples on a running vLLM server, and learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compat.heldout import EXAMPLES, heldout_reward
from servers_support import RunningVllm

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(900)]


def test_the_asynchronous_script_learns_with_a_vllm_server(vllm: RunningVllm, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "trl_async_grpo.py"), vllm.url],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert heldout_reward(tmp_path / "runs" / "trl-async-grpo" / "trained") - heldout_reward("starter") >= 0.2
