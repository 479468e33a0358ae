import asyncio
import re
import threading
from collections.abc import Mapping
from typing import Any

import pytest

import outpace
from outpace.errors import ComponentFailed
from outpace.monitoring import callbacks
from outpace.monitoring.callbacks import Callback, CallbackRunner
from support import names


class Recorder(Callback):
    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.threads: set[str] = set()

    def on_batch_start(self, version: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.entries.append(("start", version))

    async def on_batch_end(self, metrics: Mapping[str, float]) -> None:
        await asyncio.sleep(0)
        self.threads.add(threading.current_thread().name)
        self.entries.append(("end", metrics["step"]))


class Broken(Callback):
    def on_epoch_start(self, epoch: int) -> None:
        raise ZeroDivisionError(f"epoch {epoch}")

    async def on_epoch_end(self, epoch: int) -> None:
        raise SystemExit(1)


async def test_callbacks_plain_and_async_run_in_order_on_their_own_thread() -> None:
    recorder = Recorder()
    runner = CallbackRunner([recorder])
    for step in range(20):
        runner.post("on_batch_start", step)
        runner.post("on_batch_end", {"step": step})
    await runner.close()
    assert recorder.entries == [(kind, step) for step in range(20) for kind in ("start", "end")]
    assert recorder.threads == {"outpace-callbacks"}


async def test_a_callback_reports_metrics_until_the_run_has_ended() -> None:
    class Counting(Callback):
        def on_batch_start(self, version: int) -> None:
            self.log_metric("time_of/day", version)
            outpace.log_metric("time_of/night", version, 2)

    counting = Counting()
    runner = CallbackRunner([counting])
    counting.log_metric("time_of/day", 7)
    runner.post("on_batch_start", 1)
    await runner.close()
    counting.log_metric("time_of/day", 8)
    assert runner.log.take() == [("time_of/day", 7, 1), ("time_of/day", 1, 1), ("time_of/night", 1, 2)]
    for bad in ("step", "reward/mean", "faults/mine", "two words", "", "/x"):
        with pytest.raises(ValueError, match=re.escape(f"metric {bad}" if "/m" in bad else f"metric {bad!r}")):
            runner.log.log_metric(bad, 1)
    for value, weight in (("text", 1), ([1, 2], 1), (1, -1)):
        with pytest.raises(ValueError, match="time_of/day"):
            runner.log.log_metric("time_of/day", value, weight)  # type: ignore[arg-type]


async def test_a_blocked_callback_does_not_block_the_run() -> None:
    release = threading.Event()
    seen: list[int] = []

    class Blocking(Callback):
        def on_policy_updated(self, version: int) -> None:
            release.wait()
            seen.append(version)

    runner = CallbackRunner([Blocking()])
    for version in range(3):
        runner.post("on_policy_updated", version)
    assert seen == []
    release.set()
    await runner.close()
    assert seen == [0, 1, 2]


async def test_a_task_started_by_an_async_callback_keeps_running_between_events() -> None:
    done = threading.Event()

    class Background(Callback):
        async def on_run_start(self, info: Mapping[str, Any]) -> None:
            self.task = asyncio.create_task(self.later())

        async def later(self) -> None:
            await asyncio.sleep(0)
            done.set()

    runner = CallbackRunner([Background()])
    runner.post("on_run_start", {})
    assert await asyncio.to_thread(done.wait, 30)
    await runner.close()


async def test_an_exception_ends_the_run_with_its_traceback_and_nothing_is_called_after_it() -> None:
    recorder = Recorder()
    failures: list[ComponentFailed] = []
    runner = CallbackRunner([Broken(), recorder], on_failure=failures.append)
    runner.post("on_epoch_start", 3)
    runner.post("on_batch_start", 1)
    with pytest.raises(ComponentFailed, match=r"Broken\.on_epoch_start: ZeroDivisionError: epoch 3") as caught:
        await runner.close()
    assert "raise ZeroDivisionError" in caught.value.remote_traceback
    assert failures == [caught.value]
    assert recorder.entries == []
    with pytest.raises(ComponentFailed):
        runner.check()


async def test_system_exit_in_a_callback_is_a_failure() -> None:
    runner = CallbackRunner([Broken()])
    runner.post("on_epoch_end", 0)
    with pytest.raises(ComponentFailed, match="SystemExit"):
        await runner.close()


async def test_posting_after_a_failure_or_the_end_is_harmless() -> None:
    recorder = Recorder()
    runner = CallbackRunner([recorder])
    await runner.close()
    runner.post("on_batch_start", 1)
    await runner.close()
    assert recorder.entries == []


async def test_a_callback_that_never_returns_is_named_at_the_deadline() -> None:
    release = threading.Event()

    class Endless(Callback):
        def on_run_end(self, summary: Any) -> None:
            release.wait()

    runner = CallbackRunner([Endless()])
    runner.post("on_run_end", None)
    with pytest.raises(ComponentFailed, match=r"\b0\.05\b"):
        await runner.close(timeout_s=0.05)
    reporting = CallbackRunner([Endless()], errors="report")
    reporting.post("on_run_end", None)
    await reporting.close(timeout_s=0.05)
    release.set()


async def test_callbacks_too_far_behind_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "MAX_BEHIND", 5)
    release = threading.Event()

    class Slow(Callback):
        def on_epoch_start(self, epoch: int) -> None:
            release.wait()

    runner = CallbackRunner([Slow()])
    for epoch in range(6):
        runner.post("on_epoch_start", epoch)
    with pytest.raises(ComponentFailed, match=r"\b6\b"):
        runner.check()
    release.set()
    with pytest.raises(ComponentFailed):
        await runner.close()


async def test_without_callbacks_there_is_no_thread() -> None:
    before = threading.active_count()
    runner = CallbackRunner([])
    runner.post("on_epoch_start", 0)
    assert threading.active_count() == before
    await runner.close()


def test_every_event_is_a_method_of_the_base_class() -> None:
    methods = {name for name in vars(Callback) if name.startswith("on_")}
    assert methods == set(callbacks.Event.__args__)  # type: ignore[attr-defined]


async def test_a_reported_error_does_not_affect_the_run_or_the_other_callbacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Callback):
        def on_batch_start(self, version: int) -> None:
            raise ZeroDivisionError(f"version {version}")

    recorder = Recorder()
    failures: list[ComponentFailed] = []
    runner = CallbackRunner([Failing(), recorder], on_failure=failures.append, errors="report")
    for version in range(3):
        runner.post("on_batch_start", version)
    await runner.close()
    assert recorder.entries == [("start", version) for version in range(3)]
    assert failures == []
    messages = [record.getMessage() for record in caplog.records]
    tracebacks = [message for message in messages if "Traceback" in message]
    assert len(tracebacks) == 1, "the first one in full, the others counted"
    assert "raise ZeroDivisionError" in tracebacks[0]
    assert any(names(message, "Failing.on_batch_start 3") for message in messages if message not in tracebacks)


async def test_a_callback_can_request_a_stop_a_checkpoint_and_an_evaluation() -> None:
    class Enough(Callback):
        def on_batch_end(self, metrics: Mapping[str, float]) -> None:
            (self.evaluate, self.save, self.stop)[int(metrics["step"])]()

    requests: list[str] = []
    enough = Enough()
    runner = CallbackRunner([enough], on_request=requests.append)
    for step in range(3):
        runner.post("on_batch_end", {"step": step})
    await runner.close()
    assert requests == ["evaluate", "save", "stop"]
    enough.stop()
    assert requests == ["evaluate", "save", "stop"], "the run has ended"


@pytest.mark.parametrize("blocking", [True, False])
async def test_the_run_waits_for_blocking_callbacks_only(blocking: bool) -> None:
    released = threading.Event()

    class Waiting(Callback):
        def on_batch_end(self, metrics: Mapping[str, float]) -> None:
            released.wait(30)

    callback = Waiting()
    callback.blocking = blocking
    runner = CallbackRunner([callback])
    runner.post("on_batch_end", {"step": 1})
    handled = asyncio.create_task(runner.handled())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert handled.done() is not blocking
    released.set()
    await handled
    await runner.close()
