"""MCP servers: real ones, started as commands or reached by URL, that answer, fail and disappear."""

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

from outpace.config.sections import ToolsConfig
from outpace.errors import BadInput
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.episode import run_episode
from outpace.rollouts.tool_loop import ToolLoop
from outpace.rollouts.tools.mcp import McpServer, close_servers, open_servers
from outpace.rollouts.tools.toolbox import Toolbox
from outpace.types import Task, ToolCall
from support import naming

SCRIPT = Path(__file__).parent / "mcp_server.py"


QUICK_COMMAND = shlex.join([sys.executable, str(SCRIPT.with_name("quick_mcp_server.py"))])


def command(prefix: str = "") -> str:
    return shlex.join([sys.executable, str(SCRIPT), prefix])


class HttpServer:
    """A server behind a URL that can be killed and restarted."""

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
            Toolbox(servers, ToolsConfig(timeout_s=60.0, max_result_chars=1000)),
            servers,
        )
    finally:
        await close_servers(servers)


async def run_calls(toolbox: Toolbox, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    made = [ToolCall(str(n), name, json.dumps(arguments)) for n, (name, arguments) in enumerate(calls)]
    return [result.text for result in await toolbox.run(made, len(made), lambda: math.inf)]


@pytest.mark.slow
async def test_command_and_url_servers_are_used_together(web: HttpServer) -> None:
    async with opened(command(), web.url) as (toolbox, servers):
        assert [sorted(server.tools)[:2] for server in servers] == [["add", "breed"], ["web_add", "web_breed"]]
        (schema,) = (one for one in toolbox.schemas if one["function"]["name"] == "add")
        assert schema["type"] == "function"
        assert schema["function"]["description"] == "Add two numbers."
        assert schema["function"]["parameters"]["required"] == ["a", "b"]
        assert await run_calls(toolbox, ("add", {"a": 1, "b": 2}), ("web_add", {"a": 3, "b": 4})) == ["3", "7"]
        meeting = [(name, {"count": 5}) for name in ("meet", "web_meet") for _ in range(5)]
        assert await run_calls(toolbox, *meeting) == ["met"] * 10, "calls of one session run concurrently"


async def test_every_kind_of_result_becomes_text(web: HttpServer) -> None:
    async with opened(web.url) as (toolbox, _):
        calls = ("picture", "parts", "flood", "fail")
        picture, parts, flood, fail = await run_calls(toolbox, *((f"web_{name}", {}) for name in calls))
        (misfit,) = await run_calls(toolbox, ("web_add", {"a": "x"}))
    assert picture == "[6 bytes of image/png]"
    assert parts == "one\n[4 bytes of binary data]\n[more: https://example.org/more]\ntwo"
    kept, note = flood.splitlines()
    assert kept == "z" * 1000
    assert "9999000" in note
    assert fail.startswith("error: ")
    assert misfit.startswith("error: ")
    assert "Traceback" not in fail + misfit


async def test_calls_to_a_killed_server_fail_and_the_server_is_restarted(web: HttpServer) -> None:
    async with opened(QUICK_COMMAND, web.url) as (toolbox, _):
        (before,) = await run_calls(toolbox, ("whoami", {}))
        in_flight = asyncio.create_task(run_calls(toolbox, ("hang", {}), ("hang", {})))
        assert await run_calls(toolbox, ("whoami", {})) == [before], "the server has received the other calls by now"
        os.kill(int(before), signal.SIGKILL)
        assert all(text.startswith("error: ") and "hang" in text for text in await in_flight)
        answers = await asyncio.gather(
            *(run_calls(toolbox, ("whoami", {}), ("web_add", {"a": 1, "b": 1})) for _ in "ab")
        )
        after = {one for one, _ in answers}
        assert [other for _, other in answers] == ["2", "2"], "the other server is unaffected"
        assert len(after) == 1, "one connection for all callers"
        assert after != {before}
    assert not any(psutil.pid_exists(int(pid)) for pid in (before, *after))


async def test_the_death_of_a_server_is_detected_even_if_a_child_holds_its_pipe() -> None:
    async with opened(QUICK_COMMAND) as (toolbox, _):
        before, child = await run_calls(toolbox, ("whoami", {}), ("breed", {}))
        in_flight = asyncio.create_task(toolbox.run([ToolCall("0", "hang", "{}")], 1, lambda: math.inf))
        assert await run_calls(toolbox, ("whoami", {})) == [before]
        os.kill(int(before), signal.SIGKILL)
        (cut,) = await in_flight
        assert cut.status == "error"
        (after,) = await run_calls(toolbox, ("whoami", {}))
        assert after.isdecimal()
        assert after != before
        left = (await run_calls(toolbox, ("breed", {})))[0]
    assert [pid for pid in (before, after, child, left) if is_alive(int(pid))] == [], "their children have ended too"


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_url_server_can_be_restarted(web: HttpServer) -> None:
    async with opened(web.url) as (toolbox, _):
        in_flight = asyncio.create_task(run_calls(toolbox, ("web_hang", {})))
        (alive,) = await run_calls(toolbox, ("web_add", {"a": 1, "b": 1}))
        await asyncio.to_thread(web.kill)
        (cut,) = await in_flight
        (gone,) = await run_calls(toolbox, ("web_add", {"a": 1, "b": 1}))
        await asyncio.to_thread(web.start)
        assert await run_calls(toolbox, ("web_add", {"a": 1, "b": 1})) == [alive] == ["2"]
    assert re.search(naming("error: ", "web_hang"), cut)
    assert re.search(naming("error: ", "web_add"), gone)


async def test_a_hanging_call_times_out_and_the_server_keeps_working(web: HttpServer) -> None:
    servers = await open_servers([web.url])
    try:
        toolbox = Toolbox([servers[0]], ToolsConfig(timeout_s=0.05))
        (late,) = await run_calls(toolbox, ("web_hang", {}))
        assert re.search(naming("error: ", "web_hang", "0.05 s"), late)
        patient = Toolbox([servers[0]], ToolsConfig())
        assert await run_calls(patient, ("web_add", {"a": 1, "b": 1})) == ["2"]
    finally:
        await close_servers(servers)


async def test_unusual_arguments_never_end_the_session_of_other_calls(web: HttpServer) -> None:
    async with opened(web.url) as (toolbox, _):
        in_flight = asyncio.create_task(run_calls(toolbox, ("web_hang", {})))
        odd = ["\ud800", math.nan, 10**400, "x" * 10**6, [[]] * 1000, json.loads("[" * 90 + "]" * 90)]
        answers = await run_calls(toolbox, *(("web_add", {"a": value, "b": "\x00"}) for value in odd))
        assert all(answer.startswith("error: ") for answer in answers)
        assert await run_calls(toolbox, ("web_add", {"a": 1, "b": 1})) == ["2"]
        assert not in_flight.done()
        in_flight.cancel()


async def test_a_command_server_gets_the_environment_variables_of_the_worker_and_ends_when_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTPACE_TEST_KEY", "secret")
    async with opened(QUICK_COMMAND) as (toolbox, _):
        key, pid = await run_calls(toolbox, ("whoami", {"variable": "OUTPACE_TEST_KEY"}), ("whoami", {}))
        assert psutil.pid_exists(int(pid))
    assert (key, psutil.pid_exists(int(pid))) == ("secret", False)
    (closed,) = await run_calls(toolbox, ("whoami", {}))
    assert re.search(naming("error: ", QUICK_COMMAND, "closed"), closed)


async def test_two_servers_with_the_same_tool_name_are_refused_and_both_are_closed() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(BadInput) as caught:
        await open_servers([QUICK_COMMAND, f"{QUICK_COMMAND} again"])
    assert str(caught.value).count("tools.mcp: ") == 2
    assert "\n" not in str(caught.value)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    ("address", "message"),
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
async def test_an_unreachable_server_is_a_one_line_error(address: str, message: str) -> None:
    with pytest.raises(BadInput, match=naming(address, message)) as caught:
        await open_servers([address])
    assert str(caught.value).startswith("tools.mcp: ")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
async def test_a_command_that_never_answers_times_out_and_is_ended() -> None:
    with pytest.raises(BadInput, match=naming("tools.mcp: ", "sleep 3600", "0.3 s")):
        await open_servers(["sleep 3600"], limit_s=0.3)
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]


async def test_a_url_that_never_answers_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(BadInput, match=naming("tools.mcp: ", "http://127.0.0.1:", "0.3 s")):
            await open_servers([f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"], limit_s=0.3)


async def test_one_failing_server_closes_the_others() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(BadInput, match="no-such-program"):
        await open_servers([QUICK_COMMAND, "no-such-program"])
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_a_missing_mcp_package_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(BadInput, match=r"^tools\.mcp: .*outpace\[mcp\]"):
        await open_servers(["http://127.0.0.1:1/mcp"])


def test_the_mcp_package_is_not_imported_without_servers() -> None:
    program = (
        "import asyncio, sys; from outpace.rollouts import tool_loop; from outpace.rollouts.tools import mcp;"
        "assert asyncio.run(mcp.open_servers([])) == []; sys.exit('mcp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_an_episode_can_call_tools_of_a_server(
    web: HttpServer, make_engine: Any, make_client: Callable[..., PolicyClient], tokenizer: Any
) -> None:
    call = '<tool_call>{"name": "web_add", "arguments": {"a": 20, "b": 22}}</tool_call>'
    engine = make_engine([call + tokenizer.eos_token, "42." + tokenizer.eos_token])
    servers = await open_servers([web.url])
    try:
        rollout = ToolLoop(servers)
        episode = await run_episode(rollout, Task("t", "Add."), make_client(engine), 60.0)
    finally:
        await close_servers(servers)
    assert episode.error is None
    assert isinstance(episode.completion, list)
    assert [message["content"] for message in episode.completion] == ["", "42", "42."]


async def test_the_error_for_a_server_that_exits_at_once_contains_its_output(tmp_path: Path) -> None:
    broken = tmp_path / "server.py"
    broken.write_text("import sys\nsys.exit('no key for the library')")
    with pytest.raises(BadInput, match=r"^tools\.mcp: .*server\.py.*no key for the library$"):
        await open_servers([f"{sys.executable} {broken}"])
