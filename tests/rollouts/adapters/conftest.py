"""Servers of other packages, run by the Python that `OUTPACE_ADAPTERS_PYTHON` names."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

HERE = Path(__file__).parent
START_LIMIT_S = 120


@pytest.fixture(scope="session")
def other_python() -> str:
    """A Python that has OpenEnv."""
    python = os.environ.get("OUTPACE_ADAPTERS_PYTHON")
    if not python:
        pytest.skip("OUTPACE_ADAPTERS_PYTHON is not set to a Python with OpenEnv")
    return python


@pytest.fixture(scope="session")
def openenv_server(other_python: str) -> Iterator[Callable[[str], str]]:
    """Starts a server of `openenv_server.py`, once per kind, and returns its URL."""
    urls: dict[str, str] = {}
    processes: list[subprocess.Popen[bytes]] = []

    def started(kind: str) -> str:
        if kind not in urls:
            port = free_port()
            processes.append(subprocess.Popen([other_python, str(HERE / "openenv_server.py"), kind, str(port)]))
            wait_for(f"http://127.0.0.1:{port}/health", processes[-1])
            urls[kind] = f"http://127.0.0.1:{port}"
        return urls[kind]

    yield started
    for process in processes:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            urlopen(url, timeout=5).close()
            return
        except (URLError, ConnectionError, TimeoutError):
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.2)
