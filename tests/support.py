"""Starting the command line and reading what it leaves, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outpace.checkpoint.journal import _HEADER
from outpace.config import Config
from outpace.config.loading import make_config
from outpace.config.rules import resolve
from outpace.types import GroupRecord
from outpace.wire import decode

RunCommand = Callable[..., subprocess.CompletedProcess[str]]


def resolved(settings: dict[str, Any] | None = None) -> Config:
    """A complete config from dotted settings."""
    return resolve(make_config(settings or {}))


def as_arguments(settings: dict[str, Any]) -> list[str]:
    return [f"--{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in settings.items()]


def start_command(*words: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "outpace.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
    )  # fmt: skip


def run_command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    process = start_command(*words, **options)
    out, err = process.communicate(timeout=170)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def journalled(journal: Path) -> dict[int, GroupRecord]:
    """Every record of a journal, read from front to back."""
    records: dict[int, GroupRecord] = {}
    for segment in sorted(journal.iterdir()):
        data = segment.read_bytes()
        while data:
            length, _ = _HEADER.unpack_from(data)
            record: GroupRecord = decode(data[_HEADER.size : _HEADER.size + length], GroupRecord)
            records[record.group] = record
            data = data[_HEADER.size + length :]
    return records
