"""Shared helpers for tests of inference servers."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outpace.config import Config

START_S = 240.0
SMALL: dict[str, Any] = {
    "engine.kind": "vllm",
    "engine.context": 256,
    "engine.slots": 16,
    "engine.threads": 1,
    "run.device": "cpu",
    "launch.start_s": START_S,
    "launch.env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
}
"""Settings of a server small enough for tests."""


@dataclass(frozen=True)
class RunningVllm:
    """A running server with the starter model and outpace's plugin. `config` is the config it was started with."""

    url: str
    pid: int
    log: Path
    config: Config


def vllm_python() -> str:
    python = os.environ.get("OUTPACE_VLLM_PYTHON", "")
    if not python:
        pytest.skip("OUTPACE_VLLM_PYTHON does not name a Python with vLLM")
    return python


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate for 127.0.0.1."""

    key: Path
    certificate: Path

    @classmethod
    def made_in(cls, directory: Path) -> Certificate:
        made = cls(directory / "key.pem", directory / "certificate.pem")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", made.key, "-out", made.certificate,
             "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
            check=True, capture_output=True,
        )  # fmt: skip
        return made
