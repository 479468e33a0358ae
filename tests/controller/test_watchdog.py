from __future__ import annotations

from outpace.controller.supervisor import AwakeClock, Watchdog


def test_the_watchdog_warns_once_at_half_of_the_stall_limit_and_ends_the_run_at_the_limit() -> None:
    watchdog = Watchdog(10.0)
    verdicts = [watchdog.tick(1.0) for _ in range(10)]
    assert verdicts == ["fine"] * 4 + ["warn"] + ["fine"] * 4 + ["end"]


def test_progress_resets_the_watchdog() -> None:
    watchdog = Watchdog(10.0)
    assert [watchdog.tick(6.0)] == ["warn"]
    watchdog.record_progress()
    assert [watchdog.tick(4.0), watchdog.tick(1.0), watchdog.tick(5.0)] == ["fine", "warn", "end"]


def test_time_during_which_the_process_was_suspended_does_not_count() -> None:
    now = 0.0
    awake = AwakeClock(lambda: now, interval_s=1.0)
    now = 1.1
    assert awake.lap() == 1.1
    now = 5000.0  # suspended for more than an hour
    assert awake.lap() == 2.0
    now = 5001.0
    assert awake.lap() == 1.0
