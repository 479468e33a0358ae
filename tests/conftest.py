"""Hooks, settings and fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from cpus import NEOVERSE_N1, NEOVERSE_V1
from leftovers import pytest_configure  # noqa: F401 - a pytest hook: checks that the session leaves nothing behind
from outpace.hardware import cpu
from outpace.monitoring.metric_table import DECLARED

if "PYTEST_XDIST_WORKER" in os.environ:  # the processes share the cores; set before anything loads torch
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

os.environ["OUTPACE_UNDECLARED_METRICS"] = "error"  # also in the processes that tests start

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell; tests send it to children
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples per property; `support.examples` scales with them. `make test` looks at a few new ones every time, `make
# properties` at many (--hypothesis-profile=thorough). No deadline: machines are shared and sometimes slow.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("quick")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look for garbage during imports, nor later among the many objects of torch and transformers."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in captured output: some tests log them, and pytest-xdist cannot send them."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session", autouse=True)
def ranks_are_stopped() -> Generator[None, None, None]:
    """End the processes that `learner.ranks` keeps."""
    yield
    if (ranks := sys.modules.get("learner.ranks")) is not None:
        ranks.stop_ranks()


@pytest.fixture
def own_metrics() -> Generator[None, None, None]:
    """Forget the metrics that the test declares."""
    yield
    DECLARED.clear()


@pytest.fixture
def cpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make outpace detect an aarch64 CPU without bfloat16."""
    _set_cpu(NEOVERSE_N1, monkeypatch, tmp_path)


@pytest.fixture
def cpu_with_bfloat16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make outpace detect an aarch64 CPU with bfloat16."""
    _set_cpu(NEOVERSE_V1, monkeypatch, tmp_path)


def _set_cpu(cpuinfo: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    file = folder / "cpuinfo"
    file.write_text(cpuinfo)
    monkeypatch.setattr(cpu, "CPUINFO", file)
