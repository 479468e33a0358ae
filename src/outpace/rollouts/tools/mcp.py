"""MCP tools: servers reached by URL, or started as commands that use stdin and stdout, through the `mcp` package.

    episode ──▶ McpServer.call ──▶ one connection per worker, shared by all episodes ──▶ server
                     │ lost?                     ▲ opened, held and closed by one owner task
                     └── the next call reconnects

Invariants
- A connection is opened and closed in the same task, as the package requires. Calls come from any task and run
  concurrently.
- A server that cannot be reached at startup raises `BadInput` within a bounded time. A server lost later fails the
  call, the error is returned to the model, and the next call reconnects.
- The tool list is read once at startup, so the policy sees the same tools in every episode.
- A command gets the environment of the worker. It and all processes it started have ended when `close` returns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from outpace.errors import BadInput, one_line
from outpace.models.chat import Schema
from outpace.rollouts.tools.functions import ToolError, describe_binary, describe_error
from outpace.rollouts.tools.toolbox import cancel_without_waiting, tools_by_name
from outpace.runtime.async_tools import gather_or_cancel
from outpace.runtime.child_process import ProcessOutput
from outpace.runtime.process_table import MARK_VARIABLE, ProcessTable, new_mark
from outpace.runtime.process_tree import end_process_tree_async

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, ContentBlock


log = logging.getLogger(__name__)

_endings: set[asyncio.Task[None]] = set()  # keeps references: asyncio may garbage-collect an unreferenced task


@dataclass
class CommandObserver:
    """Observer of a server command. `on_end` is called once if the command exits by itself.
    Afterwards `last_line` holds its last line on stderr."""

    on_end: Callable[[], None]
    last_line: str = ""


@asynccontextmanager
async def run_server_command(words: Sequence[str], watch: CommandObserver) -> AsyncIterator[Any]:
    """Start a server command and yield its streams. On exit, end it with its whole process tree.

    The `mcp` package only watches the pipe, which a surviving child may hold open forever, and only ends processes
    that stay in the process group. So the environment of the command carries a mark that identifies its processes."""
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client

    mark = new_mark()
    # Pass the whole environment: a server may need API keys.
    parameters = StdioServerParameters(command=words[0], args=list(words[1:]), env={**os.environ, MARK_VARIABLE: mark})
    looking: asyncio.Task[int | None] | None = None
    reading, writing = os.pipe()
    printed = await ProcessOutput.of(reading, f"the MCP server {words[0]}")
    try:
        with os.fdopen(writing, "w") as errors:
            async with stdio_client(parameters, errlog=errors) as streams:
                looking = asyncio.create_task(asyncio.to_thread(_oldest_with, mark))
                with _watched(await asyncio.shield(looking), watch.on_end):
                    yield streams
    finally:
        await asyncio.shield(printed.finish())
        watch.last_line = printed.last_line
        if looking is not None:
            ending = asyncio.create_task(_end(looking, mark))
            _endings.add(ending)
            ending.add_done_callback(_endings.discard)
            await asyncio.shield(ending)


@contextmanager
def _watched(pid: int | None, on_end: Callable[[], None]) -> Iterator[None]:
    """Call `on_end` when the process exits. Without a pid (the process dropped its mark), only the pipe reveals it."""
    watch = None if pid is None else _pidfd(pid)
    if watch is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(watch)
        on_end()

    loop.add_reader(watch, ended)
    try:
        yield
    finally:
        loop.remove_reader(watch)
        os.close(watch)


def _pidfd(pid: int) -> int | None:
    """Return a pidfd, which becomes readable when the process exits, or None if that is not possible."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


async def _end(looking: asyncio.Task[int | None], mark: str) -> None:
    # The server may have exited before it was found; its children carry the mark as well.
    leader = await looking or await asyncio.to_thread(_oldest_with, mark)
    if leader is not None and not await end_process_tree_async(leader, mark):
        log.warning("cannot end all processes of an MCP server (process group %d)", leader)


def _oldest_with(mark: str) -> int | None:
    """Return the oldest process with the mark: the server, or the first child that inherited it."""
    table = ProcessTable()
    return min(
        table.find({mark: {}})[mark], key=lambda pid: (len(table.start(pid)), table.start(pid), pid), default=None
    )


def mcp_result_text(result: CallToolResult) -> str:
    """Return the text of a result, one part per line. Raises `ToolError` if the server marks it as an error."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if result.is_error:
        raise ToolError(text or "the tool failed without a message")
    return text


def _part(block: ContentBlock) -> str:
    """Return one part of a result: text verbatim, anything else as a description."""
    if block.type == "text":
        return block.text
    if block.type == "image" or block.type == "audio":
        return describe_binary(_decoded_size(block.data), block.mime_type)
    if block.type == "resource_link":
        return one_line(f"[{block.name}: {block.uri}]")
    resource = block.resource
    if hasattr(resource, "text"):
        return str(resource.text)
    return describe_binary(_decoded_size(resource.blob), resource.mime_type or "binary data")


def _decoded_size(base64: str) -> int:
    return len(base64) * 3 // 4 - base64[-2:].count("=")


CONNECT_S = 20.0
"""Timeout for a server to start, initialize and list its tools."""

CLOSE_S = 10.0
"""Timeout for a server to end. The package needs less to close, terminate and kill it."""

RECONNECT_CODES = (-32000, -32600)
"""Error codes that require a new connection: connection closed, or session unknown. Servers also use the first one for
other errors."""

T = TypeVar("T")


class _ConnectionLost(Exception):
    """The server cannot be reached, or the connection was lost."""


async def open_servers(addresses: Sequence[str], limit_s: float = CONNECT_S) -> list[McpServer]:
    """Connect to all servers. If one fails, close the others and raise `BadInput`. Imports `mcp` only if needed."""
    if not addresses:
        return []
    await asyncio.to_thread(_load_package, addresses)
    servers = [McpServer(address) for address in addresses]
    try:
        await gather_or_cancel(*(server.open(limit_s) for server in servers))
        tools_by_name(servers)
    except BaseException:
        await close_servers(servers)
        raise
    return servers


async def close_servers(servers: Sequence[McpServer]) -> None:
    await asyncio.gather(*(server.close() for server in servers))


class McpServer:
    """One MCP server: a `ToolSource` whose tools are known after `open`."""

    ordered = False

    def __init__(self, address: str) -> None:
        """`address` is a URL or a command line. Needs a running event loop."""
        self.origin = f"tools.mcp: {address}"
        self._address = address
        self._connection = _Connection(address)
        self._connections = {self._connection}  # connections that have not ended
        self._closed = False
        self.tools: dict[str, Schema] = {}

    async def open(self, limit_s: float = CONNECT_S) -> None:
        """Wait for the server and its tool list."""
        try:
            _, self.tools = await self._connection.ready(limit_s)
        except _ConnectionLost as error:
            raise BadInput(f"tools.mcp: cannot connect to {self._address}: {error}") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        connection = self._open_connection()
        try:
            client, _ = await connection.ready(CONNECT_S)
            result = await connection.run(client.call_tool(name, arguments))
        except _ConnectionLost as error:
            connection.end()
            raise ToolError(f"{name}: cannot connect to its server: {error}") from error
        except Exception as error:  # errors returned by the server, or protocol violations
            if getattr(error, "code", None) in RECONNECT_CODES:
                connection.retire()
            raise ToolError(f"{name}: {describe_error(error)}") from error
        return mcp_result_text(result)

    async def close(self) -> None:
        """Close all connections and end the processes started for them."""
        self._closed = True
        for connection in self._connections:
            connection.end()
        await asyncio.gather(*(connection.ended() for connection in self._connections))

    def _open_connection(self) -> _Connection:
        if self._closed:
            raise ToolError(f"the connection to {self._address} is closed")
        if self._connection.over:
            log.warning("lost the connection to MCP server %s; reconnecting", self._address)
            self._connections = {one for one in self._connections if not one.is_done}
            self._connection = _Connection(self._address)
            self._connections.add(self._connection)
        return self._connection


class _Connection:
    """One session with a server, owned by one task."""

    def __init__(self, address: str) -> None:
        self._closing = asyncio.Event()
        self._retired = False
        self._in_flight = 0
        self._watch = CommandObserver(self.end)
        self._ready: asyncio.Future[tuple[Client, dict[str, Schema]]] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._hold(address))

    @property
    def over(self) -> bool:
        return self.is_done or self._retired or self._closing.is_set()

    @property
    def is_done(self) -> bool:
        return self._owner.done()

    async def ready(self, limit_s: float) -> tuple[Client, dict[str, Schema]]:
        """Wait for the client and the tool list. Raises `_ConnectionLost` on failure or after `limit_s`."""
        either: set[asyncio.Future[Any]] = {self._ready, self._owner}
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done() and not self._ready.cancelled():
            return self._ready.result()
        self._owner.cancel()
        reason = f"the connection was closed{self._stderr_suffix}" if self.over else f"no answer within {limit_s:g} s"
        raise _ConnectionLost(reason)

    @property
    def _stderr_suffix(self) -> str:
        """The last stderr line of a command, as a suffix for error messages."""
        return f"; its last line on stderr: {one_line(self._watch.last_line)}" if self._watch.last_line else ""

    async def run(self, request: Awaitable[T]) -> T:
        """Return the result of a request. Raises `_ConnectionLost` if the connection ends first."""
        work = asyncio.ensure_future(request)
        either: set[asyncio.Future[Any]] = {work, self._owner}
        self._in_flight += 1
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.cancelled():
                raise _ConnectionLost("the connection was closed")
            return work.result()
        finally:
            self._in_flight -= 1
            if not work.done():
                cancel_without_waiting(work)
            if self._retired:
                self.retire()

    def retire(self) -> None:
        """Accept no more requests and close after the last in-flight one, which may still succeed."""
        self._retired = True
        if not self._in_flight:
            self.end()

    def end(self) -> None:
        self._closing.set()
        if not self._ready.done():
            self._owner.cancel()

    async def ended(self) -> None:
        await asyncio.wait({self._owner}, timeout=CLOSE_S)
        self._owner.cancel()
        await asyncio.wait({self._owner}, timeout=CLOSE_S)

    async def _hold(self, address: str) -> None:
        try:
            async with _client(address, self._watch) as client:
                self._ready.set_result((client, await _tools_of(client)))
                await self._closing.wait()
        except Exception as error:  # starting, losing or closing a server may raise anything
            log.debug("connection to %s ended", address, exc_info=True)
            if not self._ready.done():
                self._ready.set_exception(_ConnectionLost(describe_error(_innermost(error)) + self._stderr_suffix))
        finally:
            if not self._ready.cancel() and not self._ready.cancelled():
                self._ready.exception()  # mark as retrieved: there may be no waiter


def _load_package(addresses: Sequence[str]) -> None:
    """Import `mcp` and check the command lines before anything is started."""
    try:
        from mcp import Client  # noqa: F401
    except ImportError:
        raise BadInput("tools.mcp: needs the mcp package, version 2; run pip install 'outpace[mcp]'") from None
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # otherwise it logs every request
    for address in addresses:
        if not _is_url(address):
            _command(address)


def _is_url(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def _command(address: str) -> list[str]:
    try:
        words = shlex.split(address)
    except ValueError as error:
        raise BadInput(f"tools.mcp: {address!r} is not a valid command line: {error}") from None
    if not words:
        raise BadInput("tools.mcp: empty address; set a URL or a command line")
    return words


def _client(address: str, watch: CommandObserver) -> Client:
    from mcp import Client

    return Client(address) if _is_url(address) else Client(run_server_command(_command(address), watch))


async def _tools_of(client: Client) -> dict[str, Schema]:
    tools, cursor = {}, None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            shown = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            tools[tool.name] = {"type": "function", "function": shown}
        cursor = page.next_cursor
        if cursor is None:
            return tools


def _innermost(error: BaseException) -> BaseException:
    """Return the first leaf of nested exception groups."""
    return _innermost(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
