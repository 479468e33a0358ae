"""HTTP calls: which failures are retried, and which error each failure raises."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from outpace.engines.server import http as http_module
from outpace.engines.server.http import HttpClient, deadline
from outpace.engines.server.server_process import free_port
from outpace.errors import ServerFailed, ServerFaulty, ServerGone, ServerRefused, ServerSilent
from servers_support import Certificate

pytestmark = pytest.mark.timeout(120)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "_FIRST_BACKOFF_S", 0.001)


@asynccontextmanager
async def serving(handler: Handler, retries: int = 2) -> AsyncIterator[HttpClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}/", api_key="secret", retries=retries)
    try:
        yield http
    finally:
        await http.close()
        await runner.cleanup()


@asynccontextmanager
async def raw_tcp_server(bytes_back: bytes, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A TCP server that is not an HTTP server: it reads some bytes and replies with `bytes_back`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(bytes_back)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


def answering(*answers: web.Response | int, calls: list[web.Request] | None = None) -> Handler:
    """Reply with each answer in turn and repeat the last one."""
    left = list(answers)

    async def answer(request: web.Request) -> web.StreamResponse:
        if calls is not None:
            calls.append(request)
        given = left.pop(0) if len(left) > 1 else left[0]
        return web.json_response({"error": {"message": "sorry"}}, status=given) if isinstance(given, int) else given

    return answer


def streaming(*chunks: bytes) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        return response

    return answer


@pytest.mark.parametrize("status", [500, 503, 429, 408])
async def test_a_call_to_a_failing_server_is_retried(status: int) -> None:
    async with serving(answering(status, status, web.json_response([1]))) as http:
        assert await http.get("/x", deadline_s=30) == [1]


async def test_a_call_that_is_not_repeatable_is_sent_once() -> None:
    calls: list[web.Request] = []
    async with serving(answering(500, calls=calls)) as http:
        with pytest.raises(ServerFaulty, match=r"/x: 500 Internal Server Error: sorry"):
            await http.post("/x", {}, deadline_s=30)
        assert len(calls) == 1
        with pytest.raises(ServerFaulty):
            await http.post("/x", {}, deadline_s=30, repeatable=True)
        assert len(calls) == 1 + 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refused_call_is_never_retried(status: int) -> None:
    calls: list[web.Request] = []
    async with serving(answering(status, calls=calls)) as http:
        with pytest.raises(ServerRefused, match="sorry") as refused:
            await http.get("/x", deadline_s=30)
    assert refused.value.status == status
    assert len(calls) == 1


async def test_zero_retries_are_allowed() -> None:
    calls: list[web.Request] = []
    async with serving(answering(500, calls=calls), retries=0) as http:
        with pytest.raises(ServerFaulty):
            await http.get("/x", deadline_s=30)
    assert len(calls) == 1


async def test_api_key_query_and_body_are_sent() -> None:
    calls: list[web.Request] = []
    async with serving(answering(web.Response(), calls=calls)) as http:
        assert await http.post("/a/b", {"x": [1, 2]}, deadline_s=30, query={"mode": "keep"}) is None
    assert calls[0].path_qs == "/a/b?mode=keep"
    assert calls[0].headers["Authorization"] == "Bearer secret"


async def test_a_missing_answer_raises_server_silent_after_the_deadline() -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(never, retries=0) as http:
        with pytest.raises(ServerSilent, match=r"http://127\.0\.0\.1:\d+/x: .*0\.05 s"):
            await http.get("/x", deadline_s=0.05)


async def test_a_refused_connection_raises_server_gone() -> None:
    http = HttpClient(f"http://127.0.0.1:{free_port()}", retries=0)
    with pytest.raises(ServerGone, match="Connect call failed"):
        await http.get("/x", deadline_s=30)
    await http.close()


async def test_an_answer_that_is_not_json_raises_server_faulty() -> None:
    async with serving(answering(web.Response(text="<html>hello")), retries=0) as http:
        with pytest.raises(ServerFaulty, match=r"JSON.*<html>hello"):
            await http.get("/x", deadline_s=30)


async def test_a_redirect_is_reported_and_not_followed() -> None:
    moved = web.Response(status=307, headers={"Location": "http://elsewhere/x"})
    async with serving(answering(moved)) as http:
        with pytest.raises(ServerRefused, match="http://elsewhere/x"):
            await http.post("/x", {}, deadline_s=30)


async def test_a_server_that_does_not_use_http_raises_server_faulty() -> None:
    async with raw_tcp_server(b"SSH-2.0-OpenSSH_9\r\n") as port:
        http = HttpClient(f"http://127.0.0.1:{port}", retries=0)
        with pytest.raises(ServerFaulty, match="HTTP"):
            await http.get("/x", deadline_s=30)
        await http.close()


async def test_the_error_names_https_to_a_plain_http_port() -> None:
    async with serving(answering(200), retries=0) as plain:
        http = HttpClient(plain.url.replace("http://", "https://"), retries=0)
        with pytest.raises(ServerGone, match="http://"):
            await http.get("/x", deadline_s=30)
        await http.close()


async def test_the_error_names_plain_http_to_a_tls_port(certificate: ssl.SSLContext) -> None:
    async with raw_tcp_server(b"", certificate) as port:
        http = HttpClient(f"http://127.0.0.1:{port}", retries=0)
        with pytest.raises(ServerGone, match="https://"):
            await http.get("/x", deadline_s=30)
        await http.close()


async def test_the_error_names_an_untrusted_certificate(certificate: ssl.SSLContext) -> None:
    async with raw_tcp_server(b"", certificate) as port:
        http = HttpClient(f"https://127.0.0.1:{port}", retries=0)
        with pytest.raises(ServerGone, match="certificate"):
            await http.get("/x", deadline_s=30)
        await http.close()


async def test_more_calls_than_any_default_connection_limit_run_concurrently() -> None:
    here, all_here = 0, asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal here
        here += 1
        if here == 256:
            all_here.set()
        await all_here.wait()
        return web.json_response(1)

    async with serving(handle) as http:
        assert await asyncio.gather(*(http.get("/x", deadline_s=20) for _ in range(256))) == [1] * 256


@pytest.mark.parametrize(("size", "length"), [(1, 50), (7, 50), (1000, 300_000), (10**6, 300_000)])
async def test_events_are_reassembled_however_the_stream_is_chunked(size: int, length: int) -> None:
    big = b"y" * length
    text = b": hello\r\ndata: one\r\n\r\nevent: e\ndata:two\ndata: lines\n\ndata: " + big + b"\n\ndata: [DONE]\n\nrest"
    async with serving(streaming(*(text[at : at + size] for at in range(0, len(text), size)))) as http:
        assert [payload async for payload in http.events("/x", {})] == [b"one", b"two\nlines", big]


async def test_a_broken_stream_raises_server_gone() -> None:
    async with serving(streaming(b"data: one\n\n")) as http:
        payloads = http.events("/x", {})
        assert await anext(payloads) == b"one"
        with pytest.raises(ServerGone, match=r"/x: .*stream"):
            await anext(payloads)


async def test_comments_do_not_keep_a_stream_alive() -> None:
    async def comments(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        while True:
            await response.write(b": still here\n\n")
            await asyncio.sleep(0.01)

    async with serving(comments) as http:
        payloads = http.events("/x", {})
        assert await anext(payloads) == b"one"
        with pytest.raises(ServerSilent):
            async with deadline(http.url, 0.1):
                await anext(payloads)


async def test_closing_an_event_stream_closes_its_connection() -> None:
    left = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: x\n\n")
                await asyncio.sleep(0.01)
        finally:
            left.set()

    async with serving(endless) as http:
        payloads = http.events("/x", {})
        assert await anext(payloads) == b"x"
        await payloads.aclose()
        await asyncio.wait_for(left.wait(), 60)


async def test_every_error_message_is_one_line() -> None:
    async with serving(answering(web.Response(status=500, text="a\nb\n" + "c" * 1000)), retries=0) as http:
        with pytest.raises(ServerFailed) as failed:
            await http.get("/x", deadline_s=30)
    assert "\n" not in str(failed.value)
    assert len(str(failed.value)) < 400


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    made = Certificate.made_in(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    return context


async def test_an_error_status_without_a_body_is_raised_within_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outpace.engines.server.http._ERROR_BODY_S", 0.2)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=500)
        response.content_length = 100
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    async with serving(answer) as http:
        with pytest.raises(ServerFaulty, match="500 Internal Server Error"):
            async with asyncio.timeout(60):
                await anext(http.events("/x", {}))


async def test_a_call_after_close_raises_server_gone() -> None:
    async with serving(answering(web.json_response([1]))) as http:
        assert await http.get("/x", deadline_s=30) == [1]
        await http.close()
        with pytest.raises(ServerGone, match=http.url):
            await http.get("/x", deadline_s=30)
