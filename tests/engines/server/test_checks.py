"""Checks of a server before the run starts: each problem is one line with a remedy."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from outpace.config import Config
from outpace.config.load import make_config
from outpace.engines.server.checks import check_server
from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import ServerFacts
from outpace.engines.server.server_process import free_port
from outpace.engines.server.vllm import VllmServer
from outpace.errors import BadInput, ServerFaulty, ServerGone, ServerRefused, ServerSilent
from outpace.models.loading import resolve_model
from servers_support import Certificate

URL = "http://127.0.0.1:8000"
STARTER, AGENT = str(resolve_model("starter")), str(resolve_model("starter-agent"))
FINE = ServerFacts(
    "vllm", "0.32.0", "policy", 1024, "float32", "processed_logprobs", True, True, True, {"root": STARTER}
)
TOKENS = {"13 + 28": [1, 2, 3]}


def run_config(**settings: Any) -> Config:
    base = {"engine.kind": "vllm", "engine.context": 512, "model.path": STARTER}
    if "lora.rank" not in settings:
        base["weights.transport"] = "memory"
    return make_config({name: value for name, value in (base | settings).items() if value is not None})


class Scripted:
    """A server with scripted facts and the part of the protocol that checks use."""

    url = URL

    def __init__(self, facts: ServerFacts = FINE, ids: list[int] | None = None, error: Exception | None = None) -> None:
        self.reported = facts
        self.ids = ids
        self.error = error

    async def facts(self) -> ServerFacts:
        if self.error is not None:
            raise self.error
        return self.reported

    async def tokenized(self, text: str) -> list[int] | None:
        return self.ids


async def refusal(server: object, **settings: Any) -> str:
    with pytest.raises(BadInput) as refused:
        await check_server(server, run_config(**settings), TOKENS)  # type: ignore[arg-type]
    line = str(refused.value)
    assert "\n" not in line
    return line


def unnamed(line: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that the line does not contain as separate words."""
    return [key for key in keys if not re.search(rf"(?<!\w){re.escape(key)}(?!\w)", line)]


async def test_a_matching_server_is_accepted() -> None:
    assert await check_server(Scripted(ids=[1, 2, 3]), run_config(), TOKENS) == FINE  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "settings", "keys"),
    [
        pytest.param({"controls": False}, {}, ["VLLM_SERVER_DEV_MODE=1"], id="no dev mode"),
        pytest.param(
            {"logprobs": "raw_logprobs"}, {},
            ["raw_logprobs", "--logprobs-mode processed_logprobs"],
            id="raw logprobs",
        ),
        pytest.param(
            {"kind": "sglang", "version": "0.5.9", "logprobs": "original"}, {},
            ["original", "SGLANG_RETURN_ORIGINAL_LOGPROB"],
            id="original logprobs",
        ),
        pytest.param(
            {"details": {"root": AGENT}}, {},
            [AGENT, STARTER, "model.path"],
            id="other model",
        ),
        pytest.param(
            {"details": {"root": "a/first"}}, {"model.path": "a/second"},
            ["a/first", "a/second", "model.path"],
            id="other hub model",
        ),
        pytest.param({"dtype": "bfloat16"}, {}, ["bfloat16", "model.dtype", "--dtype float32"], id="other dtype"),
        pytest.param({"context": 256}, {}, ["256", "--max-model-len 512", "engine.context"], id="short context"),
        pytest.param(
            {"plugin": False}, {},
            ["memory", "`outpace serve`", 'weights.transport = "files"'],
            id="no plugin",
        ),
        pytest.param(
            {"adapters": False}, {"lora.rank": 8},
            ["lora.rank", "--enable-lora", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"],
            id="no adapters",
        ),
        pytest.param(
            {"details": {"root": STARTER, "max_lora_rank": 16}}, {"lora.rank": 20},
            ["16", "20", "--max-lora-rank 32", "lora.rank"],
            id="small adapters",
        ),
        pytest.param({"version": "0.24.0"}, {}, ["0.24.0", "0.25"], id="too old"),
    ],
)  # fmt: skip
async def test_a_mismatch_is_refused_in_one_line_with_the_flag_to_add(
    facts: dict[str, Any], settings: dict[str, Any], keys: list[str]
) -> None:
    line = await refusal(Scripted(replace(FINE, **facts)), **settings)
    assert line.startswith(f"{URL}: ")
    assert unnamed(line, keys) == []


async def test_a_different_tokenizer_is_detected_by_its_token_ids() -> None:
    line = await refusal(Scripted(ids=[7]))
    assert line.startswith(f"{URL}: ")
    assert unnamed(line, ["13 + 28", "[7]", "[1, 2, 3]", f"--tokenizer {STARTER}"]) == []


@pytest.mark.parametrize(
    ("facts", "settings"),
    [
        ({"context": None, "dtype": None, "logprobs": None}, {}),
        ({"context": 8}, {"engine.context": None}),
        ({"plugin": False}, {"weights.transport": "files"}),
        ({"plugin": False}, {"lora.rank": 8}),
        ({"adapters": False}, {}),
        ({"details": {"root": STARTER, "max_lora_rank": 16}}, {"lora.rank": 16}),
        ({"details": {"root": STARTER, "max_lora_rank": None}}, {"lora.rank": 16}),
        ({"version": "dev"}, {}),
        ({"details": {"root": "/models/on/another/machine"}}, {}),
        ({"details": {"root": "a/name"}}, {}),
        ({"details": {}, "model": "a/name"}, {"model.path": "a/name"}),
    ],
)
async def test_unreported_or_unneeded_server_facts_are_not_errors(
    facts: dict[str, Any], settings: dict[str, Any]
) -> None:
    await check_server(Scripted(replace(FINE, **facts)), run_config(**settings), TOKENS)  # type: ignore[arg-type]


async def test_the_same_model_in_another_directory_is_accepted(tmp_path: Path) -> None:
    content = json.loads((Path(STARTER) / "config.json").read_text()) | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    there = Scripted(replace(FINE, details={"root": str(tmp_path)}))
    await check_server(there, run_config(), TOKENS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "keys"),
    [
        (ServerGone(f"{URL}/version: no connection (x)"), ["version: no connection (x)"]),
        (ServerSilent("no answer within 20 s"), ["no answer within 20 s", "overloaded"]),
        (ServerRefused("404 Not Found", 404), ["404 Not Found", "engine.urls", "engine.kind"]),
        (ServerRefused("401", 401), ["engine.api_key_env"]),
        (ServerFaulty("no version"), ["no version", "engine.urls", "engine.kind"]),
    ],
)
async def test_a_server_that_cannot_be_queried_is_refused_in_one_line(error: Exception, keys: list[str]) -> None:
    line = await refusal(Scripted(error=error))
    assert line.startswith(f"{URL}: ")
    assert line.count(URL) == 1
    assert unnamed(line, keys) == []
    assert ("engine.kind" in line) == ("engine.kind" in keys), "only a server that answers can be of another kind"


# ----------------------------------------------------------------------------------------- over a real network

Serve = Callable[..., Awaitable[int]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start an unrelated web server and return its port."""
    runners: list[web.AppRunner] = []

    async def start(answer: str = "hello", status: int = 200, tls: ssl.SSLContext | None = None) -> int:
        async def page(_: web.Request) -> web.Response:
            return web.Response(text=answer, status=status)

        app = web.Application()
        app.router.add_route("*", "/{any:.*}", page)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        port = free_port()
        await web.TCPSite(runners[-1], "127.0.0.1", port, ssl_context=tls).start()
        return port

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    made = Certificate.made_in(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    return context


async def refused_at(url: str) -> str:
    server = VllmServer(HttpClient(url, retries=0))
    try:
        async with asyncio.timeout(60):
            line = await refusal(server)
    finally:
        await server.close()
    assert line.startswith(url)
    return line


async def test_a_wrong_port_is_refused_with_a_hint() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    line = await refused_at(url)
    assert "port" in line
    assert "Connect call failed" not in line


async def test_plain_http_to_a_tls_server_is_refused_with_the_https_url(
    serve: Serve, certificate: ssl.SSLContext
) -> None:
    assert "https://" in await refused_at(f"http://127.0.0.1:{await serve(tls=certificate)}")


async def test_tls_to_a_plain_http_server_is_refused_with_the_http_url(serve: Serve) -> None:
    assert "http://" in (await refused_at(f"https://127.0.0.1:{await serve()}")).partition(": ")[2]


async def test_an_untrusted_certificate_is_refused_with_the_variable_to_set(
    serve: Serve, certificate: ssl.SSLContext
) -> None:
    assert "SSL_CERT_FILE" in await refused_at(f"https://127.0.0.1:{await serve(tls=certificate)}")


@pytest.mark.parametrize(("answer", "status"), [("<html>", 200), ("{}", 200), ("no", 404), ("[]", 200), ("", 200)])
async def test_an_unrelated_web_server_is_refused(serve: Serve, answer: str, status: int) -> None:
    await refused_at(f"http://127.0.0.1:{await serve(answer, status)}")


@pytest.mark.parametrize("answer", ["[]", "", "null", "3"])
async def test_an_unrelated_web_server_is_refused_whichever_answer_arrives_first(answer: str) -> None:
    async def page(request: web.Request) -> web.Response:
        if request.path == "/version":
            await asyncio.sleep(0.2)
        return web.Response(text=answer, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", page)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        assert "engine.kind" in await refused_at(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


ON_A_CPU = replace(FINE, plugin=False, details={"root": STARTER, "device": "cpu"})
BY_FILES = {"weights.transport": "files"}


async def test_tied_embeddings_that_a_cpu_server_would_not_update_are_refused() -> None:
    line = await refusal(Scripted(ON_A_CPU), **BY_FILES)
    assert "embeddings" in line
    assert "`outpace serve`" in line


async def test_an_untied_head_a_gpu_the_plugin_or_adapters_are_accepted(tmp_path: Path) -> None:
    content = json.loads((Path(STARTER) / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").touch()
    untied = replace(ON_A_CPU, details={"root": str(tmp_path), "device": "cpu"})
    for facts, settings in (
        (untied, BY_FILES | {"model.path": str(tmp_path)}),
        (replace(ON_A_CPU, details={"root": STARTER, "device": "cuda"}), BY_FILES),
        (replace(ON_A_CPU, plugin=True), BY_FILES),
        (ON_A_CPU, BY_FILES | {"lora.rank": 8}),
    ):
        await check_server(Scripted(facts), run_config(**settings), TOKENS)  # type: ignore[arg-type]
