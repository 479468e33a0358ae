"""MCP servers: real ones, started as commands and reached by URL, that answer, fail and go away."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from outpace.errors import BadInput
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.episode import run_episode
from outpace.rollouts.tool_loop import ToolLoop
from outpace.rollouts.tools.mcp import McpServer, close_servers, open_servers
from outpace.rollouts.tools.toolbox import Toolbox, ToolLimits
from outpace.types import Task, ToolCall
from support import naming

SCRIPT = Path(__file__).parent / "mcp_server.py"


def command(prefix: str = "") -> str:
    return shlex.join([sys.executable, str(SCRIPT), prefix])


class HttpServer:
    """A server behind a URL, which can be killed and started again."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.start()

    def start(self) -> None:
        arguments = [sys.executable, str(SCRIPT), "web_", str(self.port)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def web() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.kill()


@asynccontextmanager
async def opened(*addresses: str) -> AsyncIterator[tuple[Toolbox, list[McpServer]]]:
    servers = await open_servers(addresses)
    try:
        yield (
            Toolbox([server.tool_set for server in servers], ToolLimits(timeout_s=60.0, max_result_chars=1000)),
            servers,
        )
    finally:
        await close_servers(servers)


async def ask(toolbox: Toolbox, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    made = [ToolCall(str(n), name, json.dumps(arguments)) for n, (name, arguments) in enumerate(calls)]
    return [result.text for result in await toolbox.run(made, len(made), lambda: math.inf)]


async def test_servers_of_both_kinds_are_used_at_once(web: HttpServer) -> None:
    async with opened(command(), web.url) as (toolbox, servers):
        assert [sorted(server.tools)[:2] for server in servers] == [["add", "breed"], ["web_add", "web_breed"]]
        (schema,) = (one for one in toolbox.schemas if one["function"]["name"] == "add")
        assert schema["type"] == "function"
        assert schema["function"]["description"] == "Add two numbers."
        assert schema["function"]["parameters"]["required"] == ["a", "b"]
        assert await ask(toolbox, ("add", {"a": 1, "b": 2}), ("web_add", {"a": 3, "b": 4})) == ["3", "7"]
        meeting = [(name, {"count": 5}) for name in ("meet", "web_meet") for _ in range(5)]
        assert await ask(toolbox, *meeting) == ["met"] * 10, "calls of one session run side by side"


async def test_every_kind_of_result_becomes_text(web: HttpServer) -> None:
    async with opened(web.url) as (toolbox, _):
        calls = ("picture", "parts", "flood", "fail")
        picture, parts, flood, fail = await ask(toolbox, *((f"web_{name}", {}) for name in calls))
        (misfit,) = await ask(toolbox, ("web_add", {"a": "x"}))
    assert picture == "[6 bytes of image/png]"
    assert parts == "one\n[4 bytes of binary data]\n[more: https://example.org/more]\ntwo"
    kept, note = flood.splitlines()
    assert kept == "z" * 1000
    assert "9999000" in note
    assert fail.startswith("error: ")
    assert misfit.startswith("error: ")
    assert "Traceback" not in fail + misfit


async def test_a_server_that_is_killed_is_an_error_of_the_calls_and_comes_back(web: HttpServer) -> None:
    async with opened(command(), web.url) as (toolbox, _):
        (before,) = await ask(toolbox, ("whoami", {}))
        under_way = asyncio.create_task(ask(toolbox, ("hang", {}), ("hang", {})))
        assert await ask(toolbox, ("whoami", {})) == [before], "the server has heard of the others by now"
        os.kill(int(before), signal.SIGKILL)
        assert all(text.startswith("error: ") and "hang" in text for text in await under_way)
        answers = await asyncio.gather(*(ask(toolbox, ("whoami", {}), ("web_add", {"a": 1, "b": 1})) for _ in "ab"))
        after = {one for one, _ in answers}
        assert [other for _, other in answers] == ["2", "2"], "the other server does not notice"
        assert len(after) == 1, "one connection for all who ask"
        assert after != {before}
    assert not any(psutil.pid_exists(int(pid)) for pid in (before, *after))


async def test_a_server_is_noticed_to_have_died_whoever_holds_its_pipe() -> None:
    async with opened(command()) as (toolbox, _):
        before, child = await ask(toolbox, ("whoami", {}), ("breed", {}))
        under_way = asyncio.create_task(toolbox.run([ToolCall("0", "hang", "{}")], 1, lambda: math.inf))
        assert await ask(toolbox, ("whoami", {})) == [before]
        os.kill(int(before), signal.SIGKILL)
        (cut,) = await under_way
        assert cut.status == "error"
        (after,) = await ask(toolbox, ("whoami", {}))
        assert after.isdecimal()
        assert after != before
        left = (await ask(toolbox, ("breed", {})))[0]
    assert [pid for pid in (before, after, child, left) if lives(int(pid))] == [], "what they had started has ended too"


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_server_behind_a_url_may_be_started_again(web: HttpServer) -> None:
    async with opened(web.url) as (toolbox, _):
        under_way = asyncio.create_task(ask(toolbox, ("web_hang", {})))
        (alive,) = await ask(toolbox, ("web_add", {"a": 1, "b": 1}))
        await asyncio.to_thread(web.kill)
        (cut,) = await under_way
        (gone,) = await ask(toolbox, ("web_add", {"a": 1, "b": 1}))
        await asyncio.to_thread(web.start)
        assert await ask(toolbox, ("web_add", {"a": 1, "b": 1})) == [alive] == ["2"]
    assert re.search(naming("error: ", "web_hang"), cut)
    assert re.search(naming("error: ", "web_add"), gone)


async def test_a_call_that_hangs_is_given_up_and_the_server_goes_on(web: HttpServer) -> None:
    servers = await open_servers([web.url])
    try:
        toolbox = Toolbox([servers[0].tool_set], ToolLimits(timeout_s=0.05))
        (late,) = await ask(toolbox, ("web_hang", {}))
        assert re.search(naming("error: ", "web_hang", "0.05 s"), late)
        patient = Toolbox([servers[0].tool_set], ToolLimits())
        assert await ask(patient, ("web_add", {"a": 1, "b": 1})) == ["2"]
    finally:
        await close_servers(servers)


async def test_nothing_that_a_model_writes_ends_the_session_of_the_others(web: HttpServer) -> None:
    async with opened(web.url) as (toolbox, _):
        under_way = asyncio.create_task(ask(toolbox, ("web_hang", {})))
        odd = ["\ud800", math.nan, 10**400, "x" * 10**6, [[]] * 1000, json.loads("[" * 90 + "]" * 90)]
        answers = await ask(toolbox, *(("web_add", {"a": value, "b": "\x00"}) for value in odd))
        assert all(answer.startswith("error: ") for answer in answers)
        assert await ask(toolbox, ("web_add", {"a": 1, "b": 1})) == ["2"]
        assert not under_way.done()
        under_way.cancel()


async def test_a_command_gets_the_environment_of_the_worker_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_TEST_KEY", "secret")
    async with opened(command()) as (toolbox, _):
        key, pid = await ask(toolbox, ("whoami", {"variable": "OUTPACE_TEST_KEY"}), ("whoami", {}))
        assert psutil.pid_exists(int(pid))
    assert (key, psutil.pid_exists(int(pid))) == ("secret", False)
    (closed,) = await ask(toolbox, ("whoami", {}))
    assert re.search(naming("error: ", command(), "closed"), closed)


async def test_one_name_in_two_servers_is_refused_and_neither_is_left_running() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(BadInput) as caught:
        await open_servers([command(), command("") + " "])
    assert str(caught.value).count("tools.mcp: ") == 2
    assert "\n" not in str(caught.value)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:1/mcp", "ConnectError"),
        ("http://[/mcp", ""),
        ("no-such-program --at-all", "FileNotFoundError"),
        ("false", ""),
        ("echo hello", ""),
        ("python 'unbalanced", "No closing quotation"),
        ("", "empty"),
    ],
)
async def test_a_server_that_cannot_be_had_is_one_line(address: str, said: str) -> None:
    with pytest.raises(BadInput, match=naming(address, said)) as caught:
        await open_servers([address])
    assert str(caught.value).startswith("tools.mcp: ")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
async def test_a_command_that_never_answers_is_given_up_and_ended() -> None:
    with pytest.raises(BadInput, match=naming("tools.mcp: ", "sleep 3600", "0.3 s")):
        await open_servers(["sleep 3600"], limit_s=0.3)
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]


async def test_a_url_that_never_answers_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(BadInput, match=naming("tools.mcp: ", "http://127.0.0.1:", "0.3 s")):
            await open_servers([f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"], limit_s=0.3)


@pytest.mark.slow
async def test_one_server_that_cannot_be_had_closes_the_others() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(BadInput, match="no-such-program"):
        await open_servers([command(), "no-such-program"])
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(BadInput, match=r"^tools\.mcp: .*outpace\[mcp\]"):
        await open_servers(["http://127.0.0.1:1/mcp"])


def test_the_package_is_not_loaded_by_those_who_do_not_use_it() -> None:
    program = (
        "import asyncio, sys; from outpace.rollouts import tool_loop; from outpace.rollouts.tools import mcp;"
        "assert asyncio.run(mcp.open_servers([])) == []; sys.exit('mcp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_an_episode_may_use_a_server(
    web: HttpServer, make_engine: Any, make_client: Callable[..., PolicyClient], tokenizer: Any
) -> None:
    asked = '<tool_call>{"name": "web_add", "arguments": {"a": 20, "b": 22}}</tool_call>'
    engine = make_engine([asked + tokenizer.eos_token, "42." + tokenizer.eos_token])
    servers = await open_servers([web.url])
    try:
        rollout = ToolLoop([server.tool_set for server in servers])
        episode = await run_episode(rollout, Task("t", "Add."), make_client(engine), 60.0)
    finally:
        await close_servers(servers)
    assert episode.error is None
    assert isinstance(episode.completion, list)
    assert [message["content"] for message in episode.completion] == ["", "42", "42."]


async def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "server.py"
    broken.write_text("import sys\nsys.exit('no key for the library')")
    with pytest.raises(BadInput, match=r"^tools\.mcp: .*server\.py.*no key for the library$"):
        await open_servers([f"{sys.executable} {broken}"])
