from __future__ import annotations

import time

from outpace.monitoring.efficiency import Stopwatch


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_waiting_takes_clock_time_but_no_processor_time() -> None:
    watch = Stopwatch(threads=1)
    with watch.running():
        time.sleep(0.05)
    assert watch.busy_s >= 0.05
    assert watch.core_s < 0.04


def test_work_takes_clock_and_processor_time_and_adds_up() -> None:
    watch = Stopwatch(threads=1)
    for _ in range(2):
        with watch.running():
            spin(0.02)
    assert watch.core_s >= 0.03
    assert watch.core_s <= watch.busy_s


def test_on_an_accelerator_core_time_is_clock_time() -> None:
    watch = Stopwatch(threads=None)
    with watch.running():
        time.sleep(0.01)
    assert watch.core_s == watch.busy_s
