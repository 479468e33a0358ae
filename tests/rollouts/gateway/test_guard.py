"""Gateway access control and malformed requests."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from outpace.errors import BadInput
from outpace.rollouts.gateway.http import MAX_BODY
from outpace.rollouts.gateway.server import Gateway
from outpace.rollouts.gateway.validation import MAX_DEPTH, MAX_SIZE
from outpace.types import Endpoint
from support import examples

HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PATHS = ["/chat/completions", "/completions", "/messages", "/models"]


def key(endpoint: Endpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.api_key}"}


def method_of(path: str) -> str:
    return "GET" if path == "/models" else "POST"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic eDp5"},
        {"Authorization": "Bearer \u00fc\u00df"},
        {"x-api-key": "wrong"},
    ],
)
async def test_every_route_requires_the_key(
    path: str, headers: dict[str, str], gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    client = policy(typing_engine("hello"))
    endpoint = await gateway.open(client)
    async with http.request(method_of(path), endpoint.base_url + path, json=HI, headers=headers) as response:
        assert response.status == 401
        assert (await response.json())["error"]["type"] == "authentication_error"
    assert client.requests == []


async def test_the_key_of_one_session_is_rejected_by_another(
    gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    engine = typing_engine("hello")
    ours, theirs = await gateway.open(policy(engine)), await gateway.open(policy(engine, episode=1))
    assert ours.api_key != theirs.api_key
    async with http.get(f"{theirs.base_url}/models", headers=key(ours)) as response:
        assert response.status == 401
    async with http.get(f"{theirs.base_url}/models", headers={"X-API-Key": theirs.api_key}) as response:
        assert response.status == 200


async def test_a_url_with_the_key_needs_no_other_and_one_with_a_wrong_key_is_rejected(
    gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    endpoint = await gateway.open(policy(typing_engine("hello")), key_in_url=True)
    async with http.get(f"{endpoint.base_url}/models", headers={"Authorization": "Bearer EMPTY"}) as response:
        assert response.status == 200
    wrong = endpoint.base_url.replace(endpoint.api_key, "wrong")
    async with http.get(f"{wrong}/models", headers=key(endpoint)) as response:
        assert response.status == 401


async def test_each_role_has_its_own_endpoint(gateway: Any, policy: Any, typing_engine: Any, agent_of: Any) -> None:
    client = policy(typing_engine("hello"))
    judge = await gateway.open(client, "judge")
    assert judge == await gateway.open(client, "judge") != await gateway.open(client, "policy")
    await agent_of(judge).chat.completions.create(**HI)
    assert [trajectory.role for trajectory in client.trajectories()] == ["judge"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""])
async def test_a_request_for_another_host_is_rejected(
    host: str, gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    endpoint = await gateway.open(policy(typing_engine("hello")))
    named = host.format(port=urlsplit(endpoint.base_url).port)
    async with http.get(f"{endpoint.base_url}/models", headers={**key(endpoint), "Host": named}) as response:
        assert response.status == 421


async def test_localhost_is_an_accepted_host_name(gateway: Any, policy: Any, typing_engine: Any, http: Any) -> None:
    endpoint = await gateway.open(policy(typing_engine("hello")))
    named = f"LOCALHOST:{urlsplit(endpoint.base_url).port}"
    async with http.get(f"{endpoint.base_url}/models", headers={**key(endpoint), "Host": named}) as response:
        assert response.status == 200
        assert not [header for header in response.headers if header.lower().startswith("access-control")]


async def test_a_cross_origin_preflight_is_rejected(gateway: Any, policy: Any, typing_engine: Any, http: Any) -> None:
    endpoint = await gateway.open(policy(typing_engine("hello")))
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    async with http.options(f"{endpoint.base_url}/chat/completions", headers=preflight) as response:
        assert response.status >= 400
        assert not [header for header in response.headers if header.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/sessions/x/v1/models", "/sessions//v1/models", "/sessions/../etc", "/%00"]
)
async def test_an_unknown_path_is_not_found(
    path: str, gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    endpoint = await gateway.open(policy(typing_engine("hello")))
    async with http.get(gateway.origin + path, headers=key(endpoint)) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] is None


async def test_a_wrong_method_gets_a_json_error(gateway: Any, policy: Any, typing_engine: Any, http: Any) -> None:
    endpoint = await gateway.open(policy(typing_engine("hello")))
    async with http.get(f"{endpoint.base_url}/chat/completions", headers=key(endpoint)) as response:
        assert response.status in (404, 405)
        assert (await response.json())["error"]["message"]


DEEP = b'{"messages": [{"role": "user", "content": "hi"}], "tools": ' + b"[" * 200 + b"]" * 200 + b"}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"{", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"messages": NaN}', "JSON"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (DEEP, str(MAX_DEPTH)),
        (b"{}", "messages"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
    ],
)
@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
async def test_a_malformed_body_gets_an_invalid_request_error(
    path: str, body: bytes, expected: str, gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    client = policy(typing_engine("hello"))
    endpoint = await gateway.open(client)
    async with http.post(endpoint.base_url + path, data=body, headers=key(endpoint)) as response:
        assert response.status == 400
        error = (await response.json())["error"]
        assert expected in error["message"]
        assert error["type"] == "invalid_request_error"
    assert client.requests == []


async def test_a_body_that_is_too_large_is_refused(gateway: Any, policy: Any, typing_engine: Any, http: Any) -> None:
    endpoint = await gateway.open(policy(typing_engine("hello")))
    body = io.BytesIO(b" " * (MAX_BODY + 1))
    async with http.post(f"{endpoint.base_url}/completions", data=body, headers=key(endpoint)) as sent:
        assert sent.status == 413
        assert (await sent.json())["error"]["type"] == "request_too_large"


LONG = "x" * (MAX_SIZE // 2 + 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG}]},
        ),
        ("/chat/completions", {**HI, "tools": [{"type": "function", "function": {"name": LONG, "x": [LONG]}}]}),
        ("/completions", {"prompt": LONG + LONG}),
        ("/completions", {"prompt": [1] * (MAX_SIZE + 1)}),
        ("/messages", {"max_tokens": 1, "system": LONG, "messages": [{"role": "user", "content": LONG}]}),
    ],
)
async def test_text_over_the_size_limit_is_refused_before_rendering(
    path: str, body: Any, gateway: Any, policy: Any, typing_engine: Any, http: Any
) -> None:
    client = policy(typing_engine("hello"))
    endpoint = await gateway.open(client)
    sent = io.BytesIO(json.dumps(body).encode())
    async with http.post(endpoint.base_url + path, data=sent, headers=key(endpoint)) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"]) == (400, "invalid_request_error")
        assert f"{MAX_SIZE:,}" in error["message"]
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    assert client.requests == []


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=100).map(lambda data: b"POST / HTTP/1.1\r\n" + data)))
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_on_the_port_do_not_break_the_gateway(data: bytes) -> None:
    async def attack() -> None:
        gateway = Gateway("127.0.0.1", 0, "m")
        await gateway.start()
        port = urlsplit(gateway.origin).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        await reader.read()
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        assert b"404" in (await reader.read()).splitlines()[0]
        writer.close()
        await gateway.close()

    asyncio.run(attack())


def listening() -> set[Any]:
    """The addresses on which this process accepts connections."""
    sockets = psutil.Process().net_connections("tcp")
    return {each.laddr for each in sockets if each.status == psutil.CONN_LISTEN}


async def test_the_gateway_listens_on_loopback_and_only_after_the_first_open(policy: Any, typing_engine: Any) -> None:
    before = listening()
    gateway = Gateway("127.0.0.1", 0, "m")
    assert listening() <= before
    await asyncio.gather(*(gateway.open(policy(typing_engine("x"), episode=index)) for index in range(5)))
    assert [address.ip for address in listening() - before] == ["127.0.0.1"]
    await gateway.close()


@pytest.mark.parametrize(
    ("host", "origin", "names"),
    [
        ("127.0.0.1", "http://127.0.0.1:80", {"127.0.0.1:80", "localhost:80"}),
        ("localhost", "http://127.0.0.1:80", {"127.0.0.1:80", "localhost:80"}),
        ("::1", "http://[::1]:80", {"[::1]:80", "localhost:80"}),
        ("10.0.0.7", "http://10.0.0.7:80", {"10.0.0.7:80"}),
        ("::", "http://127.0.0.1:80", None),
    ],
)
def test_the_origin_and_accepted_host_names_follow_the_listen_address(
    host: str, origin: str, names: set[str] | None
) -> None:
    gateway = Gateway(host, 80, "m")
    assert (gateway.origin, gateway.hosts()) == (origin, names)


async def test_a_port_in_use_is_named_in_the_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=rf"^gateway\.port: .*127\.0\.0\.1:{port}"):
            await Gateway("127.0.0.1", port, "m").start()


async def test_a_gateway_on_all_addresses_accepts_any_host_name(policy: Any, typing_engine: Any, http: Any) -> None:
    gateway = Gateway("0.0.0.0", 0, "m")
    endpoint = await gateway.open(policy(typing_engine("hello")))
    assert endpoint.base_url.startswith("http://127.0.0.1:")
    async with http.get(f"{endpoint.base_url}/models", headers={**key(endpoint), "Host": "my-machine:80"}) as response:
        assert response.status == 200
    await gateway.close()


def test_the_http_server_is_not_imported_before_an_endpoint_is_opened() -> None:
    program = (
        "import sys, outpace.rollouts.worker, outpace.rollouts.gateway.server, outpace.rollouts.agent_process;"
        "sys.exit('aiohttp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
