"""Misconfigured real vLLM servers: each is refused within seconds, in one line with cause and remedy."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outpace.config import Config
from outpace.config.load import make_config
from outpace.engines.server.build import build_server_engine
from outpace.engines.server.checks import check_server, expected_token_ids
from outpace.engines.server.http import HttpClient
from outpace.engines.server.launch import LaunchPlan
from outpace.engines.server.protocol import ServerFacts
from outpace.engines.server.server_engine import ServerEngine
from outpace.engines.server.server_process import ServerProcess, free_port
from outpace.engines.server.vllm import VllmServer
from outpace.errors import BadInput, ServerFailed
from servers_support import SMALL, Certificate, RunningVllm, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

SECONDS = 30.0
"""Time limit for every refusal; generous, because the test machine may be busy."""


class CorrectedServer(VllmServer):
    """A real server whose facts are partly overridden with correct values."""

    def __init__(self, url: str, **corrected: Any) -> None:
        super().__init__(HttpClient(url, retries=0))
        self._corrected = corrected

    async def facts(self) -> ServerFacts:
        return replace(await super().facts(), **self._corrected)


@asynccontextmanager
async def started(directory: Path, **settings: Any) -> AsyncIterator[str]:
    """Start a server with these settings and yield its address once its port accepts connections."""
    config = make_config(SMALL | {"launch.python": vllm_python()} | settings)
    port = free_port()
    command = (await LaunchPlan.of(config, directory)).command(port)
    process = await ServerProcess.launch(command.argv, command.env, directory / "server.log")
    try:
        async with asyncio.timeout(config.launch.start_s):
            while not await _accepts_connections(port):
                assert process.alive, process.log_tail()
                await asyncio.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        await process.stop()


async def _accepts_connections(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def refused(config: Config, url: str, tokens: dict[str, list[int]] | None = None, **corrected: Any) -> str:
    server = CorrectedServer(url, **corrected)
    try:
        async with asyncio.timeout(SECONDS):
            with pytest.raises(BadInput) as refusal:
                await check_server(server, config, tokens or {})
    finally:
        await server.close()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def run_config(**settings: Any) -> Config:
    """The config of a run that names its servers."""
    return make_config({"engine.kind": "vllm", "engine.context": 512, "engine.urls": ["http://h:1"]} | settings)


async def start_engine(config: Config, url: str, directory: Path) -> ServerEngine:
    return await build_server_engine(
        config, "engine-0", 0, url=url, incarnation="i", scratch=directory, logs=directory, stale=False
    )


async def test_a_server_with_many_mismatches_gets_one_refusal_per_mismatch(tmp_path: Path) -> None:
    wrong = {
        "model.path": "starter-agent", "weights.transport": "files",
        "launch.args": ["--logprobs-mode", "raw_logprobs"],
    }  # fmt: skip
    async with started(tmp_path, **wrong) as address:
        url, run = f"http://{address}", run_config()
        assert "--logprobs-mode processed_logprobs" in await refused(run, url)
        corrected: dict[str, Any] = {"logprobs": "processed_logprobs"}
        another_model = await refused(run, url, **corrected)
        assert "model.path" in another_model
        assert re.search(r"starter_agent\b", another_model)
        assert re.search(r"starter\b", another_model)
        agent = run_config(**{"model.path": "starter-agent"})
        in_bfloat16 = run_config(**{"model.path": "starter-agent", "model.dtype": "bfloat16"})
        assert "--dtype bfloat16" in await refused(in_bfloat16, url, **corrected)
        assert "--max-model-len 512" in await refused(agent, url, **corrected)
        corrected["context"] = 512
        assert "--tokenizer " in await refused(agent, url, await expected_token_ids("starter", False), **corrected)
        through_memory = run_config(**{"model.path": "starter-agent", "weights.transport": "memory"})
        assert 'weights.transport = "files"' in await refused(through_memory, url, plugin=False, **corrected)
        assert "embeddings" in await refused(agent, url, plugin=False, **corrected)
        with_adapters = run_config(**{"model.path": "starter-agent", "lora.rank": 8})
        assert "--enable-lora" in await refused(with_adapters, url, **corrected)


async def test_a_server_with_tls_and_without_dev_mode_is_refused_with_remedies(tmp_path: Path) -> None:
    made = await asyncio.to_thread(Certificate.made_in, tmp_path)
    wrong = {
        "launch.args": ["--ssl-keyfile", str(made.key), "--ssl-certfile", str(made.certificate)],
        "launch.env": {"VLLM_SERVER_DEV_MODE": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    async with started(tmp_path, **wrong) as address:
        assert "https://" in await refused(run_config(), f"http://{address}")
        assert "SSL_CERT_FILE" in await refused(run_config(), f"https://{address}")
        last_line = await asyncio.to_thread(_refused_elsewhere, f"https://{address}", made.certificate)
        assert "VLLM_SERVER_DEV_MODE=1" in last_line


def _refused_elsewhere(url: str, certificate: Path) -> str:
    """Return the refusal seen by a process that trusts the certificate."""
    program = (
        "import asyncio, sys, pathlib\n"
        "from outpace.config.load import make_config\n"
        "from outpace.engines.server.build import build_server_engine\n"
        "config = make_config({'engine.kind': 'vllm', 'engine.urls': [sys.argv[1]]})\n"
        "place = pathlib.Path(sys.argv[2])\n"
        "where = {'scratch': place, 'logs': place}\n"
        "asyncio.run(build_server_engine(config, 'e', 0, url=sys.argv[1], incarnation='i', stale=False, **where))\n"
    )
    env = {**os.environ, "SSL_CERT_FILE": str(certificate)}
    command = [sys.executable, "-c", program, url, str(certificate.parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3 * SECONDS, check=False)
    return done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"launch.start_s": 3.0}, r"\b3 s\b.*launch\.start_s"),
        ({"launch.args": ["--frobnicate"]}, r"code 2\b.*unrecognized arguments: --frobnicate.*launch\.args"),
    ],
    ids=["slow start", "unknown flag"],
)
async def test_a_server_that_does_not_start_is_reported_with_the_setting_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the log is copied there
    config = make_config(SMALL | {"launch.python": vllm_python()} | settings)
    with pytest.raises(BadInput, match=line):
        await start_engine(config, "", tmp_path)


async def test_a_correctly_configured_server_is_accepted(vllm: RunningVllm, tmp_path: Path) -> None:
    """The same setup passes with a correct server, so the refusals above have no other cause."""
    config = make_config({"engine.kind": "vllm", "engine.context": 256, "engine.urls": [vllm.url]})
    engine = await start_engine(config, vllm.url, tmp_path)
    try:
        assert (await engine.stats()).health == "stale", "its weights are unknown"
    finally:
        await engine.close()
    server = VllmServer(HttpClient(vllm.url))
    try:
        await server.probe(SECONDS)
    except ServerFailed as error:
        raise AssertionError("a server that outpace did not start keeps running") from error
    finally:
        await server.close()
