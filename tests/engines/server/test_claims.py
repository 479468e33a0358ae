"""Two runs on one server: the second is refused at startup, or warned if the conflict is uncertain."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engines.server.fake_server import FakeServer
from outpace.config.load import make_config
from outpace.engines.server.build import build_server_engine
from outpace.engines.server.launch import ServerClaim
from outpace.engines.server.server_engine import ServerEngine
from outpace.errors import BadInput

URL = "http://localhost:8000"
pytestmark = pytest.mark.usefixtures("tokenizer_in_this_process")

HOLD = """
import sys, pathlib
from outpace.engines.server.launch import ServerClaim
claim = ServerClaim(sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path("runs/first"))
print("held", flush=True)
sys.stdin.read()
"""


def runtime_directory(root: Path, name: str) -> Path:
    folder = root / f"outpace-0-{name}"
    folder.mkdir(exist_ok=True)
    return folder


async def start_engine(server: FakeServer, root: Path, run: str) -> ServerEngine:
    config = make_config({"engine.kind": "vllm", "engine.urls": [server.url], "weights.transport": "files"})
    return await build_server_engine(
        config, "engine-0", 0, url=server.url, incarnation=run, scratch=runtime_directory(root, run),
        logs=root / run / "logs", stale=False,
    )  # fmt: skip


def warnings_of(server: FakeServer, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if server.url in message]


async def test_a_second_run_on_a_server_is_refused_until_the_first_has_left(tmp_path: Path) -> None:
    async with FakeServer().serving() as server:
        first = await start_engine(server, tmp_path, "first")
        try:
            with pytest.raises(BadInput, match=f"{tmp_path}/first"):
                await start_engine(server, tmp_path, "second")
        finally:
            await first.close()
        second = await start_engine(server, tmp_path, "second")
        await second.close()


async def test_foreign_requests_on_the_server_at_startup_cause_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = "vllm:num_requests_running 3\nvllm:num_requests_waiting {waiting}\n"
    async with FakeServer(metrics=metrics.format(waiting=1)).serving() as server:
        with caplog.at_level(logging.WARNING):
            engine = await start_engine(server, tmp_path, "first")
        await engine.close()
    (warning,) = warnings_of(server, caplog)
    assert re.search(r"\b4\b", warning.replace(server.url, ""))


async def test_an_idle_server_causes_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeServer().serving() as server:
        with caplog.at_level(logging.WARNING):
            engine = await start_engine(server, tmp_path, "first")
        await engine.close()
    assert warnings_of(server, caplog) == []


def test_a_different_spelling_of_an_address_claims_the_same_server(tmp_path: Path) -> None:
    claim = ServerClaim(URL, runtime_directory(tmp_path, "first"), Path("runs/first"))
    with pytest.raises(BadInput, match="runs/first"):
        ServerClaim("http://127.0.0.1:8000/", runtime_directory(tmp_path, "second"), Path("runs/second"))
    ServerClaim("http://127.0.0.1:8001", runtime_directory(tmp_path, "second"), Path("runs/second")).release()
    claim.release()


def test_engines_of_the_same_run_can_claim_the_same_server(tmp_path: Path) -> None:
    first = ServerClaim(URL, runtime_directory(tmp_path, "first"), Path("runs/first"))
    second = ServerClaim(URL, runtime_directory(tmp_path, "first"), Path("runs/first"))
    first.release()
    with pytest.raises(BadInput):
        ServerClaim(URL, runtime_directory(tmp_path, "other"), Path("runs/other"))
    second.release()
    ServerClaim(URL, runtime_directory(tmp_path, "other"), Path("runs/other")).release()


def test_the_claim_of_a_killed_run_is_released(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, URL, str(runtime_directory(tmp_path, "first"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BadInput, match="runs/first"):
            ServerClaim(URL, runtime_directory(tmp_path, "second"), Path("runs/second"))
        holder.kill()
        holder.wait()
    ServerClaim(URL, runtime_directory(tmp_path, "second"), Path("runs/second")).release()
