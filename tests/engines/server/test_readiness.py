"""Waiting for a server to become ready, and the cause of failure found in its log."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from outpace.engines.server import launch as launch_module
from outpace.engines.server.checks import TOKENIZER_TEXTS, expected_token_ids
from outpace.engines.server.launch import check_sampling, wait_until_reachable, wait_until_ready
from outpace.engines.server.server_process import ServerProcess, cause_of, last_line
from outpace.errors import BadInput, ServerFailed, ServerGone

URL = "http://127.0.0.1:8000"


class Starting:
    """A server whose probes fail, or hang, until it is ready."""

    url = URL

    def __init__(self, fails: int = 0, hangs: bool = False) -> None:
        self.left = fails
        self.hangs = hangs

    async def probe(self, deadline_s: float) -> None:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.left:
            self.left -= 1
            raise ServerGone("not listening yet")


Start = Callable[[str], Awaitable[ServerProcess]]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    monkeypatch.setattr(launch_module, "POLL_S", 0.01)
    monkeypatch.setattr(launch_module, "REPORT_S", 0.02)
    started: list[ServerProcess] = []

    async def launch(program: str) -> ServerProcess:
        argv = [sys.executable, "-c", program]
        started.append(await ServerProcess.launch(argv, dict(os.environ), tmp_path / "server.log"))
        return started[-1]

    yield launch
    for process in started:
        await process.stop()


STAYS = "import time; print('INFO 11-15 16:40:11 [loader.py:9] loading weights', flush=True); time.sleep(600)"


async def ready(server: object, process: ServerProcess, start_s: float = 60.0) -> list[str]:
    log: list[str] = []
    async with asyncio.timeout(60):
        await wait_until_ready(server, process, start_s, log.append)  # type: ignore[arg-type]
    return log


async def test_a_server_is_ready_when_it_samples_its_first_token(start: Start) -> None:
    server = Starting(fails=5)
    await ready(server, await start(STAYS))
    assert server.left == 0


async def test_startup_progress_of_a_server_is_reported(start: Start) -> None:
    log = await ready(Starting(fails=100), await start(STAYS))
    assert re.search(r"\b\d+ s\b.*loading weights", log[-1])


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_server_that_exits_is_reported_with_its_own_error(start: Start, hangs: bool) -> None:
    process = await start("import sys; sys.exit('ValueError: no such thing')")
    with pytest.raises(BadInput) as failed:
        await ready(Starting(fails=10**9, hangs=hangs), process)
    assert "\n" not in str(failed.value)
    assert re.search(r"code 1\b.*ValueError: no such thing", str(failed.value))
    assert str(process.log_path) in str(failed.value)


async def test_a_server_killed_during_startup_is_reported_with_a_hint_at_memory(start: Start) -> None:
    process = await start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(BadInput, match=r"SIGKILL.*memory"):
        await ready(Starting(fails=10**9), process)


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_server_that_starts_too_slowly_is_reported_with_the_setting_to_raise(start: Start, hangs: bool) -> None:
    process = await start(STAYS)
    with pytest.raises(BadInput, match=r"0\.3 s.*launch\.start_s"):
        await ready(Starting(fails=10**9, hangs=hangs), process, start_s=0.3)


class ExternalServer:
    """A server that outpace did not start: unreachable for the first calls, and optionally left paused."""

    url = URL

    def __init__(self, away: int = 0, paused: bool = False, samples: bool = True) -> None:
        self.away = away
        self.is_paused = paused
        self.samples = samples

    async def paused(self) -> bool:
        if self.away:
            self.away -= 1
            raise ServerGone("no connection")
        return self.is_paused

    async def resume(self, recompute: bool) -> None:
        self.is_paused = False

    async def probe(self, deadline_s: float) -> None:
        if not self.samples:
            raise ServerFailed("its engine has died")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "POLL_S", 0.01)
    monkeypatch.setattr(launch_module, "LEFT_PAUSED_S", 0.05)


async def test_a_server_that_was_left_paused_is_resumed(impatient: None) -> None:
    server = ExternalServer(paused=True)
    await wait_until_reachable(server, 0.0)  # type: ignore[arg-type]
    assert not server.is_paused


async def test_a_pause_during_another_update_is_not_ended(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "LEFT_PAUSED_S", 60.0)
    server, resumed = ExternalServer(paused=True), False

    async def resume(recompute: bool) -> None:
        nonlocal resumed
        resumed = True

    server.resume = resume  # type: ignore[method-assign]
    asyncio.get_running_loop().call_later(0.05, setattr, server, "is_paused", False)
    async with asyncio.timeout(60):
        await wait_until_reachable(server, 0.0)  # type: ignore[arg-type]
    assert not resumed


async def test_an_unreachable_server_is_refused_at_once(impatient: None) -> None:
    with pytest.raises(BadInput, match=f"^{URL}: .*no connection"):
        await wait_until_reachable(ExternalServer(away=1), 0.0)  # type: ignore[arg-type]


async def test_a_server_that_was_reachable_before_may_come_back(impatient: None) -> None:
    async with asyncio.timeout(60):
        await wait_until_reachable(ExternalServer(away=20), 60.0)  # type: ignore[arg-type]


async def test_a_server_that_answers_but_cannot_sample_is_refused() -> None:
    await check_sampling(ExternalServer())  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^http://127\.0\.0\.1:8000: its engine has died"):
        await check_sampling(ExternalServer(samples=False))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ causes


@pytest.mark.parametrize(
    ("log", "cause", "settings"),
    [
        (
            "usage: api_server.py [options]\napi_server.py: error: unrecognized arguments: --frobnicate",
            "unrecognized arguments: --frobnicate",
            {"launch.args"},
        ),
        (
            "(EngineCore_DP0 pid=77) ERROR 11-15 16:40:11 [core.py:866] ValueError: Free memory on device (3/80 GiB) "
            "is less than desired\n"
            "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core "
            "proc(s): {}",
            "ValueError: Free memory on device (3/80 GiB) is less than desired",
            {"launch.gpu_memory"},
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len (1024)\n"
            "    For further information visit https://errors.pydantic.dev",
            "User-specified max_model_len (4096) is greater than the derived max_model_len (1024)",
            {"engine.context"},
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
         "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
         {"launch.gpu_memory", "engine.slots", "engine.context"}),
        ("/usr/bin/python3: Error while finding module specification (ModuleNotFoundError: No module named 'vllm')",
         "/usr/bin/python3: Error while finding module specification (ModuleNotFoundError: No module named 'vllm')",
         {"launch.python"}),
        ("OSError: [Errno 98] Address already in use",
         "OSError: [Errno 98] Address already in use", {"launch.port"}),
        ("Traceback\nKeyError: 'first'\nDuring handling\nRuntimeError: second", "RuntimeError: second", set()),
        ("(EngineCore pid=9) ERROR 11-15 16:40:11 [multiproc_executor.py:315] Worker proc VllmWorker-0 died "
         "unexpectedly (exit code: -11), shutting down executor.\n"
         "(EngineCore pid=9) RuntimeError: cancelled\n(APIServer pid=7) AttributeError: it is shutting down",
         "Worker proc VllmWorker-0 died unexpectedly (exit code: -11), shutting down executor.",
         {"model.dtype", "launch.env"}),
        ("it just stopped\n", "it just stopped", set()),
        ("", "", set()),
    ],
)  # fmt: skip
def test_the_cause_and_the_settings_to_change_are_found_in_the_log(log: str, cause: str, settings: set[str]) -> None:
    found = cause_of(log)
    assert found.startswith(cause)
    remedy = found.removeprefix(cause)
    assert set(re.findall(r"\b(?:engine|launch|model)\.\w+", remedy)) == settings
    assert bool(remedy) == bool(settings)


def test_the_last_log_line_is_stripped_of_its_prefix() -> None:
    assert last_line("(APIServer pid=7) INFO 11-15 16:40:11 [gpu.py:1] Capturing graphs\n\n") == "Capturing graphs"
    assert last_line("") == ""


# ------------------------------------------------------------------------------------------------------------ tokens


@pytest.mark.slow
async def test_expected_token_ids_come_from_the_tokenizer_of_the_run() -> None:
    first, second = await asyncio.gather(
        expected_token_ids("starter", False), expected_token_ids("starter-agent", False)
    )
    assert set(first) == set(TOKENIZER_TEXTS)
    assert all(first.values())
    assert first != second, "the ids distinguish the models"


async def test_a_model_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"^model\.path {tmp_path}: .*tokenizer"):
        await expected_token_ids(str(tmp_path), False)


async def test_a_tokenizer_that_does_not_load_in_time_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engines.server.checks.TOKENIZER_TIMEOUT_S", 0.01)
    with pytest.raises(BadInput, match=r"^model\.path starter: .*0\.01 s"):
        await expected_token_ids("starter", False)
