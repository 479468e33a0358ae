"""Test helpers: build configs, start the command line, read the files of a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import settings as hypothesis_settings

from outpace.checkpoint.journal import place_of, read_record, survey_journal
from outpace.config import Config
from outpace.config.load import (
    CONFIG_FILE,
    EMPTY_RESOLVED,
    RESOLVED_FILE,
    dump_resolved,
    dump_settings,
    make_config,
)
from outpace.config.validation import resolve
from outpace.hardware.cpu import supports_bfloat16
from outpace.types import FinishedGroup, GroupOrder, GroupRecord, GroupReport, Row

needs_bfloat16 = pytest.mark.skipif(
    not supports_bfloat16(), reason="this CPU does not support bfloat16, and outpace refuses to compute in it there"
)

INLINE = {"run.runtime": "inline", "rewards.isolation": "thread"}
"""Settings of a run that starts no process."""

RunCommand = Callable[..., subprocess.CompletedProcess[str]]


def resolved(settings: dict[str, Any] | None = None) -> Config:
    """A complete config from dotted settings."""
    return resolve(make_config(settings or {}))


def examples(count: int, **options: Any) -> hypothesis_settings:
    """Set how many examples a property gets relative to the others; the profiles in conftest.py scale the number."""
    return hypothesis_settings(max_examples=max(1, count * hypothesis_settings().max_examples // 100), **options)


def write_config(run: Path, config: Config, objects: Sequence[str] = ()) -> None:
    """Write the config files of a run."""
    (run / RESOLVED_FILE).write_text(dump_resolved(config))
    (run / CONFIG_FILE).write_text(dump_settings(config, objects))


def write_resolved(run: Path, text: str = "") -> None:
    """Write the config files of a run with only these resolved settings."""
    (run / RESOLVED_FILE).write_text(EMPTY_RESOLVED + text)
    (run / CONFIG_FILE).write_text("")


def as_arguments(settings: dict[str, Any]) -> list[str]:
    return [f"--{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in settings.items()]


def start_command(*words: str, launcher: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
    """Start outpace. `launcher`: a module that starts it, with its arguments; none: Python does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    module = [*launcher, "-m", "outpace"] if launcher else ["outpace.cli"]
    return subprocess.Popen(
        [sys.executable, "-m", *module, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
    )  # fmt: skip


def run_command(*words: str, within_s: float = 280, **options: Any) -> subprocess.CompletedProcess[str]:
    with start_command(*words, **options) as process:
        try:
            out, err = process.communicate(timeout=within_s)
        finally:
            process.kill()  # after a timeout; otherwise it has already ended
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def kill_processes(processes: Iterable[psutil.Process]) -> None:
    """Kill those that still run: a process may end because an earlier one was killed."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def journalled(journal: Path) -> dict[int, GroupRecord]:
    """Every record of a journal, by group."""
    return {found.order.group: read_record(journal, place_of(found)) for found in survey_journal(journal)}


def kept_of(group: int, newest: int = 0, **order: Any) -> FinishedGroup:
    """A finished group as the journal records it, with arbitrary values."""
    ordered = GroupOrder(group, **({"task": 0, "epoch": 0, "min_version": 0, "size": 4, "position": group} | order))
    return FinishedGroup(ordered, GroupReport(group, f"task/{group}", "finished", newest=newest))


def a_record(group: int, tokens: int = 5) -> GroupRecord:
    row = Row(
        np.arange(tokens, dtype=np.int32),
        np.ones(tokens, dtype=np.bool_),
        np.zeros(tokens, dtype=np.float32),
        np.zeros(tokens, dtype=np.int32),
        np.ones(tokens, dtype=np.float32),
    )
    return GroupRecord(group, f"task/{group}", 0, 0, [row], [1.0])


def naming(*keys: str) -> str:
    """A regex for messages that contain all keys, in any order."""
    return "(?s)^" + "".join(f"(?=.*{re.escape(key)})" for key in keys)


def names(text: str, keys: str) -> bool:
    """Whether the text contains each of the space-separated keys as a whole word."""
    return all(re.search(rf"(?<!\w){re.escape(key)}(?!\w)", text) for key in keys.split())
